"""Result records, and how they are written and read. Knows no torch."""

from fullrank.results.diagnosis import QUESTIONS, Diagnosis, Estimate
from fullrank.results.files import (
    KINDS,
    Provenance,
    check_writable,
    load,
    provenance,
    save,
    write_whole,
)
from fullrank.results.ladder import Ladder, LadderRung
from fullrank.results.series import Series

KINDS.update({record.kind: record for record in (Ladder, Diagnosis, Series)})

__all__ = [
    "KINDS",
    "QUESTIONS",
    "Diagnosis",
    "Estimate",
    "Ladder",
    "LadderRung",
    "Provenance",
    "Series",
    "check_writable",
    "load",
    "provenance",
    "save",
    "write_whole",
]
