from __future__ import annotations

import dataclasses
import math

import pytest

from fullrank.report.page import Answer
from fullrank.report.pages.answer import answer, shared_caution
from fullrank.report.subject import subjects_of
from fullrank.results import Diagnosis, Estimate
from fullrank.results.diagnosis import Verdict


def answered(record: Diagnosis) -> Answer:
    (subject,) = subjects_of([record])
    return answer(subject, alone=True)


def with_gain(record: Diagnosis, value: float, low: float, high: float) -> Diagnosis:
    assert record.better_head is not None
    gain = Estimate(value=value, low=low, high=high)
    return dataclasses.replace(record, better_head=dataclasses.replace(record.better_head, best_gain=gain))


def test_three_sentences_and_the_two_figures(diagnosis: Diagnosis) -> None:
    said = answered(diagnosis)
    assert len(said.sentences) == 3
    assert all(sentence.endswith(".") and sentence[0].isupper() for sentence in said.sentences)
    gain, rank = said.tiles
    assert (rank.value, rank.unit, rank.remarks) == ("301", "of width D = 576", ("95% interval 250 to 380",))
    assert (gain.value, gain.unit) == ("0.014", "nats per token")
    assert gain.remarks == ("95% interval 0.006 to 0.022", "1.4% of the perplexity, with moss")
    assert "about 301 (95% interval 250 to 380)" in said.sentences[0]
    assert "within 0.01 nats per token" in said.sentences[0]
    assert "moss, saves 0.014 nats per token (0.006 to 0.022)" in said.sentences[1]
    assert "disputed" in said.sentences[2]


def test_a_verdict_leads_and_says_what_would_have_been_seen(diagnosis: Diagnosis) -> None:
    lines = ("Held back: it is.", "moss gains much; 0.0042 would have been seen.", "Next: go on.")
    gain = Estimate(value=0.014, low=0.006, high=0.022)
    made = Verdict(outcome="held back", gain=gain, smallest=0.0042, lines=lines, next="go on")
    said = answered(dataclasses.replace(diagnosis, verdict=made))
    assert (said.lead, *said.sentences[:2]) == lines
    assert len(said.sentences) == 3
    _, seen, rank = said.tiles
    assert (seen.value, seen.unit) == ("0.0042", "nats per token")
    assert rank.value == "301"
    # What is not known is no figure.
    unknown = answered(dataclasses.replace(diagnosis, verdict=dataclasses.replace(made, smallest=math.inf)))
    assert unknown.tiles[1].value == "–"


def test_an_interval_that_reaches_to_what_could_have_been_missed_says_so(diagnosis: Diagnosis) -> None:
    found = with_gain(diagnosis, -0.07, -0.13, -0.01)
    made = Verdict(
        outcome="undecided", gain=Estimate(value=-0.07, low=-0.13, high=0.09), smallest=0.09,
        lines=("Undecided.", "It comes to -0.07.", "Next: go on."), next="go on",
    )  # fmt: skip
    gain, *_ = answered(dataclasses.replace(found, verdict=made)).tiles
    assert gain.remarks[0] == "95% interval −0.13 to 0.09"
    assert any(remark.startswith("found −0.13 to −0.01;") for remark in gain.remarks)


def test_a_rank_that_is_a_bound_is_shown_as_one(diagnosis: Diagnosis) -> None:
    assert diagnosis.rank_needed is not None
    for bound in ("at least", "at most"):
        needed = dataclasses.replace(diagnosis.rank_needed, bound=bound)
        tile = answered(dataclasses.replace(diagnosis, rank_needed=needed)).tiles[-1]
        assert tile.value == f"{bound} 301"
        assert not any("interval" in remark for remark in tile.remarks)


def test_a_head_that_no_step_has_helped_has_no_interval(diagnosis: Diagnosis) -> None:
    found = with_gain(diagnosis, 1e-9, -4e-9, 3e-9)
    assert found.better_head is not None
    fits = tuple(dataclasses.replace(fit, steps=0) for fit in found.better_head.fits)
    stayed = dataclasses.replace(found.better_head, fits=fits)
    said = answered(dataclasses.replace(found, better_head=stayed))
    assert said.tiles[0].value == "0"
    assert said.tiles[0].remarks == ("no step of training helped the best head tried, moss",)
    assert any("no step of training helped the best, moss" in sentence for sentence in said.sentences)


def test_an_interval_with_zero_is_no_gain(diagnosis: Diagnosis) -> None:
    said = answered(with_gain(diagnosis, 0.003, -0.001, 0.007))
    assert said.sentences[1].startswith("No gain from a better head can be told from zero")
    assert "saves" not in said.sentences[1]
    assert said.tiles[0].remarks[-1] == "cannot be told from zero"


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.02), (-0.02, 0.0)])
def test_an_interval_that_touches_zero_includes_it(low: float, high: float, diagnosis: Diagnosis) -> None:
    said = answered(with_gain(diagnosis, (low + high) / 2, low, high))
    assert "can be told from zero" in said.sentences[1]


def test_a_loss_is_no_gain(diagnosis: Diagnosis) -> None:
    said = answered(with_gain(diagnosis, -0.02, -0.03, -0.01))
    assert said.sentences[1].startswith("No better head was found")
    assert "worse by 0.020 nats per token (0.010 to 0.030)" in said.sentences[1]
    assert said.tiles[0].value == "−0.020"


def test_a_gain_without_interval_is_not_claimed(diagnosis: Diagnosis) -> None:
    said = answered(with_gain(diagnosis, 0.02, math.nan, math.nan))
    assert "cannot be told from chance" in said.sentences[1]
    assert {"no interval", "cannot be told from zero"} <= set(said.tiles[0].remarks)


def test_a_loss_that_still_falls_is_said(diagnosis: Diagnosis) -> None:
    assert diagnosis.rank_needed is not None
    needed = dataclasses.replace(diagnosis.rank_needed, still_falling=True)
    said = answered(dataclasses.replace(diagnosis, rank_needed=needed))
    assert said.sentences[0].startswith(
        "The model uses its width to the end: its loss still falls at rank 576"
    )
    assert "the loss still falls at full width" in said.tiles[-1].remarks


def test_the_verdict_comes_first(diagnosis: Diagnosis) -> None:
    assert diagnosis.better_head is not None
    assert diagnosis.rank_needed is not None
    verdict = Verdict(
        outcome="not held back", gain=diagnosis.better_head.best_gain, smallest=0.0123,
        lines=("Not held back: <b>so</b>.", "By how much.", "Next: nothing."), next="",
    )  # fmt: skip
    needed = dataclasses.replace(diagnosis.rank_needed, bound="at most")
    said = answered(dataclasses.replace(diagnosis, verdict=verdict, rank_needed=needed))
    assert said.lead == "Not held back: <b>so</b>."
    assert said.sentences[:2] == ("By how much.", "Next: nothing.")
    _, seen, rank = said.tiles
    assert (seen.value, seen.unit) == ("0.0123", "nats per token")
    assert any("nothing was planted" in remark for remark in seen.remarks)
    assert rank.value == "at most 301"
    unknown = dataclasses.replace(verdict, smallest=math.inf)
    assert answered(dataclasses.replace(diagnosis, verdict=unknown)).tiles[1].value == "–"


def test_what_was_not_measured_is_named_with_its_reason(partial: Diagnosis) -> None:
    said = answered(partial)
    assert said.sentences == (
        "What rank its output layer needs was not measured (interrupted after 3 of 9 ranks).",
        "What a better head would buy was not measured (too few tokens: 900, needs 20,000).",
        "So this page does not say whether the output layer holds the model back; what was measured follows.",
    )
    assert [tile.value for tile in said.tiles] == ["–", "–"]
    assert all("not measured" in tile.remarks for tile in said.tiles)


def test_one_figure_is_not_both(diagnosis: Diagnosis) -> None:
    said = answered(dataclasses.replace(diagnosis, rank_needed=None))
    assert said.sentences[0] == "What rank its output layer needs was not measured."
    assert said.sentences[2].startswith("The one figure comes")


def test_no_number_is_no_verdict(odd_diagnosis: Diagnosis) -> None:
    said = answered(odd_diagnosis)
    assert "came out as no number" in said.sentences[0]
    assert "came out as no number" in said.sentences[1]
    assert [tile.value for tile in said.tiles] == ["–", "–"]


def test_no_sentence_blames_the_rank(
    diagnosis: Diagnosis, other: Diagnosis, partial: Diagnosis, odd_diagnosis: Diagnosis
) -> None:
    for record in (diagnosis, other, partial, odd_diagnosis):
        words = " ".join(answered(record).sentences).lower()
        assert not {"bottleneck", "because", "broken", "too small", "too low"} & set(words.split())
        assert "cause" not in words or "disputed" in words


def test_side_by_side_the_caution_is_said_once(
    diagnosis: Diagnosis, other: Diagnosis, partial: Diagnosis
) -> None:
    subjects = subjects_of([diagnosis, other, partial])
    said = [answer(one, alone=False) for one in subjects]
    assert [len(one.sentences) for one in said] == [2, 2, 3]
    assert "disputed" in shared_caution(subjects)
    assert shared_caution(subjects[2:]) == ""
