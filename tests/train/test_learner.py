"""Which steps can be one CUDA graph; that they learn the same as one is test_gpu.py's."""

from __future__ import annotations

import pytest
import torch

from fullrank.train.config import override
from fullrank.train.learner import no_graph
from fullrank.train.recipes import recipe


def fused(name: str) -> torch.optim.Optimizer:
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[name]
    return kind([torch.nn.Parameter(torch.zeros(2))], fused=True)


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_a_step_with_a_fused_adam_can_be_one_graph(name: str) -> None:
    config = override(recipe("awd-lstm", "mos"), [f"optimiser.name={name}"])
    assert not no_graph(config, fused(name), sharded=False)


@pytest.mark.parametrize(
    ("settings", "sharded", "said"),
    [
        (("jitter=true",), False, "jitter"),
        (("penalty.spectrum=flat", "penalty.spectrum_weight=0.1"), False, "penalty"),
        ((), True, "processes"),
    ],
)
def test_what_hinders_a_graph_is_said(settings: tuple[str, ...], sharded: bool, said: str) -> None:
    assert said in no_graph(override(recipe("awd-lstm", "mos"), settings), fused("adamw"), sharded=sharded)


def test_accumulated_balance_hinders_a_graph() -> None:
    settings = ["head.balance=1", "accumulate=2", "batch=8"]
    config = override(recipe("awd-lstm", "mos"), settings)
    assert "head.balance" in no_graph(config, fused("adamw"), sharded=False)
    assert not no_graph(override(config, ["accumulate=1"]), fused("adamw"), sharded=False)


def test_an_optimiser_without_a_fused_step_is_named() -> None:
    config = override(recipe("awd-lstm", "mos"), ["optimiser.name=nt-asgd"])
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    assert "nt-asgd" in no_graph(config, plain, sharded=False)
