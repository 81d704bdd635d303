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
from collections.abc import Mapping, Sequence

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
    given = np.array([ranks[name] for name in names])
    means = np.array([statistics.fmean(values[name]) for name in names])
    value = float(_spearman(given, means))
    if count > EXACT:
        orders = random.permuted(np.tile(np.arange(count), (DRAWS, 1)), axis=1)
    else:
        orders = np.array(list(itertools.permutations(range(count))))
    p = float((np.abs(_spearman(given, means[orders])) >= abs(value) - 1e-12).mean())
    some = random.integers(count, size=(DRAWS, count))
    again = np.empty(some.shape)
    for place, name in enumerate(names):
        own, here = np.asarray(values[name]), some == place
        again[here] = random.choice(own, size=(int(here.sum()), len(own))).mean(axis=1)
    drawn = _spearman(given[some], again)
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


def _spearman(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Over the last axis; nan where one of them does not vary."""
    first, second = (stats.rankdata(each, axis=-1) - (each.shape[-1] + 1) / 2 for each in (one, other))
    size = np.sqrt((first**2).sum(axis=-1) * (second**2).sum(axis=-1))
    with np.errstate(invalid="ignore"):
        return (first * second).sum(axis=-1) / size
