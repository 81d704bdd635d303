"""Whole tensors to parts and back, on one process: bit for bit, whatever wraps the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fullrank.fit import optimiser as updates
from fullrank.heads.vocab_parallel import shard
from fullrank.models import FullrankForCausalLM
from fullrank.train import weights
from fullrank.train.config import BodyConfig, Config, HeadConfig, OptimiserConfig
from fullrank.train.model import build
from fullrank.train.objective import Objective

V = 23
OPTIMISERS = {
    "adamw": OptimiserConfig(),
    "adam": OptimiserConfig(name="adam"),
    "sgd": OptimiserConfig(name="nt-asgd", lr=1.0, schedule="constant"),
}


def config(*, tie: bool = True, head: str = "mos", seed: int = 0) -> Config:
    return Config(
        recipe="test", body=BodyConfig(layers=2, hidden=7, last=6),
        head=HeadConfig(name=head, components=3, width=5, tie=tie), batch=3, length=4, seed=seed,
    )  # fmt: skip


def model(*, split: bool = False, seed: int = 0) -> FullrankForCausalLM:
    made = build(config(tie=not split, seed=seed), V)
    if split:
        made.lm_head = shard(made.lm_head)
    return made


def step(made: FullrankForCausalLM, optimiser: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(V, (3, 4), generator=generator)
    Objective(made)(ids, ids.roll(1, 1)).value.backward()
    optimiser.step()
    optimiser.zero_grad()


@pytest.fixture(params=[False, True], ids=["plain", "split"])
def split(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_weights_come_back_bit_for_bit_under_the_names_of_a_plain_model(split: bool) -> None:
    source, target = model(split=split), model(split=split, seed=1)
    whole = weights.gather(source)
    assert whole.keys() == dict(build(config(tie=not split), V).named_parameters()).keys()
    weights.scatter(target, whole)
    for (name, one), (other, two) in zip(source.named_parameters(), target.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(one, two)


def test_weights_of_a_split_model_fit_a_plain_one_and_back() -> None:
    source, plain = model(split=True), build(config(tie=False, seed=1), V)
    weights.scatter(plain, weights.gather(source))
    ids = torch.arange(12).view(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(Objective(plain)(ids, ids).nll, Objective(source)(ids, ids).nll)
    back = model(split=True, seed=2)
    weights.scatter(back, weights.gather(plain))
    assert all(torch.equal(one, two) for one, two in zip(source.parameters(), back.parameters(), strict=True))


def test_gathered_weights_are_copies(split: bool) -> None:
    source = model(split=split)
    whole = weights.gather(source)
    before = {name: value.clone() for name, value in whole.items()}
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(whole[name], before[name]) for name in before)


def test_a_tied_matrix_is_stored_once() -> None:
    whole = weights.gather(model())
    assert "model.embedding.weight" in whole
    assert "lm_head.decoder.weight" not in whole


@pytest.mark.parametrize("name", OPTIMISERS)
def test_an_optimiser_continues_bit_for_bit(split: bool, name: str) -> None:
    cpu = torch.device("cpu")
    source, target = model(split=split), model(split=split, seed=1)
    one, two = (updates.make(made, OPTIMISERS[name], cpu) for made in (source, target))
    for number in range(3):
        step(source, one, number)
    states = weights.gather_optimiser(source, one)
    if name != "sgd":
        names = weights.gather(source).keys()
        assert states.keys() == {f"{of}/{key}" for of in names for key in ("step", "exp_avg", "exp_avg_sq")}
        assert states["model.embedding.weight/exp_avg"].shape[0] == V
        assert float(states["model.embedding.weight/step"]) == 3
    weights.scatter(target, weights.gather(source))
    weights.scatter_optimiser(target, two, states)
    again = weights.gather_optimiser(target, two)
    assert again.keys() == states.keys()
    assert all(torch.equal(again[key], states[key]) for key in states)
    for number in range(3, 6):
        step(source, one, number)
        step(target, two, number)
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


def test_states_given_to_an_optimiser_are_its_own() -> None:
    cpu = torch.device("cpu")
    source = model()
    optimiser = updates.make(source, OPTIMISERS["adamw"], cpu)
    step(source, optimiser, 0)
    states = weights.gather_optimiser(source, optimiser)
    kept = {name: value.clone() for name, value in states.items()}
    weights.scatter_optimiser(source, optimiser, states)
    step(source, optimiser, 1)
    assert all(torch.equal(states[name], kept[name]) for name in kept)


def test_states_follow_names_that_begin_alike() -> None:
    """A parameter's states must not go to another one whose name is the start of its own."""
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    module = nn.Module()
    module.register_parameter("w", first)
    module.register_parameter("w_more", second)
    optimiser = torch.optim.AdamW(module.parameters())
    first.grad, second.grad = torch.ones(2), 2 * torch.ones(2)
    optimiser.step()
    states = weights.gather_optimiser(module, optimiser)
    fresh = torch.optim.AdamW(module.parameters())
    weights.scatter_optimiser(module, fresh, states)
    assert torch.equal(fresh.state[first]["exp_avg"] * 2, fresh.state[second]["exp_avg"])
    assert fresh.state[first].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_an_average_is_gathered_under_plain_names(split: bool) -> None:
    source = model(split=split)
    average = updates.Average(source)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(3.0)
    average.update(source)
    whole = weights.gather(source, average.mean)
    assert whole.keys() == weights.gather(source).keys()
    assert all(torch.equal(value, weights.gather(source)[name]) for name, value in whole.items())
