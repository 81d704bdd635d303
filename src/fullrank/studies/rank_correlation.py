"""Spearman's correlation over a few things, each measured several times, and what it could have seen.

p          two-sided, over all orders of up to seven things, over random ones beyond
interval   a bootstrap of the things, and of the values of each
seen       by Fisher's z, whose deviation for this correlation is near sqrt(1.06 / (n - 3)): what would
           have been told from zero four times in five
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy import stats

from fullrank.results import Estimate
from fullrank.results.grid import GridAnswer

UNIT = "rank correlation"
DRAWS, EXACT = 4000, 7
"""Draws of bootstrap and permutation; up to so many things all permutations are taken."""


def related(
    label: str,
    ranks: Mapping[str, float],
    values: Mapping[str, Sequence[float]],
    *,
    level: float,
    smallest: float,
) -> GridAnswer:
    """Whether values rise or fall with ranks, both by name: where p is at most `level` and the interval of
    that level has one sign. No relation of interest where it lies within `smallest` on both sides."""
    names, count = list(ranks), len(ranks)
    if count < 4 or len(set(ranks.values())) < 2:
        return GridAnswer(
            label=label, effect=None, seeds=count, seen=math.inf, decision="undecided",
            sentence=f"{label}: {count} of them, too few to say", unit=UNIT,
        )  # fmt: skip
    random = np.random.default_rng(0)
    given = [ranks[name] for name in names]
    means = np.array([statistics.fmean(values[name]) for name in names])
    value = _spearman(given, means)
    orders: Iterable[Sequence[int]] = itertools.permutations(range(count))
    if count > EXACT:
        orders = (random.permutation(count).tolist() for _ in range(DRAWS))
    shuffled = np.array([_spearman(given, means[list(order)]) for order in orders])
    p = float((np.abs(shuffled) >= abs(value) - 1e-12).mean())
    drawn = []
    for _ in range(DRAWS):
        some = [names[place] for place in random.integers(count, size=count)]
        again = [float(random.choice(values[name], size=len(values[name])).mean()) for name in some]
        drawn.append(_spearman([ranks[name] for name in some], again))
    low, high = (float(end) for end in np.nanquantile(drawn, [level / 2, 1 - level / 2]))
    reach = float(stats.norm.ppf(1 - level / 2) + stats.norm.ppf(0.8))
    seen = math.tanh(reach * math.sqrt(1.06 / (count - 3)))
    decision = "undecided"
    if p <= level and (low > 0 or high < 0):
        decision = "rises with rank" if value > 0 else "falls with rank"
    elif -smallest < low and high < smallest:
        decision = "no relation of interest"
    sentence = (
        f"{label}: Spearman's correlation {value:+.2f} ({100 * (1 - level):g}%: {low:+.2f} to {high:+.2f}) "
        f"over {count}, p = {p:.3f} by permutation; {seen:.2f} would have been seen: {decision}"
    )
    return GridAnswer(
        label=label, effect=Estimate(value=value, low=low, high=high), seeds=count, seen=seen,
        decision=decision, sentence=sentence, unit=UNIT,
    )  # fmt: skip


def _spearman(one: Sequence[float], other: Sequence[float] | np.ndarray) -> float:
    """nan where one of them does not vary."""
    first, second = (stats.rankdata(values) - (len(values) + 1) / 2 for values in (one, other))
    size = math.sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / size if size else math.nan
