"""The verdict of records written by hand: its outcome, the gain, and the next step that it names."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from fullrank.diagnose.verdict import HELD_BACK, LEAST, MATERIAL, NOT_HELD_BACK, UNDECIDED, verdict
from fullrank.results.diagnosis import BetterHead, Diagnosis, Estimate, HeadFit, Missing, Power, RankNeeded
from tests.diagnosis_records import around, diagnosis, model_facts, text_facts

INF = math.inf
FOUND = Power(planted=around(0.03), found=around(0.025), smallest=0.008, converged=True)
MISSED = Power(planted=around(0.2), found=around(0.0), smallest=INF, converged=True)
# 0.084 of what was planted was not found.
PARTLY = Power(planted=around(0.204), found=around(0.12), smallest=0.04, converged=True)
RANK = RankNeeded(
    points=(), original=around(3.0), tolerance=0.02, knee=around(20.0, 3.0), truncated_knee=around(30.0, 3.0),
    still_falling=False, slope=around(0.001),
)  # fmt: skip
BUNDLED = "Python 3.11.7 documentation and docstrings, 90 pieces"
NO_GAIN = Estimate(value=1e-9, low=-4e-9, high=3e-9)


def record(
    gain: float | Estimate,
    *,
    power: Power | None = FOUND,
    components: int = 4,
    converged: bool = True,
    steps: int = 10,
    rank: RankNeeded | None = RANK,
    given: str = "models/tiny",
    sources: tuple[str, ...] = ("prose.txt",),
    **changes: Any,
) -> Diagnosis:
    fits = tuple(
        HeadFit(
            head=head, components=components if head == "mos" else 1, parameters=100, loss=around(3.0),
            gain=around(0.0), gain_over_equal=around(0.0), gain_by_seed=(0.0,), learning_rate=0.1,
            steps=steps, converged=converged or head != "mos",
        )
        for head in ("softmax", "softmax_equal", "mos")
    )  # fmt: skip
    better: dict[str, Any] = {
        "original": around(3.0), "fits": fits, "best": "mos", "seeds": 1, "fit_tokens": 571_000,
        "best_gain": gain if isinstance(gain, Estimate) else around(gain, 0.002), "trained_rows": 500,
        "held_out_tokens": 286_000, "control": "softmax", "refit_gain": around(0.01, 0.002), "power": power,
    }  # fmt: skip
    return diagnosis(
        model=model_facts(given=given), text=text_facts(sources=sources), rank_needed=rank,
        better_head=BetterHead(**better | changes),
    )  # fmt: skip


def powered(power: Power = FOUND, **changes: Any) -> Power:
    return dataclasses.replace(power, **changes)


LOST: dict[str, Any] = {"refit_gain": around(-0.06, 0.002), "fit_tokens": 2044, "power": None}
AT_LEAST = dataclasses.replace(RANK, bound="at least", still_falling=True)

# The record, its outcome, its gain as (value, low, high) or None for any, its smallest detectable gain or
# None for any, words that the lines have, and words that they do not have.
CASES: dict[str, tuple[Diagnosis, str, tuple[float, ...] | None, float | None, list[str], list[str]]] = {
    # 0.005 of the planted gain was not found: it is added to the figure once and to the upper end twice.
    "held back": (record(0.05), HELD_BACK, (0.055, 0.048, 0.062), 0.008, [
        "about 5.4% off the perplexity of tiny", "mos with 4 components gains +0.0500 (95%: +0.0480 to",
        "of a planted 0.030 the same fits find 0.025", "+0.0550 (95%: +0.0480 to +0.0620) is there",
        "a gain of 0.0080 would have been seen",
        "fullrank upgrade models/tiny --head mos --components 4 --train TEXT",
    ], ["any refit"]),
    "no components": (record(0.05, components=1), HELD_BACK, None, None,
        ["mos gains", "fullrank upgrade models/tiny --head mos --train TEXT"], []),
    "bundled model and text": (record(0.05, given="", sources=(BUNDLED,)), HELD_BACK, None, None,
        ["fullrank upgrade --head mos --components 4 --train-default"], []),
    # A refit to little text loses, over the unmodified layer alone.
    "lost to the original": (record(-0.05, control="original", **LOST), UNDECIDED, None, None,
        ["comes to -0.0500", "of which -0.0600 is what any refit to 2,044 tokens loses"], []),
    "lost to softmax": (record(-0.05, control="softmax", **LOST), UNDECIDED, None, None, [], ["any refit"]),
    "lost to softmax_equal": (record(-0.05, control="softmax_equal", **LOST), UNDECIDED, None, None, [],
        ["any refit"]),
    "refit gains": (record(0.05, control="original"), HELD_BACK, None, None, [], ["any refit"]),
    # A head that never moved has rounding for a gain: an interval of no width would read as certainty.
    "no step helped": (record(NO_GAIN, power=None, steps=0), UNDECIDED, None, INF,
        ["no step of training on 571,000 tokens"], ["95%"]),
    "no step, a gain": (record(0.0, power=None, steps=0), UNDECIDED, None, None, ["95%"], ["no step"]),
    "steps, no gain": (record(NO_GAIN, power=None), UNDECIDED, None, INF, ["95%"], ["no step"]),
    # 500 rows of width 64 cost 32,000 / 2N nats: 0.0551 with 290,000 tokens, 0.0549 with 292,000.
    "W costs more": (record(0.05, fit_tokens=290_000), HELD_BACK, (0.055, 0.048, INF), None,
        ["at least 4.7%", "or more) is there", "290,000 tokens"], []),
    "W costs less": (record(0.05, fit_tokens=292_000), HELD_BACK, (0.055, 0.048, 0.062), None, ["about 5.4%"],
        ["or more) is there", "292,000 tokens"]),
    # Above twice the gain, what was missed corrects nothing.
    "missed twice": (record(0.043, power=PARTLY), HELD_BACK, (0.127, 0.041, 0.213), None, ["about 11.9%"],
        ["not known how much more"]),
    "missed more": (record(0.041, power=PARTLY), HELD_BACK, (0.041, 0.039, INF), None,
        ["at least 3.8%", "not known how much more"], []),
    "a little": (record(0.010, power=PARTLY), UNDECIDED, (0.010, 0.008, INF), None,
        ["cannot say how much is there", "fullrank diagnose models/tiny --tokens 4000"], []),
    "enough": (record(0.021, power=PARTLY), HELD_BACK, (0.021, 0.019, INF), None, ["fullrank upgrade"],
        ["cannot say"]),
    "a little, all of it": (record(0.010, fit_tokens=10_000_000), HELD_BACK, (0.015, 0.008, 0.022), None, [],
        []),
    # A third of the directions has a ninth of a gain that is spread over all.
    "all directions": (record(0.0, power=powered(covered=1.0)), NOT_HELD_BACK, None, 0.008,
        ["a gain of 0.0080 or more would have been seen"], ["along its leading directions"]),
    "a third of the directions": (record(0.0, power=powered(covered=1 / 3)), UNDECIDED, None, 0.072,
        ["a gain of 0.0720 or more would have been seen", "along its leading directions"], []),
    "few directions": (record(0.0, power=powered(covered=0.001)), UNDECIDED, None, INF,
        ["one spread over all of them would not have been seen"], []),
    "a gain along few directions": (record(0.05, power=powered(covered=0.001)), HELD_BACK, (0.05, 0.048, INF),
        0.05, ["at least 4.7% off the perplexity"], []),
    # Up to what would have been seen there may be a gain.
    "not held back": (record(0.001), NOT_HELD_BACK, (0.001, -0.001, 0.008), None,
        ["elsewhere than in the output layer"], []),
    "sure and worthless": (record(Estimate(value=0.9 * LEAST, low=0.8 * LEAST, high=LEAST)), NOT_HELD_BACK,
        None, None, [], []),
    "weak": (record(0.001, power=powered(smallest=2 * MATERIAL)), UNDECIDED, None, None,
        ["0.0400 or more would have been seen", "--tokens 4000"], []),
    "unsure": (record(around(1.5 * MATERIAL, 2.5 * MATERIAL)), UNDECIDED, None, None, [], []),
    "a planted gain was missed": (record(0.001, power=MISSED), UNDECIDED, (0.001, -0.001, INF), INF,
        ["of a planted 0.200 the same fits find 0.000"], []),
    "missed, and a gain": (record(2 * MATERIAL, power=MISSED), HELD_BACK, (0.04, 0.038, INF), None,
        ["at least 3.7% off the perplexity"], []),
    "missed, and a little": (record(0.5 * MATERIAL, power=MISSED), UNDECIDED, None, None,
        ["a better head gains", "cannot say how much"], []),
    # Without a planted gain: 2.8 standard errors, of which an interval is 3.92 long.
    "quick": (record(0.0, power=None), UNDECIDED, None, 2.8 * 0.004 / 3.92, ["(not tested)"], []),
    "quick and still": (record(around(0.0, 1e-9), power=None), UNDECIDED, None, INF,
        ["stayed about where it began"], []),
    "quick and wide": (record(around(0.0, 0.1), power=None), UNDECIDED, None, None, ["without --quick"], []),
    "cut off": (record(0.0, power=None, converged=False), UNDECIDED, None, INF,
        ["did not come to their end"], []),
    "cut off with a gain": (record(0.05, power=None, converged=False), HELD_BACK, (0.05, 0.048, INF), None,
        ["at least", "there may be more"], []),
    "cut off with power": (record(0.05, converged=False), HELD_BACK, (0.05, 0.048, INF), None,
        ["at least", "there may be more"], []),
    # Remedies where no head gains.
    "fine-tune": (record(0.0, refit_gain=around(0.3)), NOT_HELD_BACK, None, None,
        ["would gain +0.3000", "fine-tune"], []),
    "refit unsure": (record(0.0, refit_gain=around(0.03, 0.02)), NOT_HELD_BACK, None, None, [],
        ["fine-tune"]),
    "no refit": (record(0.0, refit_gain=None), NOT_HELD_BACK, None, None, [], ["fine-tune"]),
    "more width": (record(0.0, rank=AT_LEAST), NOT_HELD_BACK, None, None, ["more width"], []),
    "width not measured": (record(0.0, rank=None), NOT_HELD_BACK, None, None, [], ["more width"]),
    "width at most": (record(0.0, rank=dataclasses.replace(RANK, bound="at most")), NOT_HELD_BACK, None, None,
        [], ["more width"]),
    "a gain and width": (record(0.05, rank=AT_LEAST), HELD_BACK, None, None, [], ["more width"]),
}  # fmt: skip


def outcome_and_lines(made: Diagnosis) -> tuple[str, str]:
    result = verdict(made)
    assert result.lines[0].lower().startswith(result.outcome)
    assert result.lines[2].startswith("Next: ")
    assert result.next in result.lines[2]
    assert len(result.lines) == 3
    assert all("\n" not in line and "  " not in line for line in result.lines)
    return result.outcome, "\n".join(result.lines)


@pytest.mark.parametrize("case", CASES)
def test_records_and_their_verdict(case: str) -> None:
    made, outcome, gain, smallest, words, absent = CASES[case]
    reached, lines = outcome_and_lines(made)
    assert reached == outcome
    result = verdict(made)
    if gain is not None:
        assert (result.gain.value, result.gain.low, result.gain.high) == pytest.approx(gain)
    if smallest is not None:
        assert result.smallest == pytest.approx(smallest)
    for word in words:
        assert word in lines
    # Only the best head's clause is without an interval.
    measured = lines.partition(";")[0] if "95%" in absent else lines
    for word in absent:
        assert word not in measured
    assert (result.next == "") == (outcome == NOT_HELD_BACK)


def test_each_control_has_its_name() -> None:
    names = {"original": "as it is", "softmax": "softmax refitted", "softmax_equal": "equal parameters"}
    for control, words in names.items():
        assert words in verdict(record(0.05, control=control)).lines[1]


@pytest.mark.parametrize("reason", ["too few tokens", "no head", "no number"])
def test_a_gain_that_was_not_measured_is_undecided(reason: str) -> None:
    nan = Estimate(value=math.nan, low=math.nan, high=math.nan)
    made = record(nan) if reason == "no number" else record(0.05, best="")
    if reason == "too few tokens":
        missing = (Missing(question="better_head", reason=reason),)
        made = dataclasses.replace(made, better_head=None, missing=missing)
    outcome, lines = outcome_and_lines(made)
    assert (outcome, verdict(made).gain, verdict(made).smallest) == (UNDECIDED, None, INF)
    assert (reason in lines) == (reason == "too few tokens")
