"""The loop on learners whose optimum is known: what it finds, when it ends, and what a crash costs it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullrank.fit import loop

PLAN = loop.Plan(rates=(0.05, 0.2), epochs=30, patience=2, tolerance=1e-3)
SHORT = dataclasses.replace(PLAN, epochs=6)
BATCH = 16


class Bowl(nn.Module):
    """Points about a centre, `away` from the start in its first coordinate and less far in the others: the
    mean squared distance to them is least at their mean, the centre."""

    batch = BATCH
    device = torch.device("cpu")
    graph = False

    def __init__(
        self, *, away: float = 3.0, spread: float = 0.3, examples: int = 320, upside_down: bool = False
    ) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        noise = spread * torch.randn(examples, 8, generator=draw)
        self.examples = examples
        self.centre = away * torch.linspace(1.0, 0.3, 8)
        self.points = self.centre + noise - noise.mean(dim=0)
        self.place = nn.Parameter(torch.zeros(8))
        self.sign = -1.0 if upside_down else 1.0

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.named_parameters())

    def groups(self, rate: float) -> list[dict[str, Any]]:
        return [{"params": [self.place], "lr": rate}]

    def loss(self, chosen: Tensor) -> Tensor:
        return self.sign * (self.place - self.points[chosen]).square().sum(dim=1).mean()

    @torch.no_grad()
    def choose_loss(self) -> float:
        return float((self.place - self.centre).square().sum())


@pytest.fixture
def rates_tried(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The learning rates of all runs, in order."""
    rates: list[float] = []
    groups = Bowl.groups
    monkeypatch.setattr(Bowl, "groups", lambda bowl, rate: (rates.append(rate), groups(bowl, rate))[1])
    return rates


def test_it_finds_the_optimum_and_says_that_it_did() -> None:
    found = loop.fit(Bowl, PLAN, seed=0)
    assert found.choose_loss == pytest.approx(float((found.weights["place"] - Bowl().centre).square().sum()))
    assert found.choose_loss < 0.005
    assert found.converged
    # The curve is of that run, from the start on.
    steps = [step for step, _ in found.curve]
    assert found.curve[0] == (0, pytest.approx(Bowl().choose_loss()))
    assert steps == sorted(set(steps))
    assert (found.steps, found.choose_loss) in found.curve


@pytest.mark.parametrize(
    ("rates", "upside_down", "added", "best"),
    [
        # Twenty steps of 0.01 lead nowhere near 3; of 0.16 they do, and 0.64 is no better.
        ((0.0025, 0.01), False, [0.04, 0.16, 0.64], 0.16),
        ((0.005, 0.2, 50.0), False, [], 0.2),
        # Every step leads away from the optimum, the smaller the less.
        ((0.4, 1.6), True, [0.1, 0.025, 0.00625], 0.00625),
        # No end in sight: as far as it may grow.
        ((1e-7, 4e-7), False, [1.6e-6, 6.4e-6, 2.56e-5], 2.56e-5),
    ],
    ids=["above", "inside", "below", "far above"],
)
def test_the_grid_grows_past_its_edge_where_the_best_lies_there(
    rates: tuple[float, ...], upside_down: bool, added: list[float], best: float, rates_tried: list[float]
) -> None:
    plan = dataclasses.replace(PLAN, rates=rates, epochs=3)
    fit = loop.fit(lambda: Bowl(upside_down=upside_down), plan, seed=0)
    assert rates_tried == pytest.approx([*rates, *added])
    assert fit.rate == pytest.approx(best)


def test_the_grid_grows_downwards_also_where_its_low_edge_gains_something(rates_tried: list[float]) -> None:
    """A rate far too high still gains something; a smaller one is better by much."""
    plan = dataclasses.replace(PLAN, rates=(4.0, 16.0), epochs=3)
    fit = loop.fit(lambda: Bowl(away=0.3), plan, seed=0)
    assert rates_tried[2] == 1.0
    assert fit.rate < 4.0


def test_a_single_rate_is_used_without_a_race(rates_tried: list[float]) -> None:
    fit = loop.fit(Bowl, dataclasses.replace(PLAN, rates=(0.001,), epochs=3), seed=0)
    assert rates_tried == [fit.rate] == [0.001]


def test_a_run_that_ends_by_its_epochs_is_not_converged() -> None:
    short = dataclasses.replace(PLAN, rates=(0.03,), epochs=3)
    found = loop.fit(Bowl, short, seed=0)
    assert not found.converged
    losses = [loss for _, loss in found.curve]
    assert losses == sorted(losses, reverse=True)
    # Two thirds of the passes steady, and half as long falling.
    assert [step for step, _ in found.curve] == [0, 20, 40, 60]
    # With enough epochs the same rate converges, and the curve ends the run long before the last epoch.
    found = loop.fit(Bowl, dataclasses.replace(short, epochs=40), seed=0)
    assert found.converged
    assert found.choose_loss < 1e-3
    assert found.curve[-1][0] < 0.5 * 40 * 20


def test_a_fit_that_only_gets_worse_returns_its_start() -> None:
    found = loop.fit(lambda: Bowl(away=1.0, upside_down=True), PLAN, seed=0)
    assert (found.steps, found.choose_loss) == (0, pytest.approx(Bowl(away=1.0).choose_loss()))
    assert torch.equal(found.weights["place"], torch.zeros(8))
    assert found.converged
    assert all(loss >= found.choose_loss for _, loss in found.curve)


class Broken(Bowl):
    """A loss that is no number after a few steps."""

    calls = 0

    def loss(self, chosen: Tensor) -> Tensor:
        self.calls += 1
        return super().loss(chosen) * (math.nan if self.calls > 50 else 1.0)


def test_a_loss_that_is_no_number_is_worse_than_any() -> None:
    found = loop.fit(Broken, dataclasses.replace(PLAN, rates=(0.05,)), seed=0)
    # Two passes of twenty steps were sound, the third was not.
    assert found.steps == 40
    assert math.isfinite(found.choose_loss)
    assert bool(found.weights["place"].isfinite().all())
    assert any(math.isinf(loss) for _, loss in found.curve)


class Noisy(Bowl):
    """Draws from torch's own numbers in every step, as dropout does."""

    def __init__(self) -> None:
        super().__init__(examples=96)

    def loss(self, chosen: Tensor) -> Tensor:
        return super().loss(chosen) + (0.5 * torch.randn(8) * self.place).sum()


def test_the_callers_random_numbers_are_not_changed() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    fit = loop.fit(Noisy, SHORT, seed=0)
    assert torch.equal(torch.rand(3), expected)
    # The fit depends on its seed and not on the state of the generator.
    again = loop.fit(Noisy, SHORT, seed=0)
    assert again.curve == fit.curve
    assert torch.equal(again.weights["place"], fit.weights["place"])
    assert loop.fit(Noisy, SHORT, seed=1).curve != fit.curve


def test_progress_rises_to_the_end() -> None:
    seen: list[float] = []
    loop.fit(Bowl, dataclasses.replace(PLAN, epochs=10), seed=0, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert 0 < seen[0] < 0.2


class Crash(Exception):  # noqa: N818
    """In place of a signal."""


class Steps:
    """Makes small learners, counts the steps of all of them together, and crashes in one if asked to."""

    def __init__(self, crash_in: int | None = None) -> None:
        self.count, self.crash_in = 0, crash_in

    def make(self) -> Noisy:
        outer = self

        class Counted(Noisy):
            def loss(self, chosen: Tensor) -> Tensor:
                outer.count += 1
                if outer.count == outer.crash_in:
                    raise Crash
                return super().loss(chosen)

        return Counted()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint at every step."""
    monkeypatch.setattr(loop, "EVERY", 0.0)
    monkeypatch.setattr(loop, "DEAREST", math.inf)


# A pass has six steps. In the first rate's race and in its last step, in the first of the second's, in that
# of a rate that was added, in the steady phase, and in the last step of all.
@pytest.mark.parametrize("at", [3, 6, 7, 15, 26, 0])
def test_a_crash_in_any_step_changes_no_bit(at: int, eager: None, tmp_path: Path) -> None:
    whole = Steps()
    straight = loop.fit(whole.make, SHORT, seed=3)
    at = at if at > 0 else whole.count + at
    file = tmp_path / "fit.safetensors"
    with pytest.raises(Crash):
        loop.fit(Steps(at).make, SHORT, seed=3, file=file, of="this")
    rest = Steps()
    found = loop.fit(rest.make, SHORT, seed=3, file=file, of="this")
    assert found.facts() == straight.facts()
    assert torch.equal(found.weights["place"], straight.weights["place"])
    # It went on where it last looked: nothing but the pass in hand was lost.
    assert rest.count <= whole.count - 6 * ((at - 1) // 6)
    # What would have let it go on has gone.
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_fit_is_not_believed(eager: None, tmp_path: Path) -> None:
    file = tmp_path / "fit.safetensors"
    with pytest.raises(Crash):
        loop.fit(Steps(20).make, SHORT, seed=3, file=file, of="another")
    anew = Steps()
    loop.fit(anew.make, SHORT, seed=3, file=file, of="this")
    whole = Steps()
    loop.fit(whole.make, SHORT, seed=3)
    assert anew.count == whole.count
