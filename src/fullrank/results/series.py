"""The record of a series: metrics of models over training, and whether their curves turned."""

from __future__ import annotations

import dataclasses
import typing

from fullrank.results.diagnosis import Estimate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric of one model over training, by rising step, one value a step, all finite."""

    model: str
    shots: int | None
    """In-context examples of an evaluation; None where that has no meaning."""
    metric: str
    unit: str
    lower_is_better: bool | None
    """None where neither direction is better, as for an effective rank."""
    steps: tuple[int, ...]
    values: tuple[float, ...]
    standard_errors: tuple[float, ...] | None
    """None where there are none; where a single one is missing, the median of the others stands for it."""
    dropped: int
    """Values left out because they were not finite, or not positive where a logarithm is needed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saturation:
    """Whether one curve turned before its end."""

    model: str
    shots: int | None
    metric: str
    saturated: bool
    """p_value below the series' level, and a loss of at least its material_percent."""
    best_step: int
    best_value: float
    final_step: int
    final_value: float
    lost_percent: float
    """Of the best value, from the best point to the end; 0 where the end is the best."""
    interval: tuple[float, ...]
    """95% interval of lost_percent; nan where nothing tells how large the noise is."""
    p_value: float
    """Of a curve that never turned showing a rise this clear, given the noise; 1 where too few points."""
    first_step: int
    """The steep early phase is over here: 90% of the improvement, or all but eight points, lie before."""
    points: int
    """That the test used, after pooling where there were very many."""
    noise_percent: float
    """One standard deviation of a point around the trend, of the best value; nan where not known."""
    noise_origin: str
    """In words: standard errors, scatter around the trend, or both."""
    reason: str
    """Why the curve could not be tested; "" where it was."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """One model's final and best loss beside the extrapolation."""

    model: str
    parameters: float
    tokens: float
    final: float
    best: float
    predicted: Estimate
    final_gap_percent: Estimate
    """Final loss over the prediction, minus 1."""
    best_gap_percent: Estimate
    fitted: bool
    """Whether the fit used this model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
    """L(N, T) = A / N^alpha + B / T^beta + E over final checkpoints."""

    metric: str
    unit: str
    shots: int | None
    A: Estimate
    alpha: Estimate
    B: float | None
    """None where all models saw the same number of tokens and E holds the term."""
    beta: float | None
    E: Estimate
    fixed: tuple[str, ...]
    """Constants that were taken as published rather than fitted."""
    fit_from: float
    """Models of at least so many parameters were fitted."""
    points: tuple[ScalingPoint, ...]
    """By rising number of parameters."""
    note: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """Everything `fullrank series` found."""

    kind: typing.ClassVar[str] = "series"
    version: typing.ClassVar[int] = 1

    source: str
    metric: str
    """The primary metric: the one that is tested for saturation and fitted."""
    curves: tuple[Curve, ...]
    saturation: tuple[Saturation, ...]
    """One entry a curve of the primary metric."""
    level: float
    """Of the test: the share of curves that never turned and are called saturated all the same."""
    material_percent: float
    """A smaller loss is not called saturation, however sure it is."""
    scaling: Scaling | None
    scaling_reason: str
    """Why there is no scaling fit; "" where there is one."""
    controls: tuple[str, ...]
    """Sentences on models that differ in one thing only, such as batch size, where there are such pairs."""
    notes: tuple[str, ...]
    """One sentence for everything that was left out, joined or assumed."""
