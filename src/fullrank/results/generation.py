"""The record of the study of generated texts: which output layer writes what its prompt says."""

from __future__ import annotations

import dataclasses
import typing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A stretch of a text."""

    text: str
    kind: str
    """copied: the prompt says it; invented: it does not, by the task's own measure; plain: all else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedText:
    prompt: str
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationMethod:
    """One output layer, trained as the others are."""

    method: str
    """base: not trained; softmax: trained as it is; trime: with a memory, by likelihood; histalign: and by
    the ranking loss; mos: a mixture of softmaxes; trunk_cache: a shared-trunk mixture with a memory;
    histalign_cosine: HistAlign with cosines of states."""
    added: int
    """Parameters of the head beside the output matrix."""
    rate: float | None
    """Learning rate with the least development loss; None where nothing is trained."""
    tried: dict[str, float]
    """Development loss of the first seed by learning rate, nats per token."""
    losses: tuple[float, ...]
    """Nats per token of people's texts behind the test prompts, one a seed."""
    scores: dict[str, tuple[float, ...]]
    """Of the generated texts, by the name of the measure, one a seed."""
    memory_weight: tuple[float, ...]
    """Learned log weight of the memory, nats, one a seed; empty without a memory."""
    texts: tuple[GeneratedText, ...]
    """Of the first seed."""
    seconds: tuple[float, ...]
    """Processor time of training, generating and judging, one a seed; without the rates that were tried."""
    ordinary: tuple[float, ...] = ()
    """Nats per token of ordinary text, one a seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The study from end to end."""

    kind: typing.ClassVar[str] = "generation"
    version: typing.ClassVar[int] = 1

    task: str
    """restaurants: descriptions of E2E NLG; articles: WikiText-2."""
    model: str
    fingerprint: str
    """sha256 over configuration, weights and tokenizer."""
    data: str
    data_sha256: str
    judge: str
    """The model whose loss is the coherence; "" where there is none."""
    layers: int
    """The last so many of the model's layers are trained, with what the head adds; all else is frozen."""
    trained: int
    """Parameters of these layers."""
    seeds: tuple[int, ...]
    steps: int
    batch: int
    """Texts a step."""
    prompts: int
    new_tokens: int
    """At most so many are generated behind a prompt, greedily."""
    temperature: float
    """Of the memory."""
    memory_start: float
    """Log weight of the memory before training, nats."""
    people: dict[str, float]
    """The same measures of people's own texts, where they have one."""
    methods: tuple[GenerationMethod, ...]
    notes: tuple[str, ...]
    text: tuple[str, ...] = ()
    """Sources of the ordinary text."""
