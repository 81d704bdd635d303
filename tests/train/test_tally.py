"""Sums between two lines: means, the first step that was no number, and what a checkpoint keeps of them."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import torch

from fullrank.train.batches import Cursor
from fullrank.train.tally import Tally


def machine(other: list[float] | None = None) -> Any:
    """One process, or two of which the other one has these totals."""

    def reduce(values: torch.Tensor, how: str) -> torch.Tensor:
        assert how == "mean"
        return (values + torch.tensor(other, dtype=values.dtype)) / 2

    return SimpleNamespace(device=torch.device("cpu"), num_processes=2 if other else 1, reduce=reduce)


def count(tally: Tally, losses: list[float], *, first: int = 0, norm: float = 2.0) -> None:
    for step, loss in enumerate(losses, first):
        place = Cursor(epoch=0, position=10 * step, step_in_epoch=step)
        tally.add(step, place, loss=torch.tensor(loss).double(), norm=torch.tensor(norm), tokens=7)
        tally.seconds += 0.5


def test_means_and_speed() -> None:
    tally = Tally(machine(), {})
    assert tally.means() == (0.0, 0.0)
    count(tally, [1.0, 2.0, 6.0])
    assert tally.means() == (3.0, 2.0)
    assert tally.tokens_per_second == 14.0
    tally.begin()
    count(tally, [5.0], first=3)
    assert (tally.means(), tally.steps, tally.tokens, tally.seconds) == ((5.0, 2.0), 1, 7, 0.5)


def test_means_are_those_of_all_processes() -> None:
    tally = Tally(machine([10.0, 2.0]), {})
    count(tally, [1.0, 3.0])
    assert tally.means() == (3.5, 1.5)


def test_bad_steps_are_left_out_of_the_means_and_counted() -> None:
    tally = Tally(machine(), {})
    count(tally, [1.0, math.nan, 2.0, math.inf])
    count(tally, [3.0], first=4, norm=math.inf)
    assert tally.means() == (1.5, 2.0)
    assert tally.skipped == 3
    assert (tally.steps, tally.tokens) == (5, 35)


def test_the_step_that_makes_too_long_a_row_is_named_with_its_place() -> None:
    tally = Tally(machine(), {})
    count(tally, [1.0, math.nan, math.nan, 2.0])
    assert tally.bad_row(2) is None
    count(tally, [math.nan] * 3, first=4)
    assert tally.bad_row(3) is None
    assert tally.bad_row(2) == (7, Cursor(epoch=0, position=60, step_in_epoch=6))
    assert tally.last.position == 60


def test_a_row_goes_on_over_a_line_and_over_a_checkpoint() -> None:
    tally = Tally(machine(), {})
    count(tally, [math.nan] * 2)
    tally.begin()
    count(tally, [math.nan] * 2, first=2)
    then = Tally(machine(), json.loads(json.dumps(tally.to_json())))
    count(then, [math.nan], first=4)
    assert tally.bad_row(3) is not None
    assert then.bad_row(4) == (5, Cursor(epoch=0, position=40, step_in_epoch=4))


def test_a_checkpoint_between_two_lines_loses_nothing() -> None:
    losses = [0.1, 1 / 3, 2e-9, 7.7]
    whole, first = Tally(machine(), {}), Tally(machine(), {})
    count(whole, losses)
    count(first, losses[:2])
    then = Tally(machine(), json.loads(json.dumps(first.to_json())))
    count(then, losses[2:], first=2)
    assert then.to_json() == whole.to_json()
    assert then.means() == whole.means()
    assert then.bad_row(0) is None
