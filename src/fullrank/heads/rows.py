"""Heads that are rows, a prior and a pointwise function over one matrix: nearly all of them.

    rows [..., K, D], log prior [..., K];   z_k = W row_k + b,   p = sum_k prior_k softmax(f(z_k))

A subclass gives the rows and the prior; the fused loss, log-probabilities, sampling, the most probable
tokens, entropy and divergence from a teacher, and the record come with it. So does W split over processes:
rows are all that it needs of a head.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads.base import Head, States
from fullrank.heads.labels import Labels, Loss
from fullrank.heads.record import MixtureRecord, describe_mixture
from fullrank.ops import (
    Mixture,
    Teacher,
    TopTokens,
    divergence,
    entropy,
    linear_nll,
    mixture_argmax,
    mixture_log_probs,
    mixture_nll,
    row_scores,
    token_logprobs,
)
from fullrank.ops.reduce import mixture_losses, reduce_losses

# Log-probabilities that a decoding method may hold at once, in bytes.
DECODING_BYTES = 256 << 20


class Parts(NamedTuple):
    """What a row head makes of states."""

    rows: Tensor
    """[..., K, D]"""
    log_prior: Tensor
    """[..., K]"""
    gate: Tensor | None
    """[..., K'] the log prior over a mixture's components, as a balance penalty takes it: most often
    `log_prior`, but moc mixes before there is a row. None where the head is no mixture."""


class RowHead(Head):
    """A head that is rows, a prior and a pointwise function over one matrix.

    One that has a shorter way to its loss has one to the same loss.
    """

    components: int = 1
    splits: ClassVar[bool] = True

    @property
    def row_count(self) -> int:
        """K, the rows of a token that are scored."""
        return self.components

    def scored(self) -> int:
        return self.row_count * super().scored()

    @abstractmethod
    def rows(self, states: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Rows [..., K, D] and their log prior [..., K]; None is one component with all the weight."""

    def parts(self, states: list[Tensor]) -> Parts:
        """Rows with a prior where there is one component as well, and what a mixture balances."""
        rows, log_prior = self.rows(states)
        if log_prior is None:
            return Parts(rows, rows.new_zeros(rows.shape[:-1], dtype=torch.float32), None)
        return Parts(rows, log_prior, log_prior if self.mixture else None)

    def flat_parts(self, states: list[Tensor]) -> Parts:
        """The same with one leading axis."""
        rows, log_prior, gate = self.parts(states)
        gate = None if gate is None else gate.flatten(0, -2)
        return Parts(rows.flatten(0, -3), log_prior.flatten(0, -2), gate)

    def _flat_rows(self, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        rows, log_prior, _ = self.flat_parts(states)
        return rows, log_prior

    def _score(self, rows: Tensor, log_prior: Tensor) -> Tensor:
        """Log-probabilities [N, V] of rows [N, K, D]."""
        decoder = self.decoder
        return mixture_log_probs(rows, log_prior, decoder.weight, bias=decoder.bias, pointwise=self.pointwise)

    def _log_probs(self, states: list[Tensor], context: Tensor | None) -> Tensor:
        return self._score(*self._flat_rows(states)).view(*states[0].shape[:-1], self.vocab)

    def _loss(self, states: list[Tensor], labels: Labels, context: Tensor | None) -> Loss:
        rows, log_prior, gate = self.flat_parts(states)
        decoder = self.decoder
        if labels.normaliser:
            return self._loss_and_normaliser(Parts(rows, log_prior, gate), labels)
        result = mixture_nll(
            rows, log_prior, decoder.weight, labels.targets.flatten(),
            bias=decoder.bias, pointwise=self.pointwise, ignore_index=labels.ignore_index,
            return_stats=labels.stats, **reduction_of(labels),
        )  # type: ignore[call-overload]  # fmt: skip
        loss, stats = result if labels.stats else (result, None)
        return Loss(shaped(loss, labels), stats, gate)

    def _loss_and_normaliser(self, parts: Parts, labels: Labels) -> Loss:
        """The loss from single rows, with gradients of the normalisers: four products in place of three."""
        if labels.stats:
            raise FullrankError("statistics and normalisers cannot be asked for in one call: ask for one")
        rows, log_prior, gate = parts
        targets, token_weight = labels.targets.flatten(), labels.token_weight
        if token_weight is not None:
            token_weight = token_weight.flatten()
            # Rows of weight 0 are not scored, and their losses may be infinite.
            targets = targets.masked_fill(token_weight == 0, labels.ignore_index)
        counted = targets != labels.ignore_index
        row_nll, lse = linear_nll(
            rows.flatten(0, 1), self.decoder.weight, targets.repeat_interleave(rows.shape[1]),
            bias=self.decoder.bias, pointwise=self.pointwise, ignore_index=labels.ignore_index,
        )  # fmt: skip
        row_nll, lse = row_nll.view_as(log_prior), lse.view_as(log_prior)
        nll = mixture_losses(log_prior, row_nll, counted)
        # An ignored token may have any prior; its normalisers are 0.
        prior = torch.where(counted[:, None], log_prior, 0.0).exp()
        squared = (prior * lse.square()).sum(dim=-1)
        weight = counted.to(nll.dtype)
        if token_weight is not None:
            weight = torch.where(counted, token_weight.to(nll.dtype), 0.0)
        value = reduce_losses(nll, weight, labels.reduction)
        return Loss(shaped(value, labels), None, gate, reduce_losses(squared, weight, "mean"))

    def distribution(self, hidden: States, *, context: Tensor | None = None) -> Mixture:
        """What the head says of these states, as `ops` take it: another head's teacher."""
        rows, log_prior = self._flat_rows(self._checked(hidden, None, context))
        return Mixture(rows, log_prior, self.decoder.weight, self.decoder.bias, self.pointwise)

    def token_logprobs(
        self, hidden: States, ids: Tensor, *, temperature: float = 1.0, ignore_index: int = -100
    ) -> Tensor:
        """Log-probabilities [..., M] at ids [..., M], or [M] for the same ones at every state, without an
        N x V tensor; `temperature` as in `ops/distil/reference.py`, 0 where an id is ignored."""
        rows, log_prior, weight, bias, pointwise = self.distribution(hidden)
        found = token_logprobs(
            rows, log_prior, weight, ids if ids.ndim == 1 else ids.flatten(0, -2), bias=bias,
            pointwise=pointwise, temperature=temperature, ignore_index=ignore_index,
        )  # fmt: skip
        return found.view(*self._leading(hidden), -1)

    def entropy(
        self, hidden: States, *, temperature: float = 1.0, reduction: str = "mean",
        token_weight: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Entropy in nats, differentiable, without an N x V tensor; reduced as a loss is, "none": [...]."""
        rows, log_prior, weight, bias, pointwise = self.distribution(hidden)
        found = entropy(
            rows, log_prior, weight, bias=bias, pointwise=pointwise, temperature=temperature,
            reduction=reduction, token_weight=None if token_weight is None else token_weight.flatten(),
        )  # fmt: skip
        return found.view(self._leading(hidden)) if reduction == "none" else found

    def divergence(
        self, hidden: States, teacher: Teacher, *, kind: str = "forward", temperature: float = 1.0,
        reduction: str = "mean", token_weight: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """How far the head is from a teacher, in nats, as `ops.divergence` has it: from another head's
        `distribution`, from `Mixture.softmax(states, weight)`, or from `TopTokens` with ids [..., m]."""
        rows, log_prior, weight, bias, pointwise = self.distribution(hidden)
        if isinstance(teacher, TopTokens):
            teacher = TopTokens(*(each.flatten(0, -2) for each in teacher))
        found = divergence(
            rows, log_prior, weight, teacher, kind=kind, bias=bias, pointwise=pointwise,
            temperature=temperature, reduction=reduction,
            token_weight=None if token_weight is None else token_weight.flatten(),
        )  # fmt: skip
        return found.view(self._leading(hidden)) if reduction == "none" else found

    @staticmethod
    def _leading(hidden: States) -> torch.Size:
        return (hidden if isinstance(hidden, Tensor) else hidden[0]).shape[:-1]

    @torch.no_grad()
    def sample(
        self, hidden: States, *, context: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """One exact draw a token at temperature 1: a component from the prior, then a token from it alone."""
        states = self._checked(hidden, None, context)
        rows, log_prior = self._flat_rows(states)
        if rows.shape[1] > 1:
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


def reduction_of(labels: Labels) -> dict[str, Any]:
    """How a fused loss is to reduce."""
    weight = None if labels.token_weight is None else labels.token_weight.flatten()
    return {"reduction": labels.reduction, "token_weight": weight}


def shaped(loss: Tensor, labels: Labels) -> Tensor:
    """The loss as forward gives it: for "none" in the shape of the targets."""
    return loss.view(labels.targets.shape) if labels.reduction == "none" else loss
