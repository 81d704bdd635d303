"""Saturation: did a loss curve turn before its end, where, and how much was lost since?

Small models trained for long can get worse (Godey et al. 2024, arXiv:2404.07647). With y the curve (the
logarithm of a loss or perplexity, minus an accuracy), the test takes the slope of a line after the turn and
the rise at the end, each over its noise, as `correlated_noise.py` defines this evidence (where checkpoints
are paired, less by scale / sqrt(scale² + paired² / 2)), and the p-value is the share of level curves with
noise of the same correlation whose evidence is as strong. Three answers are possible:

    turned       p below LEVEL over all curves of the call, and at least MATERIAL_PERCENT lost
    not turned   and the interval excludes a loss that the test would have found nine times in ten, and one
                 of OPEN_PERCENT
    undecided    neither; or the points are too few

Over the curves of a call p-values are Holm's: each curve is read by itself, as "this model turned", so the
chance of one false alarm among all of them is what must be small. The correlation is an upper confidence
value; `turned_up_to` says for which lower ones the curve, by itself, would be said to have turned.

Standard errors of evaluations are no noise here. Checkpoints of one model answer the same test items, so that
most of such an error is common to all checkpoints and drops out of their differences; what does not, scatters
and is seen as scatter. Where the losses of the text are at hand, as for checkpoints that are measured here,
`paired` is the standard error of a difference, taken block by block, and adds to the noise.

The interval of the loss is that of the difference between two points under this noise, with the uncertainty
of its scale, after taking off how much better than it is the best of many noisy points looks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy
import numpy.typing

from fullrank.diagnose.series import correlated_noise as noise
from fullrank.results.series import NOT_TURNED, TURNED, UNDECIDED, Curve, Saturation

Array = numpy.typing.NDArray[numpy.float64]

LEVEL = 0.01
MATERIAL_PERCENT = 2.0
"""Less than this is no loss worth the name, however many points prove it."""
OPEN_PERCENT = 25.0
"""An interval that reaches this loss leaves open whether the curve turned."""
EARLY_SHARE = 0.9
"""The early phase is over, at the latest, at the first point with this share of the improvement behind."""
LATE_POINTS = 12
STEEP = 1.3
"""Early points go, while LATE_POINTS are left, if they make the scale so many times larger ..."""
FEWEST_LATE = 8
STEEPEST = 5.0
"""... and, while FEWEST_LATE are left, if they make it so many times larger."""
EARLY_FALL = 50.0
"""There is an early phase only where the curve fell by so many times its scale."""
MOST_POINTS = 60
"""Longer curves are pooled: neighbouring checkpoints then say nothing new, and simulations take time."""
DRAWS = 4000
"""For the interval of the loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tested:
    """What the test found of one curve, and what a comparison of two curves needs."""

    record: Saturation
    losses: Array
    """Percent lost, as far as noise leaves it open: DRAWS of them, or none where there was no test."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Points:
    """A curve as the test sees it: lower is better, long ones pooled."""

    curve: Curve
    steps: Array
    heights: Array
    paired: float
    """Standard error of a difference between two checkpoints, in units of height."""
    first: int
    """Where the steep beginning is over."""
    measured: noise.Measured | None
    """From there on; None where the points are too few."""

    @property
    def relative(self) -> bool:
        """Whether heights are logarithms."""
        return self.curve.lower_is_better is not False

    @property
    def design(self) -> tuple[float, ...]:
        return tuple(self.steps[self.first :].tolist())

    def percent(self, rise: Array | float) -> Array:
        """A rise as a share of the best value."""
        if self.relative:
            return numpy.asarray(100 * numpy.expm1(numpy.minimum(rise, 700.0)))
        best = -self.heights.min()
        return 100 * numpy.asarray(rise) / best if best > 0 else numpy.zeros_like(rise)


def saturation(curve: Curve, *, seed: int = 0) -> Saturation:
    """Test one curve; deterministic for a seed."""
    return saturations([curve], seed=seed)[0].record


def saturations(curves: Sequence[Curve], *, seed: int = 0) -> list[Tested]:
    """Test the curves of one call, which share the chance of an alarm."""
    points = [_points(curve) for curve in curves]
    able = [place for place, one in enumerate(points) if one.measured is not None]
    found = [Tested(record=_outline(one), losses=numpy.zeros(0)) for one in points]
    if not able:
        return found
    for place in able:
        found[place] = _tested(points[place], found[place].record, (seed, place))
    adjusted = holm([found[place].record.p_value for place in able])
    # Holm holds a curve that is not among the alarms against this.
    level = LEVEL / max(sum(p >= LEVEL for p in adjusted), 1)
    for place, p in zip(able, adjusted, strict=True):
        record = _decided(points[place], found[place].record, p, level, seed)
        found[place] = dataclasses.replace(found[place], record=record)
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values: the chance that any is below a level by accident is at most that level."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, highest = [1.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def difference(first: Tested, other: Tested) -> tuple[float, float, float]:
    """By how many percent points more the first curve lost: a 95% interval, and the p-value of no more."""
    gaps = first.losses - other.losses
    low, high = numpy.quantile(gaps, (0.025, 0.975))
    beyond = min(int((gaps <= 0).sum()), int((gaps >= 0).sum()))
    return float(low), float(high), min(1.0, 2 * (1 + beyond) / (1 + len(gaps)))


def _outline(points: _Points) -> Saturation:
    """What a curve shows without a test."""
    curve, heights, steps = points.curve, points.heights, points.steps
    count = len(heights)
    best = int(heights.argmin()) if count else 0
    values = numpy.exp(heights) if points.relative else -heights
    few = f"{count} usable points, and a turn needs at least {noise.FEWEST_POINTS} to show"
    return Saturation(
        model=curve.model,
        shots=curve.shots,
        metric=curve.metric,
        outcome=UNDECIDED,
        best_step=int(steps[best]) if count else 0,
        best_value=float(values[best]) if count else math.nan,
        final_step=int(steps[-1]) if count else 0,
        final_value=float(values[-1]) if count else math.nan,
        lost_percent=float(points.percent(heights[-1] - heights[best])) if count else math.nan,
        interval=(math.nan, math.nan),
        p_value=1.0,
        adjusted_p=1.0,
        smallest_rise_percent=math.nan,
        turned_up_to=math.nan,
        first_step=int(steps[points.first]) if count else 0,
        points=count - points.first,
        noise_percent=math.nan,
        noise_correlation=math.nan,
        noise_origin="not estimated",
        reason="" if points.measured is not None else few if count else "no usable value",
    )


def _tested(points: _Points, outline: Saturation, seed: tuple[int, int]) -> Tested:
    """The test of one curve by itself; `seed` is the call's and the curve's own."""
    heights, scale = points.heights[points.first :], _scale(points)
    assert points.measured is not None
    correlation = noise.correlation(points.measured, points.design, seed[0])
    null = noise.null(points.design, correlation, seed[0])
    # Every curve draws its own noise, so that two of them can be compared. How far its scale may be from the
    # one that was measured is what the scales of level curves say.
    random = numpy.random.default_rng(seed)
    spread = scale / random.choice(null.scale, DRAWS)
    drawn = spread[:, None] * noise.autoregressive(random, DRAWS, len(heights), correlation)
    trend = _trend(heights)
    flattered = (trend + drawn)[:, -1] - (trend + drawn).min(axis=1) - (trend[-1] - trend.min())
    rival = int(heights[:-1].argmin())
    centre = heights[-1] - heights[rival] - float(numpy.median(flattered))
    losses = points.percent(centre + drawn[:, rival] - drawn[:, -1])
    low, high = numpy.quantile(losses, (0.025, 0.975))
    sources = ["scatter around the trend before the turn"]
    if points.paired:
        sources.append("differences of checkpoints, block by block of text")
    size = _group(len(points.curve.values))
    if size > 1:
        sources.append(f"every {size} neighbouring points were pooled")
    record = dataclasses.replace(
        outline,
        # A loss is not negative, and what was measured is never left outside.
        interval=(
            max(min(float(low), outline.lost_percent), 0.0),
            max(float(high), outline.lost_percent),
        ),
        p_value=null.p_value(_evidence(points)),
        noise_percent=float(points.percent(scale / float(numpy.median(null.scale)))),
        noise_correlation=correlation,
        noise_origin="; ".join(sources),
    )
    return Tested(record=record, losses=losses)


def _decided(points: _Points, one: Saturation, adjusted: float, level: float, seed: int) -> Saturation:
    """The answer, given the p-value over all curves and the level that the curve was held against."""
    null = noise.null(points.design, one.noise_correlation, seed)
    deviation = _scale(points) / float(numpy.median(null.scale))
    found = noise.smallest(points.design, one.noise_correlation, level, seed)
    smallest = float(points.percent(found * deviation)) if math.isfinite(found) else math.inf
    if adjusted < LEVEL:
        outcome = TURNED if one.lost_percent >= MATERIAL_PERCENT else NOT_TURNED
    else:
        outcome = UNDECIDED if one.interval[1] >= min(smallest, OPEN_PERCENT) else NOT_TURNED
    evidence = _evidence(points)
    turned_up_to = max(
        (
            correlation
            for correlation in noise.CORRELATIONS
            if one.lost_percent >= MATERIAL_PERCENT
            and noise.null(points.design, correlation, seed).p_value(evidence) < LEVEL
        ),
        default=math.nan,
    )
    return dataclasses.replace(
        one,
        outcome=outcome,
        adjusted_p=adjusted,
        smallest_rise_percent=smallest,
        turned_up_to=turned_up_to,
    )


def _scale(points: _Points) -> float:
    assert points.measured is not None
    return math.hypot(float(points.measured.scale[0]), points.paired / math.sqrt(2))


def _evidence(points: _Points) -> Array:
    assert points.measured is not None
    found: Array = points.measured.evidence[0] * points.measured.scale[0] / _scale(points)
    return found


def _group(count: int) -> int:
    """How many neighbours are pooled."""
    return max(math.ceil(count / MOST_POINTS), 1)


def _points(curve: Curve) -> _Points:
    """Pooled points are means of neighbours, counted from the end, at their middle step."""
    values, steps = numpy.array(curve.values, dtype=float), numpy.array(curve.steps, dtype=float)
    relative = curve.lower_is_better is not False
    heights = numpy.log(values) if relative else -values
    size = _group(len(values))
    if size > 1:
        groups = [slice(max(0, end - size), end) for end in range(len(heights), 0, -size)][::-1]
        heights = numpy.array([heights[group].mean() for group in groups])
        steps = numpy.array([steps[group][(len(steps[group]) - 1) // 2] for group in groups])
    paired = 0.0
    if curve.paired_errors is not None and len(values):
        paired = float(numpy.median(numpy.array(curve.paired_errors) / (values if relative else 1.0)))
    enough = len(heights) >= noise.FEWEST_POINTS
    first = _first(heights, steps) if enough else 0
    return _Points(
        curve=curve,
        steps=steps,
        heights=heights,
        paired=paired,
        first=first,
        measured=noise.measured(heights[None, first:], steps[first:]) if enough else None,
    )


def _first(heights: Array, steps: Array) -> int:
    """Where the steep beginning is over, as far as a smooth trend cannot follow it."""
    best = int(heights.argmin())
    fall = float(heights[: best + 1].max() - heights[best])
    passed = int((heights <= heights[best] + (1 - EARLY_SHARE) * fall).argmax())
    starts = range(min(passed, max(len(heights) - FEWEST_LATE, 0)) + 1)
    scales = [float(noise.measured(heights[None, start:], steps[start:]).scale[0]) for start in starts]
    ample = scales[: max(len(heights) - LATE_POINTS, 0) + 1]
    first = next(start for start, scale in enumerate(ample) if scale <= STEEP * min(ample))
    if scales[first] > STEEPEST * min(scales):
        first = next(start for start in starts if scales[start] <= STEEP * min(scales))
    # Level curves wander by so much too, and to leave out what scatters most there would cause false alarms.
    return first if fall > EARLY_FALL * scales[first] else 0


def _trend(heights: Array) -> Array:
    """The isotonic fit that falls and then rises, with the best place to turn."""
    from scipy.optimize import isotonic_regression

    fits = []
    for turn in range(1, len(heights) + 1):
        parts = [isotonic_regression(heights[:turn], increasing=False).x]
        if turn < len(heights):
            parts.append(isotonic_regression(heights[turn:]).x)
        fits.append(numpy.concatenate(parts))
    return min(fits, key=lambda fit: float(((heights - fit) ** 2).sum()))
