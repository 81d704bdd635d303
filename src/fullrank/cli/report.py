"""`fullrank report`: draw the page of a results.json again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Report:
    """Draw report.html again from the results.json that a command wrote."""

    run: Annotated[Path, tyro.conf.Positional]
    """Directory that holds results.json."""


def report(options: Report) -> None:
    from rich.console import Console

    from fullrank import report as page
    from fullrank import results

    record, made = results.load(options.run / "results.json")
    target = options.run / "report.html"
    page.write(record, made, target)
    Console().print(f"page {target}", highlight=False)
