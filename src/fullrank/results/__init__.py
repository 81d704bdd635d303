"""Result records, and how they are written and read. Knows no torch."""

from fullrank.results.corpus import Corpora, Corpus, CorpusCurve, CorpusNull
from fullrank.results.diagnosis import QUESTIONS, Diagnosis, Estimate
from fullrank.results.evaluation import Evaluated
from fullrank.results.files import (
    KINDS,
    Provenance,
    cache_directory,
    check_writable,
    load,
    provenance,
    save,
    write_whole,
)
from fullrank.results.generation import Generation
from fullrank.results.grid import Grid
from fullrank.results.histalign import Templates
from fullrank.results.ladder import Ladder, LadderRung
from fullrank.results.series import Series
from fullrank.results.training import Training, Trainings
from fullrank.results.training_log import is_run, read_log
from fullrank.results.upgrade import Collapse, Upgrade

KINDS.update({record.kind: record for record in (Ladder, Diagnosis, Series, Training, Trainings, Evaluated)})
KINDS.update({record.kind: record for record in (Upgrade, Collapse, Corpus, Corpora)})
KINDS[Templates.kind] = Templates
KINDS[Grid.kind] = Grid
KINDS[Generation.kind] = Generation

__all__ = [
    "KINDS",
    "QUESTIONS",
    "Collapse",
    "Corpora",
    "Corpus",
    "CorpusCurve",
    "CorpusNull",
    "Diagnosis",
    "Estimate",
    "Evaluated",
    "Generation",
    "Grid",
    "Ladder",
    "LadderRung",
    "Provenance",
    "Series",
    "Templates",
    "Training",
    "Trainings",
    "Upgrade",
    "cache_directory",
    "check_writable",
    "is_run",
    "load",
    "provenance",
    "read_log",
    "save",
    "write_whole",
]
