"""The contract of a head: hidden states in, normalised log-probabilities or a loss out.

    head(hidden)            [..., V] log-probabilities, fp32, normalised: log_softmax leaves them as they are
    head(hidden, targets)   the loss in nats, without an N x V tensor

`hidden` is [..., H], or for a head that reads several layers (`head.states` > 1) a sequence of as many
tensors with the same leading shape, the last layer first. Call a head through forward only, so that sharded
and adapted weights are in place.

Nearly every head is a `RowHead`: it makes K rows of width D a token and a log prior over them, and the rest
is `ops.mixture_nll` over one matrix, `head.decoder.weight` [V, D].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads.record import MixtureRecord, describe_mixture
from fullrank.ops import (
    IDENTITY,
    Pointwise,
    Softcap,
    TokenStats,
    mixture_argmax,
    mixture_log_probs,
    mixture_nll,
    row_scores,
)
from fullrank.ops.arguments import check_reduction

States = Tensor | Sequence[Tensor]

# Log-probabilities that a decoding method may hold at once, in bytes.
DECODING_BYTES = 256 << 20


def require_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise FullrankError(f"{name}={size!r} is impossible: expected a whole number >= 1")


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Targets, and how they count: as in `ops.mixture_nll`."""

    targets: Tensor
    """[...], one a hidden state."""
    reduction: str
    token_weight: Tensor | None
    """In the shape of the targets."""
    ignore_index: int
    stats: bool
    """Whether per-token statistics are asked for."""


class Head(nn.Module, ABC):
    """A map from hidden states to a distribution over V tokens through one matrix W [V, D]."""

    name: ClassVar[str]
    needs_context: ClassVar[bool] = False
    """Whether forward needs the ids that the states were computed from (a pointer does)."""
    reads_time: bool = False
    """Whether a token's distribution depends on the states of earlier tokens as well, so that forward must be
    given them all."""
    carries_memory: bool = False
    """Whether forward takes `memory` in place of the states of earlier tokens (a cache does)."""
    fixed_vocabulary: ClassVar[bool] = False
    """Whether the head has parameters for single tokens beside W and its bias."""
    softcap: float | None = None
    """Where set, the scores z are bent to c tanh(z / c); see `cap_scores`."""

    def __init__(self, *, hidden: int, vocab: int, width: int | None = None, bias: bool = False) -> None:
        super().__init__()
        width = hidden if width is None else width
        require_positive(hidden=hidden, vocab=vocab, width=width)
        self.hidden, self.vocab, self.width = hidden, vocab, width
        self.state_widths: tuple[int, ...] = (hidden,)
        """Width of each state that forward expects, the last layer first."""
        self.decoder = nn.Linear(width, vocab, bias=bias)
        nn.init.normal_(self.decoder.weight, std=0.02)
        if bias:
            nn.init.zeros_(self.decoder.bias)

    @property
    def states(self) -> int:
        return len(self.state_widths)

    @property
    def pointwise(self) -> Pointwise:
        """The function that bends the scores; override it for one of the head's own."""
        return IDENTITY if self.softcap is None else Softcap(self.softcap)

    def cap_scores(self, cap: float) -> None:
        """Bend every score by cap * tanh(score / cap), as some models do with their logits."""
        if type(self).pointwise is not Head.pointwise:
            raise FullrankError(
                f"{self.name} bends its scores already and cannot cap them at {cap}: take a head that leaves "
                "them straight, such as softmax or mos"
            )
        Softcap(cap)  # refuses what is no cap
        self.softcap = cap

    def replace_decoder(self, decoder: nn.Linear) -> None:
        """Take another matrix of the same width, for as many tokens as it has rows."""
        rows, width = decoder.weight.shape
        if width != self.width or (self.fixed_vocabulary and rows != self.vocab):
            raise FullrankError(
                f"a matrix of shape {[rows, width]} cannot replace W of shape {[self.vocab, self.width]} in "
                f"{self.name}: build the head anew for it"
            )
        self.decoder, self.vocab = decoder, rows

    def tie(self, embedding: nn.Embedding | nn.Parameter) -> None:
        """Share W with an input embedding of the same shape."""
        weight = embedding.weight if isinstance(embedding, nn.Embedding) else embedding
        if weight.shape != self.decoder.weight.shape:
            raise FullrankError(
                f"an embedding of shape {list(weight.shape)} cannot be tied to W of shape "
                f"{list(self.decoder.weight.shape)}: build the head with width={weight.shape[-1]} and "
                f"vocab={weight.shape[0]}"
            )
        self.decoder.weight = cast(nn.Parameter, weight)

    def forward(
        self,
        hidden: States,
        targets: Tensor | None = None,
        *,
        context: Tensor | None = None,
        reduction: str = "mean",
        token_weight: Tensor | None = None,
        ignore_index: int = -100,
        return_stats: bool = False,
    ) -> Tensor | tuple[Tensor, TokenStats]:
        """Log-probabilities [..., V] without targets; with targets [...] the loss, as `mixture_nll` has it.

        `context` [...] are the input ids under the states, for a head with `needs_context`; others ignore it.
        """
        states = self._checked(hidden, targets, context)
        if targets is None:
            return self._log_probs(states, context)
        # Before anything is flattened: [time, batch] weights would fit [batch, time] targets by number.
        check_reduction(targets, reduction, token_weight)
        labels = Labels(
            targets=targets,
            reduction=reduction,
            token_weight=token_weight,
            ignore_index=ignore_index,
            stats=return_stats,
        )
        loss, stats = self._loss(states, labels, context)
        if stats is None:
            return loss
        return loss, TokenStats(*(column.view(targets.shape) for column in stats))

    @abstractmethod
    def _log_probs(self, states: list[Tensor], context: Tensor | None) -> Tensor:
        """Normalised log-probabilities [..., V]."""

    @abstractmethod
    def _loss(
        self, states: list[Tensor], labels: Labels, context: Tensor | None
    ) -> tuple[Tensor, TokenStats | None]:
        """The loss and, if asked, flat per-token statistics."""

    @torch.no_grad()
    def sample(
        self, hidden: States, *, context: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """One exact draw a token at temperature 1, [...]."""
        states = self._checked(hidden, None, context)
        log_probs = self._log_probs(states, context)
        flat = torch.multinomial(log_probs.flatten(0, -2).exp(), 1, generator=generator)
        return flat.view(log_probs.shape[:-1])

    @torch.no_grad()
    def top(self, hidden: States, m: int, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The m most probable tokens of the whole distribution: log-probabilities and ids, [..., m] each."""
        states = self._checked(hidden, None, context)
        self._check_top(m)
        return torch.topk(self._log_probs(states, context), m, dim=-1)

    def _check_top(self, m: int) -> None:
        if not isinstance(m, int) or not 1 <= m <= self.vocab:
            raise FullrankError(f"top got m={m!r}, expected a whole number with 1 <= m <= V={self.vocab}")

    def _checked(self, hidden: States, targets: Tensor | None, context: Tensor | None) -> list[Tensor]:
        states = [hidden] if isinstance(hidden, Tensor) else list(hidden)
        if len(states) != self.states:
            raise FullrankError(
                f"{self.name} got {len(states)} hidden states, expected {self.states} with widths "
                f"{list(self.state_widths)}, the last layer first"
            )
        for state, width in zip(states, self.state_widths, strict=True):
            if state.ndim < 2 or state.shape[-1] != width or state.shape[:-1] != states[0].shape[:-1]:
                raise FullrankError(
                    f"{self.name} got hidden states of shapes {[list(item.shape) for item in states]}, "
                    f"expected [..., width] with one leading shape and widths {list(self.state_widths)}"
                )
        shape = states[0].shape[:-1]
        for label, ids in (("targets", targets), ("context", context)):
            if ids is not None and ids.shape != shape:
                raise FullrankError(
                    f"{label} have shape {list(ids.shape)}, expected {list(shape)}, one a hidden state"
                )
        if self.needs_context and context is None:
            raise FullrankError(
                f"{self.name} points at earlier tokens: pass context=input_ids, {list(shape)}"
            )
        return states


class RowHead(Head):
    """A head that is rows, a prior and a pointwise function over one matrix.

    One that has a shorter way to its loss has one to the same loss.
    """

    components: int = 1
    row_skip: float = 0.0
    """Rows with a posterior share of at most this may be left out of the gradients: see `ops.mixture_nll`."""

    @abstractmethod
    def rows(self, states: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Rows [..., K, D] and their log prior [..., K]; None is one component with all the weight."""

    def _flat_rows(self, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        rows, log_prior = self.rows(states)
        rows = rows.flatten(0, -3)
        if log_prior is None:
            return rows, rows.new_zeros(rows.shape[:2], dtype=torch.float32)
        return rows, log_prior.flatten(0, -2)

    def _score(self, rows: Tensor, log_prior: Tensor) -> Tensor:
        """Log-probabilities [N, V] of rows [N, K, D]."""
        decoder = self.decoder
        return mixture_log_probs(rows, log_prior, decoder.weight, bias=decoder.bias, pointwise=self.pointwise)

    def _log_probs(self, states: list[Tensor], context: Tensor | None) -> Tensor:
        return self._score(*self._flat_rows(states)).view(*states[0].shape[:-1], self.vocab)

    def _loss(
        self, states: list[Tensor], labels: Labels, context: Tensor | None
    ) -> tuple[Tensor, TokenStats | None]:
        rows, log_prior = self._flat_rows(states)
        decoder, weight = self.decoder, labels.token_weight
        result = mixture_nll(
            rows, log_prior, decoder.weight, labels.targets.flatten(),
            bias=decoder.bias, pointwise=self.pointwise, reduction=labels.reduction,
            token_weight=None if weight is None else weight.flatten(),
            ignore_index=labels.ignore_index, return_stats=labels.stats, row_skip=self.row_skip,
        )  # type: ignore[call-overload]  # fmt: skip
        loss, stats = result if labels.stats else (result, None)
        return loss.view(labels.targets.shape) if labels.reduction == "none" else loss, stats

    @torch.no_grad()
    def sample(
        self, hidden: States, *, context: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """One exact draw a token at temperature 1: a component from the prior, then a token from it alone."""
        states = self._checked(hidden, None, context)
        rows, log_prior = self._flat_rows(states)
        if self.components > 1:
            which = torch.multinomial(log_prior.exp(), 1, generator=generator)
            rows = rows.gather(1, which[:, :, None].expand(-1, -1, self.width))
        drawn = []
        for piece in rows.split(max(1, DECODING_BYTES // (8 * self.vocab))):
            scores = row_scores(piece[:, 0], self.decoder.weight, self.decoder.bias, self.pointwise)
            # The largest of scores plus Gumbel noise is a draw from their softmax, whatever its normaliser:
            # argmax f - log e with e exponential.
            noise = torch.empty_like(scores).exponential_(generator=generator)
            drawn.append(scores.sub_(noise.log_()).argmax(-1))
        return torch.cat(drawn).view(states[0].shape[:-1])

    @torch.no_grad()
    def top(self, hidden: States, m: int, *, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The m most probable tokens of the mixture: log-probabilities and ids, [..., m] each."""
        states = self._checked(hidden, None, context)
        self._check_top(m)
        rows, log_prior = self._flat_rows(states)
        shape = (*states[0].shape[:-1], m)
        if m == 1:
            decoder = self.decoder
            best = mixture_argmax(
                rows, log_prior, decoder.weight, bias=decoder.bias, pointwise=self.pointwise,
                workspace=DECODING_BYTES,
            )  # fmt: skip
            return best[0].view(shape), best[1].view(shape)
        size = max(1, DECODING_BYTES // (4 * self.vocab))
        values, ids = [], []
        for piece, prior in zip(rows.split(size), log_prior.split(size), strict=True):
            leading = torch.topk(self._score(piece, prior), m, dim=-1)
            values.append(leading.values)
            ids.append(leading.indices)
        return torch.cat(values).view(shape), torch.cat(ids).view(shape)

    @torch.no_grad()
    def describe(self, hidden: States) -> MixtureRecord:
        """How the mixture uses its components on these states."""
        rows, log_prior = self._flat_rows(self._checked(hidden, None, None))
        return describe_mixture(
            rows, log_prior, self.decoder.weight, bias=self.decoder.bias, pointwise=self.pointwise
        )
