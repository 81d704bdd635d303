"""The site: docs/ and its notebooks through zensical into site/, the reports of the gallery, and a look at
what came out.

    .venv/bin/python scripts/build_docs.py      what `make docs` runs, after scripts/check_docs.py

The look: every public name is in the reference, every link inside the site leads somewhere, and no page loads
anything from elsewhere.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

from notebooks import pages_of_the_site

from fullrank import report, results

ROOT = Path(__file__).parents[1]
SITE = ROOT / "site"
LOADED = re.compile(r'<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)="?((?:https?:)?//[^"\s>]+)')


def draw_gallery() -> int:
    """Draw the reports that docs/gallery.md links to; returns how many there are."""
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf8")
    names = re.findall(r"\]\(gallery/(\w+)\.html\)", text)
    (SITE / "gallery").mkdir(exist_ok=True)
    for name in names:
        report.write(*results.load(ROOT / "results" / f"{name}.json"), SITE / "gallery" / f"{name}.html")
    return len(names)


def unnamed() -> list[str]:
    """Public names that the page of their module does not have."""
    found = []
    for page in sorted((SITE / "api").glob("*.html")):
        room = "fullrank" if page.stem == "fullrank" else f"fullrank.{page.stem}"
        module = importlib.import_module(room)
        there = set(re.findall(r'id="([\w.]+)"', page.read_text(encoding="utf8")))
        for name in module.__all__:
            # Rooms have pages of their own. Where function and file have one name, the function is inside.
            own = isinstance(getattr(module, name), ModuleType) or name.startswith("__")
            if not own and not there & {f"{room}.{name}", f"{room}.{name}.{name}"}:
                found.append(f"{room}.{name} is not in {page.relative_to(SITE)}")
    return found


def dangling() -> list[str]:
    """Links that lead nowhere inside the site, and what is loaded from outside."""
    pages = {page: page.read_text(encoding="utf8") for page in sorted(SITE.rglob("*.html"))}
    names = {page: set(re.findall(r'\bid="?([^"\s>]+)', text)) for page, text in pages.items()}
    found = []
    for page, text in pages.items():
        here = page.relative_to(SITE)
        found += [f"{here} loads {outside}" for outside in LOADED.findall(text)]
        # Only 404.html speaks of the root, since it may be shown anywhere.
        for target in re.findall(r'<a\b[^>]*\bhref="?([^"\s>]+)', text) if page.name != "404.html" else []:
            if re.match(r"[a-z]+:|//", target):
                continue
            name, _, anchor = unquote(target).partition("#")
            to = (page.parent / name).resolve() if name else page
            if not to.exists():
                found.append(f"{here}: {target} leads nowhere")
            elif anchor and to in names and anchor not in names[to]:
                found.append(f"{here}: nothing has the name of {target}")
    return found


def main() -> None:
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", "mkdocs.yml"]
    with pages_of_the_site():
        if subprocess.run(command, cwd=ROOT).returncode:
            sys.exit(1)
    reports = draw_gallery()
    if wrong := unnamed() + dangling():
        sys.exit("\n".join(wrong))
    pages = len(list(SITE.rglob("*.html")))
    print(f"{pages} pages, {reports} of them reports: {SITE.relative_to(ROOT)}/index.html")


if __name__ == "__main__":
    main()
