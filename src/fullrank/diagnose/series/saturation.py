"""Saturation: did a loss curve turn before its end, where, and how much was lost since?

Small models trained for long can get worse (Godey et al. 2024, arXiv:2404.07647). With y the curve (the
logarithm of a loss or perplexity, minus an accuracy) and v the variance of a point, the test compares two
shapes of trend by least squares,

    T = (RSS(never rises) - RSS(falls, then rises)) / phi,        RSS = sum_i (y_i - f_i)^2 / v_i,

where both f are isotonic fits: no other form is assumed. Two kinds of noise enter. v_i is the squared
standard error of an evaluation, where there are any (else 1). phi is how much more than that the checkpoints
scatter around a trend. It is the lesser of two estimates, either of which tends to be too large: what is left
of the fit that falls and then rises, over its degrees of freedom, which counts a bump as noise,

    (PRIOR phi_0 + RSS(falls, then rises)) / (PRIOR + points - levels of the fit),

and, after the steep early phase, the mean square of what linear interpolation between a point's neighbours in
log step misses, phi_0, which counts curvature as noise. With standard errors phi is at least 1. Fewer than
`LATE_POINTS` points tell little of scatter, and curvature is most of what interpolation misses: then standard
errors are nearly taken at their word, with phi_0 = 1.

The p-value is the share of simulated curves with a never-rising trend and this noise whose T, phi estimated
anew, is as large. The turn is searched among as many points and the noise estimated from as few, so that
neither makes false alarms. Without standard errors running medians of three go into T, so that no single
checkpoint that stands out makes a turn, the last one included; with them, what stands out in the middle makes
phi large, and the last point is as sure as its standard error says.

The interval of the loss is a bootstrap around the falling-then-rising fit below, which allows for the best
of many noisy points looking better than it is, and the error of a plain difference above.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy
import numpy.typing

from fullrank.results.series import Curve, Saturation

Array = numpy.typing.NDArray[numpy.float64]

LEVEL = 0.01
MATERIAL_PERCENT = 2.0
"""Less than this is no loss worth the name, however many points prove it."""
FEWEST_POINTS = 4
EARLY_SHARE = 0.9
"""The early phase is over at the first point with this share of the improvement behind it ..."""
LATE_POINTS = 8
"""... or earlier, where fewer than these many points would be left."""
MOST_POINTS = 60
"""Longer curves are pooled: neighbouring checkpoints then say nothing new, and simulations take time."""
PRIOR = 2.0
"""Pseudo-points that keep phi from 0 where the fit goes through every point."""
LEVELLED = 3.0
"""Steps of the simulated trend smaller than so many standard deviations are levelled out."""
SIMULATIONS = 1000
# Relative: below this, differences are rounding errors of whoever wrote the file.
SMALLEST_NOISE = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Design:
    """Where the points are and how noisy they are known to be."""

    place: Array
    """Log step."""
    variance: Array
    """Of a point, by its standard error; all 1 without standard errors."""
    known: bool
    """Whether there are standard errors."""


def saturation(curve: Curve, *, seed: int = 0) -> Saturation:
    """Test one curve; deterministic for a seed."""
    relative = curve.lower_is_better is not False
    values = numpy.array(curve.values, dtype=float)
    steps = numpy.array(curve.steps, dtype=float)
    heights = numpy.log(values) if relative else -values
    errors = None
    if curve.standard_errors is not None:
        errors = numpy.array(curve.standard_errors, dtype=float) / (values if relative else 1.0)
    groups = math.ceil(len(heights) / MOST_POINTS) if len(heights) else 1
    if groups > 1:
        steps, heights, errors = _pooled(steps, heights, errors, groups)
        values = numpy.exp(heights) if relative else -heights
    if not len(heights):
        return _untested(curve, reason="no usable value")

    best, last = int(heights.argmin()), len(heights) - 1

    def percent(rise: Array | float) -> Any:
        """A rise of `heights` as a share of the best value."""
        if relative:
            return 100 * numpy.expm1(rise)
        return 100 * numpy.asarray(rise) / values[best] if values[best] > 0 else numpy.zeros_like(rise)

    found: dict[str, Any] = {
        "model": curve.model,
        "shots": curve.shots,
        "metric": curve.metric,
        "best_step": int(steps[best]),
        "best_value": float(values[best]),
        "final_step": int(steps[last]),
        "final_value": float(values[last]),
        "lost_percent": float(percent(heights[last] - heights[best])),
    }
    early = int(_early(heights[None])[0])
    found |= {"first_step": int(steps[early]), "points": len(heights)}
    if len(heights) < FEWEST_POINTS:
        spread = math.nan if errors is None else math.hypot(errors[-1], errors[heights.argmin()])
        rise = float(heights[-1] - heights.min())
        return Saturation(
            **found,
            saturated=False,
            interval=_interval(rise - 1.96 * spread, rise + 1.96 * spread, rise, percent),
            p_value=1.0,
            noise_percent=math.nan if errors is None else float(percent(numpy.median(errors))),
            noise_origin="not estimated" if errors is None else "standard errors",
            reason=f"{len(heights)} usable points, and a turn needs at least {FEWEST_POINTS} to show",
        )

    design = _Design(
        # Half a step stands for step 0, which has no logarithm.
        place=numpy.log(numpy.maximum(steps, 0.5)),
        variance=numpy.ones(len(heights)) if errors is None else errors**2,
        known=errors is not None,
    )
    random = numpy.random.default_rng(seed)
    statistic, excess = _statistic(heights[None], design)
    deviation = numpy.sqrt(excess[0] * design.variance)
    noise = deviation * random.standard_normal((SIMULATIONS, len(heights)))
    simulated, _ = _statistic(_steady(heights, deviation) + noise, design)
    # The relative tolerance makes equal curves equal on every machine.
    exceeding = int((simulated >= statistic[0] * (1 - 1e-9)).sum())
    p_value = (1 + exceeding) / (SIMULATIONS + 1)

    # Below, the trend bootstrapped: the best of many noisy points looks better than it is. Above, the plain
    # error of a difference, from the best of the other points where the end is the best.
    trend = _trend(heights, 1 / design.variance, turns=True)
    drawn = trend + noise
    error = drawn[:, -1] - drawn.min(axis=1) - (trend[-1] - trend.min())
    rise, rival = float(heights[-1] - heights.min()), int(heights[:-1].argmin())
    low = rise - float(numpy.quantile(error, 0.975))
    high = heights[-1] - heights[rival] + 1.96 * math.hypot(deviation[-1], deviation[rival])
    return Saturation(
        **found,
        saturated=p_value < LEVEL and found["lost_percent"] >= MATERIAL_PERCENT,
        interval=_interval(low, high, rise, percent),
        p_value=p_value,
        noise_percent=float(percent(numpy.median(deviation))),
        noise_origin=_origin(design.known, float(excess[0]), groups),
        reason="",
    )


def _origin(known: bool, excess: float, groups: int) -> str:
    pooled = f"; every {groups} neighbouring points were pooled" if groups > 1 else ""
    if not known:
        return f"scatter of the points around the trend, without standard errors{pooled}"
    if excess > 1:
        factor = math.sqrt(excess)
        return f"standard errors times {factor:.2g}, because the points scatter by that much more{pooled}"
    return f"standard errors; the points scatter by no more than these{pooled}"


def _untested(curve: Curve, *, reason: str) -> Saturation:
    return Saturation(
        model=curve.model, shots=curve.shots, metric=curve.metric, saturated=False, best_step=0,
        best_value=math.nan, final_step=0, final_value=math.nan, lost_percent=math.nan,
        interval=(math.nan, math.nan), p_value=1.0, first_step=0, points=0, noise_percent=math.nan,
        noise_origin="not estimated", reason=reason,
    )  # fmt: skip


def _interval(low: float, high: float, rise: float, percent: Any) -> tuple[float, ...]:
    """In percent; a loss is not negative, and what was measured is never left outside."""
    if math.isnan(low):
        return (math.nan, math.nan)
    return tuple(float(percent(end)) for end in (max(min(low, rise), 0.0), max(high, rise)))


def _pooled(
    steps: Array, heights: Array, errors: Array | None, size: int
) -> tuple[Array, Array, Array | None]:
    """Means of `size` neighbours each, counted from the end, at the step in their middle."""
    ends = range(len(heights), 0, -size)
    groups = [slice(max(0, end - size), end) for end in ends][::-1]
    pooled = numpy.array([heights[group].mean() for group in groups])
    places = numpy.array([steps[group][(len(steps[group]) - 1) // 2] for group in groups])
    if errors is None:
        return places, pooled, None
    # Evaluations on one test set share their error, so that it does not shrink in the mean.
    return places, pooled, numpy.array([math.sqrt((errors[group] ** 2).mean()) for group in groups])


def _early(rows: Array) -> numpy.typing.NDArray[numpy.intp]:
    """How many points of every row belong to its steep beginning."""
    best = rows.argmin(axis=1)[:, None]
    lowest = numpy.take_along_axis(rows, best, axis=1)
    highest = numpy.take_along_axis(numpy.maximum.accumulate(rows, axis=1), best, axis=1)
    passed = (rows <= lowest + (1 - EARLY_SHARE) * (highest - lowest)).argmax(axis=1)
    return numpy.minimum(passed, max(rows.shape[1] - LATE_POINTS, 0))


def _statistic(heights: Array, design: _Design) -> tuple[Array, Array]:
    """T and phi of every row of `heights`."""
    count = heights.shape[1]
    weights = 1 / design.variance
    fits = _fits(heights, weights)
    rough = _scatter(heights, design)
    prior = 1.0 if design.known and count < LATE_POINTS else rough
    bent = (PRIOR * prior + fits[:, 1]) / (PRIOR + count - fits[:, 2])
    phi = numpy.maximum(numpy.minimum(rough, bent), 1.0 if design.known else SMALLEST_NOISE**2)
    if not design.known and count >= LATE_POINTS:
        fits = _fits(_medians(heights), weights)
    return (fits[:, 0] - fits[:, 1]) / phi, phi


def _scatter(heights: Array, design: _Design) -> Array:
    """Mean square of what interpolation between both neighbours misses, in units of its expected variance."""
    before, here, after = design.place[:-2], design.place[1:-1], design.place[2:]
    share = (here - before) / (after - before)
    missed = heights[:, 1:-1] - (1 - share) * heights[:, :-2] - share * heights[:, 2:]
    variance = design.variance
    expected = variance[1:-1] + (1 - share) ** 2 * variance[:-2] + share**2 * variance[2:]
    late = numpy.arange(missed.shape[1]) >= _early(heights)[:, None]
    return (missed**2 / expected * late).sum(axis=1) / late.sum(axis=1)


def _medians(heights: Array) -> Array:
    """Running medians of three; the last point takes the median of the last three."""
    inner = numpy.median(numpy.stack((heights[:, :-2], heights[:, 1:-1], heights[:, 2:])), axis=0)
    return numpy.concatenate((heights[:, :1], inner, inner[:, -1:]), axis=1)


def _fits(rows: Array, weights: Array) -> Array:
    """Of every row: RSS that never rises, least RSS that falls and then rises, levels of the latter."""
    forward, backward = weights.tolist(), weights[::-1].tolist()
    found = []
    for row in rows.tolist():
        falling, levels = _never_rising(row, forward)
        rising, more = _never_rising(row[::-1], backward)
        sums = [left + right for left, right in zip(falling, reversed(rising), strict=True)]
        turn = min(range(len(sums)), key=sums.__getitem__)
        found.append((falling[-1], sums[turn], levels[turn] + more[len(row) - turn]))
    return numpy.array(found)


def _never_rising(row: list[float], weights: list[float]) -> tuple[list[float], list[int]]:
    """RSS and levels of the never-rising fit to each beginning of the row, by pooling adjacent violators."""
    errors, levels = [0.0], [0]
    stack: list[tuple[float, float]] = []
    total = 0.0
    for height, weight in zip(row, weights, strict=True):
        while stack and stack[-1][0] <= height:
            other, heavy = stack.pop()
            total += weight * heavy / (weight + heavy) * (height - other) ** 2
            height = (height * weight + other * heavy) / (weight + heavy)
            weight += heavy
        stack.append((height, weight))
        errors.append(total)
        levels.append(len(stack))
    return errors, levels


def _steady(heights: Array, deviation: Array) -> Array:
    """The never-rising trend to simulate, with steps within the noise levelled out.

    Such steps are fitted to mere noise as well, and a level curve gives more false alarms than a falling one.
    """
    weights = deviation**-2
    trend = _trend(heights, weights, turns=False)
    end = len(heights)
    for place in range(len(heights) - 1, -1, -1):
        level = numpy.average(heights[place:end], weights=weights[place:end])
        if place == 0 or trend[place - 1] - level > LEVELLED * deviation[place - 1]:
            trend[place:end] = level
            end = place
    return trend


def _trend(heights: Array, weights: Array, *, turns: bool) -> Array:
    """The fitted trend that never rises, or that falls and then rises."""
    from scipy.optimize import isotonic_regression

    turn = len(heights)
    if turns:
        falling, _ = _never_rising(heights.tolist(), weights.tolist())
        rising, _ = _never_rising(heights[::-1].tolist(), weights[::-1].tolist())
        turn = int((numpy.array(falling) + numpy.array(rising[::-1])).argmin())
    parts = [
        isotonic_regression(heights[part], weights=weights[part], increasing=increasing).x
        for part, increasing in ((slice(0, turn), False), (slice(turn, None), True))
        if len(heights[part])
    ]
    return numpy.concatenate(parts)
