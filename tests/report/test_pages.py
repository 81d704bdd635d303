"""Pages as documents: hostile text stays text, odd numbers are drawn, nothing is loaded, files are whole."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fullrank import report
from fullrank.diagnose.series.runs import judged
from fullrank.errors import FullrankError
from fullrank.report.charts import diagnosis_charts
from fullrank.report.charts.picture import svg
from fullrank.report.charts.theme import DARK, NARROW, WIDE, Key
from fullrank.report.page import Chart
from fullrank.report.standalone import LINE, stand_alone
from fullrank.results import QUESTIONS, Estimate, Trainings, read_log
from fullrank.results.diagnosis import UnreachableToken
from tests.report import records
from tests.report.page_text import Canvas, PageReader

SVG = "{http://www.w3.org/2000/svg}"
FORBIDDEN = re.compile("[\u202a-\u202e\u2066-\u2069\u200b\u2028\x00\x1b\ud800]")
RECORDS: dict[str, Any] = {
    "ladder": records.LADDER, "diagnosis": records.DIAGNOSIS, "attention": records.ATTENTION_ALONE,
    "series": records.SERIES, "upgrade": records.TAUGHT, "collapse": records.COLLAPSE,
    "corpus": records.corpus("a"), "templates": records.TEMPLATES, "generation": records.GENERATION,
    **records.GRIDS,
}  # fmt: skip
LOOKED_UP = ("metric", "split", "scores", "tokens")
"""Fields under which a page looks up rows of its record."""
SINGLE, EMPTY = records.curve("single", (3.0,), errors=False), records.curve("empty", ())
UNTESTED = {
    "interval": (math.nan, math.nan),
    "lost_percent": math.nan,
    "noise_percent": math.nan,
    "reason": "few",
}
ODD: dict[str, tuple[Any, ...]] = {
    "diagnosis": (records.emptied(records.DIAGNOSIS),),
    "attention": (dataclasses.replace(records.DIAGNOSIS, attention=records.emptied(records.ATTENTION)),),
    "series": (
        dataclasses.replace(records.SERIES, curves=(), saturation=(), scaling=None, scaling_reason="nothing"),
        dataclasses.replace(
            records.SERIES, curves=(EMPTY, SINGLE),
            saturation=(records.saturation(EMPTY, **UNTESTED), records.saturation(SINGLE, **UNTESTED)),
            scaling=dataclasses.replace(
                records.SCALING, A=Estimate(value=1.0, low=math.nan, high=math.nan), B=None, beta=None
            ),
        ),
    ),
    "corpus": (
        records.corpus("empty", curves=(), contexts=0),
        records.corpus(
            "zero", curves=(records.corpus_curve("log", norm=0.0, singular_values=(0.0,), null=None,
            relative_error=(0.0,) * 6, relative_error_interval=None, dimension_intervals=None),),
        ),
    ),
    "grid": (records.grid("width"),),
    "grid_attention": (
        records.grid("attention", records.run("a", math.nan, normaliser="new", temperature="cold")),
    ),
    "generation": (dataclasses.replace(records.GENERATION, methods=()),),
    "upgrade": (dataclasses.replace(records.UPGRADE, training=None, preserved=None),),
}  # fmt: skip
NUMBERS = (math.nan, math.inf, -math.inf, 0.0, 1e308, -1.0)
MEASURED = ("diagnosis", "attention", "training", "trainings", "upgrade", "collapse", "corpus")
"""Kinds whose figures may all be odd; of the other kinds some figures are made by the page's own command."""


def render(*several: Any) -> str:
    if len(several) == 1:
        return report.render(several[0], records.PROVENANCE)
    return report.render_comparison(several, [records.PROVENANCE] * len(several))


@pytest.fixture(scope="module")
def html() -> str:
    """A page with its pictures."""
    return render(records.LADDER)


@pytest.fixture(scope="module")
def hostile() -> str:
    """Hostile names beside figures that can be drawn, so that the names stand in pictures too."""
    better, unreachable = records.DIAGNOSIS.better_head, records.DIAGNOSIS.unreachable
    assert better is not None
    assert unreachable is not None
    token = UnreachableToken(id=7, text=records.HOSTILE + "y" * 10_000, depth=0.1)
    fits = tuple(dataclasses.replace(fit, head=records.HOSTILE) for fit in better.fits)
    record = dataclasses.replace(
        records.PARTIAL, loss=None, anisotropy=None, logprob_rank=None,
        model=dataclasses.replace(records.DIAGNOSIS.model, name=records.HOSTILE),
        better_head=dataclasses.replace(better, fits=fits, best=records.HOSTILE),
        unreachable=dataclasses.replace(unreachable, never=(token,) * 250),
    )  # fmt: skip
    return render(record, record)


def check_inert(html: str) -> PageReader:
    read = PageReader(html)
    assert not {"script", "img", "iframe", "object", "link", "a"} & {tag for tag, _ in read.elements}
    names = {name for _, attributes in read.elements for name in attributes}
    assert not any(name.startswith("on") for name in names)
    assert not {"src", "srcset", "href", "xlink:href", "action", "data", "poster", "style"} & names
    assert not FORBIDDEN.search(html)
    return read


def spoilt(record: Any) -> Any:
    """Every text of the record hostile and long."""

    def change(value: Any) -> Any:
        return records.HOSTILE + "y" * 10_000 if isinstance(value, str) else value

    return records.changed(record, change, LOOKED_UP)


def training_runs(write_run: Callable[..., Path]) -> dict[str, Any]:
    run = judged(read_log(write_run("planted", turns=True, dead_from=7)))
    return {"training": run, "trainings": Trainings(runs=(run, dataclasses.replace(run, evaluations=())))}


@pytest.mark.usefixtures("canvas")
@pytest.mark.parametrize("name", [*RECORDS, "training", "trainings"])
def test_hostile_text_stays_text(name: str, write_run: Callable[..., Path]) -> None:
    record = RECORDS[name] if name in RECORDS else training_runs(write_run)[name]
    html = report.render(spoilt(record), spoilt(records.PROVENANCE))
    check_inert(html)
    assert "alert(1)" in html
    assert "y" * 5000 not in html
    assert len(html) < 1_500_000


def test_hostile_text_stays_text_in_pictures(hostile: str) -> None:
    read = check_inert(hostile)
    assert "\\u202egnp.exe\\u2066\\x00" in hostile
    assert "y" * 600 not in hostile
    # Two models, 200 tokens each and no more.
    assert read.cells.count(next(cell for cell in read.cells if cell.startswith("“"))) == 400
    assert len([tag for tag, attributes in read.elements if attributes.get("role") == "img"]) == 4


@pytest.mark.parametrize("name", [*RECORDS, "training", "trainings"])
def test_odd_numbers_and_empty_records_have_a_page(
    name: str, canvas: Canvas, write_run: Callable[..., Path]
) -> None:
    """The canvas refuses a specification with a number that is none."""
    record = RECORDS[name] if name in RECORDS else training_runs(write_run)[name]
    for number in NUMBERS if name in MEASURED else ():
        odd = records.changed(record, lambda value, number=number: number if type(value) is float else value)
        assert PageReader(render(odd)).text["h1"]
    for odd in ODD.get(name, ()):
        assert PageReader(render(odd)).text["h1"]


@pytest.mark.slow(reason="draws eighty pictures; the specifications are checked in the default tier")
@pytest.mark.parametrize("number", NUMBERS)
def test_odd_numbers_leave_no_hole_in_a_drawing(number: float) -> None:
    odd = records.changed(records.DIAGNOSIS, lambda value: number if isinstance(value, float) else value)
    paths = [attributes["d"] for _, attributes in PageReader(render(odd)).elements if "d" in attributes]
    assert not [path for path in paths if "NaN" in str(path) or "Infinity" in str(path)]


def test_a_page_loads_nothing_and_is_for_everyone(html: str) -> None:
    read = check_inert(html)
    assert "http://" not in html
    assert "https://" not in html
    assert "url(" not in read.text["style"]
    assert "@import" not in read.text["style"]
    (policy,) = [
        str(attributes["content"])
        for tag, attributes in read.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none';")
    assert "script" not in policy
    pictures = [attributes for tag, attributes in read.elements if tag == "svg"]
    assert len(pictures) == 4
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in pictures)
    identities = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(identities) == len(set(identities))
    assert ("html", {"lang": "en"}) in read.elements


def test_a_drawing_has_its_marks_and_every_colour_turns_dark(html: str) -> None:
    # Two charts, each wide and narrow, with a dot and a tick or triangle a row.
    assert html.count('aria-roledescription="point"') == 2 * 2 * 2 * len(records.LADDER.rungs)
    colours = set(re.findall(r'(?:fill|stroke)="([^"]*)"', html.split("</style>")[1]))
    assert colours - {"none", "transparent"} <= DARK.keys()
    style = html.split("<style>")[1].split("</style>")[0].partition("prefers-color-scheme: dark")[2]
    for light, dark in DARK.items():
        assert f'svg [fill="{light}"] {{ fill: {dark}; }}' in style
        assert f'svg [stroke="{light}"] {{ stroke: {dark}; }}' in style
    for width in (WIDE, NARROW):
        drawn = svg(diagnosis_charts.ladder_kl(records.LADDER, width=width), name="", description="")
        assert width <= float(ElementTree.fromstring(drawn).get("width", 0)) <= width + 8


def test_a_picture_for_the_readme_stands_alone_on_white() -> None:
    root = ElementTree.fromstring(diagnosis_charts.ladder_svg(records.LADDER))
    assert root.find(f"{SVG}rect").get("fill") == "white"  # type: ignore[union-attr]
    assert root.get("aria-label") == "KL to the truth by output layer"
    words = {element.text for element in root.iter(f"{SVG}text")}
    assert {"KL to the truth by output layer", "mos, width 8, K = 8", "0.421", "0.0623"} <= words
    titles = [str(element.text) for element in root.iter(f"{SVG}title")]
    # Each row, each dot and each tick or triangle has the figures of its row.
    assert len(titles) == 3 * len(records.LADDER.rungs)
    assert any("KL 0.06231 nats per token; softmax floor 0.4087; least rank 255" in title for title in titles)


def test_the_picture_of_a_question_has_its_legend_inside() -> None:
    root = ElementTree.fromstring(report.picture(records.DIAGNOSIS, "rank_needed")._repr_svg_())
    words = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert {"refitted", "held-out loss, nats per token"} <= set(words)
    assert [element.get("role") for element in root.iter(f"{SVG}svg") if element.get("role")] == ["img"]
    assert root.get("role") == "img"

    chart = '<svg viewBox="0 0 760 100" role="img" aria-label="x"><path d="M0,0H1" fill="#0072b2"/></svg>'
    marks = ("line", "dashed", "dotted", "dot", "ring", "diamond", "tick", "bar", "band")
    legend = tuple(Key(label=f"a {mark} & its label", colour="#0072b2", mark=mark) for mark in marks)
    root = ElementTree.fromstring(stand_alone(Chart(wide=chart, narrow="", legend=legend)).svg)
    labels = root.findall(f"{SVG}text")
    assert [label.text for label in labels] == [key.label for key in legend]
    *samples, inner = root.findall(f"{SVG}svg")
    assert [len(sample) for sample in samples] == [1] * len(marks)
    above = float(inner.attrib["y"])
    # The legend has more than one line, and the chart stands below all of them.
    assert above == max(float(label.attrib["y"]) for label in labels) // LINE * LINE + LINE > LINE
    assert float(root.attrib["height"]) == above + 100
    assert max(float(sample.attrib["x"]) for sample in samples) < 760
    bare = ElementTree.fromstring(stand_alone(Chart(wide=chart, narrow="")).svg)
    assert (bare.findall(f"{SVG}svg")[-1].get("y"), bare.get("height")) == ("0", "100")


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out" / "report.html"
    report.write(records.COLLAPSE, records.PROVENANCE, path)
    before = path.read_bytes()

    def no_space(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(OSError, match="no space"):
        report.write(dataclasses.replace(records.COLLAPSE, steps=1), records.PROVENANCE, path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "no page": (
        lambda: render(records.PROVENANCE), "no page shows a 'Provenance', expected one of ladder"
    ),
    "no rungs": (lambda: render(dataclasses.replace(records.LADDER, rungs=())), "no rungs"),
    "no chart": (
        lambda: report.picture(records.DIAGNOSIS, "flagged"),
        r"no chart stands under 'flagged', expected one of .*'rank_needed'",
    ),
    "a number": (lambda: report.picture(3, "loss"), "no page shows a 'int'"),
    "two kinds": (lambda: render(records.DIAGNOSIS, records.LADDER), r"only diagnoses.*'ladder'"),
    "a corpus and a ladder": (lambda: render(records.corpus("a"), records.LADDER), "only corpora"),
    "too many models": (lambda: render(*[records.DIAGNOSIS] * 7), r"7 models.*colours for 6"),
    "too many corpora": (
        lambda: render(*[records.corpus("a")] * 13), "13 corpora, a picture can show 1 to 12"
    ),
}  # fmt: skip


@pytest.mark.usefixtures("canvas")
@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    call, words = REFUSALS[case]
    with pytest.raises(FullrankError, match=words):
        call()


@pytest.mark.parametrize("package", ["altair", "vl_convert", "jinja2"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FullrankError, match=rf"'{package}'.*pip install altair vl-convert-python jinja2"):
        render(records.COLLAPSE if package == "jinja2" else records.LADDER)


def test_heavy_packages_wait_until_something_is_drawn() -> None:
    code = (
        "import sys, fullrank.report\n"
        "assert not {'torch', 'altair', 'vl_convert', 'jinja2'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


# Pages in a browser, which takes two seconds to start.


def test_the_policy_of_a_page_holds_in_a_browser(hostile: str, browse: Callable[..., str]) -> None:
    # The console would show whatever the policy blocks.
    assert browse(hostile, "--dump-dom").count('role="img"') == 4


@pytest.mark.parametrize(
    ("name", "pictures", "widths"),
    [
        ("hostile", 2, (1280, 390)),
        ("trainings", 4, (1200, 360)),
        *(
            pytest.param(*case, marks=pytest.mark.slow(reason="another start of a browser"))
            for case in (
                ("ladder", 2, (1280, 390)), ("odd_ladder", 2, (1280, 390)), ("attention", 3, (1280, 390)),
                ("diagnosis", len(QUESTIONS), (1280, 390)), ("corpora", 5, (1200, 390)),
            )
        ),
    ],
)  # fmt: skip
def test_nothing_runs_out_of_its_picture(
    name: str, pictures: int, widths: tuple[int, int], hostile: str, check_layout: Callable[..., None],
    write_run: Callable[..., Path],
) -> None:  # fmt: skip
    run, plain = (
        judged(read_log(write_run("a", turns=True, dead_from=7))),
        read_log(write_run("b", components=1)),
    )
    pages: dict[str, Callable[[], str]] = {
        "hostile": lambda: hostile,
        "trainings": lambda: render(Trainings(runs=(run, plain))),
        "ladder": lambda: render(records.LADDER),
        "odd_ladder": lambda: render(records.ODD_LADDER),
        "attention": lambda: render(records.ATTENTION_ALONE),
        "diagnosis": lambda: render(records.DIAGNOSIS, records.wider()),
        "corpora": lambda: render(records.corpus("WikiText-2, words"), records.corpus("German")),
    }
    check_layout(pages[name](), pictures, widths)


@pytest.mark.slow(reason="two starts of a browser for rules of a style sheet that all pages share")
def test_paper_shows_what_is_folded_away(browse: Callable[..., str]) -> None:
    # The same rules on a screen, because only a screen can be measured.
    script = """<script>
    const shown = [...document.querySelectorAll("details")]
      .map(fold => fold.lastElementChild.checkVisibility({contentVisibilityAuto: true}));
    const result = document.createElement("output");
    result.textContent = shown.every(Boolean) + " " + shown.length;
    document.body.append(result);
    </script></body>"""
    folded = render(records.PARTIAL)
    folds = folded.count("<details>")
    for media, visible in (("@media print", "false"), ("@media all", "true")):
        page = folded.replace("@media print", media).replace("Content-Security-Policy", "")
        document = browse(page.replace("</body>", script), "--dump-dom")
        assert f"<output>{visible} {folds}</output>" in document
