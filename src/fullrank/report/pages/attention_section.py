"""The attention of a model on a diagnosis page: maps by layer and head, sets against chance, sensitivity.

Every figure of a top set has the random set beside it, and what was published stands as what it is: figures
of another model on another text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fullrank.report.charts.axis import Axis
from fullrank.report.charts.curves import Curves, Point, Reference, Trace
from fullrank.report.charts.heat import Cell, Map, Maps
from fullrank.report.charts.theme import HIGH_RANK_COLOUR, MUTED, REFERENCE, SOFTMAX_COLOUR, Key
from fullrank.report.figures import number, percent, whole, with_interval
from fullrank.report.page import Chart, Drawable, Section, chart_of
from fullrank.report.pages import attention_tables as tables
from fullrank.report.pages import attention_words as words
from fullrank.report.subject import Subject
from fullrank.report.text import shown
from fullrank.results.attention import Attention, AttentionHead, AttentionSets

PUBLISHED = (0.70, 0.85)
"""Separable share of GPT-2 (124M) on War and Peace at N of 16 and more, without a control (2508.17821)."""

_TITLE = "What does softmax let its attention select?"


def attention_sections(subjects: Sequence[Subject]) -> tuple[Section, ...]:
    """Sections of every model whose attention was measured; none where none was."""
    return tuple(
        section
        for one in subjects
        if one.record.attention is not None
        for section in _sections(one.record.attention, one.name if len(subjects) > 1 else "")
    )


def _sections(found: Attention, name: str) -> tuple[Section, ...]:
    whose = f"{name}: " if name else ""
    identity = "" if name else "attention"
    sections = [_heads(found, whose + _TITLE, identity)]
    if found.by_size:
        sections.append(
            _sets(found, f"{whose}Do the tokens it attends to stand apart?", identity and "attention_sets")
        )
    sections.append(
        _sensitivity(
            found, f"{whose}How sensitive is softmax to its scores?", identity and "attention_sensitivity"
        )
    )
    sections.append(
        _what_if(
            found, f"{whose}What if another normaliser took its place?", identity and "attention_what_if"
        )
    )
    return tuple(sections)


def _heads(found: Attention, title: str, identity: str) -> Section:
    maps = Maps(maps=tuple(_maps(found)), column_title="layer", row_title="head")
    chart = _chart(maps, title)
    return Section(
        title=title,
        identity=identity,
        text=(
            _remark(found),
            _envelope(found),
            *(shown(note, 500) for note in found.notes),
            words.HEADS_READING,
        ),
        chart=chart,
        notes=() if chart else ("There is nothing to draw: no head has a figure, or there are too many.",),
        definition=words.HEADS_DEFINITION,
        table=tables.by_length(found.by_length),
        more_tables=tables.by_head(found),
    )


def _chart(picture: Drawable, title: str) -> Chart | None:
    return chart_of(picture, name=title, description="All figures are in the tables below.")


def _maps(found: Attention) -> list[Map]:
    layers = {layer: place for place, layer in enumerate(sorted({one.layer for one in found.by_head}))}

    def cells(
        shade: Callable[[AttentionHead], float | None], told: Callable[[AttentionHead], str]
    ) -> tuple[Cell, ...]:
        made = []
        for one in found.by_head:
            value = shade(one)
            if value is not None:
                made.append(
                    Cell(
                        column=layers[one.layer],
                        row=one.head,
                        shade=value,
                        summary=f"layer {one.layer}, head {one.head}: {told(one)}",
                    )
                )
        return tuple(made)

    size = found.reference_size
    maps = [
        Map(
            title="effective number of tokens: blank for 1, full for all that are visible (log scale)",
            cells=cells(
                _spread,
                lambda one: f"{number(one.effective_tokens)} effective tokens of {whole(one.visible)}",
            ),
        ),
        Map(
            title="weight of the first position: blank for 0, full for 1",
            cells=cells(
                lambda one: one.first_mass, lambda one: f"{percent(one.first_mass)} on the first position"
            ),
        ),
    ]
    if size:
        maps += [
            Map(
                title=f"separable share of the top {size}: blank for 0, full for 1",
                cells=cells(
                    lambda one: one.separable,
                    lambda one: f"{_share(one.separable)} of the top {size} separable",
                ),
            ),
            Map(
                title=f"the same of {size} random positions",
                cells=cells(
                    lambda one: one.separable_random,
                    lambda one: f"{_share(one.separable_random)} of {size} random positions separable",
                ),
            ),
        ]
    return maps


def _spread(one: AttentionHead) -> float:
    """log effective tokens over log visible ones."""
    if not (one.visible > 1 and one.effective_tokens >= 1):
        return math.nan
    return math.log(one.effective_tokens) / math.log(one.visible)


def _share(value: float | None) -> str:
    return "no figure" if value is None else percent(value)


def _remark(found: Attention) -> str:
    if not found.by_length:
        return "No context length was looked at."
    last = found.by_length[-1]
    return (
        f"At a context of {last.length:,} tokens a query of the mean head spreads its weight over "
        f"{with_interval(last.effective_tokens)} effective tokens, and {percent(last.first_mass.value)} of "
        "it goes "
        f"to the first position. {found.heads:,} heads in {found.layers:,} layers were measured on "
        f"{found.windows:,} windows, {found.queries} queries a window and length. {_source(found)}"
    )


def _source(found: Attention) -> str:
    if found.weights != "eager":
        return "The weights are those that the model gives as output_attentions."
    sentence = "The weights are those of the model’s own eager attention, taken query by query"
    if math.isfinite(found.difference):
        sentence += f"; recomputed from queries and keys they differ by at most {number(found.difference)}"
    if math.isfinite(found.eager_difference):
        sentence += (
            f", and from the whole model in eager attention by at most {number(found.eager_difference)} "
            f"(on {found.eager_positions:,} tokens)"
        )
    return f"{sentence}."


def _envelope(found: Attention) -> str:
    last = found.by_length[-1] if found.by_length else None
    if last is None or last.exponent is None or last.envelope_says is None or last.score_range is None:
        return "The published envelope of a weight needs queries and keys, which this model does not show."
    return (
        f"The published envelope exp(±2Δ/T)/n has a mean exponent of {number(last.exponent)} here, where log "
        "n is "
        f"{number(math.log(last.visible)) if last.visible > 0 else 'undefined'}: for "
        f"{percent(1 - last.envelope_says)} of the queries it says no more than that a weight is at most 1. "
        f"The scores themselves span {number(last.score_range)}, and the largest weight is "
        f"exp({number(last.log_largest)}) / n on geometric average."
    )


def _sets(found: Attention, title: str, identity: str) -> Section:
    length = found.by_size[-1].length
    longest = [one for one in found.by_size if one.length == length]
    shortest_length = found.by_size[0].length
    shortest = [one for one in found.by_size if one.length == shortest_length]
    several = shortest_length != length
    traces = [
        _trace(longest, lambda one: one.separable, SOFTMAX_COLOUR, "line", "top"),
        _trace(longest, lambda one: one.separable_random, HIGH_RANK_COLOUR, "line", "random"),
    ]
    keys = [
        Key(label=f"top N, context {length:,}", colour=SOFTMAX_COLOUR, mark="line"),
        Key(label=f"N random positions, context {length:,}", colour=HIGH_RANK_COLOUR, mark="line"),
    ]
    if several:
        traces += [
            _trace(shortest, lambda one: one.separable, SOFTMAX_COLOUR, "dashed", "top"),
            _trace(shortest, lambda one: one.separable_random, HIGH_RANK_COLOUR, "dashed", "random"),
        ]
        keys += [
            Key(label=f"top N, context {shortest_length:,}", colour=SOFTMAX_COLOUR, mark="dashed"),
            Key(label=f"random, context {shortest_length:,}", colour=HIGH_RANK_COLOUR, mark="dashed"),
        ]
    keys.append(
        Key(label="0.70 and 0.85: GPT-2 (124M), War and Peace, published", colour=REFERENCE, mark="dotted")
    )
    curves = Curves(
        x=Axis(title="N, tokens in the set (log scale)", log=True),
        y=Axis(title="separable share N_s / N", low=0.0, high=1.02),
        traces=tuple(traces),
        horizontal=tuple(Reference(value=value, colour=REFERENCE, style="dotted") for value in PUBLISHED),
        legend=tuple(keys),
    )
    chart = _chart(curves, title)
    return Section(
        title=title,
        identity=identity,
        text=(*_separable_words(found, longest), _critical_words(found), words.SETS_READING),
        chart=chart,
        notes=() if chart else ("There is nothing to draw: no figure has a place on the axes.",),
        definition=words.SETS_DEFINITION,
        table=tables.by_size(found.by_size),
        more_tables=tables.tests(found),
    )


def _trace(
    sets: Sequence[AttentionSets], take: Callable[[AttentionSets], object], colour: str, style: str, kind: str
) -> Trace:
    return Trace(
        colour=colour,
        style=style,
        points=tuple(
            Point(
                x=float(one.size),
                y=take(one),  # type: ignore[arg-type]
                summary=f"{kind}, N = {one.size}, context {one.length}: {with_interval(take(one))}",  # type: ignore[arg-type]
            )
            for one in sets
        ),
    )


def _separable_words(found: Attention, longest: Sequence[AttentionSets]) -> tuple[str, ...]:
    for one in longest:
        if one.size == found.reference_size:
            return (
                f"Of the {one.size} tokens with the largest weights, {with_interval(one.separable)} stand "
                "apart "
                f"from all others at a context of {one.length:,}; of {one.size} tokens drawn at random, "
                f"{with_interval(one.separable_random)}. For GPT-2 (124M) on War and Peace 0.70 to 0.85 was "
                "published, without a control.",
            )
    return ()


def _critical_words(found: Attention) -> str:
    tested = [(one, test) for one in found.by_length for test in one.critical]
    if not tested:
        return "From which N on the top set is like a random one was not tested."
    sentences = []
    for statistic, start in (("f", "By F"), ("distance", "By the cumulative distance")):
        lost = [
            (one.length, test.critical)
            for one, test in tested
            if test.statistic == statistic and test.critical
        ]
        if lost:
            listed = ", ".join(f"N = {size} at a context of {length:,}" for length, size in lost)
            sentences.append(f"{start} the top set can no longer be told from a random one from {listed} on.")
        else:
            sentences.append(f"{start} the top set is told from a random one at every N that was tried.")
    return (
        f"{' '.join(sentences)} (Mean over all heads, {found.windows} windows, level {found.level:g} for "
        f"{found.tests} tests in all; published: about 0.06 of the context.)"
    )


def _sensitivity(found: Attention, title: str, identity: str) -> Section:
    points = found.by_temperature

    def trace(values: Sequence[float], colour: str, style: str, label: str) -> Trace:
        return Trace(
            colour=colour,
            style=style,
            points=tuple(
                Point(
                    x=one.temperature, y=value, summary=f"T = {one.temperature:g}, {label}: {number(value)}"
                )
                for one, value in zip(points, values, strict=True)
            ),
        )

    curves = Curves(
        x=Axis(title="temperature T; the model has 1 (log scale)", log=True),
        y=Axis(title="sensitivity to the scores (log scale)", log=True),
        traces=(
            trace([one.bound for one in points], REFERENCE, "dotted", "1/(2T)"),
            trace([one.bound / 2 for one in points], MUTED, "dashed", "1/(4T)"),
            trace([one.exact_largest for one in points], SOFTMAX_COLOUR, "dashed", "largest"),
            trace([one.exact for one in points], SOFTMAX_COLOUR, "line", "mean"),
            trace(
                [one.estimated_largest for one in points],
                HIGH_RANK_COLOUR,
                "dashed",
                "estimator, largest head",
            ),
            trace([one.estimated for one in points], HIGH_RANK_COLOUR, "line", "estimator, mean"),
        ),
        legend=(
            Key(label="spectral norm, mean", colour=SOFTMAX_COLOUR, mark="line"),
            Key(label="spectral norm, largest", colour=SOFTMAX_COLOUR, mark="dashed"),
            Key(label="1/(2T), never exceeded", colour=REFERENCE, mark="dotted"),
            Key(label="1/(4T), the published bound", colour=MUTED, mark="dashed"),
            Key(label="the paper’s estimator, mean", colour=HIGH_RANK_COLOUR, mark="line"),
            Key(label="the same, largest head", colour=HIGH_RANK_COLOUR, mark="dashed"),
        ),
    )
    chart = _chart(curves, title)
    usual = [one for one in points if one.temperature == 1.0]
    sentence = (
        f"At the model’s own temperature the exact spectral norm is {number(usual[0].exact)} on average and "
        f"{number(usual[0].exact_largest)} at most, where 0.5 is possible; {percent(usual[0].above_quarter)} "
        "of the "
        f"queries lie above the published 0.25. The paper’s estimator gives {number(usual[0].estimated)}."
        if usual
        else "No temperature of 1 was looked at."
    )
    return Section(
        title=title,
        identity=identity,
        text=(sentence, words.SENSITIVITY_READING),
        chart=chart,
        notes=() if chart else ("There is nothing to draw: no figure has a place on the axes.",),
        definition=words.SENSITIVITY_DEFINITION,
        table=tables.by_temperature(found),
    )


def _what_if(found: Attention, title: str, identity: str) -> Section:
    sentences = [words.WHAT_IF_READING]
    if found.loss is not None:
        sentences.insert(
            0,
            f"The loss of the model as it is, on the {found.loss_tokens:,} tokens of this comparison, is "
            f"{with_interval(found.loss)} nats per token.",
        )
    if found.kept:
        least = found.effective_size
        sentences.append(
            f"{'With ' + str(least) if least else 'With none of the tried numbers'} of the largest weights a "
            "query "
            f"the loss stays within {percent(found.tolerance)}"
            + (": the effective set size, among the sizes tried." if least else ".")
        )
    return Section(
        title=title,
        identity=identity,
        text=tuple(sentences),
        table=tables.normalisers(found),
        more_tables=tables.kept(found),
    )
