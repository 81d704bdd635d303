"""Parallel text from the help pages of LibreOffice, which Debian packages for some forty languages.

A page has the same name and a paragraph the same id in every language. Kept is what is a translation in all
of them: paragraphs that every language has and that differ from the English one in each of the others, so
that neither commands nor what nobody has translated yet counts as text of a language. A paragraph that stands
on many pages is kept on the first.

    mkdir pages; apt-get download libreoffice-help-de; dpkg-deb -x libreoffice-help-de_*.deb pages/de
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path

from fullrank.errors import FullrankError

ORIGINAL = "en-us"
Place = tuple[str, str]
"""Page and id of a paragraph."""

PARAGRAPHS = ("p", "h1", "h2", "h3", "h4", "h5", "h6")
IDS = ("par_id", "hd_id")


class Paragraphs(HTMLParser):
    """Texts of the paragraphs of one page that have an id."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: dict[str, str] = {}
        self._open: str | None = None
        self._parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in PARAGRAPHS:
            self._close()
            name = dict(attrs).get("id") or ""
            self._open = name if name.startswith(IDS) else None
        elif tag == "br":
            self._parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in PARAGRAPHS:
            self._close()

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self._parts.append(data)

    def _close(self) -> None:
        text = " ".join("".join(self._parts).split())
        if self._open is not None and text:
            self.found.setdefault(self._open, text)
        self._open, self._parts = None, []


def read(folder: Path) -> dict[Place, str]:
    """Every paragraph under a folder that a package was unpacked to, page by page."""
    pages = sorted(folder.glob("**/text/**/*.html"))
    if not pages:
        raise FullrankError(
            f"{folder} has no help pages: unpack a package of Debian there, dpkg-deb -x "
            "libreoffice-help-de_*.deb FOLDER"
        )
    found = {}
    for page in pages:
        reader = Paragraphs()
        reader.feed(page.read_text(encoding="utf8", errors="replace"))
        reader.close()
        parts = page.parts
        name = "/".join(parts[len(parts) - parts[::-1].index("text") :])
        found.update({(name, place): text for place, text in reader.found.items()})
    return found


def parallel(languages: Mapping[str, dict[Place, str]]) -> dict[str, dict[str, list[str]]]:
    """language -> page -> its paragraphs, the same ones in every language."""
    if ORIGINAL not in languages or len(languages) < 2:
        raise FullrankError(
            f"parallel text needs {ORIGINAL} and another language, got {', '.join(languages) or 'none'}"
        )
    others = [texts for name, texts in languages.items() if name != ORIGINAL]
    kept: dict[str, dict[str, list[str]]] = {name: {} for name in languages}
    seen = set()
    for place, text in languages[ORIGINAL].items():
        translations = [texts.get(place) for texts in others]
        if text in seen or any(one is None or one == text for one in translations):
            continue
        seen.add(text)
        for name, texts in languages.items():
            kept[name].setdefault(place[0], []).append(texts[place])
    if not kept[ORIGINAL]:
        raise FullrankError("no paragraph is translated in all of the languages: leave one out")
    return kept


def write(pages: Mapping[str, list[str]], folder: Path) -> Iterator[Path]:
    """One file a page, one line a paragraph."""
    for page, paragraphs in pages.items():
        file = folder / page.replace("/", "_").replace(".html", ".txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(paragraphs) + "\n", encoding="utf8")
        yield file
