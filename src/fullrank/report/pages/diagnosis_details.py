"""What a diagnosis has many of, as tables: positions, layers, ranks, heads, tokens.

A row each; where several models stand side by side, a column says whose it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fullrank.report.figures import Cell, percent
from fullrank.report.page import Column, Table
from fullrank.report.pages.diagnosis_rows import head_name
from fullrank.report.subject import Subject
from fullrank.report.text import shown
from fullrank.results.diagnosis import LayerGeometry

# A page with tens of thousands of rows is one that nobody can open.
MOST_TOKENS = 200
# So many rows need no folding.
FEW = 10


def details(question: str, subjects: Sequence[Subject]) -> tuple[Table, ...]:
    """What a question has many of, folded away."""
    return _DETAILS[question](subjects) if question in _DETAILS else ()


def _many(
    subjects: Sequence[Subject],
    question: str,
    take: Callable[[Any], list[tuple[Cell, ...]]],
    *,
    caption: str,
    columns: tuple[Column, ...],
    folded: str,
) -> tuple[Table, ...]:
    rows: list[tuple[Cell, ...]] = []
    several = len(subjects) > 1
    for one in subjects:
        section = getattr(one.record, question)
        if section is not None:
            rows += [(one.name, *row) if several else row for row in take(section)]
    if not rows:
        return ()
    named = (Column(name="model"), *columns) if several else columns
    return (Table(caption=caption, columns=named, rows=tuple(rows), folded=f"{folded} ({len(rows):,})"),)


def _positions(subjects: Sequence[Subject]) -> tuple[Table, ...]:
    return _many(
        subjects,
        "loss",
        lambda one: [(f"{part.first + 1:,} to {part.last + 1:,}", part.nats) for part in one.by_position],
        caption="Loss by position in the window, counted from 1.",
        columns=(Column(name="positions"), Column(name="loss", unit="nats per token")),
        folded="Loss by position",
    )


def _layers(subjects: Sequence[Subject]) -> tuple[Table, ...]:
    return _many(
        subjects,
        "anisotropy",
        lambda one: [
            (
                f"{layer.layer} {shown(layer.name, 40)}",
                layer.cosine,
                layer.cosine_centred,
                layer.top_variance_share,
                layer.effective_rank,
                layer.largest_kurtosis,
                layer.sinks,
                _outliers(layer),
            )
            for layer in one.layers
        ],
        caption="Geometry by layer, sink positions left out.",
        columns=(
            Column(name="layer"),
            Column(name="mean cosine"),
            Column(name="mean removed"),
            Column(name="top share", unit="of variance"),
            Column(name="effective rank"),
            Column(name="kurtosis", unit="largest"),
            Column(name="sinks", unit="left out"),
            Column(name="outlier dimensions", unit="share of variance"),
        ),
        folded="All layers",
    )


def _ranks(subjects: Sequence[Subject]) -> tuple[Table, ...]:
    return _many(
        subjects,
        "rank_needed",
        lambda one: [
            (point.rank, point.truncated, point.refitted, point.learning_rate) for point in one.points
        ],
        caption="Held-out loss by the rank of the output matrix, nats per token.",
        columns=(
            Column(name="rank"),
            Column(name="cut down"),
            Column(name="refitted"),
            Column(name="learning rate"),
        ),
        folded="All ranks",
    )


def _heads(subjects: Sequence[Subject]) -> tuple[Table, ...]:
    return _many(
        subjects,
        "better_head",
        lambda one: [
            (
                head_name(fit.head),
                fit.components,
                fit.parameters,
                fit.loss,
                fit.gain,
                fit.gain_over_equal,
                ", ".join(f"{gain:.4f}" for gain in fit.gain_by_seed[:12]),
                fit.learning_rate,
                fit.steps,
            )
            for fit in one.fits
        ],
        caption="Heads refitted on frozen states; losses and gains in nats per held-out token.",
        columns=(
            Column(name="head"),
            Column(name="components", unit="K"),
            Column(name="parameters", unit="trained"),
            Column(name="loss"),
            Column(name="gain", unit="over softmax"),
            Column(name="gain", unit="over one as large"),
            Column(name="gain by seed"),
            Column(name="learning rate"),
            Column(name="steps"),
        ),
        folded="All heads",
    )


def _tokens(subjects: Sequence[Subject]) -> tuple[Table, ...]:
    """The tokens that are never first, in the order of the record; the rest is counted."""
    tables = []
    for one in subjects:
        section = one.record.unreachable
        if section is None or not section.never:
            continue
        listed = section.never[:MOST_TOKENS]
        rest = len(section.never) - len(listed)
        whose = f"{one.name}: tokens" if len(subjects) > 1 else "Tokens"
        tables.append(
            Table(
                caption=f"{whose} that are never first, with their text in quotes."
                + (f" {rest:,} more are in results.json." if rest else ""),
                columns=(Column(name="id"), Column(name="token"), Column(name="depth")),
                rows=tuple((str(token.id), f"“{shown(token.text)}”", token.depth) for token in listed),
                folded=f"{whose} that are never first ({len(section.never):,})" if len(listed) > FEW else "",
            )
        )
    return tuple(tables)


_DETAILS: dict[str, Callable[[Sequence[Subject]], tuple[Table, ...]]] = {
    "loss": _positions,
    "anisotropy": _layers,
    "rank_needed": _ranks,
    "better_head": _heads,
    "unreachable": _tokens,
}


def _outliers(layer: LayerGeometry) -> str:
    named = [f"{one.dimension} ({percent(one.variance_share)})" for one in layer.outliers[:4]]
    rest = len(layer.outliers) - len(named)
    return ", ".join(named) + (f" and {rest:,} more" if rest else "")
