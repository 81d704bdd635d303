"""Updates: the schedule's shape, who is decayed, and NT-ASGD against torch's own ASGD."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn

from fullrank.heads.registry import HEADS
from fullrank.train import optimiser
from fullrank.train.config import Config, OptimiserConfig, override
from fullrank.train.model import build
from fullrank.train.recipes import recipe

CPU = torch.device("cpu")


def model(head: str = "mos") -> nn.Module:
    settings = ["body.hidden=12", "body.last=10", "head.width=8", "length=6", "batch=2"]
    if head == "trunk":
        settings.append("head.private=4")
    return build(override(recipe("awd-lstm", head), settings), 11)


def rates(config: Config, steps: int) -> list[float]:
    return [
        optimiser.rate(config, step, steps, length_scale=1.0, finetune=False) for step in range(steps + 3)
    ]


def test_a_cosine_rises_falls_and_stays() -> None:
    settings = OptimiserConfig(lr=2.0, warmup=0.1, final=0.25)
    found = rates(Config(recipe="r", optimiser=settings), 100)
    assert found[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert max(found) == found[9] == found[10] == 2.0
    assert all(later < earlier for earlier, later in itertools.pairwise(found[10:100]))
    # Half-way between the warm-up and the end a cosine is half-way between both rates.
    assert found[55] == pytest.approx((2.0 + 0.5) / 2)
    assert found[100:] == pytest.approx([0.5] * 3)


def test_a_run_of_one_step_has_a_rate() -> None:
    config = Config(recipe="r", optimiser=OptimiserConfig(lr=2.0))
    assert rates(config, 1)[0] == 2.0


def test_constant_and_length_and_finetune() -> None:
    settings = OptimiserConfig(lr=3.0, schedule="constant", finetune_epochs=1, finetune_lr=5.0)
    config = Config(recipe="r", optimiser=settings)
    assert set(rates(config, 10)) == {3.0}
    assert optimiser.rate(config, 0, 10, length_scale=0.5, finetune=True) == 5.0
    jitter = dataclasses.replace(config, jitter=True)
    assert optimiser.rate(jitter, 0, 10, length_scale=0.5, finetune=True) == 2.5


@pytest.mark.parametrize("head", HEADS)
def test_a_heads_own_parameters_have_their_own_rate(head: str) -> None:
    made = model(head)
    own = optimiser.own_parameters(made)
    names = {name for name, _ in made.named_parameters()}
    assert own <= names
    assert all(name.startswith("lm_head.") and "decoder" not in name for name in own)
    matrix = {id(made.lm_head.decoder.weight), id(made.lm_head.decoder.bias)}
    rest = {name for name, one in made.lm_head.named_parameters(prefix="lm_head") if id(one) not in matrix}
    assert own == rest & names

    settings = OptimiserConfig(lr=1.0, lr_head=0.25)
    update = optimiser.make(made, settings, CPU)
    optimiser.set_rate(update, 0.5)
    for name, parameter in made.named_parameters():
        (group,) = [one for one in update.param_groups if any(parameter is item for item in one["params"])]
        assert group["lr"] == (0.125 if name in own else 0.5)


def test_every_parameter_is_updated_once_and_only_matrices_decay() -> None:
    made = model()
    update = optimiser.make(made, OptimiserConfig(weight_decay=0.5), CPU)
    all_of_them = [id(one) for group in update.param_groups for one in group["params"]]
    assert sorted(all_of_them) == sorted(id(one) for one in made.parameters())
    for group in update.param_groups:
        assert all((one.ndim > 1) == (group["weight_decay"] == 0.5) for one in group["params"])
    published = optimiser.make(made, OptimiserConfig(name="nt-asgd", weight_decay=0.5), CPU)
    assert {group["weight_decay"] for group in published.param_groups} == {0.5}
    assert isinstance(published, torch.optim.SGD)


def test_the_average_is_torchs_asgd() -> None:
    # ASGD(t0=0, lambd=0) as the published code has it.
    torch.manual_seed(0)
    ours = nn.Linear(3, 2).double()
    theirs = copy.deepcopy(ours)
    published = torch.optim.ASGD(theirs.parameters(), lr=0.25, t0=0, lambd=0.0, alpha=0.0, weight_decay=0.01)
    plain = torch.optim.SGD(ours.parameters(), lr=0.25, weight_decay=0.01)
    average = optimiser.Average(ours)
    for step in range(7):
        inputs = torch.randn(5, 3, dtype=torch.float64)
        for one, update in ((ours, plain), (theirs, published)):
            update.zero_grad()
            one(inputs).pow(2).sum().backward()
            update.step()
        # Torch renews its share 1 / t after using it, so that its second iterate replaces the first.
        if step:
            average.update(ours)
    for name, parameter in theirs.named_parameters():
        # Torch keeps its share in fp32.
        assert torch.allclose(average.mean[name], published.state[parameter]["ax"], rtol=1e-6)
    assert average.count == 6


def test_the_mean_is_the_mean_and_live_weights_come_back() -> None:
    made = nn.Linear(2, 2)
    average = optimiser.Average(made)
    seen = []
    for value in (1.0, 2.0, 6.0):
        nn.init.constant_(made.weight, value)
        average.update(made)
        seen.append(value)
    before = made.weight.detach().clone()
    with average.swapped_in(made):
        assert torch.allclose(made.weight, torch.full((2, 2), math.fsum(seen) / 3))
    assert torch.equal(made.weight, before)
    with pytest.raises(RuntimeError, match="halfway"), average.swapped_in(made):
        raise RuntimeError("halfway")
    assert torch.equal(made.weight, before)


@pytest.mark.parametrize("patience", [0, 1, 5])
def test_the_trigger_is_the_published_one(patience: int) -> None:
    generator = torch.Generator().manual_seed(patience)
    losses = [round(float(one), 2) for one in torch.rand(40, generator=generator)]
    for count in range(1, 41):
        history, newest = losses[: count - 1], losses[count - 1]
        # main.py: before the newest is appended, and best_val_loss[:-0] would be nothing.
        older = history[: len(history) - patience]
        published = len(history) > patience and newest > min(older)
        assert optimiser.stopped_improving(losses[:count], patience) == published
