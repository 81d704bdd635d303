"""What is drawn of a training run beside its loss: one number of every evaluation or training line each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from fullrank.results.training import Evaluation, Training, TrainingPoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantity:
    """One number of every evaluation or training line."""

    title: str
    unit: str
    value: Callable[[Evaluation], float] | None = None
    """Of an evaluation."""
    trained: Callable[[TrainingPoint], float] | None = None
    """Of a training line."""
    alarms: tuple[str, ...] = ()
    """Kinds of alarms that are about it."""
    bounds: Callable[[Training], tuple[tuple[float, str], ...]] = lambda run: ()
    """Values to hold it against, with the style of their lines."""
    count: bool = False
    """Whether it counts things, from 0 on."""
    steep: bool = False
    """Whether it falls so far at the beginning that nothing else would show: then that is cut off."""


def monitor(name: str) -> Callable[[Evaluation], float]:
    return lambda one: one.monitors.get(name, math.nan)


def head_width(run: Training) -> float:
    """D of the head's matrix, as the monitors imply it; nan where they do not."""
    for one in reversed(run.evaluations):
        share = one.monitors.get("head_effective_rank_share", math.nan)
        if share > 0:
            return one.monitors.get("head_effective_rank", math.nan) / share
    return math.nan


def _ranks(run: Training) -> tuple[tuple[float, str], ...]:
    ceilings = [one.monitors.get("logprob_rank_ceiling", math.nan) for one in run.evaluations]
    finite = [value for value in ceilings if math.isfinite(value)]
    return ((finite[-1] if finite else math.nan, "dashed"), (head_width(run), "dotted"))


def _most_sensitive(run: Training) -> tuple[tuple[float, str], ...]:
    """What no softmax exceeds, 1 / (2 T); nothing of other normalisers."""
    if run.config.get("body.normaliser", "softmax") != "softmax":
        return ()
    try:
        return ((0.5 / float(run.config.get("body.attention_temperature", "1")), "dashed"),)
    except (ValueError, ZeroDivisionError):
        return ()


PROGRESS = (
    Quantity(
        title="perplexity", unit="validation", value=lambda one: one.perplexity, alarms=("curve_turned",),
        steep=True,
    ),
    Quantity(title="bits per byte", unit="validation", value=lambda one: one.bits_per_byte, steep=True),
    Quantity(title="training loss", unit="nats per token", trained=lambda one: one.loss, steep=True),
    Quantity(title="learning rate", unit="", trained=lambda one: one.lr),
    Quantity(title="gradient norm", unit="before clipping", trained=lambda one: one.gradient_norm),
    Quantity(title="speed", unit="tokens per second", trained=lambda one: one.tokens_per_second),
)  # fmt: skip
GEOMETRY = (
    Quantity(
        title="effective rank of W", unit="of the width", value=monitor("head_effective_rank_share"),
        alarms=("collapsed_head",),
    ),
    Quantity(title="singular entropy of W", unit="nats", value=monitor("head_singular_entropy")),
    Quantity(title="condition of W", unit="largest over smallest", value=monitor("head_condition")),
    Quantity(
        title="rank of log-probabilities", unit="dashed: ceiling, dotted: D", value=monitor("logprob_rank"),
        alarms=("collapsed_head",), bounds=_ranks,
    ),
    Quantity(title="effective rank of the same", unit="dimensions", value=monitor("logprob_effective_rank")),
    Quantity(title="anisotropy", unit="mean cosine of states", value=monitor("anisotropy")),
    Quantity(title="anisotropy, centred", unit="mean cosine", value=monitor("anisotropy_centred")),
    Quantity(title="norm of states", unit="mean", value=monitor("state_norm")),
    Quantity(title="norm of W’s rows", unit="mean", value=monitor("head_weight_norm_mean")),
)  # fmt: skip
MIXTURE = (
    Quantity(
        title="prior entropy", unit="of log K", value=monitor("prior_entropy_share"),
        alarms=("dead_components",),
    ),
    Quantity(title="divergence", unit="nats, of two components", value=monitor("component_divergence")),
    Quantity(
        title="dead components", unit="of K", value=monitor("dead_components"), alarms=("dead_components",),
        count=True,
    ),
)  # fmt: skip
ATTENTION = (
    Quantity(
        title="effective tokens", unit="of a query", value=monitor("attention_effective_tokens"),
    ),
    Quantity(title="first position", unit="weight", value=monitor("attention_first")),
    Quantity(
        title="sensitivity", unit="norm of the Jacobian", value=monitor("attention_sensitivity"),
        bounds=_most_sensitive,
    ),
    Quantity(title="sum of weights", unit="of a query", value=monitor("attention_sum")),
    Quantity(title="weights of zero", unit="of visible positions", value=monitor("attention_zeros")),
)  # fmt: skip
