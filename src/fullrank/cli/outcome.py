"""What every command leaves behind: results.json, report.html, and two lines that say where."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from fullrank.results import Provenance


def write(record: Any, made: Provenance, out: Path) -> None:
    from fullrank import report, results

    results.save(record, out / "results.json", made)
    report.write(record, made, out / "report.html")


def say_where(console: Console, out: Path) -> None:
    for label, name in (("results", "results.json"), ("page", "report.html")):
        # Never wrapped: a path is there to be copied.
        console.print(f"{label:<8}{out / name}", highlight=False, markup=False, soft_wrap=True)
