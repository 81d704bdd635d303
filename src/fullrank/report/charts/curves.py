"""Curves over a number: lines with their intervals, lines to hold them against, and ranges on the x axis.

    traces       points of one curve by rising x; a band and thin rules show their intervals
    horizontal   a value of y;  vertical   a value of x;  ranges   from one x to another
    marked       single points that stand out

Whatever has no place on its axis (nan, infinity, zero on a log scale) is left out: the table names it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fullrank.report.charts.axis import Axis
from fullrank.report.charts.picture import Specification
from fullrank.report.charts.theme import DASHED, DOTTED, WIDE, Key, configuration
from fullrank.results import Estimate

# More points on one line than this are closer than a pixel.
MOST_POINTS = 360
_DASH: dict[str, list[float]] = {"line": [], "dashed": list(DASHED), "dotted": list(DOTTED)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    x: float
    y: Estimate | float
    summary: str = ""
    """Shown on hovering."""

    @property
    def value(self) -> float:
        return self.y.value if isinstance(self.y, Estimate) else self.y


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    colour: str
    points: tuple[Point, ...]
    style: str = "line"
    dots: bool = True
    """Whether each point has its mark; a spectrum of hundreds has none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """A line across the picture at one value, or a range of values where `until` is given."""

    value: float
    colour: str
    style: str = "dashed"
    until: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curves:
    x: Axis
    y: Axis
    traces: tuple[Trace, ...]
    horizontal: tuple[Reference, ...] = ()
    vertical: tuple[Reference, ...] = ()
    ranges: tuple[Reference, ...] = ()
    marked: tuple[Trace, ...] = ()
    legend: tuple[Key, ...] = ()
    notes: tuple[str, ...] = ()

    def specification(self, *, width: int) -> Specification:
        """The Vega-Lite specification of the picture, `width` pixels wide in all."""
        wide = width >= WIDE
        x, y = self.axes()
        horizontal = {"field": "x", "type": "quantitative", **x.encoding(ticks=9 if wide else 5)}
        vertical = {"field": "y", "type": "quantitative", **y.encoding(ticks=6)}
        vertical["axis"]["grid"] = True
        horizontal["axis"]["grid"] = False
        horizontal["axis"]["title"] = self.x.lines(wide)
        colour = {"field": "colour", "type": "nominal", "scale": None}
        rows = [self._rows(trace, str(place)) for place, trace in enumerate(self.traces)]
        dotted = [row for trace, part in zip(self.traces, rows, strict=True) if trace.dots for row in part]
        layers = [
            _layer(
                [row for row in _references(self.ranges, "x", x) if row["until"] is not None],
                {"type": "rect", "opacity": 0.14},
                {"x": horizontal, "x2": {"field": "until"}, "fill": colour},
            ),
            _layer(
                [row for part in rows for row in part if "low" in row],
                {"type": "area", "fillOpacity": 0.16},
                {
                    "x": horizontal,
                    "y": {**vertical, "field": "low"},
                    "y2": {"field": "high"},
                    "fill": colour,
                    "detail": {"field": "trace", "type": "nominal"},
                },
            ),
            _layer(
                [row for row in dotted if "low" in row],
                {"type": "rule", "strokeWidth": 1, "opacity": 0.55},
                {
                    "x": horizontal,
                    "y": {**vertical, "field": "low"},
                    "y2": {"field": "high"},
                    "stroke": colour,
                },
            ),
        ]
        for style, dash in _DASH.items():
            mark = {"type": "rule", "strokeWidth": 1.5, "strokeDash": dash}
            across = [row for row in _references(self.horizontal, "y", y) if row["style"] == style]
            upright = [row for row in _references(self.vertical, "x", x) if row["style"] == style]
            drawn = [
                row
                for trace, part in zip(self.traces, rows, strict=True)
                for row in part
                if trace.style == style
            ]
            layers += [
                _layer(across, mark, {"y": vertical, "stroke": colour}),
                _layer(upright, mark, {"x": horizontal, "stroke": colour}),
                _layer(
                    drawn,
                    {"type": "line", "strokeWidth": 2, "strokeDash": dash},
                    {
                        "x": horizontal,
                        "y": vertical,
                        "stroke": colour,
                        "detail": {"field": "trace", "type": "nominal"},
                        "order": {"field": "x", "type": "quantitative"},
                    },
                ),
            ]
        for shape, size, data in (
            ("circle", 34, dotted),
            ("diamond", 150, [row for trace in self.marked for row in self._rows(trace, "")]),
        ):
            layers.append(
                {
                    "data": {"values": [row for row in data if y.contains(row["y"])]},
                    # Vega's own blue otherwise: a colour that dark pages would not swap.
                    "mark": {
                        "type": "point",
                        "shape": shape,
                        "size": size,
                        "opacity": 1,
                        "stroke": "transparent",
                    },
                    "encoding": {
                        "x": horizontal,
                        "y": vertical,
                        "fill": colour,
                        "description": {"field": "summary", "type": "nominal"},
                    },
                }
            )
        return {
            "width": width,
            "height": 270 if wide else 230,
            "autosize": {"type": "fit-x"},
            "config": configuration(),
            "layer": [layer for layer in layers if layer["data"]["values"]],
        }

    def drawable(self) -> bool:
        """Whether any curve has a point that the axes hold."""
        return any(self._rows(trace, "") for trace in self.traces)

    def axes(self) -> tuple[Axis, Axis]:
        """Both axes with their ends, wide enough for curves, intervals and references."""
        rows = [row for trace in (*self.traces, *self.marked) for row in self._rows(trace, "")]
        across = [row["x"] for row in rows]
        across += [
            value
            for one in (*self.vertical, *self.ranges)
            for value in (one.value, one.until)
            if value is not None and self.x.holds(value)
        ]
        along = [row[name] for row in rows for name in ("y", "low", "high") if name in row]
        along += [one.value for one in self.horizontal if self.y.holds(one.value)]
        return self.x.fitted(across), self.y.fitted(along)

    def _rows(self, trace: Trace, name: str) -> list[dict[str, Any]]:
        rows = []
        for point in trace.points:
            if not (self.x.holds(point.x) and self.y.holds(point.value)):
                continue
            row = {
                "trace": name,
                "colour": trace.colour,
                "x": point.x,
                "y": point.value,
                "summary": point.summary,
            }
            between = point.y
            if isinstance(between, Estimate) and self.y.holds(between.low) and self.y.holds(between.high):
                row |= {"low": between.low, "high": between.high}
            rows.append(row)
        return thinned(rows)


def thinned(items: list[Any]) -> list[Any]:
    """At most MOST_POINTS of the items: first and last, the first few, and even steps between."""
    if len(items) <= MOST_POINTS:
        return items
    head, rest = items[:16], items[16:]
    count = MOST_POINTS - len(head)
    places = sorted({round(place * (len(rest) - 1) / (count - 1)) for place in range(count)})
    return head + [rest[place] for place in places]


def _references(references: tuple[Reference, ...], field: str, axis: Axis) -> list[dict[str, Any]]:
    return [
        {field: one.value, "until": one.until, "colour": one.colour, "style": one.style}
        for one in references
        if axis.holds(one.value) and (one.until is None or axis.holds(one.until))
    ]


def _layer(rows: list[dict[str, Any]], mark: dict[str, Any], encoding: dict[str, Any]) -> dict[str, Any]:
    # Lines and areas that leave the axes end at the frame; only points tell readers their figures.
    return {"data": {"values": rows}, "mark": {**mark, "clip": True, "aria": False}, "encoding": encoding}
