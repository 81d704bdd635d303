"""What every picture shares: colours for light and dark pages, sizes, and the styles of axes and text.

The page's style sheet swaps each colour for its partner where the reader prefers a dark page, so a chart may
use no colour that is not a key of `DARK`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

# Okabe and Ito's hues, apart for every common colour blindness, darkened to stand out on white.
SOFTMAX_COLOUR, HIGH_RANK_COLOUR = "#0072b2", "#d55e00"
MODEL_COLOURS = (SOFTMAX_COLOUR, HIGH_RANK_COLOUR, "#00856a", "#a8518a", "#8f6b00", "#4b4f9c")
INK, MUTED, REFERENCE, GRID = "#1f2328", "#59636e", "#454c54", "#d8dee4"
# What each colour becomes on a dark page.
DARK = {
    SOFTMAX_COLOUR: "#56b4e9",
    HIGH_RANK_COLOUR: "#f28e4b",
    "#00856a": "#2fc79a",
    "#a8518a": "#e39cc3",
    "#8f6b00": "#e3b93a",
    "#4b4f9c": "#a3a8f5",
    INK: "#e6e8eb",
    MUTED: "#a3acb6",
    REFERENCE: "#c3cad1",
    GRID: "#343b43",
}

WIDE, NARROW = 760, 350

DASHED, DOTTED = (5, 4), (1.5, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """One line of a legend: a sample of a mark and what it stands for."""

    label: str
    colour: str
    mark: str
    """line, dashed, dotted, dot, ring, diamond, tick, bar or band."""


def configuration() -> dict[str, Any]:
    """The `config` of a Vega-Lite specification."""
    return {
        "background": "transparent",
        "font": "sans-serif",
        "padding": {"left": 2, "right": 2, "top": 4, "bottom": 4},
        "view": {"stroke": None},
        "text": {"fontSize": 12},
        "axis": {
            "labelColor": INK,
            "titleColor": MUTED,
            "tickColor": GRID,
            "domainColor": GRID,
            "gridColor": GRID,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "titlePadding": 10,
        },
        "axisY": {"grid": False},
        "legend": {
            "labelColor": INK,
            "labelFontSize": 12,
            "symbolOpacity": 1,
            "symbolSize": 50,
            "offset": 18,
            "columnPadding": 20,
            "padding": 0,
        },
        "title": {
            "anchor": "start",
            "frame": "group",
            "color": INK,
            "fontSize": 16,
            "fontWeight": "bold",
            "offset": 14,
            "subtitleColor": MUTED,
            "subtitleFontSize": 12,
            "subtitlePadding": 6,
        },
    }
