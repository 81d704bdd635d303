"""The record of a training run: its settings, curves, monitors and alarms.

Losses are in nats per token. `fullrank.diagnose.monitors.MONITORS` says what each monitor is; one that is a
list stands as NAME/0, NAME/1, and so on.
"""

from __future__ import annotations

import dataclasses
import typing

from fullrank.results.diagnosis import Estimate
from fullrank.results.series import Saturation


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPoint:
    """The mean of the training steps since the point before."""

    step: int
    epoch: float
    tokens: int
    """Seen since the start."""
    loss: float
    """Nats per token, without penalties."""
    lr: float
    gradient_norm: float
    """Before clipping."""
    tokens_per_second: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluation of one split."""

    step: int
    epoch: float
    tokens: int
    """Seen in training."""
    split: str
    """valid or test."""
    loss: float
    standard_error: float
    perplexity: float
    bits_per_byte: float
    counted: int
    """Tokens that were predicted."""
    averaged: bool
    """Whether the weights were those of the average of steps."""
    monitors: dict[str, float]

    def parts(self, name: str) -> tuple[float, ...]:
        """A monitor that is a list; empty where it was not measured."""
        found: list[float] = []
        while f"{name}/{len(found)}" in self.monitors:
            found.append(self.monitors[f"{name}/{len(found)}"])
        return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaisedAlarm:
    """Something that a person should look at."""

    step: int
    kind: str
    """dead_components, collapsed_head, curve_turned or nan."""
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """One run, finished or not."""

    kind: typing.ClassVar[str] = "training"
    version: typing.ClassVar[int] = 2

    name: str
    """Of the run's directory."""
    config: dict[str, str]
    """Every setting by its dotted path, as --set takes it."""
    recipe: str
    head: str
    parameters: int
    vocabulary: int
    data: dict[str, str]
    """What the text was, and how it was cut into tokens and splits."""
    device: str
    processes: int
    points: tuple[TrainingPoint, ...]
    evaluations: tuple[Evaluation, ...]
    """Of both splits, by step; one a step and split."""
    alarms: tuple[RaisedAlarm, ...]
    valid: Estimate | None
    """The validation loss of the best weights where the run has finished, else the last one, with the 95%
    interval of its standard error."""
    test: Estimate | None
    """The test loss, likewise."""
    reason: str
    """How it ended: finished, stopped, nan; "" where the log has no end."""
    steps: int
    """The last step in the log."""
    planned: int
    """Steps that it was to make; 0 where the log does not say."""
    starts: int
    """1, and one more for every time that it was resumed."""
    seconds: float
    """From every start to the last line before the next."""
    seconds_training: float
    """Of those, without evaluations and monitors."""
    monitor_share: float
    """Of those, the share that monitors took; nan where there was no time."""
    saturation: Saturation | None
    """Whether the validation loss turned; None where that was not tested."""
    flops_per_token: float = 0.0
    """Of training, by formula; 0 where the log does not say."""
    unmeasured: dict[str, str] = dataclasses.field(default_factory=dict)
    """Families of monitors that this model cannot have, each with the reason."""

    def validation(self) -> tuple[Evaluation, ...]:
        return tuple(one for one in self.evaluations if one.split == "valid")

    def best(self) -> Evaluation | None:
        """The evaluation of the lowest validation loss."""
        finite = [one for one in self.validation() if one.loss == one.loss]
        return min(finite, key=lambda one: one.loss, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainings:
    """Several runs side by side."""

    kind: typing.ClassVar[str] = "trainings"
    version: typing.ClassVar[int] = 2

    runs: tuple[Training, ...]
