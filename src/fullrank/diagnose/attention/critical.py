"""From which size on can a top set no longer be told from a random one?

A statistic (F, or the cumulative distance) is taken of the top set and of a random set of the same size at
the same queries, and the difference is averaged over the queries of a window: neighbouring queries are alike,
windows nearly independent. That the mean difference is 0 is tested by Student's t over windows.

    all heads      the difference is averaged over heads too. Sizes are tested in rising order, each at the
                   same level, until the first that is not rejected: the critical size. Testing in a fixed
                   order and stopping there keeps the chance of any wrong rejection at the level, whatever
                   the number of sizes; for lengths and statistics the level is divided by their number
    head by head   at every length and size, Benjamini and Hochberg's procedure over the heads: of those it
                   tells apart, a share of at most FALSE_SHARE is expected to be wrong

"Cannot be told apart" is no proof of equality: it means not with this much text. Size 1 is left out: a set of
one is always separated from the rest, so top and random are equal there by definition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.errors import FullrankError

LEVEL = 0.01
FALSE_SHARE = 0.05
LEAST_WINDOWS = 6
"""Fewer have too little to judge a spread by."""


def p_values(differences: Tensor) -> Tensor:
    """Two-sided p [...] of Student's t over windows, of differences [windows, ...]; NaN where one is."""
    from scipy import stats

    count = len(differences)
    if count < 2:
        raise FullrankError(f"{count} windows have no spread: expected 2 or more")
    wide = differences.double()
    centre, spread = wide.mean(0), wide.std(0)
    ratio = centre.abs() / (spread / count**0.5)
    # Without any spread a difference is sure, and none is none.
    ratio = torch.where(spread == 0, torch.where(centre == 0, 0.0, torch.inf).double(), ratio)
    ratio = torch.where(centre.isnan(), torch.nan, ratio)
    return torch.from_numpy(2 * stats.t.sf(ratio.cpu().numpy(), count - 1))


def first_kept(p: Tensor, level: float) -> int | None:
    """Place of the first of p [sizes] above the level; None where all measured ones are below."""
    for place, value in enumerate(p.tolist()):
        if value > level:
            return place
    return None


def told_apart(p: Tensor) -> Tensor:
    """Which of p [heads, ...] Benjamini and Hochberg reject over the heads; never one that is NaN."""
    filled = p.nan_to_num(nan=1.0)
    tests = (~p.isnan()).sum(0)
    ordered = filled.sort(0).values
    place = torch.arange(1, len(p) + 1).reshape(-1, *([1] * (p.dim() - 1)))
    limits = FALSE_SHARE * place / tests.clamp(min=1)
    passed = (ordered <= limits) & (place <= tests)
    limit = torch.where(passed, ordered, -1.0).amax(0)
    return (filled <= limit) & ~p.isnan()
