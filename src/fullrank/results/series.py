"""The record of a series: metrics of models over training, and whether their curves turned."""

from __future__ import annotations

import dataclasses
import typing

from fullrank.results.diagnosis import Estimate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric of one model over training."""

    model: str
    shots: int | None
    """In-context examples of an evaluation; None where that has no meaning."""
    metric: str
    unit: str
    lower_is_better: bool
    steps: tuple[int, ...]
    values: tuple[float, ...]
    standard_errors: tuple[float, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saturation:
    """Whether one curve turned before its end."""

    model: str
    shots: int | None
    metric: str
    saturated: bool
    best_step: int
    best_value: float
    final_step: int
    final_value: float
    lost_percent: float
    """Of the best value, from the best point to the end; 0 where the end is the best."""
    interval: tuple[float, ...]
    """95% interval of lost_percent."""
    p_value: float
    """Of a curve that never turned showing a rise this large, given the noise."""
    noise_origin: str
    """In words: standard errors, scatter around the trend, or both."""


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
    A: Estimate
    alpha: Estimate
    B: float
    beta: float
    E: float
    fixed: tuple[str, ...]
    """Constants that were taken as published rather than fitted."""
    points: tuple[ScalingPoint, ...]
    note: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """Everything `fullrank series` found."""

    kind: typing.ClassVar[str] = "series"
    version: typing.ClassVar[int] = 1

    source: str
    curves: tuple[Curve, ...]
    saturation: tuple[Saturation, ...]
    scaling: Scaling | None
    scaling_reason: str
    """Why there is no scaling fit; "" where there is one."""
    controls: tuple[str, ...]
    """Sentences on models that differ in one thing only, such as batch size, where there are such pairs."""
