"""The page of a diagnosis, of one model or of several side by side.

The answer first, then what was flagged, then a section a question in the order of `QUESTIONS`, then attention
where it was asked about, other models beside it, what was not answered and what was measured. A record of
attention alone has a page of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fullrank.report.charts import diagnosis_curves
from fullrank.report.charts.curves import Curves
from fullrank.report.charts.intervals import Intervals
from fullrank.report.figures import with_interval
from fullrank.report.page import Page, Section, chart_of
from fullrank.report.pages import diagnosis_rows
from fullrank.report.pages.answer import answer, reason_of, shared_caution
from fullrank.report.pages.attention_section import attention_sections
from fullrank.report.pages.diagnosis_details import details
from fullrank.report.pages.diagnosis_facts import facts, measured
from fullrank.report.pages.questions import WORDS
from fullrank.report.pages.reference_section import reference_section
from fullrank.report.pages.remarks import remark
from fullrank.report.subject import Subject, subjects_of
from fullrank.report.text import shown
from fullrank.results import QUESTIONS, Diagnosis
from fullrank.results.diagnosis import BY_NAME

_PICTURES: dict[str, Callable[[Sequence[Subject]], Curves | Intervals]] = {
    "loss": diagnosis_curves.loss,
    "spectrum": diagnosis_curves.spectrum,
    "anisotropy": diagnosis_curves.anisotropy,
    "logprob_rank": diagnosis_curves.logprob_rank,
    "rank_needed": diagnosis_curves.rank_needed,
    "better_head": diagnosis_rows.better_head,
    "unreachable": diagnosis_rows.unreachable,
    "gradient": diagnosis_rows.gradient,
}


def diagnosis_page(record: Diagnosis) -> Page:
    """The page of one model."""
    subjects = subjects_of([record])
    model, text = record.model, record.text
    if record.attention is not None and all(getattr(record, name) is None for name in QUESTIONS):
        return Page(
            title=f"Attention of {subjects[0].name}",
            lead=(
                f"{model.parameters:,} parameters, {record.attention.heads:,} heads in "
                f"{record.attention.layers:,} layers, measured on {text.tokens:,} tokens of text."
            ),
            sections=(*attention_sections(subjects), _measured(subjects)),
        )
    loss = (
        ""
        if record.loss is None
        else f" Its loss there is {with_interval(record.loss.nats_per_token)} nats per token."
    )
    return Page(
        title=f"Output layer of {subjects[0].name}",
        lead=(
            f"{model.parameters:,} parameters, width D = {model.width:,}, vocabulary V = "
            f"{model.vocabulary:,}, measured on {text.tokens:,} tokens of text.{loss}"
        ),
        answers=(answer(subjects[0], alone=True),),
        sections=_sections(subjects),
    )


def comparison_page(records: Sequence[Diagnosis]) -> Page:
    """One page of several models."""
    subjects = subjects_of(records)
    return Page(
        title=f"Output layers of {len(subjects)} models",
        lead=f"{', '.join(one.name for one in subjects[:-1])} and {subjects[-1].name}, side by side.",
        warnings=_warnings(records),
        answers=tuple(answer(one, alone=False) for one in subjects),
        closing=shared_caution(subjects),
        sections=_sections(subjects),
    )


def _warnings(records: Sequence[Diagnosis]) -> tuple[str, ...]:
    warnings = []
    if len({record.text.sha256 for record in records}) > 1:
        warnings.append("The models were measured on different texts: their losses are not comparable.")
    if len({record.text.window for record in records}) > 1:
        warnings.append(
            "The models were measured with windows of different length: a longer context lowers the loss, so "
            "their losses are not comparable."
        )
    if len({(record.model.vocabulary, record.model.tokens) for record in records}) > 1:
        warnings.append(
            "The models have different vocabularies: nats per token are not comparable between them, bits "
            "per byte are where the text is the same."
        )
    if len({record.model.dtype for record in records}) > 1:
        warnings.append("The models ran in different precision: half precision alone moves losses and ranks.")
    for question in (*QUESTIONS, *BY_NAME):
        warnings += _unequal(question, records)
    return tuple(warnings)


def _unequal(question: str, records: Sequence[Diagnosis]) -> Iterator[str]:
    """Where models answered a question with different settings."""
    made = [record.answered.get(question) for record in records if getattr(record, question) is not None]
    if not any(made):
        # Files of before settings were written down.
        return
    settings = [None if one is None else one.settings for one in made]
    names = sorted({name for one in settings if one for name in one})
    values = {name: [None if one is None else one.get(name) for one in settings] for name in names}
    unequal = {name: found for name, found in values.items() if len(set(found)) > 1}
    if unequal:
        listed = "; ".join(
            f"{shown(name)} {', '.join('not recorded' if one is None else shown(one, 200) for one in found)}"
            for name, found in unequal.items()
        )
        yield f"{_title(question)} This was asked with different settings: {listed}."


def _sections(subjects: tuple[Subject, ...]) -> tuple[Section, ...]:
    return (
        _flagged(subjects),
        *(_question(name, subjects) for name in QUESTIONS),
        *attention_sections(subjects),
        *reference_section(subjects),
        *_unanswered(subjects),
        _measured(subjects),
    )


def _flagged(subjects: tuple[Subject, ...]) -> Section:
    items = tuple(
        _of(one, subjects) + shown(finding.sentence, 500)
        for one in subjects
        for finding in one.record.findings
    )
    quiet = "Nothing was flagged. That is no proof of health: only what this page lists was looked at."
    return Section(title="What was flagged", text=() if items else (quiet,), items=items, identity="flagged")


def _question(name: str, subjects: tuple[Subject, ...]) -> Section:
    words = WORDS[name]
    answered = tuple(one for one in subjects if getattr(one.record, name) is not None)
    missing = tuple(
        f"{_of(one, subjects)}This was not measured{_because(one.record, name)}."
        for one in subjects
        if one not in answered
    )
    if not answered:
        return Section(title=words.title, text=missing, identity=name)
    picture = _PICTURES[name](answered)
    # Side by side, the table has these figures in a better order than sentences.
    found = (remark(name, answered[0].record),) if len(subjects) == 1 else ()
    chart = chart_of(picture, name=words.title, description="All figures are in the tables below.")
    return Section(
        title=words.title,
        identity=name,
        text=(*found, *missing, words.reading),
        chart=chart,
        notes=picture.notes if chart else ("There is nothing to draw: no figure has a place on the axes.",),
        definition=words.definition,
        table=facts(name, answered),
        more_tables=details(name, answered),
    )


def _unanswered(subjects: tuple[Subject, ...]) -> tuple[Section, ...]:
    items = tuple(
        f"{_of(one, subjects)}{_title(missing.question)} {shown(missing.reason, 500)}"
        for one in subjects
        for missing in one.record.missing
    )
    return (Section(title="Not answered", items=items, identity="missing"),) if items else ()


def _measured(subjects: tuple[Subject, ...]) -> Section:
    first, *rest = measured(subjects)
    return Section(
        title="What was measured",
        items=tuple(
            _of(one, subjects) + shown(note, 500) for one in subjects for note in one.record.model.notes
        ),
        table=first,
        more_tables=tuple(rest),
        identity="measured",
    )


def _title(question: str) -> str:
    return WORDS[question].title if question in WORDS else f"{shown(question)}:"


def _because(record: Diagnosis, question: str) -> str:
    reason = reason_of(record, question)
    return f": {reason}" if reason else ""


def _of(one: Subject, subjects: tuple[Subject, ...]) -> str:
    return f"{one.name}: " if len(subjects) > 1 else ""
