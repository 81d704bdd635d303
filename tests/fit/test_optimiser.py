"""Updates: who is decayed, who goes with Muon, and NT-ASGD against torch's own ASGD."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fullrank.fit import optimiser
from fullrank.fit.optimiser import OptimiserConfig
from fullrank.heads.registry import HEADS
from fullrank.train.config import override
from fullrank.train.model import build
from fullrank.train.recipes import recipe

CPU = torch.device("cpu")


def model(head: str = "mos") -> nn.Module:
    settings = ["body.hidden=12", "body.last=10", "head.width=8", "length=6", "batch=2"]
    if head == "trunk":
        settings.append("head.private=4")
    return build(override(recipe("awd-lstm", head), settings), 11)


def test_a_finetune_stage_has_its_own_rate() -> None:
    settings = OptimiserConfig(lr=3.0, schedule="constant", warmup=0.0, finetune_epochs=1, finetune_lr=5.0)
    assert optimiser.rate(settings, 0, 10) == 3.0
    assert optimiser.rate(settings, 0, 10, finetune=True) == 5.0


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


def test_adam_decays_what_has_no_gradient_at_full_rate_and_adamw_by_its_share() -> None:
    ends = {}
    for name in ("adam", "adamw"):
        model = nn.Linear(3, 2, bias=False)
        nn.init.constant_(model.weight, 0.5)
        config = OptimiserConfig(name=name, lr=0.01, weight_decay=1e-3)
        made = optimiser.make(model, config, torch.device("cpu"))
        # A row that a batch has, and one that it has not.
        model.weight.grad = torch.tensor([[1.0] * 3, [0.0] * 3])
        made.step()
        ends[name] = model.weight.detach()
    # The first step of either is its rate, whatever the size of the gradient.
    torch.testing.assert_close(ends["adam"], torch.full((2, 3), 0.49), rtol=0, atol=1e-6)
    decayed = 0.5 * (1 - 0.01 * 1e-3)
    expected = torch.tensor([[decayed - 0.01] * 3, [decayed] * 3])
    torch.testing.assert_close(ends["adamw"], expected, rtol=0, atol=1e-6)


def test_muon_takes_hidden_matrices_and_moves_each_by_an_orthogonal_step() -> None:
    made = model()
    settings = OptimiserConfig(name="muon", lr=0.1, weight_decay=0.0)
    update = optimiser.make(made, settings, CPU)
    names = {id(one): name for name, one in made.named_parameters()}
    taken = {names[id(one)] for group in update.param_groups if group["muon"] for one in group["params"]}
    assert taken
    assert not any("embedding" in name or name.startswith("head") or "bias" in name for name in taken)
    assert sorted(id(one) for group in update.param_groups for one in group["params"]) == sorted(names)
    before = {name: one.detach().clone() for name, one in made.named_parameters()}
    torch.manual_seed(0)
    for one in made.parameters():
        one.grad = torch.randn_like(one)
    update.step()
    for name, one in made.named_parameters():
        moved = before[name] - one.detach()
        if name in taken:
            # Newton-Schulz leaves all singular values near one: a gradient's would lie far apart.
            values = torch.linalg.svdvals(moved)
            assert values.max() / values.min() < 2.5
            # Scaled to the size of an update of Adam's.
            assert moved.square().mean().sqrt() == pytest.approx(0.02, rel=0.25)
        else:
            assert moved.abs() == pytest.approx(torch.full_like(moved, 0.1), rel=1e-3)


def test_muon_resumes_from_its_state_and_obeys_the_rate_after_it() -> None:
    network = model()
    settings = OptimiserConfig(name="muon", lr=0.1)

    def step(update: torch.optim.Optimizer, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for parameter in network.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        update.step()
        return copy.deepcopy(network.state_dict())

    update = optimiser.make(network, settings, CPU)
    weights = step(update, 0)
    state = copy.deepcopy(update.state)
    after = step(update, 1)
    network.load_state_dict(weights)
    resumed = optimiser.make(network, settings, CPU)
    for values, parameter in zip(state.values(), update.state, strict=True):
        resumed.state[parameter] = values
    assert all(torch.equal(value, after[name]) for name, value in step(resumed, 1).items())
    # accelerate loads a state into every optimiser that it prepares.
    resumed.load_state_dict(resumed.state_dict())
    optimiser.set_rate(resumed, 0.0)
    assert all(torch.equal(value, after[name]) for name, value in step(resumed, 2).items())
    assert len(resumed.state) == len(list(network.parameters()))
    optimiser.set_rate(resumed, 0.1)
    moved = step(resumed, 2)
    assert not any(torch.equal(moved[name], after[name]) for name, _ in network.named_parameters())


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


def test_the_average_is_the_mean_and_live_weights_come_back() -> None:
    layer = nn.Linear(2, 2)
    average = optimiser.Average(layer)
    for value in (1.0, 2.0, 6.0):
        nn.init.constant_(layer.weight, value)
        average.update(layer)
    with average.swapped_in(layer):
        assert torch.allclose(layer.weight, torch.full((2, 2), 3.0))
    assert torch.equal(layer.weight, torch.full((2, 2), 6.0))
    with pytest.raises(RuntimeError, match="halfway"), average.swapped_in(layer):
        raise RuntimeError("halfway")
    assert torch.equal(layer.weight, torch.full((2, 2), 6.0))


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
