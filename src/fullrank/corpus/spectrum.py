"""The spectrum of a table (`curve.py`): exactly where the Gram matrix fits, else with limits.

exact     all eigenvalues of the Gram matrix by LAPACK in fp64, where its n x n numbers fit the memory
          and n is at most `MOST_EXACT`, because the time grows with n³
lanczos   the leading values and limits of the rest (`approximate.py`)
"""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import scipy.linalg

from fullrank.corpus.approximate import approximate
from fullrank.corpus.curve import LEADING, ROUNDING, SHARES, Dimension, Effort, Progress, Spectrum, Task
from fullrank.corpus.gram import Gram
from fullrank.corpus.table import Table
from fullrank.errors import FullrankError


def grid_of(vocabulary: int) -> tuple[int, ...]:
    """Dimensions at which a curve is kept: 1 to V, even on a log scale."""
    values = np.geomspace(1, max(vocabulary, 1), 73)
    return tuple(sorted({round(float(value)) for value in values}))


def spectrum(
    table: Table,
    *,
    memory_bytes: int | None = None,
    progress: Progress = lambda stage, share: None,
    seed: int = 0,
    effort: Effort = Effort(),  # noqa: B008 (frozen)
    grid: tuple[int, ...] | None = None,
) -> Spectrum:
    """Singular values, curve and dimensions of a table, exactly where memory and time allow."""
    started = time.monotonic()
    gram = Gram(table)
    if not table.contexts:
        raise FullrankError(f"the {table.construction} table has no rows: pass more text, or rarer contexts")
    grid = grid_of(table.vocabulary) if grid is None else grid
    # Centred rows of one column, or all alike, leave zeros and rounding: nothing that could be iterated on.
    empty = gram.total <= 1e-12 * gram.scale
    task = Task(
        table=table,
        gram=gram,
        memory_bytes=memory_bytes,
        progress=progress,
        seed=seed,
        effort=effort,
        grid=grid,
    )
    needed = int(8.2 * gram.size**2) + task.held
    exact = gram.size <= effort.most_exact and (memory_bytes is None or needed <= 0.9 * memory_bytes)
    result = _zero(task) if empty else _exact(task) if exact else approximate(task)
    return dataclasses.replace(result, seconds=time.monotonic() - started)


def _zero(task: Task) -> Spectrum:
    """Of a table of zeros, which needs no dimension."""
    table, gram = task.table, task.gram
    none = {name: Dimension(value=0, low=0, high=0, real=0.0) for name in SHARES}
    errors = (0.0,) * len(task.grid)
    return task.answer(
        method="exact",
        norm=0.0,
        singular_values=(0.0,) * min(table.contexts, table.vocabulary, LEADING),
        singular_value_error=math.sqrt(1e-12 * gram.scale),
        relative_error=errors,
        relative_error_low=errors,
        relative_error_high=errors,
        dimensions=none,
        beyond_first=none,
    )


def _exact(task: Task) -> Spectrum:
    table, gram, progress = task.table, task.gram, task.progress
    progress(f"{table.construction}: Gram matrix", 0.0)
    joined = np.zeros(0)
    if gram.size:
        dense = gram.dense()
        progress(f"{table.construction}: eigenvalues", 0.1)
        found = scipy.linalg.eigvalsh(dense, overwrite_a=True, check_finite=False)
        joined = np.asarray(found, dtype=np.float64)
        del dense
    values = np.sort(np.concatenate([joined, gram.alone]))[::-1]
    # What LAPACK's rounding can make of a zero.
    floor = len(values) * np.finfo(np.float64).eps * float(values[0])
    values = np.where(values > floor, values, 0.0)[: min(table.contexts, table.vocabulary)]
    # From the small end, so that a short tail keeps its digits.
    beyond = np.concatenate([np.cumsum(values[::-1])[::-1], [0.0]])
    progress(f"{table.construction}: eigenvalues", 1.0)

    def dimension(bound: float) -> Dimension:
        bound *= 1 + ROUNDING
        place = int(np.argmax(beyond <= bound))
        real = place - 1 + (beyond[place - 1] - bound) / values[place - 1] if place else 0.0
        return Dimension(value=place, low=place, high=place, real=float(real))

    errors = tuple(math.sqrt(beyond[min(d, len(values))] / beyond[0]) for d in task.grid)
    return task.answer(
        method="exact",
        norm=math.sqrt(gram.total),
        singular_values=tuple(np.sqrt(values[: max(task.effort.leading, LEADING) * 4]).tolist()),
        singular_value_error=math.sqrt(floor),
        relative_error=errors,
        relative_error_low=errors,
        relative_error_high=errors,
        dimensions={name: dimension(share**2 * beyond[0]) for name, share in SHARES.items()},
        beyond_first={name: dimension(share**2 * beyond[1]) for name, share in SHARES.items()},
    )
