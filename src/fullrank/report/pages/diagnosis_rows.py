"""The pictures of a diagnosis that are rows: what heads buy, which tokens can lead, gradient kept."""

from __future__ import annotations

from collections.abc import Sequence

from fullrank.report.charts.axis import Axis
from fullrank.report.charts.intervals import Intervals, Mark
from fullrank.report.charts.theme import HIGH_RANK_COLOUR, INK, MUTED, Key
from fullrank.report.figures import figure, percent, with_interval
from fullrank.report.subject import Subject
from fullrank.report.text import shown, unique
from fullrank.results.diagnosis import HeadFit

REFERENCE_HEAD, CONTROL = "softmax", "softmax_equal"


def better_head(subjects: Sequence[Subject]) -> Intervals:
    """What each head buys over the refitted softmax."""
    several = len(subjects) > 1
    labels: dict[str, None] = {}
    marks, figures = [], {}
    for one in subjects:
        section = one.record.better_head
        if section is None:
            continue
        fits = [fit for fit in section.fits if fit.head != REFERENCE_HEAD]
        for fit, label in zip(fits, unique([head_label(fit) for fit in fits]), strict=True):
            labels[label] = None
            control = fit.head == CONTROL
            figures[label] = figure(fit.gain)
            marks.append(
                Mark(
                    row=label,
                    model=one.name,
                    value=fit.gain.value,
                    low=fit.gain.low,
                    high=fit.gain.high,
                    colour=one.colour if several else MUTED if control else one.colour,
                    shape="ring" if control else "dot",
                    summary=(
                        f"{one.name}, {label}: {with_interval(fit.gain)} nats per token gained over the "
                        "refitted softmax"
                    ),
                )
            )
    rows = tuple(labels)
    control_key = Key(label="control: softmax of as many parameters", colour=MUTED, mark="ring")
    return Intervals(
        x=Axis(title="gain over the refitted softmax, nats per token"),
        rows=rows,
        marks=tuple(marks),
        models=tuple(one.name for one in subjects),
        figures=() if several else tuple(figures[row] for row in rows),
        lines=(0.0,),
        legend=(
            *_models(subjects, alone="high-rank head, with its 95% interval"),
            control_key,
        ),
    )


def unreachable(subjects: Sequence[Subject]) -> Intervals:
    """How many tokens can lead, cannot, or could not be decided."""
    several = len(subjects) > 1
    rows = ("can be first", "undecided", "never first")
    marks, figures = [], []
    for one in subjects:
        section = one.record.unreachable
        if section is None:
            continue
        counts = (section.argmaxable, section.undecided, len(section.never))
        total = max(section.vocabulary, 1)
        for row, count in zip(rows, counts, strict=True):
            text = f"{count:,} ({percent(count / total)})"
            figures.append(text)
            marks.append(
                Mark(
                    row=row,
                    model=one.name,
                    value=float(count),
                    colour=HIGH_RANK_COLOUR if row == rows[2] and not several else one.colour,
                    summary=f"{one.name}, {row}: {text} of {section.vocabulary:,} tokens",
                )
            )
    most = max([one.record.unreachable.vocabulary for one in subjects if one.record.unreachable] + [10])
    return Intervals(
        x=Axis(title="tokens (log scale)", log=True, low=0.8, high=1.3 * most),
        rows=rows,
        marks=tuple(marks),
        models=tuple(one.name for one in subjects),
        figures=() if several else tuple(figures),
        legend=_models(subjects, alone="") if several else (),
        notes=(
            ("A row without a mark stands for no token.",) if any(mark.value < 1 for mark in marks) else ()
        ),
    )


def gradient(subjects: Sequence[Subject]) -> Intervals:
    """Quantiles of the share of the logit gradient that reaches the body, beside the random subspace."""
    several = len(subjects) > 1
    marks = []
    rows = []
    for one in subjects:
        section = one.record.gradient
        if section is None:
            continue
        row = one.name if several else "kept share"
        null = f"{row} (random)" if several else "random subspace"
        rows += [row, null]
        known = len(section.quantiles) == 5
        low, first, median, last, high = section.quantiles if known else (float("nan"),) * 5
        marks.append(
            Mark(
                row=row,
                model=one.name,
                value=median if known else section.kept_norm.value,
                low=low,
                high=high,
                inner=(first, last),
                colour=one.colour,
                summary=(
                    f"{one.name}: median {figure(median)}, half of the tokens {figure(first)} to "
                    f"{figure(last)}, nine tenths {figure(low)} to {figure(high)}"
                    if known
                    else f"{one.name}: mean {with_interval(section.kept_norm)}"
                ),
            )
        )
        marks.append(
            Mark(
                row=null,
                model=one.name,
                value=section.null_norm,
                colour=one.colour if several else HIGH_RANK_COLOUR,
                shape="diamond",
                summary=f"random subspace of the same rank: {figure(section.null_norm)}",
            )
        )
    return Intervals(
        x=Axis(title="share of the gradient’s norm that is kept, |P g| / |g|", low=0.0, high=1.0),
        rows=tuple(rows),
        marks=tuple(marks),
        models=("",),
        legend=(
            Key(label="median over tokens", colour=INK if several else subjects[0].colour, mark="dot"),
            Key(label="middle half", colour=INK if several else subjects[0].colour, mark="bar"),
            Key(label="5% to 95%", colour=INK if several else subjects[0].colour, mark="line"),
            Key(
                label="random subspace of the same rank",
                colour=INK if several else HIGH_RANK_COLOUR,
                mark="diamond",
            ),
        ),
    )


def head_label(fit: HeadFit) -> str:
    """A head in a few words."""
    name = head_name(fit.head)
    return f"{name}, K = {fit.components}" if fit.components > 1 else name


def head_name(head: str) -> str:
    """A head's name as it is shown."""
    return "softmax, as large" if head == CONTROL else shown(head, 40)


def _models(subjects: Sequence[Subject], *, alone: str) -> tuple[Key, ...]:
    if len(subjects) == 1:
        return (Key(label=alone, colour=subjects[0].colour, mark="dot"),)
    return tuple(Key(label=one.name, colour=one.colour, mark="dot") for one in subjects)
