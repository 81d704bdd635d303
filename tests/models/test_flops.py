"""The cost of a token by its formula, against what torch counts in a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fullrank.models import AwdLstmConfig, FullrankConfig, FullrankForCausalLM, bodies
from fullrank.models.flops import training_flops
from fullrank.upgrade import upgrade

V, TIME = 300, 32


@pytest.mark.parametrize("kind", ["neox", "llama"])
@pytest.mark.parametrize(
    "head", [{"name": "softmax"}, {"name": "mos", "components": 3}], ids=["softmax", "mos"]
)
def test_a_third_is_counted_forward(kind: str, head: dict[str, Any]) -> None:
    body = bodies.transformer(kind, vocab=V, hidden=32, layers=2, heads=4, inner=0, context=TIME)
    model = FullrankForCausalLM(FullrankConfig(body=body, head=head, vocab_size=V))
    # Written out, so that its products are seen.
    model.set_attn_implementation("eager")
    ids = torch.randint(V, (3, TIME))
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(ids)
    assert counted.get_total_flops() == pytest.approx(3 * TIME * training_flops(model, TIME) / 3, rel=0.02)


def test_layers_whose_heads_differ_in_width(tiny_model: Callable[..., Any]) -> None:
    """Those of Gemma 4, whose configuration does not say `head_dim` for all of them."""
    model = upgrade(tiny_model("gemma4"), "softmax")
    model.set_attn_implementation("eager")
    ids = torch.randint(101, (3, TIME))
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(ids)
    assert counted.get_total_flops() == pytest.approx(TIME * training_flops(model, TIME), rel=0.02)


def test_an_lstm_is_its_weights() -> None:
    body = AwdLstmConfig(vocab_size=V, embedding_size=8, inner_size=12, hidden_size=10, num_hidden_layers=2)
    model = FullrankForCausalLM(
        FullrankConfig(body=body, head={"name": "softmax", "hidden": 10, "width": 8}, vocab_size=V)
    )
    gates = 4 * (12 * (8 + 12) + 10 * (12 + 10))
    assert training_flops(model, TIME) == 6 * (gates + 10 * 8 + 8 * V)
