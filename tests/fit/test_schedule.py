"""The rate over a run: its shape, its ends, and the warm-up of every schedule."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.fit.schedule import Schedule, factor


def factors(schedule: Schedule, steps: int, **shares: float) -> list[float]:
    shares = {"warmup": 0.1, "decay": 0.2, "final": 0.25, **shares}
    return [factor(schedule, step, steps, **shares) for step in range(steps + 3)]


def test_a_cosine_rises_falls_and_stays() -> None:
    found = factors("cosine", 100)
    assert found[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert max(found) == found[9] == found[10] == 1.0
    assert all(later < earlier for earlier, later in itertools.pairwise(found[10:100]))
    # Half-way between the warm-up and the end a cosine is half-way between both rates.
    assert found[55] == pytest.approx((1.0 + 0.25) / 2)
    assert found[100:] == pytest.approx([0.25] * 3)


def test_constant_rises_and_stays() -> None:
    found = factors("constant", 50)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert set(found[5:]) == {1.0}


def test_wsd_is_level_until_its_fall() -> None:
    found = factors("wsd", 100)
    assert found[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert set(found[9:81]) == {1.0}
    # A quarter of the fall is half of the way, as the square root has it.
    assert found[85] == pytest.approx(1.0 - 0.75 / 2)
    assert found[100:] == pytest.approx([0.25] * 3)


def test_a_longer_wsd_run_is_the_shorter_one_until_that_falls() -> None:
    """So it can be branched: with warm-ups of equal length, both are at full rate between."""
    short, long = factors("wsd", 100, warmup=0.1), factors("wsd", 200, warmup=0.05)
    assert short[:80] == long[:80]


@pytest.mark.parametrize("schedule", ["cosine", "constant", "wsd"])
def test_a_run_of_one_step_has_a_rate(schedule: Schedule) -> None:
    assert factors(schedule, 1)[0] == 1.0


@settings(max_examples=30)
@given(
    schedule=st.sampled_from(["cosine", "constant", "wsd"]),
    steps=st.integers(1, 500),
    warmup=st.floats(0, 1),
    decay=st.floats(0, 1),
    final=st.floats(0, 1),
)
def test_factors_lie_between_nothing_and_the_whole(
    schedule: Schedule, steps: int, warmup: float, decay: float, final: float
) -> None:
    found = factors(schedule, steps, warmup=warmup, decay=decay, final=final)
    assert all(0.0 <= one <= 1.0 for one in found)
