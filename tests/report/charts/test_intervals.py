"""Rows of figures with their intervals, as they are drawn."""

from __future__ import annotations

import html
import re

import pytest

from fullrank.report.charts.axis import Axis
from fullrank.report.charts.intervals import Intervals, Mark
from fullrank.report.page import chart_of

LONG = tuple(
    f"a mixture of softmaxes for the same operations: a vocabulary of {size}" for size in (8192, 131072)
)


def drawn(rows: tuple[str, ...]) -> dict[str, list[str]]:
    """The texts of the picture, for a wide window and for a narrow one."""
    marks = tuple(Mark(row=row, model="one", value=place, colour="#000000") for place, row in enumerate(rows))
    chart = chart_of(
        Intervals(x=Axis(title="nats"), rows=rows, marks=marks, models=("one",)), name="a", description="b"
    )
    return {
        window: [html.unescape(re.sub("<[^>]*>", " ", text)) for text in re.findall(r"<text.*?</text>", svg)]
        for window, svg in (("wide", chart.wide), ("narrow", chart.narrow))
    }


@pytest.mark.parametrize("window", ["wide", "narrow"])
def test_long_labels_are_whole_and_not_one(window: str) -> None:
    texts = [" ".join(text.split()) for text in drawn(LONG)[window]]
    for row in LONG:
        assert row in texts


def test_short_labels_are_one_line() -> None:
    texts = drawn(("softmax", "mos"))["wide"]
    assert {"softmax", "mos"} <= {text.strip() for text in texts}
