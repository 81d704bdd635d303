"""Generation: the original's tokens before training, and the head's own after it, cached or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.upgrade import upgrade

Make = Callable[..., Any]

NEW = 9
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    "beam": {"do_sample": False, "num_beams": 3},
}


def generate(model: Any, inputs: dict[str, Tensor], **settings: Any) -> Tensor:
    torch.manual_seed(7)
    return model.generate(**inputs, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0, **settings)


def trained(model: Any) -> Any:
    """Every parameter of the head moved, as training would."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.lm_head.named_parameters():
            if "decoder" not in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    ("head", "way"),
    [
        *(("mos", way) for way in sorted(WAYS)),
        *((head, "greedy") for head in ("doc", "pointer", "facets", "moss")),
        # How tokens are drawn from log-probabilities is the same for every head.
        *(
            pytest.param(head, way, marks=pytest.mark.slow)
            for head in ("doc", "pointer", "facets", "moss")
            for way in ("beam", "sampling")
        ),
    ],
)
def test_the_originals_tokens(way: str, head: str, tiny_model: Make, padded: dict[str, Tensor]) -> None:
    model = tiny_model()
    expected = generate(model, padded, **WAYS[way])
    assert torch.equal(generate(upgrade(model, head), padded, **WAYS[way]), expected)


# Three seconds each for a mamba; how its tokens are drawn is the same as for any body.
@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(("llama", way) for way in sorted(WAYS)),
        *(pytest.param("mamba", way, marks=pytest.mark.slow) for way in sorted(WAYS)),
    ],
)
def test_the_cache_changes_nothing(
    way: str, family: str, tiny_model: Make, padded: dict[str, Tensor]
) -> None:
    model = trained(upgrade(tiny_model(family), "mos"))
    cached = generate(model, padded, **WAYS[way])
    assert torch.equal(generate(model, padded, use_cache=False, **WAYS[way]), cached)


@pytest.mark.parametrize("head", ["mos", "doc", "pointer", "facets", "sigsoftmax"])
def test_each_token_is_the_most_probable_of_the_whole_text(head: str, tiny_model: Make, ids: Tensor) -> None:
    model = trained(upgrade(tiny_model("llama untied"), head))
    found = generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, do_sample=False)
    assert len(set(found[:, -NEW:].flatten().tolist())) > 2
    with torch.no_grad():
        log_probs = model(found).logits[:, ids.shape[1] - 1 : -1]
    log_probs[..., 0] = -torch.inf  # the end, which min_new_tokens forbids
    assert torch.equal(log_probs.argmax(-1), found[:, ids.shape[1] :])


@pytest.mark.parametrize("head", ["pointer", "facets"])
def test_a_trained_head_that_reads_time_ignores_padding(
    head: str, tiny_model: Make, ids: Tensor, padded: dict[str, Tensor]
) -> None:
    model = trained(upgrade(tiny_model("llama untied"), head))
    alone = {"input_ids": ids[:1, 3:], "attention_mask": torch.ones_like(ids[:1, 3:])}
    expected = generate(model, alone, do_sample=False)[0, -NEW:]
    assert torch.equal(generate(model, padded, do_sample=False)[0, -NEW:], expected)


def test_a_static_cache(tiny_model: Make, padded: dict[str, Tensor]) -> None:
    model = trained(upgrade(tiny_model(), "mos"))
    expected = generate(model, padded, do_sample=False)
    found = generate(model, padded, do_sample=False, cache_implementation="static", disable_compile=True)
    assert torch.equal(found, expected)
