"""A scaling law over final checkpoints, and how far each model ends above it.

    L(N, T) = A / N^alpha + B / T^beta + E          N parameters, T training tokens, L nats per token

Godey et al. (2024, arXiv:2404.07647) take B = 410.7, beta = 0.28 and E = 1.69 from Hoffmann et al. (2022,
arXiv:2203.15556), fit A and alpha on Pythia models from 410M parameters on (A = 119.09, alpha = 0.246 on the
Pile), and find that smaller models end about 8% above the extrapolation. Here log L is fitted by least
squares over the final checkpoints of the models that are large enough. The published constants belong to the
loss of web text in nats per token and are used only where they are asked for. Otherwise all models must have
seen the same number of tokens, the term in T becomes part of E, and A, alpha and E are all fitted. Of a
perplexity the logarithm is fitted.

Models scatter around any law, by their seeds, data and settings. With s² the residual sum of squares over its
n - p degrees of freedom and J the derivatives of log L by the constants, one more model of size N lies within

    log L(N) ± t s sqrt(1 + j (J'J)^-1 j')          t: Student's quantile on n - p degrees

where the fit is as good as linear. Fewer than two degrees of freedom are refused: with one, t is 12.7.
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
FEWEST_FREEDOM = 2
"""Models beyond the number of constants."""

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
) -> Scaling:
    """Fit the law; `published` says whether B, beta and E are taken as published. Raises NoFitError."""
    from scipy import stats

    models = sorted(models, key=lambda model: (model.parameters, model.name))
    chosen = numpy.array([model.parameters >= fit_from for model in models])
    _check(models, chosen, published=published, fit_from=fit_from)
    sizes = numpy.array([model.parameters for model in models])
    tokens = numpy.array([model.tokens for model in models])
    final = numpy.array([model.final for model in models])
    term = PUBLISHED_B / tokens**PUBLISHED_BETA if published else numpy.zeros(len(models))
    # Parameters in units of their geometric mean: log A and alpha are then nearly uncorrelated.
    centre = float(numpy.exp(numpy.log(sizes[chosen]).mean()))
    places = numpy.log(sizes / centre)
    best = _solve(places[chosen], term[chosen], numpy.log(final[chosen]), published=published)
    fitted = _curve(places, term, best, published=published)
    slopes = _slopes(places, term, best, published=published)
    residuals = numpy.log(final[chosen] / fitted[chosen])
    freedom = int(chosen.sum()) - len(best)
    variance = float((residuals**2).sum()) / freedom
    covariance = variance * numpy.linalg.pinv(slopes[chosen].T @ slopes[chosen])
    quantile = float(stats.t.ppf(0.975, freedom))
    reach = quantile * numpy.sqrt(variance + ((slopes @ covariance) * slopes).sum(axis=1))

    def around(value: float, row: Array) -> Estimate:
        """A linear function of the constants."""
        error = quantile * math.sqrt(float(row @ covariance @ row))
        return Estimate(value=value, low=value - error, high=value + error)

    def gap(loss: float, column: int) -> Estimate:
        low, value, high = (
            100 * (loss / (fitted[column] * math.exp(sign * reach[column])) - 1) for sign in (1, 0, -1)
        )
        return Estimate(value=value, low=low, high=high)

    A, alpha, E = _constants(best, centre, published=published)
    sentences = [*notes]
    if published:
        sentences.append("B, beta and E are those of Hoffmann et al. for web text in nats per token")
    else:
        sentences.append("E was fitted and holds the token term")
    sentences.append(
        f"models scatter around the law by {100 * math.sqrt(variance):.2g}%, on {freedom} degrees of "
        "freedom; intervals are where one more model would lie"
    )
    unit_rows = numpy.eye(len(best))
    log_a = around(math.log(A), unit_rows[0] + math.log(centre) * unit_rows[1])
    return Scaling(
        metric=metric,
        unit=unit,
        shots=shots,
        A=_exponential(log_a),
        alpha=around(alpha, unit_rows[1]),
        B=PUBLISHED_B if published else None,
        beta=PUBLISHED_BETA if published else None,
        E=Estimate(value=E, low=E, high=E) if published else _exponential(around(math.log(E), unit_rows[2])),
        fixed=("B", "beta", "E") if published else (),
        fit_from=fit_from,
        points=tuple(
            ScalingPoint(
                model=model.name,
                parameters=model.parameters,
                tokens=model.tokens,
                final=model.final,
                best=model.best,
                predicted=_exponential(
                    Estimate(
                        value=math.log(fitted[column]),
                        low=math.log(fitted[column]) - reach[column],
                        high=math.log(fitted[column]) + reach[column],
                    )
                ),
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
    free = 2 if published else 3
    constants = "A and alpha" if published else "A, alpha and E"
    sizes = len({model.parameters for model in large})
    if len(large) < free + FEWEST_FREEDOM or sizes < free:
        raise NoFitError(
            f"{len(large)} {'model' if len(large) == 1 else 'models'} of {sizes} "
            f"{'size' if sizes == 1 else 'sizes'} of at least {fit_from:.3g} parameters, and a fit of "
            f"{constants} with an interval needs {free + FEWEST_FREEDOM}: add models or lower --fit-from"
        )
    if any(model.final <= 0 for model in large):
        raise NoFitError(
            "a final loss is not positive, and the law describes positive losses: choose another --metric"
        )
    if not published:
        # Within 1%: logs of a run may end a few steps apart.
        if max(model.tokens for model in models) > 1.01 * min(model.tokens for model in models):
            raise NoFitError(
                "the models saw different numbers of tokens and E holds the token term: give models with "
                "equal tokens or, for the loss of web text in nats per token, pass --web-text"
            )
        return
    for model in large:
        floor = PUBLISHED_B / model.tokens**PUBLISHED_BETA + PUBLISHED_E
        if model.final <= floor:
            raise NoFitError(
                f"the final loss of {model.name}, {model.final:.4g}, is not above the published "
                f"B / T^beta + E = {floor:.4g}, which so does not hold for this text: leave out --web-text"
            )


def _curve(places: Array, term: Array, constants: Array, *, published: bool) -> Array:
    floor = PUBLISHED_E if published else math.exp(constants[2])
    return numpy.exp(constants[0] - constants[1] * places) + term + floor


def _slopes(places: Array, term: Array, constants: Array, *, published: bool) -> Array:
    """Derivatives of log L by the constants [models, constants]."""
    power = numpy.exp(constants[0] - constants[1] * places)
    columns = [power, -places * power]
    if not published:
        columns.append(numpy.full_like(places, math.exp(constants[2])))
    return numpy.stack(columns, axis=1) / _curve(places, term, constants, published=published)[:, None]


def _solve(places: Array, term: Array, logs: Array, *, published: bool) -> Array:
    """log of A / centre^alpha, alpha and, where it is free, log E."""
    from scipy.optimize import least_squares

    def misses(constants: Array) -> Array:
        return numpy.log(_curve(places, term, constants, published=published)) - logs

    def slopes(constants: Array) -> Array:
        return _slopes(places, term, constants, published=published)

    losses = numpy.exp(logs)
    starts = []
    # E between none of the loss and all of it, alpha between flat and steep: some start is near the optimum.
    for share in (1.0,) if published else (0.05, 0.5, 0.9):
        floor = PUBLISHED_E + term if published else share * losses.min()
        rest = numpy.log(numpy.maximum(losses - floor, 1e-6))
        slope, height = numpy.polyfit(places, rest, 1)
        starts.append(numpy.array([height, -slope] if published else [height, -slope, math.log(floor)]))
    # E of a free fit can run to 0, that is log E to minus infinity, where nothing changes any more.
    low, high = [-20.0, -5.0, -12.0], [20.0, 5.0, 5.0]
    bounds = (low[: len(starts[0])], high[: len(starts[0])])
    found = [
        least_squares(
            misses,
            numpy.clip(guess, *bounds),
            jac=slopes,
            bounds=bounds,
            x_scale="jac",
            ftol=1e-10,
            xtol=1e-10,
            gtol=1e-10,
            max_nfev=1000,
        )
        for guess in starts
    ]
    return min(found, key=lambda result: float(result.cost)).x


def _exponential(estimate: Estimate) -> Estimate:
    low, value, high = (math.exp(min(end, 700.0)) for end in (estimate.low, estimate.value, estimate.high))
    return Estimate(value=value, low=low, high=high)


def _constants(found: Array, centre: float, *, published: bool) -> tuple[float, float, float]:
    """A, alpha and E."""
    E = PUBLISHED_E if published else math.exp(found[2])
    return math.exp(min(found[0] + found[1] * math.log(centre), 700.0)), float(found[1]), E
