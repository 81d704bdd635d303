"""The losses of docs/distil.md run as they stand and say what their materialised versions say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.upgrade import upgrade

Make = Callable[..., Any]
DOCUMENT = Path(__file__).parents[2] / "docs" / "distil.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf8"), re.DOTALL):
        exec(compile(block, str(DOCUMENT), "exec"), names)
    return names


# Families that scale their logits, cap them, or do neither.
@pytest.mark.parametrize("family", ["llama", "cohere", "granite", "gemma2"])
def test_the_documented_losses(family: str, page: dict[str, Any], tiny_model: Make, ids: Tensor) -> None:
    plain = tiny_model(family)
    model, teacher = upgrade(plain, "mos", components=3), upgrade(tiny_model(family), "softmax")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.lm_head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    mask = torch.ones(ids.shape)
    mask[1, 5:] = 0.0
    advantage = torch.randn(2, ids.shape[1] - 1, generator=generator)
    asked = {
        "policy_gradient_loss": (model, ids, advantage, mask[:, 1:], 0.8),
        "distillation_loss": (model, teacher, ids, mask, 2.0),
    }
    for name, arguments in asked.items():
        results = []
        for function in (name, f"materialised_{name}"):
            model.zero_grad()
            loss = page[function](*arguments)
            loss.backward()
            grads = {
                key: item.grad.clone() for key, item in model.named_parameters() if item.grad is not None
            }
            results.append((loss.detach(), grads))
        (fast, gradients), (table, expected) = results
        torch.testing.assert_close(fast, table, rtol=1e-4, atol=1e-5)
        assert gradients.keys() == expected.keys()
        assert "lm_head.contexts.gate.weight" in gradients
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-3, atol=1e-4)
    # The plain teacher's own logits say the same, and so do the losses of model and teacher.
    torch.testing.assert_close(
        page["distillation_loss"](model, teacher, ids, mask),
        page["materialised_distillation_loss"](model, tiny_model(family), ids, mask),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip
    ones, loss = torch.ones(2, ids.shape[1] - 1), model(ids, labels=ids).loss
    torch.testing.assert_close(page["policy_gradient_loss"](model, ids, ones, ones, bonus=0.0), loss)
