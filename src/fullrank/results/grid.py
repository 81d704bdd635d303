"""The record of a study that trains: what was stated before it ran, every run, and what the rule decides.

A run is small here: its curve, its monitors and its end. Losses are nats per token of validation text.
Effects are too, unless an answer says another unit.
"""

from __future__ import annotations

import dataclasses
import typing

from fullrank.results.estimate import Estimate
from fullrank.results.files import Provenance

NATS = "nats per token"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statement:
    """What stands in a study's file before anything is run."""

    question: str
    hypothesis: str
    comparison: str
    """What is held against what."""
    smallest: float
    """The smallest effect of interest."""
    rule: str
    """What decides."""
    unit: str = NATS
    """Of the smallest effect."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One evaluation of a run."""

    step: int
    tokens: int
    loss: float
    standard_error: float
    monitors: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridRun:
    """One training."""

    name: str
    factors: dict[str, str]
    """What tables are made over: width, head, rate, ..."""
    seed: int
    settings: tuple[str, ...]
    """Beyond the recipe, as `--set` takes them."""
    recipe: str
    parameters: int
    tokens: int
    """Trained on."""
    flops: float
    seconds: float
    """Of training, on a device that may have trained others beside."""
    curve: tuple[GridPoint, ...]
    valid: float | None
    """Of the best weights; None where the run failed."""
    test: float | None
    last: float | None
    """Validation loss at the end of training, which is above `valid` where a curve has turned."""
    failure: str
    after_looking: bool
    """Whether the study's file was changed when results were known already."""
    made: Provenance
    per_byte: float | None = None
    """Test loss of the best weights in nats per byte of text, which compares vocabularies; None where the
    bytes are not known."""
    text: str = ""
    """The name of what it read, in a study over several texts."""
    data: str = ""
    """The digest of its tokens; empty where a record is older than this field."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridAnswer:
    """One comparison that the rule decides."""

    label: str
    effect: Estimate | None
    """Of losses below zero where the first is better; None where runs are missing."""
    seeds: int
    seen: float
    """The smallest effect that so many seeds would have told from zero four times in five; inf for one."""
    decision: str
    sentence: str
    unit: str = NATS
    """Of the effect and of what would have been seen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """A study."""

    kind: typing.ClassVar[str] = "grid"
    version: typing.ClassVar[int] = 1

    name: str
    statement: Statement
    declared: str
    """SHA-256 of the study's file when its first run began."""
    small: bool
    """Whether this is the small version, which shows that a study runs and decides nothing."""
    runs: tuple[GridRun, ...]
    missing: tuple[str, ...]
    """Runs that the plan has and nobody has made yet."""
    answers: tuple[GridAnswer, ...]
    scale: float = 1.0
    """Of the length of all runs, as --scale had it."""
    settings: tuple[str, ...] = ()
    """Of all runs, as --set had them."""
