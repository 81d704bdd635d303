"""Training on a device without fp64 (Apple's): steps, sums of losses and monitors."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fullrank.ops import arguments
from fullrank.train import monitor
from fullrank.train.batches import Cursor
from fullrank.train.learner import Learner
from fullrank.train.objective import Objective
from fullrank.train.tally import Tally
from tests import small_models
from tests.without_float64 import MPS, OnMps, on_mps, without_float64


def test_the_simulated_device_refuses_fp64() -> None:
    with without_float64():
        values = torch.ones(3, device=MPS)
        assert values.device == MPS
        assert type(values.cpu().double()) is torch.Tensor
        for wide in (values.double, lambda: torch.zeros(2, device=MPS, dtype=torch.float64)):
            with pytest.raises(TypeError, match="float64"):
                wide()


@pytest.mark.parametrize("head", ["mos", "plif", "mixtape"])
def test_steps_and_their_sums(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The dispatcher hands our operators the tensors of the CPU that stand for the device's.
    monkeypatch.setattr(arguments, "WITHOUT_FLOAT64", ("mps", "cpu"))
    torch.manual_seed(0)
    model = small_models.transformer(head, vocab=19, context=8, tie=False)
    ids, targets = torch.randint(19, (2, 4, 6), generator=torch.Generator().manual_seed(1))
    expected = model.lm_head(model.head_inputs(ids).states, targets, context=ids)
    expected.backward()
    gradients = {name: item.grad.clone() for name, item in model.named_parameters()}
    with without_float64():
        model = cast(Any, on_mps(model))
        machine = SimpleNamespace(
            device=MPS, num_processes=1, no_sync=lambda module: contextlib.nullcontext(),
            backward=lambda loss: loss.backward(),
        )  # fmt: skip
        learner = object.__new__(Learner)
        learner.__dict__.update(
            config=SimpleNamespace(accumulate=2, head=SimpleNamespace(balance=0.0)), machine=machine,
            objective=Objective(model), half=False,
        )  # fmt: skip
        ids, targets = ids.as_subclass(OnMps), targets.as_subclass(OnMps)
        loss, _ = learner._gradients(ids, targets, ())
        norm = torch.nn.utils.get_total_norm([item.grad for item in model.parameters()])
        tally = Tally(machine, {})
        tally.add(0, Cursor(), loss=loss, norm=norm, tokens=24)
        again = Tally(machine, tally.to_json())
    assert again.means() == tally.means()
    assert tally.means()[0] == pytest.approx(float(expected.detach()), rel=1e-6)
    for name, item in model.named_parameters():
        torch.testing.assert_close(item.grad.cpu(), gradients[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("head", ["mos", "mixtape"])
def test_monitors_are_those_of_the_cpu(head: str) -> None:
    torch.manual_seed(0)
    model = small_models.transformer(head, vocab=19, context=8, normaliser="log_length").eval()
    ids = torch.randint(19, (6, 8), generator=torch.Generator().manual_seed(1))
    expected = monitor.measure(model, ids)
    with without_float64():
        measured = monitor.measure(cast(Any, on_mps(model)), ids.as_subclass(OnMps))
    assert measured.keys() == expected.keys()
    for name, value in expected.items():
        assert measured[name] == pytest.approx(value, rel=1e-3, abs=1e-6, nan_ok=True), name
    assert "attention_effective_tokens" in measured
