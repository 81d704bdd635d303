"""Alarms: planted defects raise them once, noise does not, and a resumed run says what it would have said."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullrank.train.alarms import Alarms


def evaluation(step: int, loss: float = 4.0, error: float = 0.01, **monitors: Any) -> dict[str, Any]:
    return {
        "event": "evaluate", "step": step, "split": "valid", "loss": loss, "standard_error": error,
        "monitors": monitors,
    }  # fmt: skip


def raised(lines: list[dict[str, Any]]) -> list[tuple[int, str]]:
    alarms = Alarms()
    return [(alarm.step, alarm.kind) for line in lines for alarm in alarms.check(line["step"], line)]


def components(counts: list[int], K: int = 4) -> list[dict[str, Any]]:
    shares = [[0.0] * count + [1 / (K - count)] * (K - count) for count in counts]
    return [
        evaluation(step, dead_components=float(count), component_shares=shares[step])
        for step, count in enumerate(counts)
    ]


@pytest.mark.parametrize(
    ("counts", "steps"),
    [
        ([0, 0, 1, 1, 1, 2, 2], [2, 5]),
        ([2, 0, 0, 0], []),
        ([2, 2, 2], [1]),
        ([2, 1, 1], [1]),
        ([0, 1, 0, 0, 1], [1, 4]),
        ([3], []),
    ],
)
def test_dead_components_are_told_once_a_change(counts: list[int], steps: list[int]) -> None:
    assert raised(components(counts)) == [(step, "dead_components") for step in steps]


def test_the_message_names_the_dead_components() -> None:
    alarms = Alarms(components([0, 0]))
    line = evaluation(2, dead_components=2.0, component_shares=[0.5, 1e-7, 0.5 - 2e-7, 1e-7])
    (alarm,) = alarms.check(2, line)
    assert "2 of 4 components (number 1, 3, counted from 0) are dead, 0 before" in alarm.message
    assert "component_shares" in alarm.message


def head(shares: list[float]) -> list[dict[str, Any]]:
    return [evaluation(step, head_effective_rank_share=share) for step, share in enumerate(shares)]


@pytest.mark.parametrize(
    ("shares", "steps"),
    [
        ([0.95, 0.9, 0.6, 0.47, 0.46, 0.40], [3]),
        # Back above the bound but not by enough, down again: still the same collapse.
        ([0.9, 0.44, 0.46, 0.44, 0.46, 0.44], [1]),
        ([0.9, 0.44, 0.6, 0.44], [1, 3]),
        ([0.15, 0.12, 0.09, 0.05], [2]),
        ([0.2, 0.5, 0.9, 0.8], []),
        ([0.9, math.nan, 0.9], []),
    ],
)
def test_a_head_that_collapses_is_told_once_until_it_recovers(shares: list[float], steps: list[int]) -> None:
    assert raised(head(shares)) == [(step, "collapsed_head") for step in steps]


def ranks(values: list[float], ceiling: float = 160.0, K: int = 4) -> list[dict[str, Any]]:
    return [
        evaluation(
            step, logprob_rank=value, logprob_rank_ceiling=ceiling, head_effective_rank=90.0,
            head_effective_rank_share=0.9, component_shares=[1 / K] * K,
        )
        for step, value in enumerate(values)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        (ranks([100, 160, 160, 101, 101]), [3]),
        (ranks([100, 100, 101]), []),
        (ranks([100, 160, 140, 160]), []),
        (ranks([60, 60, 40], ceiling=60), []),
        (ranks([160, 100], K=1), []),
        (ranks([160, 100, 160, 100]), [1, 3]),
    ],
)
def test_a_mixture_that_falls_back_to_one_softmax(lines: list[dict[str, Any]], steps: list[int]) -> None:
    assert raised(lines) == [(step, "collapsed_head") for step in steps]


def test_a_curve_that_turns_is_told_once_for_every_best() -> None:
    losses = [5.0, 4.5, 4.0, 4.05, 4.1, 4.12, 4.3, 4.5, 3.9, 3.95, 4.0, 4.2]
    found = raised([evaluation(step, loss) for step, loss in enumerate(losses)])
    # Above 4.08 from step 4 on, the second time at 5; above 3.978 from step 10 on, the second time at 11.
    assert found == [(5, "curve_turned"), (11, "curve_turned")]


def test_the_message_of_a_turn_has_the_best_and_its_step() -> None:
    alarms = Alarms([evaluation(10, 4.0), evaluation(20, 4.2)])
    (alarm,) = alarms.check(30, evaluation(30, 4.3))
    assert "4.3000 nats per token, 7.5% above its best of 4.0000 at step 10" in alarm.message


def test_one_bad_evaluation_a_small_rise_and_a_rise_within_its_errors_are_no_turn() -> None:
    assert raised([evaluation(step, loss) for step, loss in enumerate([4.0, 4.5, 4.0, 4.5, 4.0])]) == []
    assert raised([evaluation(step, loss) for step, loss in enumerate([4.0, 4.07, 4.07, 4.07])]) == []
    noisy = [evaluation(step, loss, error=0.1) for step, loss in enumerate([4.0, 4.3, 4.4, 4.3, 4.4])]
    assert raised(noisy) == []


def test_noise_around_a_falling_or_level_curve_is_hardly_ever_a_turn() -> None:
    """The best of 30 lies some two deviations below the truth: that alone must not make an alarm."""
    called = 0
    for seed in range(300):
        draw = random.Random(seed)
        losses = [4.0 + 3.0 / (1 + step) + draw.gauss(0.0, 0.05) for step in range(30)]
        called += bool(raised([evaluation(step, loss, error=0.05) for step, loss in enumerate(losses)]))
    assert called <= 3


def test_the_test_split_missing_monitors_and_no_numbers_raise_nothing() -> None:
    lines = [evaluation(0, 4.0), *({**evaluation(step, 9.0), "split": "test"} for step in (1, 2, 3))]
    assert raised(lines) == []
    assert raised([evaluation(step, math.nan) for step in range(4)]) == []
    assert raised([{"step": 0, "split": "valid", "loss": 4.0, "standard_error": math.nan}]) == []


@given(
    losses=st.lists(st.floats(3.0, 6.0), min_size=1, max_size=20),
    dead=st.lists(st.integers(0, 3), min_size=20, max_size=20),
    shares=st.lists(st.floats(0.05, 1.0), min_size=20, max_size=20),
    cut=st.integers(0, 20),
)
def test_a_resumed_run_gives_the_alarms_of_one_never_stopped(
    losses: list[float], dead: list[int], shares: list[float], cut: int
) -> None:
    lines = [
        evaluation(step, loss, dead_components=dead[step], head_effective_rank_share=shares[step])
        for step, loss in enumerate(losses)
    ]
    whole = Alarms()
    every = [whole.check(line["step"], line) for line in lines]
    resumed = Alarms(lines[:cut])
    assert [resumed.check(line["step"], line) for line in lines[cut:]] == every[cut:]
