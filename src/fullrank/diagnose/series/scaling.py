"""A scaling law over final checkpoints, and how far each model ends above it.

    L(N, T) = A / N^alpha + B / T^beta + E          N parameters, T training tokens, L nats per token

Godey et al. (2024, arXiv:2404.07647) take B = 410.7, beta = 0.28 and E = 1.69 from Hoffmann et al. (2022,
arXiv:2203.15556), fit A and alpha on Pythia models from 410M parameters on (A = 119.09, alpha = 0.246 on the
Pile), and find that smaller models end about 8% above the extrapolation. The same is done here: log L is
fitted by Huber least squares over the final checkpoints of the models that are large enough.

The constants belong to the loss of web text in nats per token. For a perplexity, whose logarithm is fitted,
and for losses in other units, they do not hold: then all models must have seen the same number of tokens, the
term in T becomes part of E, and A, alpha and E are all fitted, on at least four models.

Intervals are a parametric bootstrap: points are drawn around the fit with the scale of its residuals and with
the standard errors of the losses, and fitted again.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy
import numpy.typing

from fullrank.errors import FullrankError
from fullrank.results.diagnosis import Estimate
from fullrank.results.series import Scaling, ScalingPoint

Array = numpy.typing.NDArray[numpy.float64]

PUBLISHED_B, PUBLISHED_BETA, PUBLISHED_E = 410.7, 0.28, 1.69
FIT_FROM = 4e8
FEWEST_FREE = 4
"""Models for a fit of three constants."""
FEWEST_FIXED = 2
HUBER = 0.01
"""Residuals of log L beyond this count linearly: a model that is 1% off is a poor witness of the law."""
RESAMPLES = 200

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([mbt])", re.IGNORECASE)
_BATCH = re.compile(r"(\d+(?:\.\d+)?)Mtok(?:ens)?BS", re.IGNORECASE)
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}


class NoFitError(FullrankError):
    """There is nothing to fit, and why; `fullrank series` reports it instead of failing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """What the fit needs to know of one model."""

    name: str
    parameters: float
    tokens: float
    final: float
    """Loss of the last checkpoint, nats per token or what takes its place."""
    best: float
    relative_error: float
    """Standard error of the final loss over the loss; 0 where not known."""


def size(name: str) -> str | None:
    """The part of a model's name that gives its size, such as 70m in pythia-70m-0.25MtokBS."""
    for part in re.split(r"[-_/\s]+", name):
        if _SIZE.fullmatch(part):
            return part
    return None


def parameters_of(name: str) -> float | None:
    """Parameters by the model's name; None where it holds no size."""
    found = _SIZE.fullmatch(size(name) or "")
    return float(found[1]) * _UNITS[found[2].lower()] if found else None


def batch_of(name: str) -> float | None:
    """Tokens a step by a name such as pythia-70m-0.25MtokBS; None where it does not say."""
    found = _BATCH.search(name)
    return float(found[1]) * 2**20 if found else None


def predict(
    parameters: Array | float,
    tokens: Array | float,
    *,
    A: float,
    alpha: float,
    B: float,
    beta: float,
    E: float,
) -> Array:
    return (
        A / numpy.asarray(parameters, dtype=float) ** alpha
        + B / numpy.asarray(tokens, dtype=float) ** beta
        + E
    )


def fit(
    models: Sequence[Model],
    *,
    metric: str,
    unit: str,
    shots: int | None,
    published: bool,
    fit_from: float = FIT_FROM,
    notes: Sequence[str] = (),
    seed: int = 0,
) -> Scaling:
    """Fit the law; `published` says whether B, beta and E hold for this loss. Raises NoFitError."""
    models = sorted(models, key=lambda model: (model.parameters, model.name))
    chosen = numpy.array([model.parameters >= fit_from for model in models])
    _check(models, chosen, published=published, fit_from=fit_from)
    sizes = numpy.array([model.parameters for model in models])
    tokens = numpy.array([model.tokens for model in models])
    final = numpy.array([model.final for model in models])
    errors = numpy.array([model.relative_error for model in models])
    term = PUBLISHED_B / tokens**PUBLISHED_BETA if published else numpy.zeros(len(models))
    # Parameters in units of their geometric mean: log A and alpha are then nearly uncorrelated.
    centre = float(numpy.exp(numpy.log(sizes[chosen]).mean()))
    places = numpy.log(sizes / centre)

    def solve(logs: Array, start: Array | None = None) -> Array:
        return _solve(places[chosen], term[chosen], logs, published=published, start=start)

    def curve(constants: Array) -> Array:
        return _curve(places, term, constants, published=published)

    best = solve(numpy.log(final[chosen]))
    fitted = curve(best)
    residuals = numpy.log(final[chosen]) - numpy.log(fitted[chosen])
    freedom = int(chosen.sum()) - len(best)
    scale = math.sqrt(float((residuals**2).sum()) / freedom) if freedom else 0.0
    spread = numpy.hypot(errors, scale)
    random = numpy.random.default_rng(seed)
    drawn, curves = numpy.full((RESAMPLES, 3), math.nan), numpy.full((RESAMPLES, len(models)), math.nan)
    known = bool((spread[chosen] > 0).any())
    for row in range(RESAMPLES if known else 0):
        again = solve(
            numpy.log(fitted[chosen]) + spread[chosen] * random.standard_normal(int(chosen.sum())), best
        )
        drawn[row], curves[row] = _constants(again, centre, published=published), curve(again)
    noise = errors * random.standard_normal((RESAMPLES, len(models)))

    def estimate(value: float, samples: Array) -> Estimate:
        low, high = numpy.quantile(samples, (0.025, 0.975)) if known else (math.nan, math.nan)
        return Estimate(value=float(value), low=float(low), high=float(high))

    def gap(loss: float, column: int) -> Estimate:
        samples = 100 * (loss * numpy.exp(noise[:, column]) / curves[:, column] - 1)
        return estimate(100 * (loss / fitted[column] - 1), samples)

    A, alpha, E = _constants(best, centre, published=published)
    sentences = [*notes]
    if published:
        sentences.append("B, beta and E are those of Hoffmann et al. for web text in nats per token")
    else:
        sentences.append(
            "the published B, beta and E do not hold for this metric: E was fitted and holds the token term"
        )
    if not known:
        sentences.append("as many models as constants and no standard errors: no intervals")
    return Scaling(
        metric=metric,
        unit=unit,
        shots=shots,
        A=estimate(A, drawn[:, 0]),
        alpha=estimate(alpha, drawn[:, 1]),
        B=PUBLISHED_B if published else None,
        beta=PUBLISHED_BETA if published else None,
        E=Estimate(value=E, low=E, high=E) if published else estimate(E, drawn[:, 2]),
        fixed=("B", "beta", "E") if published else (),
        fit_from=fit_from,
        points=tuple(
            ScalingPoint(
                model=model.name,
                parameters=model.parameters,
                tokens=model.tokens,
                final=model.final,
                best=model.best,
                predicted=estimate(fitted[column], curves[:, column]),
                final_gap_percent=gap(model.final, column),
                best_gap_percent=gap(model.best, column),
                fitted=bool(chosen[column]),
            )
            for column, model in enumerate(models)
        ),
        note="; ".join(sentences),
    )


def _check(models: Sequence[Model], chosen: Array, *, published: bool, fit_from: float) -> None:
    """Raise where the models cannot carry a fit."""
    large = [model for model, inside in zip(models, chosen, strict=True) if inside]
    fewest = FEWEST_FIXED if published else FEWEST_FREE
    counted = len({model.parameters for model in large})
    constants = "A and alpha" if published else "A, alpha and E"
    if counted < fewest:
        raise NoFitError(
            f"{counted} {'size' if counted == 1 else 'sizes'} of at least {fit_from:.3g} parameters, and a "
            f"fit of {constants} needs {fewest}: add models or lower --fit-from"
        )
    if any(model.final <= 0 for model in large):
        raise NoFitError(
            "a final loss is not positive, and the law describes positive losses: choose another --metric"
        )
    if not published:
        # Within 1%: logs of a run may end a few steps apart.
        if max(model.tokens for model in models) > 1.01 * min(model.tokens for model in models):
            raise NoFitError(
                "the models saw different numbers of tokens and the published token term does not hold for "
                "this metric: give models with equal tokens, or a loss in nats per token"
            )
        return
    for model in large:
        floor = PUBLISHED_B / model.tokens**PUBLISHED_BETA + PUBLISHED_E
        if model.final <= floor:
            raise NoFitError(
                f"the final loss of {model.name}, {model.final:.4g}, is not above the published "
                f"B / T^beta + E = {floor:.4g}, which so does not hold for this text: choose another --metric"
            )


def _curve(places: Array, term: Array, constants: Array, *, published: bool) -> Array:
    floor = PUBLISHED_E if published else math.exp(constants[2])
    return numpy.exp(constants[0] - constants[1] * places) + term + floor


def _solve(places: Array, term: Array, logs: Array, *, published: bool, start: Array | None) -> Array:
    """log of A / centre^alpha, alpha and, where it is free, log E."""
    from scipy.optimize import least_squares

    def misses(constants: Array) -> Array:
        return numpy.log(_curve(places, term, constants, published=published)) - logs

    def slopes(constants: Array) -> Array:
        power = numpy.exp(constants[0] - constants[1] * places)
        columns = [power, -places * power] + (
            [] if published else [numpy.full_like(places, math.exp(constants[2]))]
        )
        return numpy.stack(columns, axis=1) / _curve(places, term, constants, published=published)[:, None]

    losses = numpy.exp(logs)
    # E between none of the loss and all of it, alpha between flat and steep: some start is near the optimum.
    shares = (1.0,) if published else (0.05, 0.5, 0.9)
    starts = [start] if start is not None else []
    for share in shares if start is None else ():
        floor = PUBLISHED_E + term if published else share * losses.min()
        rest = numpy.log(numpy.maximum(losses - floor, 1e-6))
        slope, height = numpy.polyfit(places, rest, 1)
        starts.append(numpy.array([height, -slope] if published else [height, -slope, math.log(floor)]))
    # E of a free fit can run to 0, that is log E to minus infinity, where nothing changes any more.
    low, high = [-20.0, -5.0, -12.0], [20.0, 5.0, 5.0]
    bounds = (low[: len(starts[0])], high[: len(starts[0])])
    # A resample needs no more digits than its noise leaves it.
    digits = 1e-10 if start is None else 1e-5
    found = [
        least_squares(
            misses,
            numpy.clip(guess, *bounds),
            jac=slopes,
            bounds=bounds,
            loss="huber",
            f_scale=HUBER,
            x_scale="jac",
            ftol=digits,
            xtol=digits,
            gtol=digits,
            max_nfev=1000 if start is None else 60,
        )
        for guess in starts
    ]
    return min(found, key=lambda result: float(result.cost)).x


def _constants(found: Array, centre: float, *, published: bool) -> tuple[float, float, float]:
    """A, alpha and E."""
    E = PUBLISHED_E if published else math.exp(found[2])
    return math.exp(min(found[0] + found[1] * math.log(centre), 700.0)), float(found[1]), E
