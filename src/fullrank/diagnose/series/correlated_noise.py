"""How clear the rise of a curve is over its noise, where the noise of neighbouring checkpoints is alike.

    line    the largest t of r over turns k, in least squares of

                y = a + b m + c m² + r (s - s_k)+,      m = min(log s, log s_k) - log s_k

            a curve that bends in the logarithm of the step s up to the turn and is a line after it, joined.
            All points after the turn speak, and not the last ones alone
    end     the lower of the last two points, minus the lowest mean of two neighbours before them, over the
            scale: for a curve that did something else after it turned than to rise in a line
    scale   root mean square of what a smooth trend leaves, by degrees of freedom

The evidence is both, and counts by the smaller of their p-values. The trend of the scale is a quadratic up to
the turn and a line after it, each over the step or its logarithm, whichever fits better. The scale is that
of both parts or, where less, that of the part before the turn: what a curve does after it turned is no
measure of how noisy it was. The line begins at the lowest point, or one before or up to two after it,
wherever the scale is least.

Noise is taken as AR(1): e_i = c e_(i-1) + sqrt(1 - c²) u_i. Correlated noise wanders, so that level curves
rise by more, and a trend fitted to few points follows the wandering, so that the scale comes out too small
and so does the correlation of what is left: at 14 points its mean is -0.3 where c = 0 and -0.1 where c = 0.8.
Nothing here is therefore read off a formula: `null` simulates level curves on the same steps, noise of one
standard deviation, and applies the same estimates. A level trend is the one that gives most false alarms.
`correlation` does the same for the estimate of c.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy
import numpy.typing

Array = numpy.typing.NDArray[numpy.float64]

CORRELATIONS = (0.0, 0.2, 0.4, 0.6, 0.8)
"""That are reckoned with. One curve of 14 checkpoints excludes none of them, and one of 27 few."""
PARAMETERS, BEFORE, AFTER = 4, 2, 3
"""Of a curve that turns; points that must lie before the turn, and after it."""
FEWEST_POINTS = 6
"""For one turn and two degrees of freedom."""
SIMULATIONS = 20_000
RISES = 500
"""Simulations of a rise, of which one in ten may be missed."""
ESTIMATES = 2000
"""Simulations of the estimate of a curve's correlation."""
CUTS = (-1, 0, 1, 2)
"""Where the line may begin, counted from the lowest point."""
FEWEST_BEFORE = 4
"""Degrees of freedom from which on the part before the turn is a scale of its own ..."""
BEFORE_WEIGHT = 2.0
"""... kept from 0 by the scale of both parts, with so many degrees of freedom ..."""
MOST_AFTER = 9.0
"""... but counted as at most so many times its own square: a swing after the turn is no noise."""
SMALLEST = 1e-6
"""Relative: below this, differences are rounding errors of whoever wrote the file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Of every row."""

    evidence: Array
    """[rows, 2] line and end."""
    scale: Array
    correlation: Array
    """Between neighbours of what the trend leaves: biased towards -1."""
    trend: Array
    """[rows, points]"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Null:
    """Level curves with noise of one standard deviation."""

    evidence: Array
    """[simulations, 2], each column rising."""
    least: Array
    """[simulations] the smaller p-value of both, rising."""
    scale: Array

    def p_value(self, evidence: Array) -> float:
        """Of the evidence [2] of a curve."""
        return float(self.p_values(evidence[None])[0])

    def p_values(self, evidence: Array) -> Array:
        """Of the evidence [rows, 2] of curves."""
        found = _smaller(self.evidence, evidence)
        as_small = numpy.searchsorted(self.least, found * (1 + 1e-9), side="right")
        return (1 + as_small) / (1 + len(self.least))


def _smaller(null: Array, evidence: Array) -> Array:
    """The smaller p-value of both columns, by a null whose columns rise."""
    found = numpy.ones(len(evidence))
    for column in range(2):
        # The relative tolerance makes equal curves equal on every machine.
        value = evidence[:, column] - 1e-9 * numpy.abs(evidence[:, column])
        below = numpy.searchsorted(null[:, column], value)
        found = numpy.minimum(found, (1 + len(null) - below) / (1 + len(null)))
    return found


def line(rows: Array, steps: Array) -> Array:
    """Of every row: how sure its rise after some turn is, in standard errors."""
    free = rows.shape[1] - PARAMETERS
    found = numpy.full(len(rows), -math.inf)
    for basis, slope in _turns(tuple(steps.tolist())):
        left = rows - (rows @ basis) @ basis.T
        scale = numpy.maximum(numpy.sqrt((left**2).sum(axis=1) / free), SMALLEST)
        found = numpy.maximum(found, rows @ slope / (scale * numpy.linalg.norm(slope)))
    return found


@functools.lru_cache(maxsize=256)
def _turns(steps: tuple[float, ...]) -> tuple[tuple[Array, Array], ...]:
    """For every turn: an orthonormal basis of the curves that turn there, and what takes a curve to the slope
    of its line."""
    straight = numpy.array(steps)
    bent = numpy.log(numpy.maximum(straight, 0.5))
    straight, bent = ((axis - axis[0]) / (axis[-1] - axis[0]) for axis in (straight, bent))
    found = []
    for place in range(BEFORE, len(steps) - AFTER):
        before = numpy.minimum(bent, bent[place]) - bent[place]
        after = numpy.maximum(straight - straight[place], 0.0)
        design = numpy.stack([numpy.ones_like(before), before, before**2, after], axis=1)
        found.append((numpy.linalg.qr(design)[0], numpy.linalg.pinv(design)[-1]))
    return tuple(found)


def measured(rows: Array, steps: Array) -> Measured:
    """Evidence, scale and correlation of curves [rows, points] that share their steps."""
    points = rows.shape[1]
    pairs = (rows[:, :-1] + rows[:, 1:]) / 2
    rise = rows[:, -2:].min(axis=1) - pairs[:, :-2].min(axis=1)
    lowest = rows[:, :-2].argmin(axis=1)
    least, correlation = numpy.full(len(rows), math.inf), numpy.zeros(len(rows))
    trend = rows.copy()
    for place in numpy.unique(lowest):
        chosen = numpy.flatnonzero(lowest == place)
        for cut in place + numpy.array(CUTS):
            if not 0 <= cut <= points:
                continue
            before, free_before = _left(rows[chosen, :cut], steps[:cut], degree=2)
            after, free_after = _left(rows[chosen, cut:], steps[cut:], degree=1)
            squares = (before**2).sum(axis=1)
            both = (squares + (after**2).sum(axis=1)) / (free_before + free_after)
            found = both
            if free_before >= FEWEST_BEFORE:
                held = numpy.minimum(both, MOST_AFTER * squares / free_before)
                alone = (squares + BEFORE_WEIGHT * held) / (free_before + BEFORE_WEIGHT)
                found = numpy.minimum(both, alone)
            better = found < least[chosen]
            kept = chosen[better]
            least[kept] = found[better]
            products = sum((part[:, 1:] * part[:, :-1]).sum(axis=1) for part in (before, after))
            total = numpy.maximum(both * (free_before + free_after), SMALLEST**2)
            correlation[kept] = (products / total)[better]
            trend[kept] = rows[kept] - numpy.concatenate((before, after), axis=1)[better]
    scale = numpy.maximum(numpy.sqrt(least), SMALLEST)
    evidence = numpy.stack([line(rows, steps), rise / scale], axis=1)
    return Measured(evidence=evidence, scale=scale, correlation=correlation, trend=trend)


def _left(rows: Array, steps: Array, *, degree: int) -> tuple[Array, int]:
    """What the better of two polynomials, in the step and in its logarithm, leaves; degrees of freedom."""
    if len(steps) <= degree + 1:
        return numpy.zeros_like(rows), 0
    best: Array | None = None
    for basis in _bases(tuple(steps.tolist()), degree):
        left = rows - (rows @ basis) @ basis.T
        if best is None:
            best = left
        else:
            better = (left**2).sum(axis=1) < (best**2).sum(axis=1)
            best = numpy.where(better[:, None], left, best)
    assert best is not None
    return best, len(steps) - degree - 1


@functools.lru_cache(maxsize=4096)
def _bases(steps: tuple[float, ...], degree: int) -> tuple[Array, Array]:
    """Orthonormal polynomials over the step and over its logarithm."""
    found = []
    # Half a step stands for step 0, which has no logarithm.
    for axis in (numpy.array(steps), numpy.log(numpy.maximum(steps, 0.5))):
        centred = (axis - axis.mean()) / numpy.ptp(axis)
        found.append(numpy.linalg.qr(numpy.stack([centred**power for power in range(degree + 1)], axis=1))[0])
    return found[0], found[1]


def autoregressive(random: numpy.random.Generator, rows: int, points: int, correlation: float) -> Array:
    """AR(1) noise of one standard deviation [rows, points]."""
    noise = random.standard_normal((rows, points))
    fresh = math.sqrt(1 - correlation**2)
    for place in range(1, points):
        noise[:, place] = correlation * noise[:, place - 1] + fresh * noise[:, place]
    return noise


@functools.lru_cache(maxsize=64)
def null(steps: tuple[float, ...], correlation: float, seed: int) -> Null:
    """Level curves over these steps."""
    random = numpy.random.default_rng(seed)
    found = measured(autoregressive(random, SIMULATIONS, len(steps), correlation), numpy.array(steps))
    ordered = numpy.sort(found.evidence, axis=0)
    return Null(evidence=ordered, least=numpy.sort(_smaller(ordered, found.evidence)), scale=found.scale)


@functools.lru_cache(maxsize=256)
def smallest(steps: tuple[float, ...], correlation: float, level: float, seed: int) -> float:
    """A rise over the second half of the steps, in standard deviations of the noise, that is found at this
    level nine times in ten; infinite where so few points show none."""
    level_curves = null(steps, correlation, seed)
    axis = numpy.array(steps)
    shape = numpy.maximum(axis - (axis[0] + axis[-1]) / 2, 0.0) / (axis[-1] - axis[0]) * 2
    noise = autoregressive(numpy.random.default_rng(seed + 1), RISES, len(steps), correlation)

    def missed(rise: float) -> bool:
        found = measured(rise * shape + noise, axis).evidence
        return bool((level_curves.p_values(found) >= level).mean() > 0.1)

    low, high = 0.0, 1.0
    while missed(high):
        if high > 1e4:
            return math.inf
        low, high = high, 2 * high
    for _ in range(6):
        middle = (low + high) / 2
        low, high = (middle, high) if missed(middle) else (low, middle)
    return high


def correlation(curve: Measured, steps: tuple[float, ...], seed: int) -> float:
    """The upper 99.95% confidence value of a curve's correlation, at most the last of CORRELATIONS.

    The estimate is held against those of curves simulated around the same trend, so that its bias, which
    depends on where the curve turns, is theirs too.
    """
    random = numpy.random.default_rng(seed)
    for one in reversed(CORRELATIONS):
        drawn = curve.scale[0] * autoregressive(random, ESTIMATES, len(steps), one)
        estimates = measured(curve.trend + drawn, numpy.array(steps)).correlation
        if curve.correlation[0] >= numpy.quantile(estimates, 0.0005):
            return one
    return CORRELATIONS[0]
