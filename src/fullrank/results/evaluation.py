"""The record of an evaluation: how well a trained run predicts a split, by one method or several."""

from __future__ import annotations

import dataclasses
import typing


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrequencyBin:
    """The predicted tokens whose type occurs low <= count < high times in the training split."""

    low: int
    high: int | None
    """None is no upper end."""
    counted: int
    """Predicted tokens in the bin."""
    loss: float
    """Mean nats per token; nan where the bin is empty."""
    standard_error: float
    """Of that mean, over contiguous blocks of text; inf where fewer than two blocks hold such a token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """One method on the split."""

    method: str
    """plain, dynamic (weights follow the text) or cache (recent states vote)."""
    settings: dict[str, float]
    """Of the method, by name; empty for plain."""
    tuned: bool
    """Whether the settings were chosen on the validation split."""
    loss: float
    """Nats per token."""
    standard_error: float
    """Of the loss, over contiguous blocks of text."""
    perplexity: float
    bits_per_byte: float
    """Total nats / ln 2 / bytes of the text; nan where its bytes are not known."""
    counted: int
    """Tokens predicted, each once."""
    seconds: float
    frequency: tuple[FrequencyBin, ...]
    """Where the loss comes from: rare words to common ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One metric of a task of lm-evaluation-harness."""

    task: str
    metric: str
    value: float
    standard_error: float
    """As the harness has it; nan where it has none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Everything `fullrank eval` found."""

    kind: typing.ClassVar[str] = "evaluation"
    version: typing.ClassVar[int] = 1

    run: str
    """The run directory, as it was given."""
    recipe: str
    head: str
    checkpoint: str
    """best, last or a step, as it was asked for."""
    step: int
    """Training steps of the weights."""
    split: str
    tokens: int
    """Of the split; fewer were counted where a limit was set."""
    context: int | None
    """The most tokens that one prediction sees; None for a recurrent body."""
    length: int
    """Tokens of a batch's rows: of a transformer, the window."""
    stride: int
    """Tokens from one window to the next; equal to length where windows do not overlap."""
    batch: int
    scores: tuple[Score, ...]
    """One a method, plain first; none where only tasks were asked for."""
    tasks: tuple[TaskScore, ...] = ()
