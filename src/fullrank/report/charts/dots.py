"""Dot plots: one row a thing, a dot for what it reached, a tick for what it is held against.

    rows     "row" (the label), "figure" (written at the right), "summary" (shown on hovering)
    points   those of their row, "series", "x", and "beyond": "left" or "right" of the axis, else ""

A log axis has no zero. What lies under `SMALLEST_DRAWN`, a loss of nothing included, is drawn as a triangle
at the left edge, and infinity as a triangle at the right edge. NaN has no mark, only its row and its word.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fullrank.report.charts.picture import Specification, missing
from fullrank.report.charts.theme import (
    HIGH_RANK_COLOUR,
    INK,
    MUTED,
    REFERENCE,
    SOFTMAX_COLOUR,
    WIDE,
    configuration,
)

if TYPE_CHECKING:
    import altair

Row = dict[str, Any]

ROW_HEIGHT = 26
LETTER_WIDTH, LABEL_PADDING = 7.0, 10
# Less than this many nats per token separates no two models in practice.
SMALLEST_DRAWN = 1e-6

# Paths in units of half a symbol.
DIAMOND = "M0,-1.25L1.25,0L0,1.25L-1.25,0Z"
TICK = "M-0.2,-1.6H0.2V1.6H-0.2Z"
TO_THE_LEFT, TO_THE_RIGHT = "M0,0L2,-1.1V1.1Z", "M0,0L-2,-1.1V1.1Z"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogAxis:
    """A log scale that holds every positive value from SMALLEST_DRAWN on, and has a place for the others."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float]) -> LogAxis:
        present = [value for value in values if not math.isnan(value)]
        drawn = [value for value in present if SMALLEST_DRAWN <= value < math.inf]
        if not drawn:
            return cls(low=SMALLEST_DRAWN, high=1.0)
        # The triangles at an edge get a decade, or part of one, to themselves.
        below = any(value < SMALLEST_DRAWN for value in present)
        above = any(value == math.inf for value in present)
        exponent = math.floor(math.log10(min(drawn)) - (0.5 if below else 0.05))
        return cls(
            low=max(10.0**exponent, SMALLEST_DRAWN), high=_round_up(max(drawn) * (4.0 if above else 1.15))
        )

    def beyond(self, value: float) -> str:
        return "left" if value < self.low else "right" if value > self.high else ""

    def place(self, value: float) -> float:
        return min(max(value, self.low), self.high)

    def ticks(self) -> list[float]:
        exponents = range(round(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
        steps = (1, 2, 5) if len(exponents) <= 3 else (1,)
        ticks = [float(f"{step}e{exponent}") for exponent in exponents for step in steps]
        return [tick for tick in ticks if tick <= self.high]


def _round_up(value: float) -> float:
    exponent = math.floor(math.log10(value))
    return next(
        rounded for step in (1, 2, 5, 10) if (rounded := float(f"{step}e{exponent}")) >= value or step == 10
    )


def dots(
    rows: list[Row],
    points: list[Row],
    *,
    series: tuple[str, str, str],
    scale: dict[str, Any],
    axis: dict[str, Any],
    axis_title: list[str],
    figure_title: str,
    references: list[float],
    width: int,
) -> Specification:
    """The grammar of both charts: `series` names the two families of dots and the tick."""
    try:
        import altair
    except ImportError as error:
        raise missing(error) from error
    wide = width >= WIDE
    # A narrow chart has room for what is drawn; the page's text says the rest.
    lines = axis_title if wide else textwrap.wrap(axis_title[0], 30)
    # Whoever looks may have a wider font than the one that measured the labels here; the widest common one
    # takes a fifth more. Without the room, the labels would run out of the picture.
    limit = 220 if wide else 110
    extent = min(1.2 * limit, LETTER_WIDTH * max(len(row["row"]) for row in rows)) + LABEL_PADDING
    # A domain given outright, because sorting by a list would compile the labels into an expression.
    y = altair.Y(
        "row:N",
        scale=altair.Scale(domain=[row["row"] for row in rows]),
        axis=altair.Axis(
            title=None,
            domain=False,
            ticks=False,
            labelPadding=LABEL_PADDING,
            labelLimit=limit,
            minExtent=extent,
        ),
    )
    x = altair.X(
        "x:Q",
        scale=altair.Scale(**scale),
        axis=altair.Axis(title=lines, labelFlush=False, **axis),
    )
    colour = altair.Color(
        "series:N",
        scale=altair.Scale(domain=series, range=[SOFTMAX_COLOUR, HIGH_RANK_COLOUR, REFERENCE]),
        legend=altair.Legend(
            title=None, orient="top", direction="horizontal" if wide else "vertical", labelLimit=400
        ),
    )
    shape = altair.Shape("series:N", scale=altair.Scale(domain=series, range=["circle", DIAMOND, TICK]))
    beyond = {"left": TO_THE_LEFT, "right": TO_THE_RIGHT}

    def chart(values: list[Row]) -> altair.Chart:
        return altair.Chart(altair.Data(values=values))

    # Hovering anywhere on a row shows its figures, not only on a dot a few pixels wide.
    layers = [chart(rows).mark_bar(fill="transparent").encode(y=y, description="summary:N")]
    if references:
        layers.append(
            chart([{"x": value} for value in references])
            .mark_rule(color=REFERENCE, strokeDash=[3, 3], aria=False)
            .encode(x=x)
        )
    layers.append(
        chart(_spans(points))
        .mark_rule(color=MUTED, strokeWidth=1, opacity=0.6, aria=False)
        .encode(y=y, x=x, x2="until:Q")
    )
    # Ticks first, so that a dot on its tick stays visible.
    points = sorted(points, key=lambda point: point["series"] != series[2])
    layers.append(
        chart([point for point in points if not point["beyond"]])
        .mark_point(filled=True, size=100, opacity=1)
        .encode(y=y, x=x, color=colour, shape=shape, description="summary:N")
    )
    for side, path in beyond.items():
        outside = [point for point in points if point["beyond"] == side]
        if outside:
            layers.append(
                chart(outside)
                .mark_point(filled=True, size=100, opacity=1, shape=path)
                .encode(y=y, x=x, color=colour, description="summary:N")
            )
    # The figures stand in a column at the right, where they cannot run into a mark.
    column: dict[str, Any] = {"x": altair.value("width"), "text": altair.Text("figure:N")}
    figures: dict[str, Any] = {"align": "right", "dx": 64 if wide else 58, "color": INK, "aria": False}
    layers.append(chart(rows).mark_text(**figures).encode(y=y, **column))
    layers.append(
        chart([{"figure": figure_title}])
        .mark_text(**{**figures, "color": MUTED, "fontSize": 11})
        .encode(y=altair.value(-8), **column)
    )
    drawn = altair.layer(*layers).properties(
        width=width, height=ROW_HEIGHT * len(rows), autosize=altair.AutoSizeParams(type="fit-x")
    )
    return {**drawn.to_dict(), "config": configuration()}


def _spans(points: list[Row]) -> list[Row]:
    """From dot to tick, row by row, where a row has both."""
    ends: dict[str, list[float]] = {}
    for point in points:
        ends.setdefault(point["row"], []).append(point["x"])
    return [{"row": row, "x": pair[0], "until": pair[1]} for row, pair in ends.items() if len(pair) == 2]
