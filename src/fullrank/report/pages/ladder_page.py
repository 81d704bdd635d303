"""The page of a rank ladder: KL to the truth and least rank by output layer, and what both mean."""

from __future__ import annotations

import math

from fullrank.report.charts import diagnosis_charts as charts
from fullrank.report.charts.dots import SMALLEST_DRAWN
from fullrank.report.figures import number
from fullrank.report.page import Column, Page, Section, Table, draw
from fullrank.report.text import shown
from fullrank.results import Ladder


def ladder_page(record: Ladder) -> Page:
    """The page of a rank ladder."""
    rungs = charts.ordered(record)
    dashed = f" The dashed line is the floor for width {record.small_width}."
    return Page(
        title="Rank ladder",
        lead=(
            f"Output layers trained on one made-up language whose least rank, {record.least_rank}, is known "
            "by construction: softmax layers of several widths, and high-rank heads at width "
            f"{record.small_width}."
        ),
        sections=(
            Section(
                title="KL to the truth, by output layer",
                text=(
                    "Each row is one output layer after training. The dot is how far its predictions are "
                    "from the language’s true probabilities; further left is closer. The tick, the softmax "
                    "floor, is the lowest value found for a softmax of the layer’s width."
                    + (dashed if charts.small_floor(record) is not None else ""),
                ),
                chart=draw(
                    charts.ladder_kl,
                    record,
                    name="KL to the truth by output layer, nats per token",
                    description=f"{charts.ladder_subtitle(record)}. All figures are in the table below.",
                ),
                notes=_edge_notes(record),
            ),
            Section(
                title="Least rank learnt, by output layer",
                text=(
                    "The same layers. The dot is the least rank of what the layer learnt, over every context "
                    "of the language; the tick, the softmax ceiling, is the most that a softmax of the "
                    "layer’s width can have. The dashed line is the language.",
                ),
                chart=draw(
                    charts.ladder_rank,
                    record,
                    name="Least rank learnt by output layer",
                    description=f"{charts.ladder_subtitle(record)}. All figures are in the table below.",
                ),
            ),
            Section(
                title="All figures",
                table=Table(
                    caption=(
                        "One row a trained output layer, in the order of the charts. KL is to the truth; the "
                        "softmax floor is the lowest KL found for a softmax of the row’s width."
                    ),
                    columns=(
                        Column(name="head"),
                        Column(name="width", unit="D"),
                        Column(name="components", unit="K"),
                        Column(name="KL", unit="nats per token"),
                        Column(name="softmax floor", unit="nats per token"),
                        Column(name="least rank", unit="learnt"),
                        Column(name="parameters"),
                        Column(name="training", unit="seconds"),
                    ),
                    rows=tuple(
                        (
                            shown(rung.head),
                            rung.width,
                            rung.components,
                            rung.kl,
                            rung.floor,
                            rung.least_rank,
                            rung.parameters,
                            rung.seconds,
                        )
                        for rung in rungs
                    ),
                ),
            ),
            Section(
                title="The language",
                table=Table(
                    caption="What every layer was trained on.",
                    columns=(Column(name="quantity"), Column(name="value"), Column(name="unit")),
                    rows=(
                        ("contexts", record.contexts, ""),
                        ("vocabulary", record.vocabulary, "tokens"),
                        ("least rank, by construction", record.least_rank, ""),
                        ("entropy of the truth", record.entropy, "nats per token"),
                        ("small width", record.small_width, ""),
                        ("training", record.steps, "steps a layer"),
                    ),
                ),
            ),
            Section(
                title="How to read this",
                text=(
                    f"The language is a table: for each of {record.contexts:,} contexts, the probability of "
                    f"each of {record.vocabulary:,} tokens. Its least rank, {record.least_rank}, is the "
                    "least width at which a softmax without a bias can give exactly these probabilities.",
                    "KL is what the layer’s predictions cost beyond the truth, in nats per token: at 0 they "
                    "are the truth, and the loss of the layer is its KL plus the entropy, "
                    f"{number(record.entropy)}.",
                    "The softmax floor is the lowest KL that a search found for a softmax of that "
                    "width whose context vectors may be anything. The search proves nothing: the true least "
                    "can lie lower. A dot to the left of its tick is closer to the truth than any softmax of "
                    "that width that was found; a dot to the right leaves a gap that the width alone does "
                    "not explain.",
                    "A rank above the language’s is no merit in itself: how close a layer came is what the "
                    "KL says.",
                    "Each row is one training run on one language. Small differences between rows can be "
                    "chance, and nothing here is a statement about models of real text.",
                ),
            ),
        ),
    )


def _edge_notes(record: Ladder) -> tuple[str, ...]:
    """Words for the marks that only odd values have."""
    values = [value for rung in record.rungs for value in (rung.kl, rung.floor)]
    notes = []
    if any(value < SMALLEST_DRAWN for value in values):
        notes.append(
            f"A triangle at the left edge stands for a value under {SMALLEST_DRAWN:f}, zero included: "
            "a log scale has no place for it."
        )
    if math.inf in values:
        notes.append("A triangle at the right edge stands for infinity.")
    if any(math.isnan(value) for value in values):
        notes.append("A row without its mark has no number (nan).")
    return tuple(notes)
