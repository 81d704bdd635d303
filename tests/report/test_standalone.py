"""A chart of a page by itself: the same marks, its legend drawn in, and a name for screen readers."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from fullrank import report
from fullrank.errors import FullrankError
from fullrank.report.charts.theme import Key
from fullrank.report.page import Chart
from fullrank.report.standalone import LINE, stand_alone
from fullrank.results import Diagnosis

SVG = "{http://www.w3.org/2000/svg}"
MARKS = ("line", "dashed", "dotted", "dot", "ring", "diamond", "tick", "bar", "band")
CHART = '<svg viewBox="0 0 760 100" role="img" aria-label="a chart"><path d="M0,0H1" fill="#0072b2"/></svg>'


def test_the_chart_of_a_question_has_its_legend(diagnosis: Diagnosis) -> None:
    root = ElementTree.fromstring(report.picture(diagnosis, "rank_needed")._repr_svg_())
    said = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert "refitted" in said
    assert "held-out loss, nats per token" in said
    assert [one.get("role") for one in root.iter(f"{SVG}svg") if one.get("role")] == ["img"]
    assert root.get("role") == "img"


def test_every_mark_of_a_legend_is_drawn_inside_the_picture() -> None:
    legend = tuple(Key(label=f"a {mark} & its label", colour="#0072b2", mark=mark) for mark in MARKS)
    root = ElementTree.fromstring(stand_alone(Chart(wide=CHART, narrow="", legend=legend)).svg)
    labels = root.findall(f"{SVG}text")
    assert [label.text for label in labels] == [key.label for key in legend]
    *samples, chart = root.findall(f"{SVG}svg")
    assert len(samples) == len(MARKS)
    assert all(len(sample) == 1 for sample in samples)
    above = float(chart.attrib["y"])
    # More than one line, and the chart stands below all of them.
    assert above == max(float(label.attrib["y"]) for label in labels) // LINE * LINE + LINE > LINE
    assert float(root.attrib["height"]) == above + 100
    assert max(float(sample.attrib["x"]) for sample in samples) < 760


def test_without_a_legend_the_chart_stands_at_the_top() -> None:
    root = ElementTree.fromstring(stand_alone(Chart(wide=CHART, narrow="")).svg)
    assert root.findall(f"{SVG}svg")[-1].get("y") == "0"
    assert root.get("height") == "100"


@pytest.mark.usefixtures("blank_pictures")
def test_a_section_has_its_title_and_its_question(diagnosis: Diagnosis) -> None:
    assert report.picture(diagnosis, "rank_needed") == report.picture(diagnosis, "What rank does it need?")
    with pytest.raises(
        FullrankError, match=r"no chart stands under 'flagged', expected one of .*'rank_needed'"
    ):
        report.picture(diagnosis, "flagged")
    with pytest.raises(FullrankError, match="no page shows a 'int'"):
        report.picture(3, "loss")
