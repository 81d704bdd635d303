"""What the page of `fullrank study domains` has beside that of every study: what width costs on every text,
over the rank of its table."""

from __future__ import annotations

import statistics

from fullrank.report.charts.axis import Axis
from fullrank.report.charts.curves import Curves, Point, Reference, Trace
from fullrank.report.charts.theme import MODEL_COLOURS, MUTED, Key
from fullrank.report.figures import Cell, number
from fullrank.report.page import Column, Section, Table, chart_of
from fullrank.report.text import shown
from fullrank.results import Estimate
from fullrank.results.grid import Grid

MEASURES = {"frequent": "of frequent contexts", "probability": "of plain probabilities"}
"""Factors of a run that are ranks, dimensions for 90%."""

Costs = dict[str, dict[int, Estimate]]
"""By domain and narrow width: mean and range over seeds, nats per token."""


def sections(record: Grid) -> tuple[Section, ...]:
    ranks, costs, wide = _costs(record)
    if not costs:
        return ()
    chart = chart_of(
        over_ranks(ranks, costs), name="What a narrow body loses over the rank of the text",
        description="The figures are in the table below.",
    )  # fmt: skip
    widths = sorted({width for each in costs.values() for width in each})
    rows: list[tuple[Cell, ...]] = [
        (
            shown(name),
            *(ranks[name].get(measure) for measure in MEASURES),
            *(costs[name].get(width) for width in widths),
        )
        for name in sorted(costs, key=lambda name: ranks[name].get("frequent", 0.0))
    ]
    return (
        Section(
            title="What width costs, over the rank of the text",
            identity="domains",
            text=(
                f"The validation loss of a narrow body minus that of one of width {wide} of the same seed, "
                "nats per token: means over seeds, and ranges from the lowest to the highest.",
            ),
            chart=chart,
            table=Table(
                caption="Texts by the rank of their frequent contexts.",
                columns=(
                    Column(name="text"),
                    *(Column(name=f"rank {words}", unit="dimensions for 90%") for words in MEASURES.values()),
                    *(Column(name=f"width {width}", unit="cost, range over seeds") for width in widths),
                ),
                rows=tuple(rows),
            ),
        ),
    )


def over_ranks(ranks: dict[str, dict[str, float]], costs: Costs) -> Curves:
    """A dot for each text and width, over the rank of frequent contexts."""
    widths = sorted({width for each in costs.values() for width in each})
    colours = {width: MODEL_COLOURS[place % len(MODEL_COLOURS)] for place, width in enumerate(widths)}
    traces = [
        Trace(
            colour=colours[width],
            points=(
                Point(
                    x=ranks[name]["frequent"],
                    y=cost,
                    summary=f"{shown(name)}, width {width}: {number(cost.value)} nats per token",
                ),
            ),
        )
        for name, each in costs.items()
        for width, cost in each.items()
        if "frequent" in ranks[name]
    ]
    return Curves(
        x=Axis(title="rank of frequent contexts, dimensions for 90%"),
        y=Axis(title="cost of a narrow body, nats per token"),
        traces=tuple(traces),
        horizontal=(Reference(value=0.0, colour=MUTED),),
        legend=tuple(Key(label=f"width {width}", colour=colours[width], mark="dot") for width in widths),
    )


def _costs(record: Grid) -> tuple[dict[str, dict[str, float]], Costs, int]:
    """Ranks and costs by domain, and the widest width."""
    ends: dict[tuple[str, int], dict[int, float]] = {}
    ranks: dict[str, dict[str, float]] = {}
    for run in record.runs:
        try:
            name, width = run.factors["domain"], int(run.factors["width"])
            found = {measure: float(run.factors[measure]) for measure in MEASURES if measure in run.factors}
        except (KeyError, ValueError):
            continue
        if "trial" not in run.factors and run.valid is not None:
            ends.setdefault((name, width), {})[run.seed] = run.valid
            ranks[name] = found
    wide = max((width for _, width in ends), default=0)
    costs: Costs = {}
    for (name, width), each in ends.items():
        other = ends.get((name, wide), {})
        values = [loss - other[seed] for seed, loss in each.items() if seed in other]
        if width != wide and values:
            found_cost = Estimate(value=statistics.fmean(values), low=min(values), high=max(values))
            costs.setdefault(name, {})[width] = found_cost
    return ranks, costs, wide
