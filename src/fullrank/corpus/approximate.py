"""The spectrum of a table whose Gram matrix is too large for all of its eigenvalues.

The leading values come from block Lanczos, with residuals; all other figures from stochastic Lanczos
quadrature, with limits that hold for each of them with a probability of 99.9%.

Two limits hold without chance and cut the others: no orthonormal basis sums to more than the largest
eigenvalues do (Schur-Horn), so the sorted diagonal of G bounds every error from above; and no eigenvalue
beyond the computed ones is larger than the last of them, which bounds it from below.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fullrank.corpus.curve import ROUNDING, SHARES, Dimension, Progress, Spectrum, Task
from fullrank.corpus.lanczos import Leading, leading
from fullrank.corpus.quadrature import Probes, Sums
from fullrank.errors import FullrankError

ACCURACY = 0.005
"""Of a dimension: half the width of its limits that is aimed at."""


def approximate(task: Task) -> Spectrum:
    """Leading values by block Lanczos, all other figures by quadrature."""
    table, gram, effort, progress = task.table, task.gram, task.effort, task.progress
    basis, steps = _sizes(task)
    generator, chance = (np.random.default_rng([task.seed, part]) for part in (0, 1))
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
            sums.bracket(probes=2)
            if depth + 1 == len(steps) or _bracketed(sums, list(bounds.values())):
                break
            depth += 1
        batch.release()
        if not effort.brackets or len(batches) == effort.batches or _accurate(sums, list(bounds.values())):
            break
    return _assembled(task, found, batches, sums, bounds)


def _telling(progress: Progress, stage: str, before: int, most: int) -> Callable[[float], None]:
    """Progress of one batch of probes of several, of which not all may be needed."""
    return lambda share: progress(stage, (before + share) / most)


def _sizes(task: Task) -> tuple[int, tuple[int, ...]]:
    """Vectors in the Lanczos basis, and steps of the probes, that fit the memory."""
    table, gram, memory_bytes, effort = task.table, task.gram, task.memory_bytes, task.effort
    basis, steps = 4 * effort.leading, list(effort.steps)
    if memory_bytes is None:
        return basis, tuple(steps)
    vector = 8 * gram.size
    free = 0.8 * memory_bytes - task.held
    # Beside the basis stand its Ritz vectors, and beside the probes' bases the vectors that were taken out.
    basis = min(basis, int(free / vector / 1.6))
    steps = [step for step in steps if vector * (effort.probes * (step + 1) + 3 * effort.leading) <= free]
    if basis < 1.5 * effort.leading or not steps:
        needed = task.held + vector * (effort.probes * effort.steps[0] + 3 * effort.leading)
        raise FullrankError(
            f"the {table.construction} table has {gram.entries:,} entries in {gram.size:,} columns, for "
            "which "
            f"{memory_bytes / 1e9:.1f} GB is too little: allow {1.3 * needed / 1e9:.1f} GB or more"
        )
    return basis, tuple(steps)


def _bracketed(sums: Sums, bounds: list[float]) -> bool:
    """Whether more steps would not help: the brackets are narrow against what is aimed at, or chance."""
    for bound in bounds:
        place = sums.decided(bound)
        level = sums.levels[place]
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
    task: Task, found: Leading, batches: list[Probes], sums: Sums, bounds: dict[tuple[str, str], float]
) -> Spectrum:
    table, gram, effort, grid = task.table, task.gram, task.effort, task.grid
    total = gram.total
    rank = min(table.contexts, table.vocabulary)
    merged = np.sort(np.concatenate([found.values, gram.alone[gram.alone >= found.values[-1]]]))[::-1][:rank]
    # The joined columns could hold more values of the size of the last one, so that only the larger are sure.
    beyond = np.maximum(total - np.concatenate([[0.0], np.cumsum(merged)]), 0.0)
    diagonal = np.sort(np.concatenate([gram.diagonal, gram.alone]))[::-1]
    most = np.maximum(total - np.concatenate([[0.0], np.cumsum(diagonal)]), 0.0)
    if effort.brackets:
        sums.bracket()

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
    return task.answer(
        method="lanczos",
        norm=math.sqrt(total),
        singular_values=tuple(sigma.tolist()),
        singular_value_error=float((found.residuals / np.maximum(np.sqrt(found.values), 1e-300)).max()),
        relative_error=tuple(value),
        relative_error_low=tuple(low),
        relative_error_high=tuple(high),
        dimensions={name: dimension(bounds["dimensions", name]) for name in SHARES},
        beyond_first=first,
        probes=effort.probes * len(batches),
        steps=max(batch.steps for batch in batches),
        products=found.products + effort.probes * sum(batch.steps for batch in batches),
    )
