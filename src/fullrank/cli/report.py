"""`fullrank report`: draw the page of a results.json again, or of several diagnoses or corpora in one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro


@dataclass(frozen=True, kw_only=True)
class Report:
    """Draw report.html again from the results.json that a command wrote.

    With several diagnoses, or several corpora, draw one page that shows them side by side.
    Example: fullrank report runs/a runs/b --out both.html
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Directories that hold a results.json, or such files: one, or several diagnoses or corpora."""

    out: Path | None = None
    """Page to write: report.html beside the results of one run, comparison.html here for several."""


def report(options: Report) -> dict[str, Any]:
    from rich.console import Console

    from fullrank import report as page
    from fullrank import results
    from fullrank.errors import FullrankError

    if not options.runs:
        raise FullrankError("got no results: pass a directory that holds results.json")
    files = [_results_file(run) for run in options.runs]
    loaded = [results.load(file) for file in files]
    if len(files) == 1:
        target = options.out or files[0].with_name("report.html")
        _check_target(target)
        page.write(*loaded[0], target)
    else:
        # Corpora stand side by side as diagnoses do, but not both on one page.
        corpora = loaded[0][0].kind == results.Corpus.kind
        expected = results.Corpus.kind if corpora else results.Diagnosis.kind
        for file, (record, _) in zip(files, loaded, strict=True):
            if record.kind != expected:
                beside = (
                    "only corpora stand beside a corpus"
                    if corpora
                    else "only diagnoses can stand side by side"
                )
                raise FullrankError(
                    f"{file} holds a {record.kind!r}, {beside}: leave it out, "
                    f"or draw it alone with `fullrank report {file.parent}`"
                )
        target = options.out or Path("comparison.html")
        _check_target(target)
        page.write_comparison([record for record, _ in loaded], [made for _, made in loaded], target)
    Console().print(f"page {target}", highlight=False, markup=False, soft_wrap=True)
    return {"page": str(target)}


def _results_file(run: Path) -> Path:
    # A name that ends in .json is a file, also where it is missing: the error then names what was asked for.
    return run if run.suffix == ".json" and not run.is_dir() else run / "results.json"


def _check_target(target: Path) -> None:
    from fullrank.errors import FullrankError

    if target.is_dir():
        raise FullrankError(f"{target} is a directory: pass the page's file to --out, as {target}/page.html")
    # The one mistake that would cost more than a page.
    if target.suffix == ".json":
        raise FullrankError(f"{target} looks like a results file: pass a name that ends in .html to --out")
