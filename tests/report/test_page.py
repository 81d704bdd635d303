from __future__ import annotations

import dataclasses
import os
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

import fullrank.report
from fullrank.errors import FullrankError
from fullrank.report.charts import diagnosis_charts as charts
from fullrank.report.charts.theme import DARK, HIGH_RANK_COLOUR, SOFTMAX_COLOUR
from fullrank.report.figures import figure
from fullrank.results import Ladder, Provenance


@pytest.fixture(scope="module")
def html(ladder: Ladder, made: Provenance) -> str:
    return fullrank.report.render(ladder, made)


@pytest.fixture(scope="module")
def hostile(odd: Ladder, payload: str) -> str:
    made = Provenance(
        command=f"fullrank demo --out {payload}",
        commit="",
        time=payload,
        device=payload,
        seed=None,
        versions={payload: payload},
    )
    return fullrank.report.render(odd, made)


def test_page_holds_every_figure(read_page: Callable[[str], Any], html: str, ladder: Ladder) -> None:
    read = read_page(html)
    exact = {attributes["value"] for tag, attributes in read.elements if tag == "data"}
    for rung in ladder.rungs:
        assert rung.head in read.cells
        for value in (rung.width, rung.components, rung.kl, rung.floor, rung.least_rank, rung.seconds):
            assert str(value) in exact
            assert figure(value) in read.cells
        assert f"{rung.parameters:,}" in read.cells
    for value in (ladder.contexts, ladder.vocabulary, ladder.least_rank, ladder.small_width, ladder.steps):
        assert figure(value) in read.cells
    assert str(ladder.entropy) in exact
    assert "nats per token" in " ".join(read.cells)


def test_table_has_the_order_of_the_chart(read_page: Callable[[str], Any], html: str, ladder: Ladder) -> None:
    cells = read_page(html).cells
    places = [cells.index(figure(rung.kl)) for rung in charts.ordered(ladder)]
    assert places == sorted(places)


def test_page_tells_how_the_figures_came_to_be(
    read_page: Callable[[str], Any], html: str, made: Provenance
) -> None:
    footer = read_page(html).text["footer"]
    for words in (made.command, made.commit, made.time, made.device, "17", "python 3.12.3", "torch 2.13.0"):
        assert words in footer


def test_odd_values_are_written_as_words(read_page: Callable[[str], Any], hostile: str) -> None:
    read = read_page(hostile)
    assert {"inf", "nan", "0", "−1e-12", "1e-09", "12,345"} <= set(read.cells)
    assert "not recorded" in read.text["footer"]
    assert "none" in read.text["footer"]
    for words in ("left edge", "right edge", "no number"):
        assert words in read.text["main"]


def test_text_stays_text(read_page: Callable[[str], Any], hostile: str, payload: str) -> None:
    read = read_page(hostile)
    assert not {"script", "img", "iframe", "object", "link", "a"} & {tag for tag, _ in read.elements}
    assert not any(name.startswith("on") for _, attributes in read.elements for name in attributes)
    assert payload in read.cells
    assert read.text["footer"].count(payload) == 5
    assert "<script" not in hostile
    assert "nul \\x00, half a pair \\ud800, two\\nlines" in read.cells


def test_page_loads_nothing(read_page: Callable[[str], Any], html: str, hostile: str) -> None:
    for page in (html, hostile):
        read = read_page(page)
        names = {name for _, attributes in read.elements for name in attributes}
        assert not {"src", "srcset", "href", "xlink:href", "action", "data", "poster", "style"} & names
        assert "http://" not in page
        assert "https://" not in page
        assert "url(" not in read.text["style"]
        assert "@import" not in read.text["style"]
        policies = [
            attributes["content"]
            for tag, attributes in read.elements
            if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
        ]
        assert len(policies) == 1
        assert str(policies[0]).startswith("default-src 'none';")
        assert "script" not in str(policies[0])


def test_page_is_for_everyone(read_page: Callable[[str], Any], html: str) -> None:
    read = read_page(html)
    pictures = [attributes for tag, attributes in read.elements if tag == "svg"]
    assert len(pictures) == 4
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in pictures)
    identities = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(identities) == len(set(identities))
    assert ("html", {"lang": "en"}) in read.elements


def test_write_is_whole_or_not_at_all(
    html: str, ladder: Ladder, made: Provenance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out" / "report.html"
    fullrank.report.write(ladder, made, path)
    assert path.read_text(encoding="utf8") == html

    def no_space(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(OSError, match="no space"):
        fullrank.report.write(dataclasses.replace(ladder, steps=1), made, path)
    assert path.read_text(encoding="utf8") == html
    assert list(path.parent.iterdir()) == [path]


def test_a_kind_without_a_page_is_an_error(made: Provenance, tmp_path: Path) -> None:
    with pytest.raises(FullrankError, match="no page shows a 'Provenance', expected one of ladder"):
        fullrank.report.write(made, made, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_missing_jinja_is_named(ladder: Ladder, made: Provenance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(FullrankError, match=r"'jinja2'.*pip install altair vl-convert-python jinja2"):
        fullrank.report.render(ladder, made)


def pixels(path: Path) -> numpy.ndarray:
    """The colours of a PNG of 8-bit channels, [height, width, 3]."""
    content = path.read_bytes()
    width, height, depth, kind = struct.unpack(">IIBB", content[16:26])
    assert depth == 8
    channels = {2: 3, 6: 4}[kind]
    start, packed = 8, b""
    while start < len(content):
        (length,) = struct.unpack(">I", content[start : start + 4])
        if content[start + 4 : start + 8] == b"IDAT":
            packed += content[start + 8 : start + 8 + length]
        start += length + 12
    raw, stride = zlib.decompress(packed), width * channels
    rows = numpy.frombuffer(raw, dtype=numpy.uint8).reshape(height, stride + 1)
    image = numpy.zeros((height, stride), dtype=numpy.uint8)
    above = numpy.zeros(stride, dtype=numpy.uint8)
    for how, added, out in zip(rows[:, 0], rows[:, 1:], image, strict=True):
        if how == 1:
            out[:] = added.reshape(width, channels).cumsum(axis=0, dtype=numpy.uint8).ravel()
        elif how in (0, 2):
            out[:] = added + above if how else added
        else:
            # A margin of one pixel at the left, so that every byte has a neighbour.
            line, upper = [0] * channels, [0] * channels + above.tolist()
            for place, value in enumerate(added.tolist()):
                left, up, corner = line[place], upper[place + channels], upper[place]
                guess = (left + up) // 2
                if how == 4:
                    guess = min((left, up, corner), key=lambda near: abs(left + up - corner - near))
                line.append((value + guess) & 255)
            out[:] = line[channels:]
        above = out
    return image.reshape(height, width, channels)[..., :3]


# The hostile page has the same pictures and the longest names.
@pytest.mark.parametrize("which", ["hostile", pytest.param("html", marks=pytest.mark.slow)])
def test_nothing_runs_out_of_its_picture(
    which: str, measure: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    widths = (1280, 390)
    for width, found in zip(widths, measure(request.getfixturevalue(which), *widths), strict=True):
        assert found == {
            "pictures": 2,
            "outside": [],
            "overlapping": [],
            "overflow": 0,
            "width": width,
            "foreign": 0,
            "requests": 0,
        }


# Two seconds a picture; dark is the one where every colour is replaced.
@pytest.mark.parametrize(("scheme", "dark"), [(0, True), pytest.param(1, False, marks=pytest.mark.slow)])
def test_the_page_shows_its_marks(
    scheme: int, dark: bool, html: str, browse: Callable[..., str], tmp_path: Path
) -> None:
    shot = tmp_path / "shot.png"
    options = (
        f"--screenshot={shot}",
        "--window-size=800,700",
        f"--blink-settings=preferredColorScheme={scheme}",
    )
    browse(html, *options)
    image = pixels(shot)
    for colour in (SOFTMAX_COLOUR, HIGH_RANK_COLOUR):
        wanted = DARK[colour] if dark else colour
        there = (image == [int(wanted[place : place + 2], 16) for place in (1, 3, 5)]).all(axis=2)
        # The first chart has at least two marks of each colour, of some 50 pixels inside their edges.
        assert there.sum() > 90
    assert (image.mean() < 80) == dark


def test_the_document_holds_a_mark_for_each_figure(
    html: str, ladder: Ladder, browse: Callable[..., str]
) -> None:
    document = browse(html, "--dump-dom")
    # Two charts, each wide and narrow, with a dot and a tick or triangle a row.
    assert document.count('aria-roledescription="point"') == 2 * 2 * 2 * len(ladder.rungs)
