"""Parallel paragraphs of help pages: what counts as a translation, and what is left out."""

from pathlib import Path

import pytest

from fullrank.errors import FullrankError
from fullrank.studies import help_pages

PAGE = """<html><head><title>no text</title><script>var p = "<p id='par_id9'>no</p>";</script></head>
<body><p>Menu without an id</p><div id="DisplayArea">
<h1 id="hd_id1" dir="auto">{title}</h1>
<p id="par_id2"><a name="x"></a>{first}<br>and   <span class="emph">{second}</span> &amp;
 more.</p>
<p id="par_id3"><img alt="a picture"></p>
<pre id="bas_id4">Sub Main</pre>
<p id="par_id5">{code}</p>
<p id="par_id6">{boiler}</p>
</div></body></html>"""


def pages(folder: Path, language: str, **texts: str) -> None:
    for name in ("writer/one", "calc/two"):
        file = folder / "usr/share/help" / language / "text" / f"{name}.html"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(PAGE.format(**{key: value.replace("PAGE", name) for key, value in texts.items()}))


@pytest.fixture
def read(tmp_path: Path) -> dict[str, dict[help_pages.Place, str]]:
    english = {"title": "Open PAGE", "first": "Some", "second": "words in PAGE", "code": "=SUM(A1)"}
    german = {"title": "Öffnen PAGE", "first": "Einige", "second": "Worte in PAGE", "code": "=SUM(A1)"}
    pages(tmp_path / "en-us", "en-us", **english, boiler="Related topics")
    pages(tmp_path / "de", "de", **german, boiler="Verwandte Themen")
    return {name: help_pages.read(tmp_path / name) for name in ("en-us", "de")}


def test_paragraphs_are_those_with_an_id_and_text(read: dict[str, dict[help_pages.Place, str]]) -> None:
    assert read["en-us"] == {
        (f"{name}.html", place): text.replace("PAGE", name)
        for name in ("calc/two", "writer/one")
        for place, text in {
            "hd_id1": "Open PAGE",
            "par_id2": "Some and words in PAGE & more.",
            "par_id5": "=SUM(A1)",
            "par_id6": "Related topics",
        }.items()
    }


def test_parallel_text_is_translated_everywhere_and_stands_once(
    read: dict[str, dict[help_pages.Place, str]], tmp_path: Path
) -> None:
    found = help_pages.parallel(read)
    # Formulas are the same in both languages, and the heading that all pages share counts on the first.
    assert found["de"] == {
        "calc/two.html": ["Öffnen calc/two", "Einige and Worte in calc/two & more.", "Verwandte Themen"],
        "writer/one.html": ["Öffnen writer/one", "Einige and Worte in writer/one & more."],
    }
    assert {page: len(texts) for page, texts in found["en-us"].items()} == {
        page: len(texts) for page, texts in found["de"].items()
    }
    files = list(help_pages.write(found["de"], tmp_path / "out"))
    assert [file.name for file in files] == ["calc_two.txt", "writer_one.txt"]
    assert files[1].read_text() == "Öffnen writer/one\nEinige and Worte in writer/one & more.\n"


def test_bad_pages_are_refused(read: dict[str, dict[help_pages.Place, str]], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FullrankError, match="has no help pages: unpack"):
        help_pages.read(tmp_path / "empty")
    with pytest.raises(FullrankError, match="needs en-us and another language, got de"):
        help_pages.parallel({"de": read["de"]})
    with pytest.raises(FullrankError, match="no paragraph is translated in all"):
        help_pages.parallel({"en-us": read["en-us"], "xx": dict(read["en-us"])})
