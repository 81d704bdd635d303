from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from fullrank.report.pages import reference_section
from tests.report.page_text import Canvas

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def canvas(monkeypatch: pytest.MonkeyPatch) -> Canvas:
    """Keeps the specifications of pictures in place of drawing them, a tenth of a second each."""
    canvas = Canvas()
    monkeypatch.setattr("vl_convert.vegalite_to_svg", canvas)
    return canvas


@pytest.fixture
def two_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the models that ship: a narrow one that uses half of its width, and a wide one."""
    models = tuple(
        reference_section.Known(
            name=name, about=f"what {name} is", parameters=10 * width, width=width, tokens=1000,
            effective_rank=effective_rank, random_effective_rank=0.99 * width, cosine=0.5,
            rank_needed="about 3", gain=0.01, low=-0.01, high=None, outcome="undecided",
        )
        for name, width, effective_rank in (("narrow", 8, 4.0), ("wide", 4096, 4096.0))
    )  # fmt: skip
    monkeypatch.setattr(reference_section, "reference", lambda: models)


@pytest.fixture(scope="session")
def same_as_golden() -> Callable[[str, str], None]:
    """Compares a text with the file in golden/; `REGENERATE=1 pytest tests/report` writes the files anew."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if "REGENERATE" in os.environ:
            path.write_text(text, encoding="utf8")
        expected = path.read_text(encoding="utf8")
        differences = difflib.unified_diff(expected.splitlines(), text.splitlines(), "stored", "now", n=1)
        changes = "\n".join(differences)
        assert text == expected, (
            f"{name} has changed. If it should: REGENERATE=1 pytest tests/report\n{changes}"
        )

    return compare


# Only a browser can tell whether a text runs out of its picture or over its neighbour. The measured copy
# has a script, so the policy that forbids scripts is taken out of it.
MEASURE = """<script>
const boxes = (picture, what) => [...picture.querySelectorAll(what)]
  .filter(mark => mark.getAttribute("opacity") !== "0")
  .map(mark => ({box: mark.getBoundingClientRect(), text: mark.outerHTML}))
  .filter(({box}) => box.width > 0 && box.height > 0);
const pictures = [...document.querySelectorAll("svg[role=img]")]
  .filter(svg => svg.getBoundingClientRect().width > 0);
const outside = [], overlapping = [];
for (const picture of pictures) {
  const frame = picture.getBoundingClientRect();
  for (const {box, text} of boxes(picture, "text, path, line"))
    if (box.left < frame.left - 1 || box.right > frame.right + 1) outside.push(text);
  const texts = boxes(picture, "text");
  for (const [place, one] of texts.entries())
    for (const other of texts.slice(place + 1)) {
      const across = Math.min(one.box.right, other.box.right) - Math.max(one.box.left, other.box.left);
      const along = Math.min(one.box.bottom, other.box.bottom) - Math.max(one.box.top, other.box.top);
      if (across > 0 && along > 3) overlapping.push(one.text + other.text);
    }
}
const result = document.createElement("output");
result.textContent = JSON.stringify({
  pictures: pictures.length, outside, overlapping,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  width: innerWidth,
  foreign: document.scripts.length - 1 + document.images.length + document.links.length,
  requests: performance.getEntriesByType("resource").length,
});
parent.document.body.append(result);
</script></body>"""


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., str]:
    """Opens a page in chromium and returns its output."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is a program of the system, and it is not installed")

    def run(page: str, *options: str) -> str:
        path = tmp_path / "page.html"
        path.write_text(page, encoding="utf8")
        command = [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--hide-scrollbars", "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
            *options, path.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf8", timeout=120, check=True
        )
        # The console of a page shows errors and breaches of its policy.
        assert "CONSOLE" not in done.stderr, done.stderr
        return done.stdout

    return run


@pytest.fixture
def check_layout(browse: Callable[..., str]) -> Callable[[str, int, tuple[int, int]], None]:
    """Fails where anything leaves its picture, covers its neighbour or makes a page scroll sideways."""

    def check(page: str, pictures: int, widths: tuple[int, int]) -> None:
        measured = escape(page.replace("Content-Security-Policy", "").replace("</body>", MEASURE))
        # In frames, because a window of chromium is never narrower than 500 pixels.
        frames = "".join(
            f'<iframe srcdoc="{measured}" width="{width}" height="1600" frameborder="0"></iframe>'
            for width in widths
        )
        document = browse(f"<!doctype html><body>{frames}</body>", "--dump-dom", "--window-size=1400,1700")
        outputs = [unescape(part.split("</output>")[0]) for part in document.split("<output>")[1:]]
        by_width: dict[int, dict[str, Any]] = {result["width"]: result for result in map(json.loads, outputs)}
        for width in widths:
            assert by_width[width] == {
                "pictures": pictures, "outside": [], "overlapping": [], "overflow": 0, "width": width,
                "foreign": 0, "requests": 0,
            }  # fmt: skip

    return check
