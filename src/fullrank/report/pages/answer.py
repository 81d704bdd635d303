"""The answer first: the verdict's three lines, and the figures that carry it.

Of a file without a verdict, from an earlier version, the sentences are made from its answers.

The sentences say no more than the record holds. An interval that includes 0 is no gain, an unmeasured
question is named as such, and no sentence makes a low rank the cause of anything: that is disputed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fullrank.report.figures import (
    NONE,
    figure,
    interval,
    number,
    percent,
    perplexity_share,
    whole,
    whole_interval,
)
from fullrank.report.page import Answer, Tile
from fullrank.report.pages.diagnosis_rows import head_name
from fullrank.report.subject import Subject
from fullrank.report.text import shown
from fullrank.results import Diagnosis, Estimate
from fullrank.results.diagnosis import BetterHead, RankNeeded

_RANK, _GAIN = "What rank does it need?", "What does a better head buy?"
_LIMITS = (
    "show what training the whole model with another output layer would bring, and whether a low rank of the "
    "output layer is the cause of a model’s weakness is disputed."
)


def answer(subject: Subject, *, alone: bool) -> Answer:
    """Sentences and tiles of one model, with its name unless it has the page to itself."""
    record = subject.record
    # Side by side, what limits all figures is said once, under them.
    last = (_caution(record),) if alone or not _figures(record) else ()
    verdict = record.verdict
    first, *rest = (
        verdict.lines if verdict is not None else ("", _rank_sentence(record), _gain_sentence(record))
    )
    return Answer(
        name="" if alone else subject.name,
        colour=subject.colour,
        lead=shown(first, 300),
        sentences=(*(shown(one, 600) for one in rest), *last),
        tiles=(_gain_tile(record), *_seen_tile(record), _rank_tile(record)),
    )


def shared_caution(subjects: Sequence[Subject]) -> str:
    """What limits the figures of all models side by side; "" where there is no figure."""
    if not any(_figures(one.record) for one in subjects):
        return ""
    return f"These figures come from frozen states, so they do not {_LIMITS}"


def reason_of(record: Diagnosis, question: str) -> str:
    """Why a question has no answer, as the end of a sentence; "" where nobody wrote it down."""
    for missing in record.missing:
        if missing.question == question:
            return shown(missing.reason, 300).rstrip(" .")
    return ""


def _unmeasured(record: Diagnosis, question: str) -> str:
    reason = reason_of(record, question)
    return f"was not measured ({reason})" if reason else "was not measured"


def _rank_sentence(record: Diagnosis) -> str:
    section = record.rank_needed
    if section is None:
        return f"What rank its output layer needs {_unmeasured(record, 'rank_needed')}."
    width, allowed = record.model.width, number(section.tolerance)
    if not math.isfinite(section.knee.value):
        return "What rank its output layer needs was measured, but came out as no number."
    if section.still_falling:
        return (
            f"The model uses its width to the end: its loss still falls at rank {width:,}, and on frozen "
            f"states it takes a refitted output layer of rank {_ranks(section.knee)} to come within "
            f"{allowed} nats per token of one of full width; whether more width would help as well is open."
        )
    return (
        f"An output layer of rank {_ranks(section.knee)} comes within {allowed} nats per token of one of its "
        f"full width, {width:,}, when both are refitted on the model’s frozen states."
    )


def _gain_sentence(record: Diagnosis) -> str:
    section = record.better_head
    if section is None:
        return f"What a better head would buy {_unmeasured(record, 'better_head')}."
    gain = section.best_gain
    best = head_name(section.best)
    if not math.isfinite(gain.value):
        return "What a better head would buy was measured, but came out as no number."
    if section.stayed:
        return f"No gain from a better head was found: no step of training helped the best, {best}."
    over = "over the better of two softmax controls"
    if not _has_interval(gain):
        return (
            f"The best high-rank head, {best}, measured {figure(gain)} nats per token {over}, but without an "
            "interval that cannot be told from chance."
        )
    if gain.low <= 0 <= gain.high:
        return (
            f"No gain from a better head can be told from zero: the best, {best}, measured {figure(gain)} "
            f"nats per token ({interval(gain)}) {over}."
        )
    if gain.high < 0:
        return (
            f"No better head was found: the best high-rank one, {best}, did worse by "
            f"{figure(_negated(gain))} nats per token ({interval(_negated(gain))}) than the better "
            "of two softmax controls."
        )
    return (
        f"The best high-rank head, {best}, saves {figure(gain)} nats per token ({interval(gain)}) {over}, "
        f"which is {percent(perplexity_share(gain.value))} of the perplexity."
    )


def _figures(record: Diagnosis) -> int:
    """How many of the two figures there are."""
    rank, head = record.rank_needed, record.better_head
    return (rank is not None and math.isfinite(rank.knee.value)) + (
        head is not None and math.isfinite(head.best_gain.value)
    )


def _caution(record: Diagnosis) -> str:
    match _figures(record):
        case 0:
            return (
                "So this page does not say whether the output layer holds the model back; what was measured "
                "follows."
            )
        case 1:
            return f"The one figure comes from frozen states on one text, so it does not {_LIMITS}"
        case _:
            return f"Both figures come from frozen states on one text, so they do not {_LIMITS}"


def _rank_tile(record: Diagnosis) -> Tile:
    section: RankNeeded | None = record.rank_needed
    width = f"of width D = {record.model.width:,}"
    if section is None or not math.isfinite(section.knee.value):
        why = "not measured" if section is None else "no number came out"
        return Tile(question=_RANK, value=NONE, unit="", remarks=(why, width.removeprefix("of ")))
    between = whole_interval(section.knee)
    remarks = [f"95% interval {between}" if between else "no interval"]
    if section.bound:
        remarks = ["no smaller rank was tried" if section.bound == "at most" else "up to the full width"]
    if section.still_falling:
        remarks.append("the loss still falls at full width")
    value = f"{shown(section.bound)} {whole(section.knee.value)}".strip()
    return Tile(question=_RANK, value=value, unit=width, remarks=tuple(filter(None, remarks)))


def _seen_tile(record: Diagnosis) -> tuple[Tile, ...]:
    verdict, section = record.verdict, record.better_head
    if verdict is None or section is None:
        return ()
    question = "What gain would have been seen?"
    if not math.isfinite(verdict.smallest) and section.power is not None:
        tried = section.power
        value, why = (
            f"over {tried.planted.value:.2g}",
            f"of that, planted, {figure(tried.found)} was found",
        )
        return (Tile(question=question, value=value, unit="nats per token", remarks=(why,)),)
    if not math.isfinite(verdict.smallest):
        return (Tile(question=question, value=NONE, unit="", remarks=("not known: see the verdict",)),)
    remarks = ["the smallest, four times in five"]
    if section.power is not None:
        found = section.power
        remarks.append(f"{number(found.found.value)} was found of a planted {number(found.planted.value)}")
    else:
        remarks.append("by the spread over text alone: nothing was planted")
    value = number(verdict.smallest)
    return (Tile(question=question, value=value, unit="nats per token", remarks=tuple(remarks)),)


def _gain_tile(record: Diagnosis) -> Tile:
    section: BetterHead | None = record.better_head
    if section is None or not math.isfinite(section.best_gain.value):
        why = "not measured" if section is None else "no number came out"
        return Tile(question=_GAIN, value=NONE, unit="", remarks=(why,))
    if section.stayed:
        why = f"no step of training helped the best head tried, {head_name(section.best)}"
        return Tile(question=_GAIN, value="0", unit="nats per token", remarks=(why,))
    found = section.best_gain
    gain = found if record.verdict is None or record.verdict.gain is None else record.verdict.gain
    share = percent(perplexity_share(gain.value))
    remarks = [_between(gain), f"{share} of the perplexity, with {head_name(section.best)}"]
    if gain.value != found.value:
        remarks.append(f"{figure(found)} was found on this text")
    elif gain.high != found.high and interval(found):
        remarks.append(f"found {interval(found)}; up to the upper end it could have been missed")
    if not _has_interval(gain) or gain.low <= 0 <= gain.high:
        remarks.append("cannot be told from zero")
    return Tile(
        question=_GAIN, value=figure(gain), unit="nats per token", remarks=tuple(filter(None, remarks))
    )


def _ranks(knee: Estimate) -> str:
    between = whole_interval(knee)
    return f"about {whole(knee.value)} (95% interval {between})" if between else f"about {whole(knee.value)}"


def _between(estimate: Estimate) -> str:
    between = interval(estimate)
    return f"95% interval {between}" if between else "no interval"


def _has_interval(estimate: Estimate) -> bool:
    return math.isfinite(estimate.low) and not math.isnan(estimate.high)


def _negated(estimate: Estimate) -> Estimate:
    return Estimate(value=-estimate.value, low=-estimate.high, high=-estimate.low)
