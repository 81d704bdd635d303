"""The record of a series: metrics of models over training, and whether their curves turned."""

from __future__ import annotations

import dataclasses
import math
import typing

from fullrank.results.diagnosis import Estimate

TURNED, NOT_TURNED, UNDECIDED = "turned", "not turned", "undecided"
ANSWERS = {TURNED: "yes", NOT_TURNED: "no", UNDECIDED: "undecided"}
"""In the column of a table."""


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
    paired_errors: tuple[float, ...] | None = None
    """Of the difference to the checkpoint before, taken text block by text block (of the first: to the next);
    None where the losses of the blocks are not known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saturation:
    """Whether one curve turned before its end."""

    model: str
    shots: int | None
    metric: str
    outcome: str
    """TURNED, NOT_TURNED or UNDECIDED."""
    best_step: int
    best_value: float
    final_step: int
    final_value: float
    lost_percent: float
    """Of the best value, from the best point to the end; 0 where the end is the best."""
    interval: tuple[float, ...]
    """95% interval of lost_percent; nan where nothing tells how large the noise is."""
    p_value: float
    """Of a curve that never turned showing a rise this clear; 1 where too few points."""
    adjusted_p: float
    """Holm's, over the curves of the call: this is held against the series' level."""
    smallest_rise_percent: float
    """The test finds a rise of this size nine times in ten; infinite where so few points show none, nan where
    there was no test."""
    turned_up_to: float
    """By itself, the curve would be said to have turned if the noise of neighbouring points correlated by no
    more than this; nan where it would not even without correlation."""
    first_step: int
    """Points before belong to the steep beginning, and were left out."""
    points: int
    """That the test used, after pooling where there were very many."""
    noise_percent: float
    """One standard deviation of a point around the trend, of the best value; nan where not known."""
    noise_correlation: float
    """Of neighbouring points, as the test reckons with it; nan where not known."""
    noise_origin: str
    """In words."""
    reason: str
    """Why the curve could not be tested; "" where it was."""

    @property
    def turned(self) -> bool:
        return self.outcome == TURNED

    @property
    def power(self) -> str:
        """What the test would have found, in words."""
        if math.isinf(self.smallest_rise_percent):
            return "its points are too few to show a rise of any size"
        return f"a rise of {self.smallest_rise_percent:.2g}% would have been seen"


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
    version: typing.ClassVar[int] = 2

    source: str
    metric: str
    """The primary metric: the one that is tested for saturation and fitted."""
    curves: tuple[Curve, ...]
    saturation: tuple[Saturation, ...]
    """One entry a curve of the primary metric."""
    level: float
    """Of the test: the chance that any curve of the call that never turned is said to have."""
    material_percent: float
    """A smaller loss is not called saturation, however sure it is."""
    scaling: Scaling | None
    scaling_reason: str
    """Why there is no scaling fit; "" where there is one."""
    controls: tuple[str, ...]
    """Sentences on models that differ in one thing only, such as batch size, where there are such pairs."""
    notes: tuple[str, ...]
    """One sentence for everything that was left out, joined or assumed."""
