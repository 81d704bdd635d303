"""Budgets: what they say, and how many steps they are."""

from __future__ import annotations

import pytest

from fullrank.errors import FullrankError
from fullrank.fit.budget import Budget


def test_steps_of_every_measure() -> None:
    sizes = {"tokens": 1000, "flops": 10**6}
    assert Budget("tokens", 2.5e6).steps(**sizes) == 2500
    assert Budget("flops", 1e12).steps(**sizes) == 1000
    assert Budget("seconds", 60.0).steps(**sizes) is None
    assert Budget("seconds", 60.0).steps(**sizes, seconds=0.5) == 120
    assert Budget("tokens", 10).steps(**sizes) == 1, "a run has a step"


def test_a_head_that_costs_twice_as_much_has_half_the_steps() -> None:
    budget = Budget("flops", 1e12)
    assert budget.steps(tokens=64, flops=2 * 10**6) == budget.steps(tokens=64, flops=10**6) // 2  # type: ignore[operator]


def test_what_is_written() -> None:
    assert Budget.parse("tokens=2e9") == Budget("tokens", 2e9)
    assert Budget.parse("seconds=600") == Budget("seconds", 600.0)
    assert Budget.parse("") is None


@pytest.mark.parametrize(
    "text", ["tokens", "tokens=", "tokens=-1", "flops=0", "steps=5", "seconds=inf", "tokens=nan"]
)
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(FullrankError, match="expected tokens=, flops= or seconds="):
        Budget.parse(text)
