"""The losses of docs/distil.md run as they stand and say what their materialised versions say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fullrank.upgrade import upgrade

DOCUMENT = Path(__file__).parents[2] / "docs" / "distil.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf8"), re.DOTALL):
        exec(compile(block, str(DOCUMENT), "exec"), names)
    return names


def tiny(width: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=53, hidden_size=width, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    return LlamaForCausalLM(config)


def test_the_documented_losses(page: dict[str, Any]) -> None:
    model, teacher = upgrade(tiny(16, 0), "mos", components=3), tiny(24, 1)
    ids = torch.randint(53, (2, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 9)
    mask[1, 5:] = 0.0
    advantage = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))
    asked = {
        "policy_gradient_loss": (model, ids, advantage, mask[:, 1:], 0.8),
        "distillation_loss": (model, teacher, ids, mask, 2.0),
    }
    for name, arguments in asked.items():
        found = []
        for each in (name, f"materialised_{name}"):
            model.zero_grad()
            loss = page[each](*arguments)
            loss.backward()
            found.append((loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        (fast, gradients), (plain, expected) = found
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
        assert len(gradients) == len(expected) > 0
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
