"""Maps of a grid: one small square a cell, one colour, darker for more. Several maps stand under each other.

A shade is the opacity of one colour, so that a dark page can swap it like every other: 0 is the background,
1 the full colour. Cells without a figure are left out.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from typing import Any

from fullrank.report.charts.picture import Specification
from fullrank.report.charts.theme import SOFTMAX_COLOUR, WIDE, Key, configuration

# So many cells can each tell their figure on hovering before a page grows by megabytes.
MOST_TOLD = 1500
# Beyond this a cell is smaller than a pixel of a narrow window.
MOST_COLUMNS, MOST_ROWS = 160, 160
_LEAST_SHADE = 0.03


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    column: int
    row: int
    shade: float
    """From 0 to 1."""
    summary: str = ""
    """Shown on hovering."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Map:
    title: str
    cells: tuple[Cell, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Maps:
    """Maps over the same grid."""

    maps: tuple[Map, ...]
    column_title: str
    row_title: str
    legend: tuple[Key, ...] = ()

    def drawable(self) -> bool:
        cells = [cell for one in self.maps for cell in self._cells(one)]
        columns, rows = self._size()
        return bool(cells) and columns <= MOST_COLUMNS and rows <= MOST_ROWS

    def specification(self, *, width: int) -> Specification:
        """The Vega-Lite specification of the picture, `width` pixels wide in all."""
        wide = width >= WIDE
        columns, rows = self._size()
        told = sum(len(one.cells) for one in self.maps) <= MOST_TOLD
        inner = width - 60
        # Squares where they fit, never so tall that one map fills a screen.
        height = min(rows * min(inner / columns, 20 if wide else 12), 260)
        drawn = []
        for place, one in enumerate(self.maps):
            last = place == len(self.maps) - 1
            drawn.append(
                {
                    "title": {
                        "text": [one.title] if wide else textwrap.wrap(one.title, 50),
                        "fontSize": 12,
                        "fontWeight": "normal",
                        "offset": 6,
                    },
                    "width": inner,
                    "height": height,
                    "data": {"values": [self._row(cell, told) for cell in self._cells(one)]},
                    "mark": {"type": "rect", "fill": SOFTMAX_COLOUR, "aria": told},
                    "encoding": {
                        "x": self._place("column", columns, self.column_title if last else None, wide),
                        "y": self._place("row", rows, self.row_title, wide),
                        "fillOpacity": {
                            "field": "shade",
                            "type": "quantitative",
                            "scale": None,
                            "legend": None,
                        },
                        **({"description": {"field": "summary", "type": "nominal"}} if told else {}),
                    },
                }
            )
        return {"vconcat": drawn, "spacing": 14, "config": configuration()}

    def _size(self) -> tuple[int, int]:
        cells = [cell for one in self.maps for cell in one.cells]
        return (
            max((cell.column for cell in cells), default=0) + 1,
            max((cell.row for cell in cells), default=0) + 1,
        )

    @staticmethod
    def _cells(one: Map) -> list[Cell]:
        return [
            cell for cell in one.cells if math.isfinite(cell.shade) and cell.column >= 0 and cell.row >= 0
        ]

    @staticmethod
    def _row(cell: Cell, told: bool) -> dict[str, Any]:
        shade = round(_LEAST_SHADE + (1 - _LEAST_SHADE) * min(max(cell.shade, 0.0), 1.0), 3)
        row: dict[str, Any] = {"column": cell.column, "row": cell.row, "shade": shade}
        return {**row, "summary": cell.summary} if told else row

    @staticmethod
    def _place(field: str, count: int, title: str | None, wide: bool) -> dict[str, Any]:
        step = max(1, math.ceil(count / (16 if wide and field == "column" else 8)))
        return {
            "field": field,
            "type": "ordinal",
            "scale": {"domain": list(range(count)), "paddingInner": 0.06, "paddingOuter": 0},
            "axis": {
                "title": title,
                "values": list(range(0, count, step)),
                "labelAngle": 0,
                "domain": False,
                "ticks": False,
            },
        }
