"""The records of an upgrade and of a collapse: what a new output layer cost or bought, in nats per token."""

from __future__ import annotations

import dataclasses
import typing

from fullrank.results.diagnosis import Estimate


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpgradedModel:
    """A model as it came: what was upgraded, or what taught it."""

    name: str
    source: str
    """directory, hub, gguf, bundled, or object."""
    architecture: str
    fingerprint: str
    """sha256 over configuration, weights and tokenizer."""
    parameters: int
    width: int
    vocabulary: int
    tied: bool
    """Whether its output matrix is the input embedding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preserved:
    """How near the upgraded model is to the original before any training."""

    tokens: int
    kl: Estimate
    """KL(original || upgraded), nats per token."""
    largest: float
    """Largest difference of a log-probability of any token, nats."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingText:
    """What the heads were trained and judged on, in three parts of whole windows."""

    sources: tuple[str, ...]
    sha256: str
    window: int
    """Tokens a window, the longest context."""
    fit_tokens: int
    """Trained on."""
    choose_tokens: int
    """Learning rates, stopping points and heads were chosen on them."""
    held_out_tokens: int
    """Judged on, and looked at for nothing else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distance:
    """KL(teacher || head) of one head on the held-out text, nats per token."""

    before: Estimate
    """Before training."""
    before_error: float
    """Its standard error over blocks of text."""
    after: Estimate
    """Mean over the seeds; the interval is over blocks of text and seeds."""
    after_error: float
    """Standard error over blocks of text of the mean over seeds."""
    after_by_seed: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedHead:
    """One output layer after its training, over several seeds."""

    head: str
    """`softmax` is the original head, `softmax_equal` one with as many parameters as the upgraded."""
    parameters: int
    """Of the head without its matrix."""
    trained: int
    """Parameters that were trained, rows of the matrix included."""
    before: Estimate
    """Nats per token on the held-out text before training."""
    before_error: float
    """Its standard error over blocks of text."""
    after: Estimate
    """And after, mean over the seeds; the interval is over blocks of text and seeds."""
    after_error: float
    """Standard error over blocks of text of the mean over seeds."""
    choose_loss: float
    """Mean over the seeds on the text for choosing, normaliser estimated where rows were sampled; with a
    teacher KL from it."""
    after_by_seed: tuple[float, ...]
    rate: float
    """Learning rate: of the body where it was trained, else a pace relative to the width."""
    steps: tuple[int, ...]
    """At the stopping point of each seed."""
    seconds: float
    distance: Distance | None = None
    """From the teacher; None without one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A head that `--head auto` tried on a small budget."""

    head: str
    choose_loss: float
    """Nats per token on the text for choosing; with a teacher KL from it."""
    control_loss: float
    """The same of the better of its controls after the same training."""
    seconds: float
    reason: str
    """Why it was not tried; "" where it was."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teaching:
    """The model that heads and controls were trained to say the same as."""

    model: UpgradedModel
    loss: Estimate
    """Its own held-out nats per token."""
    control: str
    """The control that came nearest to it on the held-out text."""
    gain: Estimate
    """That control's KL from the teacher minus the upgraded head's, nats per token, paired by token, over
    blocks and seeds."""
    gain_by_seed: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpgradeTraining:
    """Training of the head on the states of the frozen body, or of the whole model."""

    text: TrainingText
    unfrozen: bool
    """Whether the body was trained with the head."""
    rows: int
    """Rows of the output matrix that were trained."""
    exact: bool
    """Whether the loss in training was over the whole vocabulary; held-out losses always are."""
    seeds: int
    fits: tuple[TrainedHead, ...]
    """The controls, then the upgraded head."""
    control: str
    """The better control on the held-out text."""
    gain: Estimate
    """Of the upgraded head over that control, nats per token, paired by token, over blocks and seeds."""
    gain_by_seed: tuple[float, ...]
    saved_seed: int
    """The seed whose weights were saved, chosen on the text for choosing."""
    saved_loss: float
    """Held-out nats per token of those weights."""
    untied: bool
    """Whether the output matrix had to leave the input embedding in order to be trained."""
    candidates: tuple[Candidate, ...]
    """What `--head auto` tried; none where a head was named."""
    seconds: float
    teacher: Teaching | None = None
    """None where heads were trained on the text alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Upgrade:
    """Everything `fullrank upgrade` found."""

    kind: typing.ClassVar[str] = "upgrade"
    version: typing.ClassVar[int] = 1

    model: UpgradedModel
    asked: str
    """The head that was asked for: a name, or auto."""
    head: str
    """The head that the model got, or, where none was worth it, the best that was tried."""
    options: dict[str, str]
    """Of the head, as words."""
    parameters: int
    """Of the upgraded model."""
    preserved: Preserved | None
    """None where no text was run."""
    training: UpgradeTraining | None
    saved: bool
    """Whether a model was written: not where auto found none worth it."""
    verdict: str
    """One sentence."""
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collapse:
    """Everything `fullrank collapse` found: the closest plain softmax head to an upgraded one."""

    kind: typing.ClassVar[str] = "collapse"
    version: typing.ClassVar[int] = 1

    model: str
    head: str
    """Of the upgraded model."""
    architecture: str
    """Class of transformers that the plain model loads as."""
    text: TrainingText
    rows: int
    """Rows of the output matrix that were fitted; a square map that all rows share was fitted as well."""
    start: Estimate
    """KL(upgraded || softmax) on the held-out text with the upgraded head's own matrix, nats per token."""
    cost: Estimate
    """The same after fitting: what the collapse costs."""
    upgraded_loss: Estimate
    """Held-out nats per token of the upgraded model."""
    plain_loss: Estimate
    """And of the plain one."""
    steps: int
    seconds: float
    notes: tuple[str, ...]
    base_model: str = ""
    """Hub name of the upgraded model, or of the one that was upgraded; "" where neither has one."""
