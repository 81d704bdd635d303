"""The closest plain softmax head to another head.

Over the states h of a text, with p the upgraded head's distribution, find W' and a square map M that minimise

    KL( p || softmax f( W' (h + M h) + b ) )

with f the soft cap where the original has one, and b where the original has a bias. W' starts as the upgraded
head's own matrix and M at 0, or at the map that is nearest to the mixture's mean row, whichever is closer to
p. The result is W = W' (I + M).

As in `training`, the rows of W' that are fitted are those with the largest share of probability. The others'
part of both sums is estimated with rows drawn from p itself: with r the probability of the rest,

    Σ_{v not in S} p_v z_v ≈ r mean_v z_v,      Σ_{v not in S} exp z_v ≈ r mean_v exp( z_v - log p_v )

The KL that is reported is exact, on text that nothing was fitted or chosen on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from fullrank.fit import comparison as fit
from fullrank.fit import estimates, loop, sampling, states
from fullrank.fit.trainee import batch_of
from fullrank.heads import Head
from fullrank.heads.rows import RowHead
from fullrank.ops import IDENTITY, Pointwise
from fullrank.results import Estimate


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Taught:
    """States, and what the upgraded head says of them."""

    hidden: Tensor
    """[N, D]"""
    shares: Tensor
    """[N, S] probabilities of the fitted rows."""
    rest: Tensor
    """[N] log probability of all others."""
    drawn: Tensor
    """[N, m] some of the others, drawn from p."""
    log_probs: Tensor
    """[N, m] their log p."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Closest:
    """A softmax head near another one."""

    weight: Tensor
    """[V, D]"""
    bias: Tensor | None
    rows: int
    start: Estimate
    cost: Estimate
    upgraded_loss: Estimate
    plain_loss: Estimate
    steps: int


def closest(
    head: Head,
    parts: states.Parts,
    *,
    pointwise: Pointwise = IDENTITY,
    bias: bool = False,
    settings: fit.Settings,
    progress: fit.Progress = lambda stage, share: None,
) -> Closest:
    """Fit W, and a bias if there is to be one, to what the head says of the states."""
    head.eval()
    limit = settings.memory // 8
    rows = _rows(head, parts.fit, settings.rows, limit)
    generator = torch.Generator(device=rows.device).manual_seed(settings.seed)
    progress("asking the upgraded head", 0.0)
    taught = _taught(head, parts.fit, rows, sampling.DRAWN, limit, generator)
    progress("asking the upgraded head", 0.7)
    choose = _taught(head, parts.choose, rows, 4 * sampling.DRAWN, limit, generator)
    progress("asking the upgraded head", 1.0)

    def student(start: Tensor | None) -> _Student:
        return _Student(head, rows, pointwise, bias, start, taught, choose)

    begun = min(_starts(head, parts.fit), key=lambda start: student(start).choose_loss())
    plan = loop.Plan(
        rates=settings.rates, epochs=settings.epochs, patience=settings.patience, tolerance=settings.tolerance
    )
    found = loop.fit(
        lambda: student(begun), plan, seed=settings.seed,
        progress=lambda share: progress("fitting softmax", share),
    )  # fmt: skip
    best = student(begun)
    with torch.no_grad():
        for name, parameter in best.trained():
            parameter.copy_(found.weights[name])
    weight, offset = best.folded()
    held_out, blocks = parts.held_out, parts.held_out.blocks.flatten()
    own = student(None)
    start = _judged(head, held_out, *own.folded(), pointwise, limit)[0]
    divergence, upgraded, plain = _judged(head, held_out, weight, offset, pointwise, limit)
    return Closest(
        weight=weight,
        bias=offset,
        rows=len(rows),
        start=estimates.mean(start, blocks),
        cost=estimates.mean(divergence, blocks),
        upgraded_loss=estimates.mean(upgraded, blocks),
        plain_loss=estimates.mean(plain, blocks),
        steps=found.steps,
    )


def _log_probs(head: Head, part: states.Part, limit: int) -> Iterator[tuple[slice, Tensor]]:
    """Windows and the head's log-probabilities [tokens, V] of them, some at a time."""
    count, length = part.targets.shape
    size = max(1, limit // (4 * head.vocab * length))
    for start in range(0, count, size):
        at = slice(start, start + size)
        piece = part.windows(at)
        found = head(list(piece.states[: head.states]), context=piece.ids if head.needs_context else None)
        yield at, cast(Tensor, found).flatten(0, 1).float()


@torch.no_grad()
def _rows(head: Head, part: states.Part, rows: int, limit: int) -> Tensor:
    """Ids, rising: those with the largest mean probability."""
    device = part.targets.device
    if head.vocab <= max(rows, fit.SMALL_VOCABULARY):
        return torch.arange(head.vocab, device=device)
    share = torch.zeros(head.vocab, device=device)
    few = part.windows(slice(None, None, max(1, len(part.targets) // 4)))
    for _, log_probs in _log_probs(head, few, limit):
        share += log_probs.exp().sum(dim=0)
    share += torch.bincount(part.targets.flatten(), minlength=head.vocab)
    return share.topk(rows).indices.sort().values


@torch.no_grad()
def _taught(
    head: Head, part: states.Part, rows: Tensor, count: int, limit: int, generator: torch.Generator
) -> Taught:
    other = torch.ones(head.vocab, dtype=torch.bool, device=rows.device)
    other[rows] = False
    ids = other.nonzero()[:, 0]
    shares, rest, drawn, chosen = [], [], [], []
    for _, log_probs in _log_probs(head, part, limit):
        shares.append(log_probs[:, rows].exp())
        if len(ids):
            tail = log_probs[:, ids]
            total = tail.logsumexp(dim=1)
            sums = (tail - total[:, None]).exp_().cumsum_(dim=1)
            at = torch.rand(len(tail), count, device=rows.device, generator=generator) * sums[:, -1:]
            which = torch.searchsorted(sums, at).clamp_(max=len(ids) - 1)
            rest.append(total)
            drawn.append(ids[which])
            chosen.append(tail.gather(1, which))
        else:
            rest.append(log_probs.new_full((len(log_probs),), -math.inf))
            drawn.append(torch.zeros(len(log_probs), 1, dtype=torch.int64, device=rows.device))
            chosen.append(log_probs.new_zeros(len(log_probs), 1))
    return Taught(
        hidden=part.states[0].flatten(0, 1),
        shares=torch.cat(shares),
        rest=torch.cat(rest),
        drawn=torch.cat(drawn),
        log_probs=torch.cat(chosen),
    )


@torch.no_grad()
def _starts(head: Head, part: states.Part) -> list[Tensor | None]:
    """Maps to begin with: none, and the one that is nearest to the mean row of a mixture."""
    if not isinstance(head, RowHead) or head.components < 2 or head.hidden != head.width:
        return [None]
    flat = [state.flatten(0, 1) for state in part.states[: head.states]]
    rows, log_prior = head.rows(flat)
    if log_prior is None:
        return [None]
    mean = (log_prior.exp().to(rows.dtype)[..., None] * rows).sum(dim=-2).double()
    hidden = flat[0].double()
    square = hidden.T @ hidden
    ridge = 1e-3 * square.diagonal().mean() * torch.eye(len(square), device=square.device)
    return [None, torch.linalg.solve(square + ridge, hidden.T @ (mean - hidden)).T.float()]


class _Student(nn.Module):
    """W' in some rows, M, and a bias where there is to be one."""

    def __init__(
        self,
        head: Head,
        rows: Tensor,
        pointwise: Pointwise,
        bias: bool,
        start: Tensor | None,
        taught: Taught,
        choose: Taught,
    ) -> None:
        super().__init__()
        self.taught, self.choose = taught, choose
        weight = head.decoder.weight.detach().float()
        self.base, self.rows, self.pointwise = weight, rows, pointwise
        self.matrix = nn.Parameter(weight[rows].clone())
        self.map = nn.Parameter(weight.new_zeros(head.width, head.width) if start is None else start.clone())
        self.offset: Tensor | None = None
        self.bias: nn.Parameter | None = None
        if bias:
            own = head.decoder.bias
            # Softmax does not see a constant, which sigsoftmax has in its bias.
            self.offset = (
                weight.new_zeros(len(weight)) if own is None else (own - own.mean()).detach().float()
            )
            self.bias = nn.Parameter(self.offset[rows].clone())

    def losses(self, batch: Taught) -> Tensor:
        """[n] cross entropy of p and the softmax, nats."""
        rows = batch.hidden + batch.hidden @ self.map.T
        scores = rows @ self.matrix.T
        drawn = torch.einsum("nd,nmd->nm", rows, self.base[batch.drawn])
        if self.bias is not None and self.offset is not None:
            scores, drawn = scores + self.bias, drawn + self.offset[batch.drawn]
        scores, drawn = self.pointwise(scores), self.pointwise(drawn)
        moved = (drawn - batch.log_probs).logsumexp(dim=1) - math.log(drawn.shape[1])
        normaliser = torch.logaddexp(scores.logsumexp(dim=1), batch.rest + moved)
        return normaliser - (batch.shares * scores).sum(dim=1) - batch.rest.exp() * drawn.mean(dim=1)

    # What the loop asks (`fit.loop.Learner`).

    @property
    def examples(self) -> int:
        return len(self.taught.hidden)

    @property
    def batch(self) -> int:
        return batch_of(self.examples)

    @property
    def device(self) -> torch.device:
        return self.taught.hidden.device

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.named_parameters())

    def loss(self, chosen: Tensor) -> Tensor:
        return self.losses(_some(self.taught, chosen)).mean()

    @torch.no_grad()
    def choose_loss(self) -> float:
        count = len(self.choose.hidden)
        parts = torch.arange(count, device=self.device).split(512)
        return sum(float(self.losses(_some(self.choose, part)).double().sum()) for part in parts) / max(
            1, count
        )

    def groups(self, rate: float) -> list[dict[str, Any]]:
        width = self.matrix.shape[1]
        size = float(self.matrix.detach().square().mean().sqrt())
        found: list[dict[str, Any]] = [
            {"params": [self.matrix], "lr": 4.0 * size * rate / width},
            {"params": [self.map], "lr": rate / width},
        ]
        return [*found, {"params": [self.bias], "lr": 0.25 * rate}] if self.bias is not None else found

    @torch.no_grad()
    def folded(self) -> tuple[Tensor, Tensor | None]:
        """W [V, D] with the map in it, and the bias."""
        weight = self.base.index_copy(0, self.rows, self.matrix)
        bias = self.offset
        if bias is not None and self.bias is not None:
            bias = bias.index_copy(0, self.rows, self.bias)
        return weight + weight @ self.map, bias


def _some(taught: Taught, chosen: Tensor) -> Taught:
    return Taught(**{field.name: getattr(taught, field.name)[chosen] for field in dataclasses.fields(taught)})


def softmax_log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, pointwise: Pointwise) -> Tensor:
    scores = hidden @ weight.T
    return torch.log_softmax(pointwise(scores if bias is None else scores + bias), dim=-1)


@torch.no_grad()
def _judged(
    head: Head, part: states.Part, weight: Tensor, bias: Tensor | None, pointwise: Pointwise, limit: int
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(head || softmax), the head's losses and the softmax's, [tokens] each, over the whole vocabulary."""
    found = []
    for at, log_probs in _log_probs(head, part, limit):
        piece = part.windows(at)
        plain = softmax_log_probs(piece.states[0].flatten(0, 1), weight, bias, pointwise)
        targets = piece.targets.flatten()[:, None]
        # A token of no probability adds nothing: 0 log 0 = 0.
        ratio = torch.where(torch.isneginf(log_probs), 0.0, log_probs - plain)
        found.append(
            torch.stack(
                [
                    # Never below 0 but for rounding.
                    (log_probs.exp() * ratio).sum(dim=1).clamp_(min=0.0),
                    -log_probs.gather(1, targets)[:, 0],
                    -plain.gather(1, targets)[:, 0],
                ]
            )
        )
    divergence, upgraded, plain = torch.cat(found, dim=1)
    return divergence, upgraded, plain
