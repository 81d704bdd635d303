"""Budgets: what they say, and how many steps they are."""

from __future__ import annotations

import pytest

from fullrank.errors import FullrankError
from fullrank.fit.budget import PACED, WARMING, Budget, Watch


def test_steps_of_every_measure() -> None:
    sizes = {"tokens": 1000, "flops": 10**6}
    assert Budget("tokens", 2.5e6).steps(**sizes) == 2500
    assert Budget("flops", 1e12).steps(**sizes) == 1000
    assert Budget("flops", 1e12).steps(tokens=1000, flops=2 * 10**6) == 500, "twice the cost, half the steps"
    assert Budget("seconds", 60.0).steps(**sizes) is None
    assert Budget("tokens", 10).steps(**sizes) == 1, "a run has a step"


def test_a_watch_goes_by_the_newest_pace() -> None:
    first = Watch().looked(WARMING, 4.0)
    known = WARMING + PACED
    assert [step for step in range(known + 1) if Watch().due(step)] == [WARMING]
    assert [step for step in range(known + 1) if first.due(step)] == [known]
    even = first.looked(known, 4.0 + 0.25 * PACED)
    assert even.end(60.0) == known + (60 - 10) / 0.25
    assert even.share(known + 80, 60.0) == pytest.approx((10 + 20) / 60)
    slow = even.looked(known + 80, 10.0 + 40.0)
    assert slow.end(60.0) == known + 80 + 20, "half a second a step, ten seconds are left"
    assert slow.share(known + 90, 60.0) == pytest.approx(55 / 60)


def test_a_watch_past_its_time_ends_at_once() -> None:
    watch = Watch(step=100, seconds=50.0, pace=0.5)
    late = watch.looked(150, 75.0)
    assert late.end(60.0) == 150
    assert late.share(150, 60.0) == 1.0
    assert watch.looked(100, 51.0) == watch, "a second look at the same step changes nothing"


def test_budgets_are_parsed() -> None:
    assert Budget.parse("tokens=2e9") == Budget("tokens", 2e9)
    assert Budget.parse("seconds=600") == Budget("seconds", 600.0)
    assert Budget.parse("") is None


@pytest.mark.parametrize(
    "text", ["tokens", "tokens=", "tokens=-1", "flops=0", "steps=5", "seconds=inf", "tokens=nan"]
)
def test_refusals(text: str) -> None:
    with pytest.raises(FullrankError, match="expected tokens=, flops= or seconds="):
        Budget.parse(text)
