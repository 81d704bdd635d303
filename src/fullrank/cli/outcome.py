"""What every command leaves behind: results.json, report.html, and two lines that say where; and the card of
those that make a model."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from fullrank.results import Provenance

RESULTS, PAGE = "results.json", "report.html"
PLACES = ("model", "teacher", "parent")
"""Arguments that may be paths though they are strings."""
REPEATED = ("options", "settings")
"""What --set NAME=VALUE, given many times, is called in a command."""


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


def flags(options: Any) -> str:
    """What a command was given beyond its defaults, without anything that names a place on this machine."""
    return shlex.join(_flags(options))


def _flags(options: Any) -> Iterator[str]:
    for field in dataclasses.fields(options):
        value, name = getattr(options, field.name), f"--{field.name.replace('_', '-')}"
        several = value if isinstance(value, tuple) else (value,)
        if field.name in PLACES or value == field.default or any(isinstance(one, Path) for one in several):
            continue
        if field.name in REPEATED:
            for one in several:
                setting, _, given = one.partition("=")
                hidden = any(mark in given for mark in ("/", "\\", "~"))
                yield from ("--set", f"{setting}={'...' if hidden else given}")
        elif isinstance(value, bool):
            yield name if value else f"--no-{name.removeprefix('--')}"
        else:
            yield from (() if field.name == "recipe" else (name,))
            yield from map(str, several)


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
