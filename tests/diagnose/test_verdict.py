"""The verdict from records made by hand: every outcome, and what it tells a reader to do."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from fullrank.diagnose import verdict as module
from fullrank.diagnose.verdict import HELD_BACK, LEAST, MATERIAL, NOT_HELD_BACK, UNDECIDED, verdict
from fullrank.results.diagnosis import (
    BetterHead,
    Diagnosis,
    Estimate,
    HeadFit,
    Missing,
    ModelFacts,
    Power,
    RankNeeded,
    TextFacts,
    Verdict,
)


def around(value: float, reach: float = 0.002) -> Estimate:
    return Estimate(value=value, low=value - reach, high=value + reach)


def fit_of(head: str, *, components: int = 1, converged: bool = True) -> HeadFit:
    return HeadFit(
        head=head, components=components, parameters=100, loss=around(3.0), gain=around(0.0),
        gain_over_equal=around(0.0), gain_by_seed=(0.0,), learning_rate=0.1, steps=10, converged=converged,
    )  # fmt: skip


SEEN = Power(planted=around(0.03), found=around(0.025), smallest=0.008, converged=True)
MISSED = Power(planted=around(0.2), found=around(0.0), smallest=math.inf, converged=True)

RANK = RankNeeded(
    points=(), original=around(3.0), tolerance=0.02, knee=around(20.0, 3.0), truncated_knee=around(30.0, 3.0),
    still_falling=False, slope=around(0.001),
)  # fmt: skip


def record(
    gain: Estimate,
    *,
    power: Power | None = SEEN,
    components: int = 4,
    converged: bool = True,
    rank: RankNeeded | None = RANK,
    **changes: Any,
) -> Diagnosis:
    fits = (
        fit_of("softmax"), fit_of("softmax_equal"),
        fit_of("mos", components=components, converged=converged),
    )  # fmt: skip
    better: dict[str, Any] = {
        "original": around(3.0), "fits": fits, "best": "mos", "best_gain": gain, "seeds": 1,
        "fit_tokens": 571_000, "held_out_tokens": 286_000, "trained_rows": 500, "control": "softmax",
        "refit_gain": around(0.01), "power": power,
    }  # fmt: skip
    return Diagnosis(
        model=ModelFacts(
            name="tiny", source="directory", architecture="Tiny", parameters=1000, layers=2, width=64,
            vocabulary=1050, tokens=1000, tied=True, bias=False, logit_scale=1.0, softcap=None,
            final_norm="RMSNorm", storage="float32", dtype="float32", fingerprint="", notes=(),
            given="models/tiny",
        ),
        text=TextFacts(
            sources=("prose.txt",), sha256="", bytes=4000, tokens=1000, window=128, windows=8,
            starts_with_bos=False, fit_tokens=571, choose_tokens=143, held_out_tokens=286,
        ),
        findings=(), loss=None, spectrum=None, anisotropy=None, logprob_rank=None, rank_needed=rank,
        better_head=BetterHead(**better | changes), unreachable=None, gradient=None, missing=(), seconds={},
    )  # fmt: skip


def checked(made: Diagnosis) -> Verdict:
    """The verdict, after what is true of every one."""
    found = verdict(made)
    assert len(found.lines) == 3
    assert found.lines[0].lower().startswith(found.outcome)
    assert found.lines[2].startswith("Next: ")
    assert all("\n" not in line and "  " not in line for line in found.lines)
    return found


def test_held_back() -> None:
    found = checked(record(around(0.05)))
    assert found.outcome == HELD_BACK
    assert found.smallest == SEEN.smallest
    # Of 0.030 planted 0.025 were found, so 0.005 more is there, and up to twice that.
    assert found.gain is not None
    assert found.gain.value == pytest.approx(0.055)
    assert (found.gain.low, found.gain.high) == pytest.approx((0.048, 0.062))
    # A gain of g nats lowers the perplexity by 1 - exp(-g).
    assert "tiny" in found.lines[0]
    assert "about 5.4% off the perplexity" in found.lines[0]
    assert "mos with 4 components gains +0.0500 (95%: +0.0480 to +0.0520)" in found.lines[1]
    assert "of a planted 0.030 the same fits find 0.025" in found.lines[1]
    assert "+0.0550 (95%: +0.0480 to +0.0620) is there for a head of this kind" in found.lines[1]
    assert "a gain of 0.0080 would have been seen" in found.lines[1]
    assert found.next == "fullrank upgrade models/tiny --head mos --components 4 --train TEXT"
    assert found.next in found.lines[2]


def test_what_too_little_text_costs_is_no_heads_loss() -> None:
    lost = {"refit_gain": around(-0.06), "control": "original", "fit_tokens": 2044}
    found = checked(record(around(-0.05), power=None, **lost))
    assert found.outcome == UNDECIDED
    assert "comes to -0.0500" in found.lines[1]
    assert "of which -0.0600 is what any refit to 2,044 tokens loses" in found.lines[1]
    # Over a control that was refitted itself it is no part of the figure.
    for control in ("softmax", "softmax_equal"):
        assert "any refit" not in checked(record(around(-0.05), **lost | {"control": control})).lines[1]
    assert "any refit" not in checked(record(around(0.05), control="original")).lines[1]


def test_a_head_that_no_step_has_helped_has_no_interval() -> None:
    """Its figures are rounding: an interval of no width would read as certainty."""
    made = record(around(0.0), power=None)
    assert made.better_head is not None
    fits = tuple(dataclasses.replace(fit, steps=0) for fit in made.better_head.fits)
    nothing = Estimate(value=1e-9, low=-4e-9, high=3e-9)
    found = checked(record(nothing, power=None, fits=fits))
    assert "no step of training on 571,000 tokens made it better" in found.lines[1]
    assert "95%" not in found.lines[1].partition(";")[0]
    for other in (record(around(0.0), power=None, fits=fits), record(nothing, power=None)):
        assert "comes to" in checked(other).lines[1] or "gains" in checked(other).lines[1]


def test_no_upper_end_where_learning_the_matrix_costs_more_than_the_gain() -> None:
    # 500 rows of width 64 cost 32,000 / 2N nats: 0.0551 with 290,000 tokens, 0.0549 with 292,000.
    for tokens, closed in ((290_000, False), (292_000, True)):
        found = checked(record(around(0.05), fit_tokens=tokens))
        assert found.outcome == HELD_BACK
        assert found.gain is not None
        assert math.isfinite(found.gain.high) is closed
        # Of perplexity: what is sure where the end is open.
        assert ("at least 4.7%" in found.lines[0]) is not closed
        assert ("or more) is there" in found.lines[1]) is not closed
        assert (f"{tokens:,} tokens" in found.lines[1]) is not closed


def test_what_was_missed_of_far_more_than_was_found_is_not_added() -> None:
    # 0.084 was missed: twice what was found at 0.042.
    for gain, added in ((0.043, True), (0.041, False)):
        tried = Power(planted=around(0.204), found=around(0.12), smallest=0.04, converged=True)
        found = checked(record(around(gain), power=tried))
        assert found.outcome == HELD_BACK
        assert found.gain is not None
        assert found.gain.value == pytest.approx(gain + 0.084 if added else gain)
        assert found.gain.low == around(gain).low
        assert math.isfinite(found.gain.high) is added
        assert ("at least 3.8%" in found.lines[0]) is not added
        assert ("not known how much more" in found.lines[1]) is not added


def test_a_little_of_which_nobody_knows_how_much_more_there_is_is_undecided() -> None:
    # Below and above what matters, while 0.084 of what was planted was missed.
    tried = Power(planted=around(0.204), found=around(0.12), smallest=0.04, converged=True)
    for gain, outcome in ((0.010, UNDECIDED), (0.021, HELD_BACK)):
        found = checked(record(around(gain), power=tried))
        assert found.outcome == outcome
        assert found.gain == Estimate(value=gain, low=around(gain).low, high=math.inf)
        assert ("cannot say how much is there" in found.lines[0]) == (outcome == UNDECIDED)
        assert ("diagnose" in found.next) == (outcome == UNDECIDED)
    # As little is held back where it is known to be all.
    assert checked(record(around(0.010), fit_tokens=10_000_000)).outcome == HELD_BACK


def test_a_gain_spread_over_directions_that_nobody_looked_at_is_not_said_to_be_seen() -> None:
    # Of a third of the directions a ninth of the gain is left: of 0.072 it is 0.008.
    for covered, smallest, outcome in ((1.0, 0.008, NOT_HELD_BACK), (1 / 3, 0.072, UNDECIDED)):
        tried = dataclasses.replace(SEEN, covered=covered)
        found = checked(record(around(0.0), power=tried))
        assert found.outcome == outcome
        assert found.smallest == pytest.approx(smallest)
        assert f"a gain of {smallest:.4f} or more would have been seen" in found.lines[1]
        assert ("along its leading directions" in found.lines[1]) is (covered < 1)
    few = dataclasses.replace(SEEN, covered=0.001)
    found = checked(record(around(0.0), power=few))
    assert (found.outcome, found.smallest) == (UNDECIDED, math.inf)
    assert "one spread over all of them would not have been seen" in found.lines[1]
    # What was found is there all the same, and more may be.
    found = checked(record(around(0.05), power=few))
    assert found.outcome == HELD_BACK
    assert found.gain == Estimate(value=0.05, low=around(0.05).low, high=math.inf)
    assert "at least 4.7% off the perplexity" in found.lines[0]
    assert found.smallest == 0.05


def test_a_head_without_components_is_upgraded_to_without_them() -> None:
    found = checked(record(around(0.05), components=1))
    assert "mos gains" in found.lines[1]
    assert found.next == "fullrank upgrade models/tiny --head mos --train TEXT"


def test_the_command_is_one_that_can_be_typed() -> None:
    """The bundled model has no name to give, and the text that every Python carries no file."""
    made = record(around(0.05))
    made = dataclasses.replace(
        made,
        model=dataclasses.replace(made.model, given=""),
        text=dataclasses.replace(
            made.text, sources=("Python 3.11.7 documentation and docstrings, 90 pieces",)
        ),
    )
    assert checked(made).next == "fullrank upgrade --head mos --components 4 --train-default"


def test_not_held_back() -> None:
    found = checked(record(around(0.001)))
    assert found.outcome == NOT_HELD_BACK
    assert found.next == ""
    assert "elsewhere than in the output layer" in found.lines[2]
    # However sure, a gain that is not worth a word is none.
    sure = Estimate(value=0.9 * LEAST, low=0.8 * LEAST, high=LEAST)
    assert verdict(record(sure)).outcome == NOT_HELD_BACK
    # Up to what would have been seen there may be something.
    assert found.gain == Estimate(value=0.001, low=around(0.001).low, high=SEEN.smallest)


def test_undecided_where_a_gain_that_matters_would_not_have_been_seen() -> None:
    weak = dataclasses.replace(SEEN, smallest=2 * MATERIAL)
    found = checked(record(around(0.001), power=weak))
    assert found.outcome == UNDECIDED
    assert f"{2 * MATERIAL:.4f} or more would have been seen" in found.lines[1]
    assert "--tokens 4000" in found.next
    # As much as matters may be there, only not surely.
    unsure = Estimate(value=1.5 * MATERIAL, low=-MATERIAL, high=4 * MATERIAL)
    assert verdict(record(unsure)).outcome == UNDECIDED


def test_undecided_where_a_planted_gain_was_not_found() -> None:
    found = checked(record(around(0.001), power=MISSED))
    assert found.outcome == UNDECIDED
    assert math.isinf(found.smallest)
    assert "of a planted 0.200 the same fits find 0.000" in found.lines[1]
    assert found.gain is not None
    assert math.isinf(found.gain.high)
    assert found.next in found.lines[2]


def test_a_gain_that_is_found_although_a_planted_one_was_not_counts_where_it_matters() -> None:
    found = checked(record(around(2 * MATERIAL), power=MISSED))
    assert found.outcome == HELD_BACK
    # How much more there is nobody knows.
    assert found.gain == Estimate(value=0.04, low=around(0.04).low, high=math.inf)
    assert "at least 3.7% off the perplexity" in found.lines[0]
    little = verdict(record(around(0.5 * MATERIAL), power=MISSED))
    assert little.outcome == UNDECIDED
    assert "gains" in little.lines[0]
    assert "cannot say how much" in little.lines[0]


def test_without_power_the_spread_speaks_and_says_that_nothing_was_planted() -> None:
    quick = checked(record(around(0.0, 0.004), power=None))
    # Nobody has tried whether these fits find what is there.
    assert quick.outcome == UNDECIDED
    # 2.8 standard errors, of which an interval is 3.92 long.
    assert quick.smallest == pytest.approx(2.8 * 0.008 / 3.92)
    assert "(not tested)" in quick.lines[1]
    # A head that never moved differs from its control nowhere, which is no power.
    still = checked(record(around(0.0, 1e-9), power=None))
    assert still.outcome == UNDECIDED
    assert math.isinf(still.smallest)
    assert "stayed about where it began" in still.lines[1]
    wide = checked(record(around(0.0, 0.1), power=None))
    assert wide.outcome == UNDECIDED
    assert "without --quick" in wide.next


def test_without_power_a_fit_that_was_cut_off_says_nothing() -> None:
    found = checked(record(around(0.0, 0.004), power=None, converged=False))
    assert found.outcome == UNDECIDED
    assert math.isinf(found.smallest)
    assert "did not come to their end" in found.lines[1]
    # Cut off or not, what it gained it gained, and there may be more.
    for power in (None, SEEN):
        cut = checked(record(around(0.05), power=power, converged=False))
        assert cut.outcome == HELD_BACK
        assert cut.gain == Estimate(value=0.05, low=around(0.05).low, high=math.inf)
        assert "at least" in cut.lines[0]
        assert "there may be more" in cut.lines[1]


def test_where_the_refit_gains_much_the_advice_is_to_fine_tune() -> None:
    found = checked(record(around(0.0), refit_gain=around(0.3)))
    assert found.outcome == NOT_HELD_BACK
    assert "would gain +0.3000" in found.lines[2]
    assert "fine-tune" in found.lines[2]
    # Where it is not sure to be more than matters it is not said.
    assert "fine-tune" not in verdict(record(around(0.0), refit_gain=around(0.03, 0.02))).lines[2]
    assert "fine-tune" not in verdict(record(around(0.0), refit_gain=None)).lines[2]


def test_where_every_direction_is_used_the_advice_is_width() -> None:
    at_least = dataclasses.replace(RANK, bound="at least", still_falling=True)
    assert "more width" in checked(record(around(0.0), rank=at_least)).lines[2]
    for other in (None, RANK, dataclasses.replace(RANK, bound="at most")):
        assert "more width" not in checked(record(around(0.0), rank=other)).lines[2]
    # A head that gains is the nearer remedy.
    assert "more width" not in checked(record(around(0.05), rank=at_least)).lines[2]


@pytest.mark.parametrize("control", ["original", "softmax", "softmax_equal"])
def test_the_control_is_named_in_words(control: str) -> None:
    line = checked(record(around(0.05), control=control)).lines[1]
    words = {name: module._control(name) for name in ("original", "softmax", "softmax_equal")}
    assert words[control] in line
    assert len(set(words.values())) == 3


@pytest.mark.parametrize("nothing", ["not asked", "no head", "no number"])
def test_what_was_not_measured_is_undecided_with_its_reason(nothing: str) -> None:
    made = record(around(0.05))
    assert made.better_head is not None
    if nothing == "not asked":
        missing = (Missing(question="better_head", reason="too few tokens"),)
        made = dataclasses.replace(made, better_head=None, missing=missing)
    else:
        changes: dict[str, Any] = (
            {"best": ""} if nothing == "no head" else {"best_gain": around(math.nan, math.nan)}
        )
        made = dataclasses.replace(made, better_head=dataclasses.replace(made.better_head, **changes))
    found = checked(made)
    assert found.outcome == UNDECIDED
    assert found.gain is None
    assert math.isinf(found.smallest)
    assert ("too few tokens" in found.lines[1]) == (nothing == "not asked")
