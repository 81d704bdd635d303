"""The loop on learners whose optimum is known: what it finds, when it ends, and what a crash costs it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullrank.fit import loop

PLAN = loop.Plan(rates=(0.05, 0.2), epochs=30, patience=2, tolerance=1e-3)
BATCH = 16


class Bowl(nn.Module):
    """Points about a centre, `away` from the start in its first coordinate and less far in the others: the
    mean squared distance to them is least at their mean, the centre."""

    def __init__(
        self, *, away: float = 3.0, spread: float = 0.3, examples: int = 320, upside_down: bool = False
    ) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        noise = spread * torch.randn(examples, 8, generator=draw)
        self.centre = away * torch.linspace(1.0, 0.3, 8)
        self.points = self.centre + noise - noise.mean(dim=0)
        self.place = nn.Parameter(torch.zeros(8))
        self.sign = -1.0 if upside_down else 1.0
        self.rates: list[float] = []

    @property
    def examples(self) -> int:
        return len(self.points)

    @property
    def batch(self) -> int:
        return BATCH

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def graph(self) -> bool:
        return False

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.named_parameters())

    def groups(self, rate: float) -> list[dict[str, Any]]:
        return [{"params": [self.place], "lr": rate}]

    def loss(self, chosen: Tensor) -> Tensor:
        return self.sign * (self.place - self.points[chosen]).square().sum(dim=1).mean()

    @torch.no_grad()
    def choose_loss(self) -> float:
        return float((self.place - self.centre).square().sum())


def recorded(made: list[Bowl], **options: Any) -> Callable[[], Bowl]:
    """A maker of bowls that remembers them, and the rates they were asked to learn at."""

    def make() -> Bowl:
        found = Bowl(**options)
        made.append(found)
        groups = found.groups

        def remember(rate: float) -> list[dict[str, Any]]:
            found.rates.append(rate)
            return groups(rate)

        found.groups = remember  # type: ignore[method-assign]
        return found

    return make


def tried(made: list[Bowl]) -> list[float]:
    return [rate for one in made for rate in one.rates]


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
    rates: tuple[float, ...], upside_down: bool, added: list[float], best: float
) -> None:
    made: list[Bowl] = []
    make = recorded(made, upside_down=upside_down)
    found = loop.fit(make, dataclasses.replace(PLAN, rates=rates, epochs=6), seed=0)
    assert tried(made) == pytest.approx([*rates, *added])
    assert found.rate == pytest.approx(best)


def test_the_grid_grows_downwards_also_where_its_low_edge_gains_something() -> None:
    """Far too fast, but not so fast that nothing is gained: a smaller rate is better by much."""
    made: list[Bowl] = []
    found = loop.fit(recorded(made, away=0.3), dataclasses.replace(PLAN, rates=(4.0, 16.0)), seed=0)
    assert tried(made)[2] == 1.0
    assert found.rate < 4.0


def test_a_single_rate_is_taken_as_it_is() -> None:
    made: list[Bowl] = []
    found = loop.fit(recorded(made), dataclasses.replace(PLAN, rates=(0.001,)), seed=0)
    assert tried(made) == [0.001]
    assert found.rate == 0.001


def test_a_run_that_is_cut_off_says_so() -> None:
    short = dataclasses.replace(PLAN, rates=(0.03,), epochs=3)
    found = loop.fit(Bowl, short, seed=0)
    assert not found.converged
    losses = [loss for _, loss in found.curve]
    assert losses == sorted(losses, reverse=True)
    # Two thirds of the passes steady, and half as long falling.
    assert [step for step, _ in found.curve] == [0, 20, 40, 60]
    # With room enough the same rate gets there, and the curve ends it long before the passes do.
    found = loop.fit(Bowl, dataclasses.replace(short, epochs=40), seed=0)
    assert found.converged
    assert found.choose_loss < 1e-3
    assert found.curve[-1][0] < 0.5 * 40 * 20


def test_what_only_gets_worse_comes_back_as_it_came() -> None:
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


def test_the_callers_random_numbers_go_on_as_they_would_have() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    found = loop.fit(Noisy, PLAN, seed=0)
    assert torch.equal(torch.rand(3), expected)
    # And what was drawn before it is nothing to the fit, the seed is.
    again = loop.fit(Noisy, PLAN, seed=0)
    assert again.curve == found.curve
    assert torch.equal(again.weights["place"], found.weights["place"])
    assert loop.fit(Noisy, PLAN, seed=1).curve != found.curve


def test_progress_rises_to_the_end() -> None:
    seen: list[float] = []
    loop.fit(Bowl, PLAN, seed=0, progress=seen.append)
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


SHORT = dataclasses.replace(PLAN, epochs=6)


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
