"""Which page shows which kind of record, and how a page becomes a file.

A new kind of record gets its page here: a function from the record to a `Page`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fullrank.errors import FullrankError
from fullrank.report.charts.corpus_charts import looks
from fullrank.report.page import Page, html
from fullrank.report.pages.corpus_page import corpora_page, corpus_page
from fullrank.report.pages.diagnosis_page import comparison_page, diagnosis_page
from fullrank.report.pages.generation_page import generation_page
from fullrank.report.pages.grid_page import grid_page
from fullrank.report.pages.ladder_page import ladder_page
from fullrank.report.pages.series_page import series_page
from fullrank.report.pages.templates_page import templates_page
from fullrank.report.pages.training_page import training_page, trainings_page
from fullrank.report.pages.upgrade_page import collapse_page, upgrade_page
from fullrank.report.standalone import Picture, stand_alone
from fullrank.report.subject import names_of
from fullrank.results import (
    Collapse,
    Corpora,
    Corpus,
    Diagnosis,
    Generation,
    Grid,
    Ladder,
    Provenance,
    Series,
    Templates,
    Training,
    Trainings,
    Upgrade,
    write_whole,
)

_PAGES: dict[str, Callable[[Any], Page]] = {
    Ladder.kind: ladder_page,
    Diagnosis.kind: diagnosis_page,
    Series.kind: series_page,
    Training.kind: training_page,
    Trainings.kind: trainings_page,
    Upgrade.kind: upgrade_page,
    Collapse.kind: collapse_page,
    Corpus.kind: corpus_page,
    Corpora.kind: corpora_page,
    Templates.kind: templates_page,
    Grid.kind: grid_page,
    Generation.kind: generation_page,
}


def write(record: Any, made: Provenance, path: Path) -> None:
    """Write the record's page, whole or not at all."""
    write_whole(path, render(record, made))


def render(record: Any, made: Provenance) -> str:
    """The record's page as HTML."""
    return html(_page(record), {"": made})


def picture(record: Any, section: str) -> Picture:
    """One chart of the record's page: that of the section with this title, of a diagnosis also by the name of
    the question."""
    charts = {
        name: one.chart
        for one in _page(record).sections
        for name in (one.title, one.identity)
        if name and one.chart is not None
    }
    if section not in charts:
        listed = ", ".join(map(repr, charts)) or "none: this record has no chart"
        raise FullrankError(f"no chart stands under {section!r}, expected one of {listed}")
    return stand_alone(charts[section])


def _page(record: Any) -> Page:
    kind = getattr(record, "kind", type(record).__name__)
    if kind not in _PAGES:
        raise FullrankError(f"no page shows a {kind!r}, expected one of {', '.join(_PAGES)}")
    return _PAGES[kind](record)


def write_comparison(records: Sequence[Any], made: Sequence[Provenance], path: Path) -> None:
    """Write one page that shows several diagnoses, or several corpora, side by side, whole or not at all."""
    write_whole(path, render_comparison(records, made))


def render_comparison(records: Sequence[Any], made: Sequence[Provenance]) -> str:
    """Several diagnoses, or several corpora, side by side as HTML."""
    if records and all(isinstance(record, Corpus) for record in records):
        page = corpora_page(Corpora(title="", corpora=tuple(records), notes=()))
        names = [look.name for look in looks(records)]
        return html(page, dict(zip(names, made, strict=True)))
    for record in records:
        if not isinstance(record, Diagnosis):
            kind = getattr(record, "kind", type(record).__name__)
            raise FullrankError(
                f"only diagnoses, or only corpora, stand side by side, got a {kind!r}: draw its page alone"
            )
    return html(comparison_page(records), dict(zip(names_of(records), made, strict=True)))
