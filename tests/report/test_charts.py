"""Charts that no golden page shows: odd ranges of axes, long labels, many points, broken intervals."""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullrank.errors import FullrankError
from fullrank.report.charts import corpus_charts, diagnosis_curves, series_charts, training_charts
from fullrank.report.charts.axis import Axis
from fullrank.report.charts.curves import MOST_POINTS, thinned
from fullrank.report.charts.dots import SMALLEST_DRAWN, LogAxis
from fullrank.report.charts.heat import MOST_TOLD, Cell, Map, Maps
from fullrank.report.charts.intervals import Intervals, Mark
from fullrank.report.charts.picture import printable
from fullrank.report.charts.theme import NARROW, WIDE
from fullrank.report.page import chart_of
from fullrank.report.pages import diagnosis_rows
from fullrank.report.pages.series_page import series_page
from fullrank.report.subject import subjects_of
from fullrank.results import Diagnosis, Estimate, read_log
from tests.report import records

FIGURES = st.one_of(st.sampled_from([math.nan, math.inf, 0.0]), st.floats(-1.0, 1e100), st.floats(0.0, 20.0))


def layers(specification: dict[str, Any], kind: str) -> list[list[dict[str, Any]]]:
    """The data of every layer of a kind of mark."""
    return [layer["data"]["values"] for layer in specification["layer"] if layer["mark"]["type"] == kind]


def with_changed(question: str, **changes: Any) -> Diagnosis:
    section = getattr(records.DIAGNOSIS, question)
    return dataclasses.replace(records.DIAGNOSIS, **{question: dataclasses.replace(section, **changes)})


@given(
    low=st.floats(1e-12, 1e12), ratio=st.floats(1.0, 1e9), most=st.integers(5, 9),
    powers_of_two=st.booleans(),
)  # fmt: skip
def test_a_log_axis_has_labels_whatever_its_range(
    low: float, ratio: float, most: int, powers_of_two: bool
) -> None:
    axis = Axis(title="", log=True, powers_of_two=powers_of_two).fitted([low, low * ratio])
    ticks = axis.ticks(most)
    assert ticks is not None
    assert (2 if powers_of_two else 3) <= len(ticks) <= most + 1
    assert all(first < second for first, second in itertools.pairwise(ticks))
    assert axis.low is not None
    assert axis.high is not None
    assert axis.low * (1 - 1e-9) <= ticks[0] <= ticks[-1] <= axis.high * (1 + 1e-9)


def test_labels_are_round() -> None:
    for low, high, ticks in (
        (157.0, 171.0, [157.5, 160.0, 162.5, 165.0, 167.5, 170.0]),
        (66.0, 140.0, [80.0, 100.0, 120.0, 140.0]),
        (0.26, 0.44, [0.3, 0.35, 0.4]),
        (9.0, 130.0, [10.0, 20.0, 50.0, 100.0]),
    ):
        assert Axis(title="", log=True, low=low, high=high).ticks(6) == ticks
    assert Axis(title="", low=0.0, high=1.0).ticks(6) is None


def test_an_axis_holds_only_figures_that_can_be_drawn() -> None:
    linear, log = Axis(title=""), Axis(title="", log=True)
    for value in (math.nan, math.inf, -math.inf, 1e300):
        assert not linear.holds(value)
        assert not log.holds(value)
    assert linear.holds(0)
    assert not log.holds(0)
    assert not log.fitted([0.5, 64.0]).contains(0.1)
    for axis in (linear.fitted([3.0]), log.fitted([3.0])):
        assert axis.low is not None
        assert axis.high is not None
        assert axis.low < 3.0 < axis.high


@given(st.lists(FIGURES, max_size=8))
def test_a_log_axis_of_dots_holds_every_figure(figures: list[float]) -> None:
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


def test_long_curves_are_thinned_but_keep_their_ends() -> None:
    few = thinned(list(range(50_000)))
    assert len(few) <= MOST_POINTS
    assert few[:16] == list(range(16))
    assert few[-1] == 49_999
    assert few == sorted(set(few))
    assert thinned([1, 2]) == [1, 2]


def test_long_labels_are_written_whole_on_several_lines() -> None:
    rows = tuple(
        f"a mixture of softmaxes for the same operations: a vocabulary of {size}" for size in (8192, 131072)
    )
    marks = tuple(Mark(row=row, model="a", value=1.0, colour="#000000") for row in (*rows, "softmax"))
    picture = Intervals(x=Axis(title="nats"), rows=(*rows, "softmax"), marks=marks, models=("a",))
    chart = chart_of(picture, name="a", description="b")
    assert chart is not None
    for drawn in (chart.wide, chart.narrow):
        texts = [
            html.unescape(re.sub("<[^>]*>", " ", text)) for text in re.findall(r"<text.*?</text>", drawn)
        ]
        assert {*rows, "softmax"} <= {" ".join(text.split()) for text in texts}


def test_noise_far_below_the_spectrum_is_a_note() -> None:
    picture = diagnosis_curves.spectrum(subjects_of([with_changed("spectrum", noise=1e-9)]))
    assert layers(picture.specification(width=WIDE), "rule") == []
    assert picture.notes == ("The storage noise, 1e-09, lies below the picture.",)


def test_a_broken_interval_leaves_its_point_and_a_rank_without_refit_has_none() -> None:
    assert records.DIAGNOSIS.rank_needed is not None
    points = records.DIAGNOSIS.rank_needed.points
    broken = Estimate(value=3.3, low=math.nan, high=math.inf)
    odd = tuple(dataclasses.replace(point, refitted=broken, truncated=broken) for point in points)
    picture = diagnosis_curves.rank_needed(subjects_of([with_changed("rank_needed", points=odd)]))
    (drawn,) = layers(picture.specification(width=WIDE), "point")
    assert len(drawn) == 2 * len(points)
    assert layers(picture.specification(width=WIDE), "area") == []
    sparse = tuple(
        dataclasses.replace(point, refitted=None) if place % 2 else point
        for place, point in enumerate(points)
    )
    trace, _ = diagnosis_curves.rank_needed(subjects_of([with_changed("rank_needed", points=sparse)])).traces
    expected = [point.rank for point in sparse if point.refitted]
    assert [point.x for point in trace.points] == expected[-len(trace.points) :]
    assert len(trace.points) >= 2


def test_a_token_count_of_zero_has_its_figure_and_no_mark() -> None:
    picture = diagnosis_rows.unreachable(subjects_of([with_changed("unreachable", never=())]))
    points = [row for layer in layers(picture.specification(width=NARROW), "point") for row in layer]
    assert [row["row"] for row in points if "x" in row] == ["can be first", "undecided"]
    assert picture.figures[2] == "0 (0.0%)"
    assert picture.notes == ("A row without a mark stands for no token.",)


def test_large_maps_lose_their_hover_texts_or_are_left_out() -> None:
    def grid(columns: int, rows: int) -> Maps:
        cells = tuple(
            Cell(column=column, row=row, shade=0.5, summary="hover")
            for column in range(columns)
            for row in range(rows)
        )
        return Maps(maps=(Map(title="a", cells=cells),), column_title="layer", row_title="head")

    assert "hover" in str(grid(10, 10).specification(width=NARROW))
    assert MOST_TOLD < 60 * 40
    assert "hover" not in str(grid(60, 40).specification(width=NARROW))
    assert grid(60, 40).drawable()
    assert not grid(200, 2).drawable()


def test_runs_of_one_head_share_a_colour_and_no_two_look_alike(write_run: Any) -> None:
    run = read_log(write_run())
    heads = ("softmax", "mos", "softmax", "mos", "mos")
    looks = training_charts.looks([dataclasses.replace(run, head=head) for head in heads])
    assert [look.colour == looks[0].colour for look in looks] == [head == "softmax" for head in heads]
    assert [look.style for look in looks] == ["line", "line", "dashed", "dashed", "dotted"]
    assert len({look.name for look in looks}) == 5
    assert len({(look.colour, look.style) for look in training_charts.looks([run] * 18)}) == 18
    with pytest.raises(FullrankError, match="19 runs"):
        training_charts.looks([run] * 19)


@pytest.mark.usefixtures("canvas")
def test_a_page_has_only_so_many_curves_and_says_so() -> None:
    pairs = [(records.STEADY, records.saturation(records.STEADY))] * (series_charts.MOST_PANELS + 3)
    assert len(series_charts.panels(pairs, width=WIDE)["concat"]) == series_charts.MOST_PANELS
    curves, verdicts = zip(*pairs, strict=True)
    page = series_page(dataclasses.replace(records.SERIES, curves=curves, saturation=verdicts))
    assert any(f"of {len(pairs)} curves" in note for note in page.sections[0].notes)


def test_limits_of_the_method_are_the_band_where_there_is_no_interval() -> None:
    def first(curve: Any) -> Any:
        looks = corpus_charts.looks([records.corpus("a", curves=(curve,))])
        return corpus_charts.errors(looks, "log").traces[0].points[2].y

    bare = records.corpus_curve("log", relative_error_interval=None, dimension_intervals=None, null=None)
    assert first(bare).high == pytest.approx(1.01 * records.ERRORS[2])
    assert first(dataclasses.replace(bare, method="exact")) == records.ERRORS[2]


@given(st.text())
def test_printable_text_fits_xml_and_utf8(text: str) -> None:
    clean = printable(text + "\x00\ud800")
    clean.encode("utf8")
    ElementTree.fromstring(f"<a>{clean.replace('&', '').replace('<', '')}</a>")
    assert printable("plain – ∑ \U0001f600\n") == "plain – ∑ \U0001f600\n"
