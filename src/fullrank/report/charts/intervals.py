"""Rows of figures with their intervals: one row a thing, one mark a model, a thin line for the interval.

A thick line inside the thin one shows a second, inner range. On a log axis a value of zero has its row and
its figure at the right but no mark. A long label is broken into lines: cut short, labels that begin alike
would be one.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from fullrank.report.charts.axis import Axis
from fullrank.report.charts.dots import DIAMOND, LABEL_PADDING, LETTER_WIDTH, TICK
from fullrank.report.charts.picture import Specification
from fullrank.report.charts.theme import INK, REFERENCE, WIDE, Key, configuration

# Of the widest common font; a label that got less room would run out of the picture.
WIDE_LETTER = 7.8
LINE = 15
"""Pixels of a line of a label."""
_SHAPES = {"dot": "circle", "ring": "circle", "diamond": DIAMOND, "tick": TICK}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    row: str
    model: str
    value: float
    colour: str
    low: float = float("nan")
    high: float = float("nan")
    inner: tuple[float, float] | None = None
    shape: str = "dot"
    """dot, ring, diamond or tick."""
    summary: str = ""
    """Shown on hovering."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intervals:
    x: Axis
    rows: tuple[str, ...]
    marks: tuple[Mark, ...]
    models: tuple[str, ...]
    """Side by side within a row, in this order."""
    figures: tuple[str, ...] = ()
    """Written at the right of each row, or none."""
    lines: tuple[float, ...] = ()
    """Values of x at which a line stands."""
    legend: tuple[Key, ...] = ()
    notes: tuple[str, ...] = ()

    def drawable(self) -> bool:
        """Whether any mark has a place on the axis."""
        return any(self.x.holds(mark.value) for mark in self.marks)

    def specification(self, *, width: int) -> Specification:
        """The Vega-Lite specification of the picture, `width` pixels wide in all."""
        wide = width >= WIDE
        limit = 220 if wide else 110
        broken = {row: textwrap.wrap(row, int(limit / LETTER_WIDTH)) or [row] for row in self.rows}
        longest = max(len(line) for lines in broken.values() for line in lines)
        most = max(map(len, broken.values()))
        labels = {row: "\n".join(lines) for row, lines in broken.items()}
        placed = self._placed(labels)
        x = self.x.fitted([value for row in placed for value in _ends(row)] + list(self.lines))
        # Room for a wider font than the one that measures the labels here.
        extent = min(1.2 * limit, WIDE_LETTER * longest) + LABEL_PADDING
        across: dict[str, Any] = {"field": "x", "type": "quantitative", **x.encoding(ticks=8 if wide else 4)}
        across["axis"]["title"] = self.x.lines(wide)
        along: dict[str, Any] = {
            "field": "row",
            "type": "nominal",
            # A domain given outright: sorting by a list would compile the labels into an expression.
            "scale": {
                "domain": list(labels.values()),
                "type": "band",
                "paddingInner": 0.2,
                "paddingOuter": 0.1,
            },
            "axis": {
                "title": None,
                "domain": False,
                "ticks": False,
                "labelPadding": LABEL_PADDING,
                "labelLimit": limit,
                "minExtent": extent,
                **(_in_lines(most) if most > 1 else {}),
            },
        }
        place: dict[str, Any] = {"y": along}
        if len(self.models) > 1:
            place["yOffset"] = {"field": "model", "type": "nominal", "scale": {"domain": list(self.models)}}
        colour = {"field": "colour", "type": "nominal", "scale": None}

        def between(names: tuple[str, str], thickness: float) -> dict[str, Any]:
            return {
                "data": {"values": [row for row in placed if names[0] in row]},
                "mark": {"type": "rule", "strokeWidth": thickness, "aria": False, "clip": True},
                "encoding": {
                    **place,
                    "x": {**across, "field": names[0]},
                    "x2": {"field": names[1]},
                    "stroke": colour,
                },
            }

        layers: list[dict[str, Any]] = [
            # Every row is there, also one without a mark.
            {
                "data": {"values": [{"row": row} for row in labels.values()]},
                "mark": {"type": "point", "stroke": "transparent", "aria": False},
                "encoding": {"y": along},
            },
            {
                "data": {"values": [{"x": value} for value in self.lines]},
                "mark": {"type": "rule", "color": REFERENCE, "strokeWidth": 1.5, "aria": False},
                "encoding": {"x": across},
            },
            between(("low", "high"), 1.5),
            between(("inner_low", "inner_high"), 6),
        ]
        for shape, path in _SHAPES.items():
            painted = {"stroke": colour} if shape == "ring" else {"fill": colour}
            layers.append(
                {
                    "data": {"values": [row for row in placed if row["shape"] == shape]},
                    "mark": {
                        "type": "point",
                        "shape": path,
                        "size": 80,
                        "opacity": 1,
                        "strokeWidth": 2,
                        # Vega's own blue otherwise: a colour that dark pages would not swap.
                        "fill" if shape == "ring" else "stroke": "transparent",
                    },
                    "encoding": {
                        **place,
                        "x": across,
                        **painted,
                        "description": {"field": "summary", "type": "nominal"},
                    },
                }
            )
        if self.figures:
            layers.append(
                {
                    "data": {
                        "values": [
                            {"row": labels[row], "figure": text}
                            for row, text in zip(self.rows, self.figures, strict=True)
                        ]
                    },
                    "mark": {
                        "type": "text",
                        "align": "right",
                        "dx": LETTER_WIDTH * max(map(len, self.figures)) + 8,
                        "color": INK,
                        "aria": False,
                    },
                    "encoding": {
                        "y": along,
                        "x": {"value": "width"},
                        "text": {"field": "figure", "type": "nominal"},
                    },
                }
            )
        return {
            "width": width,
            "height": len(self.rows) * max(30, 16 * len(self.models) + 6, LINE * most + 10),
            "autosize": {"type": "fit-x"},
            "config": configuration(),
            "layer": [layer for layer in layers if layer["data"]["values"]],
        }

    def _placed(self, labels: dict[str, str]) -> list[dict[str, Any]]:
        rows = []
        for mark in self.marks:
            if not self.x.holds(mark.value):
                continue
            row: dict[str, Any] = {
                "row": labels[mark.row],
                "model": mark.model,
                "colour": mark.colour,
                "x": mark.value,
                "shape": mark.shape,
                "summary": mark.summary,
            }
            if self.x.holds(mark.low) and self.x.holds(mark.high):
                row |= {"low": mark.low, "high": mark.high}
            if mark.inner is not None and self.x.holds(mark.inner[0]) and self.x.holds(mark.inner[1]):
                row |= {"inner_low": mark.inner[0], "inner_high": mark.inner[1]}
            rows.append(row)
        return rows


def _in_lines(most: int) -> dict[str, Any]:
    """Of an axis whose labels have up to so many lines, each beside the middle of its row."""
    lines = "split(datum.label, '\\n')"
    raised = [
        {"test": f"length({lines}) == {count}", "value": -LINE * (count - 1) / 2}
        for count in range(2, most + 1)
    ]
    return {"labelExpr": lines, "labelOffset": {"condition": raised, "value": 0}}


def _ends(row: dict[str, Any]) -> list[float]:
    return [row[name] for name in ("x", "low", "high") if name in row]
