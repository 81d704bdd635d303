"""The spectrum of a table: leading singular values, relative error against dimension, and dimensions needed.

    relative error(d) = sqrt(Σ_{i > d} σ_i²) / |T|     the least that a table of rank d leaves (Eckart-Young)

`dimensions` holds, for 50, 90 and 99%, the smallest d whose relative error is at most 50, 10 and 1%.
`beyond_first` holds the same for the error relative to what is left after one dimension: in the log table the
first one is the unigram distribution, which a bias of the output layer can hold, and it makes most of the
norm.

    exact     all eigenvalues of the Gram matrix by LAPACK in fp64, where its n x n numbers fit the memory
              and n is at most `MOST_EXACT`, because the time grows with n³
    lanczos   the leading values by block Lanczos, with residuals; all other figures by stochastic Lanczos
              quadrature, with limits that hold for each of them with a probability of 99.9%

Two limits hold without chance and cut the others: no orthonormal basis sums to more than the largest
eigenvalues do (Schur-Horn), so the sorted diagonal of G bounds every error from above; and no eigenvalue
beyond the computed ones is larger than the last of them, which bounds it from below.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from fullrank.corpus.gram import Gram
from fullrank.corpus.lanczos import Leading, leading
from fullrank.corpus.quadrature import Probes, Sums
from fullrank.corpus.table import Table
from fullrank.errors import FullrankError

Floats = NDArray[np.float64]
Progress = Callable[[str, float], None]

SHARES: Mapping[str, float] = {"50": 0.5, "90": 0.1, "99": 0.01}
"""Relative error that is left, by what is explained."""
LEADING = 256
MOST_EXACT = 12_000
"""Joined columns; larger matrices take LAPACK longer than the quadrature by far."""
PROBES, BATCHES = 8, 4
STEPS = (64, 96, 144, 216, 324)
ACCURACY = 0.005
"""Of a dimension: half the width of its limits that is aimed at."""
ROUNDING = 1e-9
"""A relative error that equals its bound up to rounding has reached it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How much work the approximate path may do."""

    leading: int = LEADING
    probes: int = PROBES
    """A batch."""
    batches: int = BATCHES
    """At most; more are drawn while limits are wide."""
    steps: tuple[int, ...] = STEPS
    """Lanczos steps of a probe, at most the last; more are taken while brackets are wide."""
    brackets: bool = True
    """Whether limits are wanted: without them the first number of steps is taken, and no bracket."""
    most_exact: int = MOST_EXACT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dimension:
    """A number of dimensions; low and high are its limits, equal to it where it is exact."""

    value: int
    low: int
    high: int
    real: float
    """Before rounding up: where the error, drawn as a line between whole dimensions, meets its bound."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spectrum:
    """What a table's singular values say."""

    construction: str
    contexts: int
    vocabulary: int
    method: str
    """exact or lanczos."""
    joined: int
    """Columns whose eigenvalues had to be computed; the others were read off the diagonal."""
    norm: float
    """Frobenius norm of the table."""
    singular_values: tuple[float, ...]
    """The leading ones, falling."""
    singular_value_error: float
    """Largest bound of their errors, absolute."""
    grid: tuple[int, ...]
    relative_error: tuple[float, ...]
    relative_error_low: tuple[float, ...]
    relative_error_high: tuple[float, ...]
    dimensions: dict[str, Dimension]
    beyond_first: dict[str, Dimension]
    probes: int
    steps: int
    products: int
    """Vectors that the Gram matrix was applied to."""
    seconds: float


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
    held = _held(table, gram)
    # Centred rows of one column, or all alike, leave zeros and rounding: nothing that could be iterated on.
    empty = gram.total <= 1e-12 * gram.scale
    needed = int(8.2 * gram.size**2) + held
    exact = gram.size <= effort.most_exact and (memory_bytes is None or needed <= 0.9 * memory_bytes)
    method = _zero if empty else _exact if exact else _lanczos
    result = method(table, gram, memory_bytes, progress, seed, effort, grid)
    return dataclasses.replace(result, seconds=time.monotonic() - started)


def _zero(
    table: Table,
    gram: Gram,
    memory_bytes: int | None,
    progress: Progress,
    seed: int,
    effort: Effort,
    grid: tuple[int, ...],
) -> Spectrum:
    """Of a table of zeros, which needs no dimension."""
    none = {name: Dimension(value=0, low=0, high=0, real=0.0) for name in SHARES}
    errors = (0.0,) * len(grid)
    return Spectrum(
        construction=table.construction,
        contexts=table.contexts,
        vocabulary=table.vocabulary,
        method="exact",
        joined=gram.size,
        norm=0.0,
        singular_values=(0.0,) * min(table.contexts, table.vocabulary, LEADING),
        singular_value_error=math.sqrt(1e-12 * gram.scale),
        grid=grid,
        relative_error=errors,
        relative_error_low=errors,
        relative_error_high=errors,
        dimensions=none,
        beyond_first=none,
        probes=0,
        steps=0,
        products=0,
        seconds=0.0,
    )


def _exact(
    table: Table,
    gram: Gram,
    memory_bytes: int | None,
    progress: Progress,
    seed: int,
    effort: Effort,
    grid: tuple[int, ...],
) -> Spectrum:
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

    errors = tuple(math.sqrt(beyond[min(d, len(values))] / beyond[0]) for d in grid)
    return Spectrum(
        construction=table.construction,
        contexts=table.contexts,
        vocabulary=table.vocabulary,
        method="exact",
        joined=gram.size,
        norm=math.sqrt(gram.total),
        singular_values=tuple(np.sqrt(values[: max(effort.leading, LEADING) * 4]).tolist()),
        singular_value_error=math.sqrt(floor),
        grid=grid,
        relative_error=errors,
        relative_error_low=errors,
        relative_error_high=errors,
        dimensions={name: dimension(share**2 * beyond[0]) for name, share in SHARES.items()},
        beyond_first={name: dimension(share**2 * beyond[1]) for name, share in SHARES.items()},
        probes=0,
        steps=0,
        products=0,
        seconds=0.0,
    )


def _lanczos(
    table: Table,
    gram: Gram,
    memory_bytes: int | None,
    progress: Progress,
    seed: int,
    effort: Effort,
    grid: tuple[int, ...],
) -> Spectrum:
    basis, steps = _sizes(table, gram, memory_bytes, effort)
    generator, chance = (np.random.default_rng([seed, part]) for part in (0, 1))
    stage = f"{table.construction}: leading values"
    found = leading(
        gram.apply,
        gram.size,
        effort.leading,
        generator=generator,
        most=basis,
        progress=lambda share: progress(stage, share),
    )
    total = gram.total
    # A vector that is not quite an eigenvector would put an error into all sums: those are left to the
    # probes.
    sure = 2 * np.cumsum(found.residuals) <= 1e-8 * total
    known, values = found.vectors[:, sure], found.values[sure]
    left_size, left_trace = gram.size - len(values), gram.trace - float(values.sum())
    first = float(np.concatenate([found.values[:1], gram.alone[:1]]).max())
    bounds = {("dimensions", name): share**2 * total for name, share in SHARES.items()}
    bounds |= {("beyond_first", name): share**2 * (total - first) for name, share in SHARES.items()}

    batches: list[Probes] = []
    depth = 0
    stage = f"{table.construction}: tail"
    while True:
        # By column, so that tables of the same text with other columns joined meet the same signs.
        signs = chance.choice([-1.0, 1.0], size=(table.vocabulary, effort.probes))[gram.columns]
        batch = Probes(gram.apply, known, signs, most=steps[-1])
        batches.append(batch)
        while True:
            batch.extend(steps[depth], _telling(progress, stage, len(batches) - 1, effort.batches))
            sums = Sums(np.concatenate([gram.alone, values]), left_size, left_trace, batches)
            if not effort.brackets:
                break
            # Brackets of two probes tell whether to go on; all are worked out in the end.
            sums.bracket([sums.level(bound) for bound in bounds.values()], probes=2)
            if depth + 1 == len(steps) or _bracketed(sums, list(bounds.values())):
                break
            depth += 1
        batch.release()
        if not effort.brackets or len(batches) == effort.batches or _accurate(sums, list(bounds.values())):
            break
    return _assembled(table, gram, found, batches, sums, bounds, grid, effort)


def _held(table: Table, gram: Gram) -> int:
    """Bytes of the table and of its Gram matrix: a number and its place an entry."""
    return 12 * table.entries + 16 * gram.entries + 64 * table.vocabulary


def _telling(progress: Progress, stage: str, before: int, most: int) -> Callable[[float], None]:
    """Progress of one batch of probes of several, of which not all may be needed."""
    return lambda share: progress(stage, (before + share) / most)


def _sizes(table: Table, gram: Gram, memory_bytes: int | None, effort: Effort) -> tuple[int, tuple[int, ...]]:
    """Vectors in the Lanczos basis, and steps of the probes, that fit the memory."""
    basis, steps = 4 * effort.leading, list(effort.steps)
    if memory_bytes is None:
        return basis, tuple(steps)
    vector = 8 * gram.size
    free = 0.8 * memory_bytes - _held(table, gram)
    # Beside the basis stand its Ritz vectors, and beside the probes' bases the vectors that were taken out.
    basis = min(basis, int(free / vector / 1.6))
    steps = [step for step in steps if vector * (effort.probes * (step + 1) + 3 * effort.leading) <= free]
    if basis < 1.5 * effort.leading or not steps:
        needed = _held(table, gram) + vector * (effort.probes * effort.steps[0] + 3 * effort.leading)
        raise FullrankError(
            f"the {table.construction} table has {gram.entries:,} entries in {gram.size:,} columns, for "
            "which "
            f"{memory_bytes / 1e9:.1f} GB is too little: allow {1.3 * needed / 1e9:.1f} GB or more"
        )
    return basis, tuple(steps)


def _bracketed(sums: Sums, bounds: list[float]) -> bool:
    """Whether more steps would not help: the brackets are narrow against what is aimed at, or chance."""
    for bound in bounds:
        level = sums.level(bound)
        place = int(np.searchsorted(sums.levels, level))
        width = (sums.under + sums.over)[place] / level
        goal = max(ACCURACY * sums.dimension(bound)[0], 1.0) / 2
        if width > max(goal, 0.3 * sums.chance[place] / level):
            return False
    return True


def _accurate(sums: Sums, bounds: list[float]) -> bool:
    for bound in bounds:
        value, low, high = sums.dimension(bound)
        if (high - low) / 2 > max(ACCURACY * value, 1.0):
            return False
    return True


def _assembled(
    table: Table,
    gram: Gram,
    found: Leading,
    batches: list[Probes],
    sums: Sums,
    bounds: dict[tuple[str, str], float],
    grid: tuple[int, ...],
    effort: Effort,
) -> Spectrum:
    total = gram.total
    rank = min(table.contexts, table.vocabulary)
    merged = np.sort(np.concatenate([found.values, gram.alone[gram.alone >= found.values[-1]]]))[::-1][:rank]
    # The joined columns could hold more values of the size of the last one, so that only the larger are sure.
    beyond = np.maximum(total - np.concatenate([[0.0], np.cumsum(merged)]), 0.0)
    diagonal = np.sort(np.concatenate([gram.diagonal, gram.alone]))[::-1]
    most = np.maximum(total - np.concatenate([[0.0], np.cumsum(diagonal)]), 0.0)
    # The brackets are wanted for the whole curve, too.
    curve = [d for d in grid if len(merged) < d < rank]
    levels = [float(sums.levels[int(np.argmax(sums.below - d * sums.levels))]) for d in curve[::4]]
    if effort.brackets:
        sums.bracket([*levels, *(sums.level(bound) for bound in bounds.values())])

    def tail(d: int) -> tuple[float, float, float]:
        if d >= rank:
            return 0.0, 0.0, 0.0
        if d < len(beyond):
            slack = float(found.residuals[: d + 1].sum())
            return float(beyond[d]), max(float(beyond[d]) - slack, 0.0), float(beyond[d])
        value, low, high = sums.beyond(d)
        ceiling = float(most[d])
        floor = float(beyond[-1]) - (d - len(merged)) * float(merged[-1])
        high = max(min(high, ceiling), 0.0)
        low = min(max(low, floor), high)
        return min(max(value, low), high), low, high

    def dimension(bound: float) -> Dimension:
        bound *= 1 + ROUNDING
        if beyond[-1] <= bound:
            place = int(np.argmax(beyond <= bound))
            real = place - 1 + (beyond[place - 1] - bound) / merged[place - 1] if place else 0.0
            slack = float(found.residuals[:place].sum())
            low = int(np.argmax(beyond - slack <= bound))
            return Dimension(value=place, low=low, high=place, real=float(real))
        real, low_d, high_d = sums.dimension(bound)
        ceiling = int(np.argmax(most <= bound))
        high = max(min(math.ceil(high_d), ceiling, rank), len(merged))
        low = min(max(math.ceil(low_d), len(merged)), high)
        value = min(max(math.ceil(real), low), high)
        return Dimension(value=value, low=low, high=high, real=float(min(max(real, low - 1), high)))

    tails = [tail(d) for d in grid]
    low, value, high = ([math.sqrt(one[part] / total) for one in tails] for part in (1, 0, 2))
    sigma = np.sqrt(merged)
    first = {name: dimension(bounds["beyond_first", name]) for name in SHARES}
    return Spectrum(
        construction=table.construction,
        contexts=table.contexts,
        vocabulary=table.vocabulary,
        method="lanczos",
        joined=gram.size,
        norm=math.sqrt(total),
        singular_values=tuple(sigma.tolist()),
        singular_value_error=float((found.residuals / np.maximum(np.sqrt(found.values), 1e-300)).max()),
        grid=grid,
        relative_error=tuple(value),
        relative_error_low=tuple(low),
        relative_error_high=tuple(high),
        dimensions={name: dimension(bounds["dimensions", name]) for name in SHARES},
        beyond_first=first,
        probes=effort.probes * len(batches),
        steps=max(batch.steps for batch in batches),
        products=found.products + effort.probes * sum(batch.steps for batch in batches),
        seconds=0.0,
    )
