from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullrank.errors import FullrankError
from fullrank.report.charts import diagnosis_charts as charts
from fullrank.report.charts.dots import SMALLEST_DRAWN, LogAxis
from fullrank.report.charts.picture import printable, svg
from fullrank.report.charts.theme import DARK, NARROW, WIDE
from fullrank.results import Ladder, LadderRung

FIELDS = [field.name for field in dataclasses.fields(LadderRung)]


def marks(specification: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of every dot, tick and triangle."""
    return [
        datum
        for layer in specification["layer"]
        if layer["mark"]["type"] == "point"
        for datum in layer["data"]["values"]
    ]


def as_json(value: Any) -> Any:
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


@pytest.mark.parametrize("draw", [charts.ladder_kl, charts.ladder_rank])
def test_chart_data_are_the_record(draw: Any, ladder: Ladder) -> None:
    rows = draw(ladder)["layer"][0]["data"]["values"]
    expected = [{name: getattr(rung, name) for name in FIELDS} for rung in charts.ordered(ladder)]
    assert [{name: row[name] for name in FIELDS} for row in rows] == expected


def test_softmax_comes_first_by_width_then_the_other_heads_in_order(ladder: Ladder) -> None:
    labels = ["softmax, width 8", "softmax, width 16", "softmax, width 24"]
    labels += ["mos, width 8, K = 8", "sigsoftmax, width 8"]
    domain = charts.ladder_kl(ladder)["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert domain == labels


def test_kl_marks_stand_at_their_values(ladder: Ladder) -> None:
    drawn = marks(charts.ladder_kl(ladder))
    reached = {mark["row"]: mark["x"] for mark in drawn if mark["series"] != "softmax floor"}
    assert reached["softmax, width 8"] == 0.42137
    assert reached["mos, width 8, K = 8"] == 0.06231
    floors = {mark["row"]: mark for mark in drawn if mark["series"] == "softmax floor"}
    assert floors["softmax, width 16"]["x"] == 0.11021
    assert floors["softmax, width 24"]["beyond"] == "left"
    families = {mark["row"]: mark["series"] for mark in drawn if mark["series"] != "softmax floor"}
    assert families["softmax, width 24"] == "softmax"
    assert families["sigsoftmax, width 8"] == "high-rank head"


def test_rank_marks_stand_at_rank_and_width(ladder: Ladder) -> None:
    specification = charts.ladder_rank(ladder)
    drawn = {(mark["row"], mark["series"]): mark["x"] for mark in marks(specification)}
    assert drawn["mos, width 8, K = 8", "high-rank head"] == 255
    assert drawn["mos, width 8, K = 8", "softmax ceiling"] == 8
    assert drawn["softmax, width 16", "softmax"] == 16
    assert [{"x": 24}] in [layer["data"]["values"] for layer in specification["layer"]]


def test_odd_values_have_their_place(odd: Ladder) -> None:
    specification = charts.ladder_kl(odd)
    json.dumps(specification, allow_nan=False)
    rows = specification["layer"][0]["data"]["values"]
    assert [row["kl"] for row in rows] == [as_json(rung.kl) for rung in charts.ordered(odd)]
    drawn = marks(specification)
    assert [mark["kl"] for mark in drawn if mark["series"] != "softmax floor"] == [
        0.3,
        0.0,
        -1e-12,
        1e-9,
        "inf",
    ]
    assert [mark["row"] for mark in drawn if mark["beyond"] == "right"] == ["softmax, width 2"]
    # A floor that is no number has no tick.
    assert len([mark for mark in drawn if mark["series"] == "softmax floor"]) == 4
    assert "softmax, width 2 (2)" in [row["row"] for row in rows]


values = st.one_of(st.sampled_from([math.nan, math.inf, 0.0]), st.floats(-1.0, 1e100), st.floats(0.0, 20.0))


@given(st.lists(values, max_size=8))
def test_log_axis_holds_what_it_is_given(figures: list[float]) -> None:
    axis = LogAxis.over(figures)
    assert SMALLEST_DRAWN <= axis.low < axis.high < math.inf
    ticks = axis.ticks()
    assert len(ticks) >= 2
    assert all(axis.low <= tick <= axis.high for tick in ticks)
    for value in figures:
        if math.isnan(value):
            continue
        assert axis.low <= axis.place(value) <= axis.high
        assert (axis.beyond(value) == "") == (SMALLEST_DRAWN <= value < math.inf)
        assert axis.beyond(value) or axis.place(value) == value


def test_colours_of_a_drawing_are_those_that_turn_dark(ladder: Ladder, odd: Ladder) -> None:
    for record in (ladder, odd):
        for draw in (charts.ladder_kl, charts.ladder_rank):
            drawn = svg(draw(record), name="", description="")
            colours = set(re.findall(r'(?:fill|stroke)="([^"]*)"', drawn)) - {"none", "transparent"}
            assert colours <= DARK.keys()


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_a_drawing_is_as_wide_as_was_asked(width: int, ladder: Ladder) -> None:
    root = ElementTree.fromstring(svg(charts.ladder_kl(ladder, width=width), name="", description=""))
    assert width <= float(root.get("width", 0)) <= width + 8


def test_picture_stands_alone_on_white(ladder: Ladder) -> None:
    picture = charts.ladder_svg(ladder)
    root = ElementTree.fromstring(picture)
    space = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{space}rect").get("fill") == "white"  # type: ignore[union-attr]
    assert root.get("aria-label") == "KL to the truth by output layer"
    assert root.findtext(f"{space}desc") == charts.ladder_subtitle(ladder)
    written = {element.text for element in root.iter(f"{space}text")}
    assert {"KL to the truth by output layer", "mos, width 8, K = 8", "0.421", "0.0623"} <= written
    titles = [element.text for element in root.iter(f"{space}title")]
    # Each row, each dot and each tick or triangle tells the figures of its row.
    assert len(titles) == 3 * len(ladder.rungs)
    assert any(
        "KL 0.06231 nats per token; softmax floor 0.4087; least rank 255" in str(text) for text in titles
    )


def test_a_ladder_without_rungs_is_an_error(ladder: Ladder) -> None:
    with pytest.raises(FullrankError, match="no rungs"):
        charts.ladder_kl(dataclasses.replace(ladder, rungs=()))


@pytest.mark.parametrize("package", ["altair", "vl_convert"])
def test_missing_package_is_named(package: str, ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FullrankError, match=rf"'{package}'.*pip install altair vl-convert-python jinja2"):
        charts.ladder_svg(ladder)


def test_heavy_packages_wait_until_something_is_drawn() -> None:
    code = (
        "import sys, fullrank.report\n"
        "assert not {'torch', 'altair', 'vl_convert', 'jinja2'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@given(st.text())
def test_printable_text_fits_xml_and_utf8(text: str) -> None:
    clean = printable(text + "\x00\ud800")
    clean.encode("utf8")
    ElementTree.fromstring(f"<a>{clean.replace('&', '').replace('<', '')}</a>")
    assert printable("plain – ∑ \U0001f600\n") == "plain – ∑ \U0001f600\n"
