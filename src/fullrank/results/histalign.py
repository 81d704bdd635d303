"""The record of the study of ambiguous templates: what a memory, its training or a mixture does for them."""

from __future__ import annotations

import dataclasses
import typing

from fullrank.results.estimate import Estimate


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemplateAccuracy:
    """Completions of one kind of prompt by one distribution, by seed."""

    split: str
    """train, one overlap, or no overlap."""
    scores: str
    """full: the model's distribution; memory: that of its memory alone."""
    prompts: int
    """Of each seed."""
    top: dict[str, tuple[float, ...]]
    """Share of prompts with both answers among the k likeliest tokens, by k, one a seed."""
    distracted: tuple[float, ...]
    """Share in which a distractor is likelier than the less likely answer, one a seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextLoss:
    """Nats per token on a kind of tokens."""

    tokens: str
    """text: ordinary text; first: names at their first occurrence; repeated: names that came before; other:
    the rest of the text with names."""
    count: int
    loss: Estimate
    """Mean over the seeds; the interval is over blocks of text and seeds."""
    change: Estimate
    """Against the model that was not trained, token by token; above 0 is worse."""
    by_seed: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemplateMethod:
    """One way to train the same layers."""

    method: str
    """base: not trained; cache: not trained, with a memory; softmax: trained as it is; trime: with a memory,
    by likelihood; histalign: and by the ranking loss, a mean over pairs; histalign_sum: a sum over them, as
    published; mos: with a mixture of softmaxes; histalign_cosine: with cosines of states; *_uncredited:
    answers in a prompt are not credited to the memory."""
    added: int
    """Parameters of the head beside the output matrix."""
    accuracies: tuple[TemplateAccuracy, ...]
    losses: tuple[TextLoss, ...]
    least_rank: tuple[int, ...]
    """Of the log-probabilities over the shift class, on sampled contexts and tokens, one a seed."""
    memory_weight: tuple[float, ...]
    """Learned log weight of the memory, nats, one a seed; empty without a memory."""
    last_loss: tuple[float, ...]
    """Mean loss of the answers over the last epoch, nats, one a seed; empty where nothing is trained."""
    seconds: tuple[float, ...]
    """Processor time of training and judging, one a seed."""
    rate: float | None = None
    """Learning rate of layers and head with the least loss of answers with one overlap; None where nothing
    was trained, or nothing tried."""
    tried: dict[str, float] = dataclasses.field(default_factory=dict)
    """That loss of the first seed by learning rate, nats."""

    def accuracy(self, split: str, scores: str) -> TemplateAccuracy:
        return next(one for one in self.accuracies if one.split == split and one.scores == scores)

    def loss(self, tokens: str) -> TextLoss:
        return next(one for one in self.losses if one.tokens == tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Templates:
    """The study from end to end."""

    kind: typing.ClassVar[str] = "templates"
    version: typing.ClassVar[int] = 1

    model: str
    fingerprint: str
    """sha256 over configuration, weights and tokenizer."""
    width: int
    vocabulary: int
    layers: int
    """The last so many of the model's layers are trained, with what the head adds; all else is frozen."""
    trained: int
    """Parameters of these layers."""
    seeds: tuple[int, ...]
    """Each draws its own split of the word pairs, prompts, order and start of the head."""
    epochs: int
    steps: int
    batch: int
    """Prompts a step."""
    text_tokens: int
    """Tokens of ordinary text a step, beside the prompts; none where `as_published`."""
    rates: dict[str, float]
    """Learning rates at their highest."""
    margin: float
    align: float
    """Weight of the ranking loss."""
    as_published: bool
    """Whether the answers alone were trained on, with a memory whose weight is fixed."""
    temperature: float
    """Of the memory."""
    memory_start: float
    """Log weight of the memory before training, nats."""
    text: tuple[str, ...]
    text_sha256: str
    window: int
    """Tokens of a window of text, the longest memory."""
    rank_contexts: int
    rank_tokens: int
    """Size of the sample for the rank, which is its ceiling."""
    methods: tuple[TemplateMethod, ...]
    notes: tuple[str, ...]
