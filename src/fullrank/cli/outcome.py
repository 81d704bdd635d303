"""What every command leaves behind: results.json, report.html, and two lines that say where."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from fullrank.results import Provenance

RESULTS, PAGE = "results.json", "report.html"


def write(record: Any, made: Provenance, out: Path) -> None:
    from fullrank import results

    results.save(record, out / RESULTS, made)
    write_page(record, made, out)


def write_page(record: Any, made: Provenance, out: Path) -> None:
    """Beside its results; where pages cannot be drawn, an old one that would contradict them goes."""
    from fullrank import report

    if _no_page():
        (out / PAGE).unlink(missing_ok=True)
    else:
        report.write(record, made, out / PAGE)


def say_where(console: Console, out: Path) -> Path:
    """Two lines for people; returns the results, for machines."""
    page = _no_page() or str(out / PAGE)
    for label, place in (("results", str(out / RESULTS)), ("page", page)):
        # Never wrapped: a path is there to be copied.
        console.print(f"{label:<8}{place}", highlight=False, markup=False, soft_wrap=True)
    return out / RESULTS


def _no_page() -> str:
    """Why no page can be drawn, and what to do; "" if one can."""
    from fullrank import report
    from fullrank.errors import FullrankError

    try:
        report.check_installed()
    except FullrankError as error:
        return f"none: {error}, then fullrank report"
    return ""
