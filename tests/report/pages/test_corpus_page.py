"""The page of corpora: every figure, nothing but text, several in one picture, and odd records."""

import dataclasses
import math
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import fullrank.report
from fullrank import results
from fullrank.cli.report import Report, report
from fullrank.errors import FullrankError
from fullrank.report.charts import corpus_charts as charts
from fullrank.report.charts.theme import DARK, MODEL_COLOURS, NARROW, WIDE
from fullrank.report.charts.training_charts import grid
from fullrank.report.pages.corpus_page import corpora_page, corpus_page
from fullrank.report.registry import render_comparison
from fullrank.results import Corpora, Corpus, CorpusCurve, CorpusNull, Estimate, Provenance

GRID = (1, 10, 100, 1000, 10_000, 30_000)
ERRORS = (0.97, 0.85, 0.7, 0.55, 0.21, 0.008)
FIGURES = {"50": 1523, "90": 24_117, "99": 29_950}


def curve(construction: str, **changes: Any) -> CorpusCurve:
    record = CorpusCurve(
        construction=construction, contexts=1_821_457, vocabulary=33_278,
        least=5 if construction == "frequent" else None, prior=3.981 if construction == "log" else None,
        norm=1333.5, singular_values=tuple(314.9 / place for place in range(1, 257)),
        singular_value_error=1e-6, method="lanczos", bound="Within 1e-06 of true ones.",
        dimensions=FIGURES,
        dimension_limits={name: (value - 3, value + 4) for name, value in FIGURES.items()},
        dimension_intervals={
            name: Estimate(value=value, low=value - 111, high=value + 222) for name, value in FIGURES.items()
        },
        beyond_first={"50": 7950, "90": 30_789, "99": 33_159},
        beyond_first_limits={"50": (7928, 7968), "90": (30_789, 30_789), "99": (33_156, 33_162)},
        grid=GRID, relative_error=ERRORS,
        relative_error_limits=(
            tuple(0.99 * error for error in ERRORS), tuple(1.01 * error for error in ERRORS)
        ),
        relative_error_interval=(
            (*(0.9 * error for error in ERRORS[:-1]), 0.0),
            tuple(min(1.1 * error, 1) for error in ERRORS),
        ),
        blocks=20,
        null=CorpusNull(
            dimensions={"50": 1444, "90": 23_023, "99": 28_028},
            relative_error=tuple(0.8 * error for error in ERRORS),
        ),
        seconds=40.0,
    )  # fmt: skip
    return dataclasses.replace(record, **changes)


def corpus(name: str, **changes: Any) -> Corpus:
    record = Corpus(
        name=name, sources=("train.txt",), sha256="00", tokenizer="words", order=5, engine="duckdb",
        documents=629, bytes=10_797_148, replaced=7, tokens=2_088_628, pairs=2_086_112, contexts=1_821_457,
        entries=1_968_858, vocabulary=33_278, used=33_277, single=1_744_147,
        curves=tuple(map(curve, ("probability", "weighted", "frequent", "log"))),
        seconds={"count": 3.0, "probability": 40.0}, notes=("7 places were not UTF-8",),
    )  # fmt: skip
    return dataclasses.replace(record, **changes)


@pytest.mark.usefixtures("blank_pictures")
def test_page_holds_every_figure(made: Provenance) -> None:
    html = unescape(fullrank.report.render(corpus("WikiText-2"), made))
    for words in (
        "Dimensions of WikiText-2", "2,088,628 tokens", "1,523", "24,117", "29,950", "1,412 to 1,745",
        "1,444", "23,023", "28,028", "7,950", "7,928 to 7,968", "30,789", "95.8%", "3.981 tokens",
        "at least 5 times", "7 places were not UTF-8", "Within 1e-06 of true ones", "1,000 to 2,000",
        "10,000 to 15,000", "2404.07647", "33,277", "10,797,148", "Singular values", "jackknife",
    ):  # fmt: skip
        assert words in html, words
    order = [html.index(f"<h2>{title}") for title in charts.TITLES.values()]
    assert order == sorted(order)


def test_published_ranges_only_beside_the_published_construction() -> None:
    drawn = charts.looks([corpus("a")])
    for construction in charts.TITLES:
        picture = charts.errors(drawn, construction)
        assert bool(picture.ranges) == (construction == "probability")
        assert [trace.style for trace in picture.traces] == ["dashed", "line"]
        assert [one.value for one in picture.horizontal] == [0.5, 0.1, 0.01]


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_lines_bands_and_colours(width: int) -> None:
    drawn = charts.looks([corpus("a"), corpus("b")])
    made = charts.errors(drawn, "weighted").specification(width=width)
    kinds = [layer["mark"]["type"] for layer in made["layer"]]
    assert kinds.count("area") == 1
    bands = next(layer["data"]["values"] for layer in made["layer"] if layer["mark"]["type"] == "area")
    # The null has no interval, and a band down to zero leaves the picture instead of ending.
    assert len(bands) == 2 * len(GRID)
    lines = [layer["data"]["values"] for layer in made["layer"] if layer["mark"]["type"] == "line"]
    assert sorted({row["y"] for part in lines for row in part}) == pytest.approx(
        sorted({*ERRORS, *(0.8 * error for error in ERRORS)})
    )
    panels = grid(charts.singular_values(drawn, list(charts.TITLES)), width=width)
    assert len(panels["concat"]) == 4
    text = str([made, panels])
    used = {text[place : place + 7] for place in range(len(text)) if text[place] == "#"}
    assert {MODEL_COLOURS[0], MODEL_COLOURS[1]} <= used <= set(DARK)


def test_limits_are_the_band_where_there_is_no_interval() -> None:
    bare = curve("log", relative_error_interval=None, dimension_intervals=None, null=None)
    limited = charts.errors(charts.looks([corpus("a", curves=(bare,))]), "log")
    point = limited.traces[0].points[2]
    assert isinstance(point.y, Estimate)
    assert point.y.high == pytest.approx(1.01 * ERRORS[2])
    exact = dataclasses.replace(bare, method="exact")
    picture = charts.errors(charts.looks([corpus("a", curves=(exact,))]), "log")
    assert picture.traces[0].points[2].y == ERRORS[2]
    assert [key.label for key in picture.legend] == ["relative error"]


@pytest.mark.usefixtures("blank_pictures")
def test_several_corpora_in_one_picture(made: Provenance, tmp_path: Path) -> None:
    german = corpus(
        "German", tokens=999, vocabulary=500, curves=(curve("probability"), curve("log", prior=9.0))
    )
    html = unescape(render_comparison([corpus("English"), german], [made, made]))
    for words in (
        "2 corpora",
        "English",
        "German",
        "vocabularies differ",
        "amounts of text differ",
        "from 999",
    ):
        assert words in html, words
    page = corpora_page(Corpora(title="Languages", corpora=(corpus("a"), corpus("a")), notes=("by hand",)))
    assert page.title == "Languages"
    assert page.warnings == ()
    assert [answer.name for answer in page.answers] == ["a", "a (2)"]
    with pytest.raises(FullrankError, match="13 corpora, a picture can show 1 to 12"):
        charts.looks([corpus("a")] * 13)
    for name in ("one", "two"):
        results.save(corpus(name), tmp_path / name / "results.json", made)
    report(Report(runs=(tmp_path / "one", tmp_path / "two"), out=tmp_path / "page.html"))
    assert "two" in (tmp_path / "page.html").read_text(encoding="utf8")


def test_many_corpora_are_drawn_one_tokeniser_at_a_time() -> None:
    many = tuple(
        corpus(f"{name}, {kind}", tokenizer=kind)
        for kind in ("bpe:300", "bytes")
        for name in ("a", "b", "c", "d", "e", "f", "g")
    )
    page = corpora_page(Corpora(title="Languages", corpora=many, notes=()))
    titles = [section.title for section in page.sections]
    assert "bpe:300: plain probabilities" in titles
    assert "bytes: plain probabilities" in titles
    drawn = next(section for section in page.sections if section.title == "bytes: plain probabilities")
    assert drawn.table is not None
    assert [row[0] for row in drawn.table.rows] == [f"{name}, bytes" for name in "abcdefg"]
    texts = next(section for section in page.sections if section.title == "The texts")
    assert texts.table is not None
    assert [row[0] for row in texts.table.rows] == [one.name for one in many]


def test_more_corpora_of_one_tokeniser_than_a_picture_tells_apart_have_several() -> None:
    many = tuple(corpus(f"text {place}") for place in range(1, 15))
    page = corpora_page(Corpora(title="Languages", corpora=many, notes=()))
    drawn = [section for section in page.sections if "plain probabilities" in section.title]
    assert [section.title.split(", ")[-1] for section in drawn] == [
        "1 to 7: plain probabilities", "8 to 14: plain probabilities",
    ]  # fmt: skip
    names = [row[0] for section in drawn if section.table is not None for row in section.table.rows]
    assert names == [one.name for one in many]


def test_kinds_do_not_mix(made: Provenance, ladder: Any, tmp_path: Path) -> None:
    with pytest.raises(FullrankError, match="only corpora, stand side by side"):
        render_comparison([corpus("a"), ladder], [made, made])
    results.save(corpus("a"), tmp_path / "a" / "results.json", made)
    results.save(ladder, tmp_path / "b" / "results.json", made)
    with pytest.raises(FullrankError, match="only corpora stand beside a corpus"):
        report(Report(runs=(tmp_path / "a", tmp_path / "b"), out=tmp_path / "page.html"))


def test_hostile_names_stay_text(made: Provenance, hostile_text: str) -> None:
    odd = corpus(
        hostile_text, sources=(hostile_text,) * 3, tokenizer=hostile_text, engine=hostile_text,
        notes=(hostile_text,), curves=(curve("probability", bound=hostile_text),),
    )  # fmt: skip
    for html in (fullrank.report.render(odd, made), render_comparison([odd, odd], [made, made])):
        assert "<script" not in html
        assert "<img" not in html
        assert "\u202e" not in html
        assert "\x00" not in html


def test_odd_records_can_be_drawn(made: Provenance) -> None:
    zero = curve(
        "log", norm=0.0, singular_values=(0.0,), relative_error=(0.0,) * 6, null=None, method="exact",
        dimensions=dict.fromkeys(FIGURES, 0), dimension_intervals=None, relative_error_interval=None,
    )  # fmt: skip
    no_number = curve(
        "weighted", norm=math.nan, relative_error=(math.nan,) * 6, relative_error_interval=None,
        singular_values=(math.nan,),
        dimension_intervals={"50": Estimate(value=1, low=math.nan, high=math.nan)},
    )  # fmt: skip
    short = curve("probability", grid=(1,), relative_error=(0.0,), relative_error_interval=None,
                  relative_error_limits=((0.0,), (0.0,)), singular_values=(2.0,), null=None)  # fmt: skip
    for curves in ((zero,), (no_number,), (short,), ()):
        assert "How to read this" in fullrank.report.render(corpus("odd", curves=curves, contexts=0), made)


def test_nothing_leaves_its_picture(made: Provenance, measure: Callable[..., Any]) -> None:
    html = render_comparison([corpus("WikiText-2, words"), corpus("German")], [made, made])
    for found in measure(html, 1200, 390):
        assert found["pictures"] == 5
        assert found["outside"] == []
        assert found["overlapping"] == []
        assert found["overflow"] <= 0
        assert found["foreign"] == found["requests"] == 0


def test_one_corpus_has_the_page_to_itself() -> None:
    page = corpus_page(corpus("a"))
    assert [answer.name for answer in page.answers] == [""]
    assert [tile.value for tile in page.answers[0].tiles] == ["1,523", "24,117", "29,950"]
