"""One upgrade for every family of bodies: distribution, loss, gradients, generation, the disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fullrank.upgrade import upgrade

Make = Callable[..., Any]

NAMED = ["llama", "gpt2", "gpt_neox", "gemma2"]
# A second and a half each; their output layers are like one of the above.
OTHERS = [
    "mamba", "opt", "qwen3", "mistral", "gemma3", "opt projected", "rwkv", "granite", "cohere", "phi", "gptj",
    "bloom",
    "mpt", "mixtral", "phi3 long", "openai-gpt", "falcon_h1", "nemotron_h",
    "gemma4",
]  # fmt: skip
FAMILIES = [*NAMED, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


@pytest.mark.parametrize("head", ["softmax", "mos", "trunk"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_model_the_minute_after(
    family: str, head: str, tiny_model: Make, padded: dict[str, Tensor]
) -> None:
    model = tiny_model(family)
    made = upgrade(model, head)
    with torch.no_grad():
        expected, found = model(**padded).logits.log_softmax(-1), made(**padded).logits
    seen = padded["attention_mask"].bool()
    torch.testing.assert_close(found[seen], expected[seen], atol=1e-4, rtol=0)
    assert made.get_input_embeddings() is model.get_input_embeddings()


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_gradients_and_disk(
    family: str, tiny_model: Make, padded: dict[str, Tensor], tmp_path: Path
) -> None:
    model = tiny_model(family)
    labels = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
    inputs = {**padded, "labels": labels}
    if family != "rwkv":  # whose own loss counts padding
        expected = model(**inputs, num_items_in_batch=torch.tensor(17)).loss
        theirs = torch.autograd.grad(expected, model.get_input_embeddings().weight)[0]
        made = upgrade(model, "mos")
        loss = made(**inputs, num_items_in_batch=torch.tensor(17)).loss
        torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
        ours = torch.autograd.grad(loss, made.get_input_embeddings().weight)[0]
        torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-3)
    made = upgrade(model, "mos").train()
    made(**inputs).loss.backward()
    # Components that are equal leave the prior nothing to choose: their own parts move first.
    still = {name for name, item in made.lm_head.named_parameters() if not item.grad.abs().max() > 1e-6}
    assert still <= {"contexts.gate.weight"}
    optimiser = torch.optim.SGD(made.parameters(), lr=0.05)
    optimiser.step()
    optimiser.zero_grad()
    made(**inputs).loss.backward()
    assert all(item.grad.abs().max() > 1e-6 for item in made.lm_head.parameters())
    made.eval().save_pretrained(tmp_path, max_shard_size="30KB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again(**padded).logits, made(**padded).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_sampling_and_beam(family: str, tiny_model: Make, padded: dict[str, Tensor]) -> None:
    model = tiny_model(family)
    made = upgrade(model, "mos")
    ways: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True}]
    prompts: list[dict[str, Any]] = [padded]
    if family == "rwkv":
        # It has no beam search, and transformers mixes the rows of a batch, which we do not.
        prompts = [{"input_ids": row[None]} for row in padded["input_ids"]]
    else:
        ways.append({"do_sample": False, "num_beams": 3})
    for way, prompt in itertools.product(ways, prompts):
        tokens = []
        for each in (model, made):
            torch.manual_seed(11)
            tokens.append(each.generate(**prompt, max_new_tokens=8, pad_token_id=0, **way))
        assert torch.equal(*tokens), way
