"""A cache head in a transformers model: memory lives in the cache, and steps say what the whole text says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import fullrank  # noqa: F401  (registers the model class)
from fullrank.errors import FullrankError
from fullrank.heads import CacheHead
from fullrank.models import cache_layer as memory
from fullrank.upgrade import upgrade

Make = Callable[..., Any]

NEW = 9
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    "beam": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
}
QUICK = ("greedy", "beam")
FAMILIES = ["gemma3", "mistral", "mamba", "rwkv", "gpt2", "phi3 long"]


def generate(model: Any, inputs: dict[str, Tensor], **settings: Any) -> Tensor:
    torch.manual_seed(7)
    return model.generate(**inputs, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0, **settings)


def strong(model: Any, weight: float = 2.0) -> Any:
    """A memory that outweighs the base, of states that look for others, so that a lost one shows."""
    head = model.lm_head
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        head.memory_weight.fill_(weight)
        for part in (head.query, head.key):
            if part is not None:
                part.weight.add_(0.3 * torch.randn(part.weight.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    "way",
    [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in sorted(WAYS)],
)
@pytest.mark.parametrize(
    "family",
    ["llama untied", *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES)],
)
def test_steps_with_a_cache_are_steps_without(
    way: str, family: str, tiny_model: Make, padded: dict[str, Tensor]
) -> None:
    model = strong(upgrade(tiny_model(family), "cache"))
    expected = generate(model, padded, use_cache=False, **WAYS[way])
    found = generate(model, padded, **WAYS[way])
    assert torch.equal(found, expected)
    with torch.no_grad():
        model.lm_head.memory_weight.fill_(-100.0)
    assert not torch.equal(generate(model, padded, **WAYS[way]), expected)


@pytest.mark.parametrize(
    "options", [{"window": 4}, {"base": "mos", "components": 3}, {"base": "doc"}, {"cosine": True}], ids=str
)
def test_each_step_says_what_the_whole_text_says(
    options: dict[str, Any], tiny_model: Make, ids: Tensor
) -> None:
    model = strong(upgrade(tiny_model("llama untied"), "cache", **options)).eval()
    with torch.no_grad():
        whole = model(ids).logits
        cache = DynamicCache(config=model.config.body)
        for start, stop in ((0, 4), (4, 5), (5, 9), (9, 11)):
            found = model(ids[:, start:stop], past_key_values=cache, use_cache=True).logits
            torch.testing.assert_close(found, whole[:, start:stop], rtol=1e-4, atol=1e-4)
        last = model(ids, logits_to_keep=2).logits
        torch.testing.assert_close(last, whole[:, -2:], rtol=1e-4, atol=1e-4)
        chosen = model(ids, logits_to_keep=torch.tensor([3, 7])).logits
        torch.testing.assert_close(chosen, whole[:, [3, 7]], rtol=1e-4, atol=1e-4)
    layer = memory.find(cache)
    assert layer is not None
    assert layer.get_seq_length() == ids.shape[1] == cache.get_seq_length()


def test_the_loss_with_a_cache_is_that_of_the_whole_text(tiny_model: Make, ids: Tensor) -> None:
    model = strong(upgrade(tiny_model(), "cache")).eval()
    with torch.no_grad():
        whole = -model(ids).logits[:, 4:-1].gather(-1, ids[:, 5:, None]).mean()
        cache = model(ids[:, :4], use_cache=True).past_key_values
        loss = model(ids[:, 4:], labels=ids[:, 4:], past_key_values=cache).loss
    torch.testing.assert_close(loss, whole, rtol=1e-4, atol=1e-4)


def test_what_is_done_to_a_cache_is_done_to_the_memory(tiny_model: Make, ids: Tensor) -> None:
    model = strong(upgrade(tiny_model("llama untied"), "cache")).eval()
    with torch.no_grad():
        whole = model(ids).logits

        def after(change: Callable[[Any], Any], rows: list[int], start: int) -> None:
            cache = model(ids[:, :6], use_cache=True).past_key_values
            change(cache)
            found = model(ids[rows, start : start + 2], past_key_values=cache).logits
            torch.testing.assert_close(found, whole[rows, start : start + 2], rtol=1e-4, atol=1e-4)

        after(lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0], 6)
        after(lambda cache: cache.batch_select_indices(torch.tensor([1])), [1], 6)
        after(lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1], 6)
        after(lambda cache: cache.crop(-2), [0, 1], 4)
        emptied = model(ids[:, :6], use_cache=True).past_key_values
        emptied.reset()
        if emptied.get_seq_length() == 0:  # older versions of transformers leave as many zeros
            after(lambda cache: cache.reset(), [0, 1], 0)


@pytest.mark.slow
def test_a_base_that_reads_time_runs_without_a_cache(tiny_model: Make, padded: dict[str, Tensor]) -> None:
    model = strong(upgrade(tiny_model("llama untied"), "cache", base="pointer"))
    expected = generate(model, padded, use_cache=False, do_sample=False)
    assert torch.equal(generate(model, padded, do_sample=False), expected)


@pytest.mark.slow
def test_a_static_cache(tiny_model: Make, padded: dict[str, Tensor]) -> None:
    model = strong(upgrade(tiny_model("llama untied"), "cache"))
    expected = generate(model, padded, do_sample=False)
    found = generate(model, padded, do_sample=False, cache_implementation="static", disable_compile=True)
    assert torch.equal(found, expected)


def test_padding_is_not_remembered(tiny_model: Make, ids: Tensor, padded: dict[str, Tensor]) -> None:
    model = strong(upgrade(tiny_model("llama untied"), "cache"))
    alone = {"input_ids": ids[:1, 3:], "attention_mask": torch.ones_like(ids[:1, 3:])}
    expected = generate(model, alone, do_sample=False)[0, -NEW:]
    assert torch.equal(generate(model, padded, do_sample=False)[0, -NEW:], expected)


def test_a_filled_cache_without_a_memory_is_refused(tiny_model: Make, ids: Tensor) -> None:
    original = tiny_model()
    cache = original(ids[:, :5], use_cache=True).past_key_values
    model = upgrade(original, "cache")
    with pytest.raises(FullrankError, match=r"cache has 5 tokens.*pass the whole text"):
        model(ids[:, 5:], past_key_values=cache)
    with pytest.raises(FullrankError, match="inputs_embeds: pass input_ids"):
        model(inputs_embeds=torch.zeros(1, 3, 32))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"cosine": True}),
        pytest.param("gemma2", {"base": "mos", "components": 2}, marks=pytest.mark.slow),
        pytest.param("gptj", {"window": 5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_start_is_the_original_and_it_is_saved_whole(
    family: str, options: dict[str, Any], tiny_model: Make, ids: Tensor, tmp_path: Path
) -> None:
    original = tiny_model(family)
    model = upgrade(original, "cache", **options)
    assert model.config.origin["kl"] < 1e-4
    if options.get("cosine"):
        # Whatever the states' length, a state scores 8 nats against itself.
        assert model.lm_head.temperature == pytest.approx(model.lm_head.hidden / 8)
    with torch.no_grad():
        before = original(ids).logits.log_softmax(-1)
        start = model(ids).logits
    assert float((before.exp() * (before - start)).sum(-1).max()) < 1e-4
    strong(model).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again.lm_head, CacheHead)
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(again(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, start, atol=1e-2)
    tied = again.get_input_embeddings().weight is again.lm_head.decoder.weight
    assert tied == (model.get_input_embeddings().weight is model.lm_head.decoder.weight)


def test_a_narrow_model_keeps_the_weight_of_its_memory(tiny_model: Make, ids: Tensor, tmp_path: Path) -> None:
    model = upgrade(tiny_model().to(torch.bfloat16), "cache")
    assert model.lm_head.memory_weight.dtype == torch.float32
    assert model.lm_head.decoder.weight.dtype == torch.bfloat16
    with torch.no_grad():
        model.lm_head.memory_weight.fill_(1.2345)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert again.lm_head.memory_weight.item() == pytest.approx(1.2345, abs=1e-6)
    assert again(ids).logits.dtype == torch.float32


def test_a_resized_vocabulary(tiny_model: Make, ids: Tensor) -> None:
    model = upgrade(tiny_model(), "cache")
    model.resize_token_embeddings(120)
    assert model(ids).logits.shape[-1] == model.lm_head.base.vocab == 120
    assert copy.deepcopy(model)(ids).logits.shape[-1] == 120


def test_wrong_options_of_the_head_under_the_cache(tiny_model: Make) -> None:
    for options, message in [
        ({"base": "mixtape"}, "squeezes"),
        ({"base": "cache"}, "under the cache is 'cache'"),
        ({"base": "mose"}, "under the cache is 'mose'"),
        ({"base_options": {"bias": True}}, "bias cannot be chosen"),
        ({"width": 3}, "width cannot be chosen"),
        ({"experts": 3}, "cache has no option experts"),
        ({"base": "mos", "base_options": {"experts": 3}}, "mos has no option experts"),
    ]:
        with pytest.raises(FullrankError, match=message):
            upgrade(tiny_model(), "cache", **options)
