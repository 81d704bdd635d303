"""Public names and command-line flags change on purpose only: `public_surface.txt` holds them all.

After an intended change: .venv/bin/python -m tests.test_public_surface
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullrank.cli.main import parse

SNAPSHOT = Path(__file__).parent / "public_surface.txt"
ROOMS = ("diagnose", "heads", "models", "ops", "report", "results", "theory", "train", "upgrade")


def public_names() -> list[str]:
    """`fullrank.heads.build` and so on: what each public module lists, with the registered heads."""
    from fullrank.heads import HEADS

    names = [
        f"{module}.{name}"
        for module in ("fullrank", *(f"fullrank.{room}" for room in ROOMS))
        for name in importlib.import_module(module).__all__
    ]
    return sorted([*names, *(f"head {name}" for name in HEADS)])


def flags() -> list[str]:
    """`fullrank diagnose --text` and so on, from the specification that the parser prints for shells."""
    script = io.StringIO()
    with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):
        parse(["--tyro-print-completion", "bash"])
    specification = next(
        line.partition("=")[2].strip()
        for line in script.getvalue().splitlines()
        if line.startswith("COMPLETION_SPEC")
    )

    def walk(command: str, node: dict[str, Any]) -> Iterator[str]:
        for option in node["options"]:
            yield from (f"{command} {flag}" for flag in option["flags"] if flag.startswith("--"))
        for name, inner in node["subcommands"].items():
            yield from walk(f"{command} {name}", inner)

    return sorted(set(walk("fullrank", ast.literal_eval(specification))))


def surface() -> str:
    return "\n".join([*public_names(), *flags(), ""])


def test_names_and_flags_are_those_of_the_snapshot() -> None:
    before, now = set(SNAPSHOT.read_text(encoding="utf8").splitlines()), set(surface().splitlines())
    assert now - before == set(), "new: write the snapshot again if this is meant (see the docstring)"
    assert before - now == set(), "removed: write the snapshot again if this is meant, and tell CHANGELOG.md"


if __name__ == "__main__":
    SNAPSHOT.write_text(surface(), encoding="utf8")
