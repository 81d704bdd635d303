"""Directories of training runs: recognised by their files, read from their logs (`results/training_log.py`).

The validation loss of each is a curve like any other, and `saturation.py` says whether it turned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from fullrank.diagnose.series import curves
from fullrank.diagnose.series.saturation import saturation, saturations
from fullrank.errors import FullrankError
from fullrank.results.training import Training, Trainings
from fullrank.results.training_log import is_run, read_log

Progress = Callable[[str, float], None]


def are_runs(sources: Sequence[str | Path]) -> bool:
    """Whether all sources are directories of training runs; raises where only some are."""
    runs = [source for source in sources if is_run(Path(source))]
    if runs and len(runs) < len(sources):
        other = next(source for source in sources if source not in runs)
        raise FullrankError(
            f"{runs[0]} is a training run and {other} is none: pass runs alone, or the other inputs alone"
        )
    return bool(runs)


def trainings(
    sources: Sequence[str | Path],
    *,
    progress: Progress = lambda label, share: None,
    seed: int = 0,
) -> Training | Trainings:
    """The records of training runs from their logs, each with the test of its validation loss."""
    read = []
    for place, source in enumerate(sources):
        progress(f"reading {Path(source).name}", place / len(sources))
        read.append(read_log(Path(source)))
    answers = saturations([curves.validation(run) for run in read], seed=seed)
    found = [
        dataclasses.replace(run, saturation=answer.record if run.validation() else None)
        for run, answer in zip(read, answers, strict=True)
    ]
    progress("done", 1.0)
    return found[0] if len(found) == 1 else Trainings(runs=tuple(found))


def judged(run: Training, *, seed: int = 0) -> Training:
    """The run with what the saturation test says of its validation loss."""
    curve = curves.validation(run)
    return dataclasses.replace(run, saturation=saturation(curve, seed=seed) if curve.steps else None)
