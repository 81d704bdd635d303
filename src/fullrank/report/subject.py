"""A model on a page: its record, the name it goes by, and its colour where several stand side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fullrank.errors import FullrankError
from fullrank.report.charts.theme import MODEL_COLOURS
from fullrank.report.text import shown, unique
from fullrank.results import Diagnosis


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    name: str
    """Inert, short, and no other model's on the page."""
    colour: str
    record: Diagnosis


def subjects_of(records: Sequence[Diagnosis]) -> tuple[Subject, ...]:
    """One subject a record, in order."""
    if len(records) > len(MODEL_COLOURS):
        raise FullrankError(
            f"got {len(records)} models, a page has colours for {len(MODEL_COLOURS)}: compare fewer at a time"
        )
    return tuple(
        Subject(name=name, colour=colour, record=record)
        for name, colour, record in zip(names_of(records), MODEL_COLOURS, records, strict=False)
    )


def names_of(records: Sequence[Diagnosis]) -> list[str]:
    """The models' names as they are shown, numbered where they repeat."""
    return unique([shown(record.model.name, 48) or "unnamed model" for record in records])
