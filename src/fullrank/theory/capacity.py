"""Top-m capacity: how many tokens an output layer can give arbitrary probabilities (Basri and Jacobs 2026).

A set S of m rows of W [V, D] is *free* if for any target log-ratios t and any margin M some state h has

    w_s·h = c + t_s  for s in S,      w_j·h <= c - M  for j not in S,

so that the softmax puts any wished distribution on S and as little as wished elsewhere. That holds if and
only if (a) the rows of S are affinely independent, so that t can be reached, and (b) some direction has
w_s·h = c on S and w_j·h < c elsewhere, along which the others sink for ever while S stays level: the hull
of S is a face of the hull of all rows, with no other row on it. Necessity is t = 0 with growing M. A bias
changes no set's answer, since a state far along (b)'s direction outweighs it, so none is asked for.

In the standard coordinates z [V, r] of `linear_program` the mean is 0, so the level c of a face is positive
(unless S is everything) and can be set to one:

    v = min_h max { z_j·h : j not in S }   subject to   z_s·h = 1 for s in S

S is free if v < 1, proved by h; it is not if v > 1, proved by the program over any part of the rows. The
equalities are solved first (h = h_S + Q y, Q the null space of Z_S), so the program has r - m unknowns.

A face's subsets are faces. So along an ordering of tokens the first m are free up to one critical size
and not beyond it, found by bisection, and one ordering gives a whole curve: the share of orderings with
critical size >= m estimates the share of m-sets that are free. For Gaussian W this is the weak threshold
of Donoho and Tanner (2005) for projected simplices, about D / (2 log(V / D)) for V much above D.

A program of hundreds of unknowns takes half a minute. `capacity_search` looks for the h that proves v < 1
without one, in about a second. It cannot prove v > 1, so alone it gives lower bounds of the critical sizes
(`exact=False`); before the programs it leaves them little more than one size an ordering.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from fullrank.errors import FullrankError
from fullrank.theory.capacity_search import Level, WitnessSearch, level_states
from fullrank.theory.linear_program import (
    SOLVER_TOLERANCE,
    TOLERANCE,
    Array,
    Program,
    StandardPoints,
    as_matrix,
    equal_rows,
    standardise,
)

Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]
# From this rank on a search for witnesses before the programs pays off: at V = 20,000 it is even at 256, and
# at V = 49152, D = 576 three times faster.
_SEARCH_FROM = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """A share of the orderings with its 95 % interval (Wilson's, for a binomial share)."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityReport:
    """The critical size of each ordering of tokens, and the size that the wanted share of them reaches."""

    vocabulary: int
    rank: int
    """Dimension of the affine span of the rows; no set above rank + 1 is free."""
    capacity: int
    """The largest m such that the first m tokens are free in at least `share` of the orderings."""
    interval: tuple[int, int]
    """The sizes m at which the interval of the share of free sets leaves `share` behind."""
    share: float
    sizes: tuple[int, ...]
    """For each ordering, the largest m whose first m tokens are proved free."""
    undecided: int
    """Orderings whose next size is not proved either way: within 1e-7 of the boundary, out of time, or,
    without programs, not found free."""
    exact: bool
    """Whether programs decided what a search left open; else sizes and capacity are lower bounds."""
    seconds: float

    def free_share(self, m: int) -> Share:
        """Share of the orderings whose first m tokens are free."""
        return _wilson(sum(size >= m for size in self.sizes), len(self.sizes))


def is_free(weight: torch.Tensor | Array, tokens: torch.Tensor | Indices) -> bool | None:
    """Whether the set of distinct tokens can take any probabilities; None if on the boundary in fp64."""
    matrix = as_matrix(weight)
    chosen = _as_orders(tokens, len(matrix), dimensions=1)[0]
    return _is_free(standardise(matrix), _has_equal(matrix), chosen)


def top_m_capacity(
    weight: torch.Tensor | Array,
    *,
    orders: torch.Tensor | Indices | None = None,
    samples: int = 32,
    share: float = 0.5,
    seed: int = 0,
    exact: bool = True,
    time_limit: float | None = None,
) -> CapacityReport:
    """The largest m for which at least `share` of the sets of m tokens are free.

    Args:
        weight: the output matrix [V, D].
        orders: token ids [samples, length], an ordering a row, such as a model's tokens at real contexts,
            most probable first; None draws uniform orderings of the vocabulary.
        samples: orderings to draw where none are given.
        share: the share of orderings that must be free at m.
        seed: of the draw.
        exact: solve linear programs for what a search for witnesses leaves open; else sizes are lower bounds.
        time_limit: seconds after which no further size is tried. The report then has the orderings finished
            so far, or the first one as far as it was proved. A program being solved is not interrupted.
    """
    started = time.monotonic()
    matrix = as_matrix(weight)
    if not 0 < share <= 1:
        raise FullrankError(
            f"share is {share}, expected more than 0 and at most 1: use 0.5 for the median set"
        )
    points, twin = standardise(matrix), _has_equal(matrix)
    V, rank = points.rows.shape
    if orders is None:
        if samples < 1:
            raise FullrankError(f"samples is {samples}, expected at least 1: draw 32 or more for an interval")
        generator = np.random.default_rng(seed)
        length = min(V, rank + 1)
        chosen = np.stack([generator.permutation(V)[:length] for _ in range(samples)])
    else:
        chosen = _as_orders(orders, V, dimensions=2)
    deadline = math.inf if time_limit is None else started + time_limit
    search = None if exact and rank < _SEARCH_FROM else WitnessSearch(points.rows, deadline)
    sizes: list[int] = []
    undecided = 0
    # The threshold of a Gaussian matrix, and then the last ordering's size, is the best guess.
    guess = int(rank / (1 + 2 * math.log(V / rank))) if rank else 1
    for order in chosen:
        low = 0
        if search is not None:
            found = functools.partial(_is_found, search, points, twin)
            # Long steps, so that a time limit leaves little below the end.
            bracket = _bracket(found, order, 0, guess, max(1, guess // 8), deadline)
            low, guess = bracket.low, bracket.low + 1
        if exact:
            proved = functools.partial(_is_free, points, twin)
            bracket = _bracket(proved, order, low, guess, 1, deadline)
        # A search that the deadline cut short ends like one that found nothing.
        finished = bracket.high - bracket.low == 1 and (exact or time.monotonic() <= deadline)
        if sizes and not finished:
            break
        sizes.append(bracket.low)
        undecided += bracket.is_open
        guess = bracket.low
    longest = chosen.shape[1]
    counts = [_wilson(sum(size >= m for size in sizes), len(sizes)) for m in range(1, longest + 1)]
    return CapacityReport(
        vocabulary=V,
        rank=rank,
        capacity=sum(count.value >= share for count in counts),
        interval=(sum(count.low >= share for count in counts), sum(count.high >= share for count in counts)),
        share=share,
        sizes=tuple(sizes),
        undecided=undecided,
        exact=exact,
        seconds=time.monotonic() - started,
    )


def _as_orders(tokens: torch.Tensor | Indices, vocabulary: int, dimensions: int) -> Indices:
    given = tokens.detach().cpu().numpy() if isinstance(tokens, torch.Tensor) else np.asarray(tokens)
    if given.ndim != dimensions or 0 in given.shape or given.dtype.kind not in "iu":
        expected = "[m]" if dimensions == 1 else "[samples, length]"
        raise FullrankError(
            f"tokens have shape {given.shape} and type {given.dtype}, expected {expected} and integers: pass "
            "one or more token ids, not scores"
        )
    ids = np.atleast_2d(given).astype(np.int64)
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise FullrankError(
            f"token ids run from {ids.min()} to {ids.max()}, expected 0 to {vocabulary - 1}, the rows of the "
            "weight: drop ids the output layer does not have"
        )
    sorted_ids = np.sort(ids, axis=1)
    repeated = (sorted_ids[:, 1:] == sorted_ids[:, :-1]).any(axis=1)
    if repeated.any():
        raise FullrankError(
            f"row {int(repeated.argmax())} of the tokens names one twice, expected distinct ids: a set has "
            "each token once"
        )
    return ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bracket:
    """What is known of an ordering: its first `low` tokens are free, its first `high` ones are not."""

    low: int
    high: int
    is_open: bool
    """Whether `high` is not proved, or there are sizes between the two."""


def _bracket(
    is_free: Callable[[Indices], bool | None],
    order: Indices,
    low: int,
    guess: int,
    step: int,
    deadline: float,
) -> _Bracket:
    """Look for the critical size above low, which is known to be free, until the deadline."""
    high, is_open = len(order) + 1, False
    probe = min(max(1, guess), len(order))
    # Gallop from the guess until the size is bracketed, then halve.
    while high - low > 1 and time.monotonic() <= deadline:
        answer = is_free(order[:probe])
        if answer:
            low = probe
            probe = low + step
        else:
            high, is_open = probe, answer is None
            probe = high - step
        step *= 2
        if not low < probe < high:
            probe = (low + high) // 2
    return _Bracket(low=low, high=high, is_open=is_open or high - low > 1)


def _has_equal(weight: Array) -> Flags:
    group = equal_rows(weight)
    return np.bincount(group)[group] > 1


def _level(points: StandardPoints, twin: Flags, tokens: Indices) -> Level | bool:
    """The states that hold the tokens level, or the answer where it takes no search among them."""
    if twin[tokens].any():
        # An equal row outside the set is on its face; inside, the set is not affinely independent.
        return False
    (V, r), m = points.rows.shape, len(tokens)
    if m == V:
        # Nothing else to beat: only affine independence is left.
        return r == V - 1
    if m > r:
        return False
    level = level_states(points.rows, tokens)
    if level is None:
        # Dependent, to rounding: not affinely independent, or level with the mean, which is on no face.
        return False
    if np.linalg.norm(level.base) > (1 + TOLERANCE) * points.reach:
        # The shortest h with z_s·h = 1 is too long to have all z_j·h <= 1, by (1) of `linear_program`.
        return False
    return level


def _is_found(search: WitnessSearch, points: StandardPoints, twin: Flags, tokens: Indices) -> bool | None:
    """Whether the tokens are free, as far as a search can tell: None where it finds no witness."""
    level = _level(points, twin, tokens)
    if isinstance(level, bool):
        return level
    return True if search.find(level) is not None else None


def _is_free(points: StandardPoints, twin: Flags, tokens: Indices) -> bool | None:
    level = _level(points, twin, tokens)
    if isinstance(level, bool):
        return level
    others = np.ones(len(points.rows), dtype=bool)
    others[tokens] = False
    return _sinks(points.rows[others], level.base, level.null, points.reach)


def _sinks(others: Array, base: Array, null: Array, reach: float) -> bool | None:
    """Whether some h = base + null y has others·h < 1: v's program over ever more of the others."""
    scores = others @ base
    if scores.max() < 1 - TOLERANCE:
        return True
    width = null.shape[1]
    if width == 0:
        return False if scores.max() > 1 + TOLERANCE else None
    # Unknowns y and v. A witness lies within reach, so twice that cuts none off; v below 0 is as good as 0.
    bound = np.append(np.full(width, 2 * reach), np.inf)
    program = Program(np.append(np.zeros(width), -1.0), np.append(-bound[:-1], 0.0), bound)
    grow = max(64, len(base) // 2)
    violated = np.argsort(scores)[::-1][: 4 * grow]
    while len(violated):
        rows = others[violated]
        program.add(np.column_stack([rows @ null, -np.ones(len(rows))]), -(rows @ base))
        solution = program.solve()
        if solution is None:
            return None
        level = -solution.value
        if level > 1 + TOLERANCE:
            return False
        scores = others @ (base + null @ solution.point[:-1])
        if scores.max() < 1 - TOLERANCE:
            return True
        worst = np.argsort(scores)[::-1][:grow]
        violated = worst[scores[worst] > level + 10 * SOLVER_TOLERANCE]
    return None


def _wilson(count: int, total: int) -> Share:
    quantile = 1.959964
    share = count / total
    scale = 1 + quantile**2 / total
    centre = (share + quantile**2 / (2 * total)) / scale
    half = quantile * math.sqrt(share * (1 - share) / total + quantile**2 / (4 * total**2)) / scale
    return Share(value=share, low=max(0.0, centre - half), high=min(1.0, centre + half))
