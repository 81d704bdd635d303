"""The record of `fullrank study attention` of version 0.1: one small transformer with every normaliser.

Losses are in nats per token. Runs of one seed begin with the same weights and see the same batches, so the
difference to softmax is taken seed by seed; its interval is Student's over seeds and says nothing about other
texts, sizes or budgets.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import typing

from fullrank.results.estimate import Estimate

REFERENCE = "softmax"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """What the heads of one layer do after training; means over heads and queries."""

    effective_tokens: float
    """exp of the entropy of the weights as shares of their sum."""
    first_mass: float
    """The weight of the first position."""
    mass: float
    """The sum of a query's weights: 1, but for a sink and for sigmoid."""
    zeros: float
    """The share of visible positions that weigh exactly 0."""
    separable: float
    """Separable share of the top set (docs/attention_theory.md)."""
    separable_random: float
    """The same of a random set."""
    learnt: tuple[float, ...]
    """The learnt parameter of every head; empty where the normaliser has none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionRun:
    """One normaliser, one seed."""

    normaliser: str
    seed: int
    parameters: int
    steps: tuple[int, ...]
    """Of the evaluations while training."""
    losses: tuple[float, ...]
    """Validation loss at each, over fewer tokens than the last one."""
    valid: Estimate | None
    """Validation loss of the best weights, with the 95% interval over tokens; None where the run failed."""
    test: Estimate | None
    seconds: float
    """Of training, without evaluations; of a machine that may have done other things beside."""
    layers: tuple[AttentionLayer, ...]
    failure: str = ""
    """What ended the run before its end; "" where nothing did."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """One normaliser over all seeds that have it and softmax."""

    normaliser: str
    seeds: int
    valid: float
    """Mean over seeds; nan where no seed finished."""
    spread: float
    """Standard deviation over seeds; nan for one seed."""
    test: float
    difference: Estimate | None
    """Validation loss minus that of softmax with the same seed, with the 95% interval of Student's t over
    seeds; None for softmax itself and where fewer than two seeds finished."""
    failed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionStudy:
    """Every normaliser at one budget, over seeds."""

    kind: typing.ClassVar[str] = "attention_study"
    version: typing.ClassVar[int] = 1

    recipe: str
    config: dict[str, str]
    """Every setting that all runs share, by its dotted path."""
    data: dict[str, str]
    vocabulary: int
    context: int
    training_steps: int
    training_tokens: int
    """Seen by each run."""
    evaluated_tokens: int
    """Of the final validation loss."""
    queries: int
    """That every head was measured at, each of which sees more than half of the context."""
    set_size: int
    """Of the sets whose separable share is given."""
    device: str
    runs: tuple[AttentionRun, ...]

    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.normaliser for run in self.runs))

    def of(self, name: str) -> tuple[AttentionRun, ...]:
        return tuple(run for run in self.runs if run.normaliser == name)

    def compared(self) -> tuple[Compared, ...]:
        """One row a normaliser, in the order of the runs."""
        return tuple(self._row(name) for name in self.names())

    def _row(self, name: str) -> Compared:
        runs = self.of(name)
        valid = [run.valid.value for run in runs if run.valid is not None]
        test = [run.test.value for run in runs if run.test is not None]
        beside = {run.seed: run.valid.value for run in self.of(REFERENCE) if run.valid is not None}
        differences = [
            run.valid.value - beside[run.seed] for run in runs if run.valid is not None and run.seed in beside
        ]
        compares = name != REFERENCE and len(differences) > 1
        return Compared(
            normaliser=name,
            seeds=len(valid),
            valid=statistics.fmean(valid) if valid else math.nan,
            spread=statistics.stdev(valid) if len(valid) > 1 else math.nan,
            test=statistics.fmean(test) if test else math.nan,
            difference=_interval(differences) if compares else None,
            failed=len(runs) - len(valid),
        )


def _interval(values: list[float]) -> Estimate:
    from scipy.special import stdtrit

    mean = statistics.fmean(values)
    half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(value=mean, low=mean - half, high=mean + half)
