"""The reductions of a loss: V scores to three numbers a row, K rows to a token, N tokens to one number.

**A row.** With scores z, a = f(z), y the target, m = max_v a_v:

    d = a_y - m,   S = sum_{v != y} exp(a_v - m)
    nll = log1p(S + expm1(d)) - d          lse = m + log(S + e^d)          p_y - 1 = -S / (S + e^d)

S leaves the target out, so that neither nll nor p_y - 1 is a difference of nearly equal numbers: a confident
row keeps its digits.

**A token.** nll = -logsumexp_k (log_prior_k - nll_k), shares r_k = exp(log_prior_k - nll_k + nll).

**A batch.** With weights w_i, "none": w_i nll_i; "sum": sum_i w_i nll_i; "mean": that over sum_i w_i. A
token that is ignored, or that is given weight 0, counts nothing, even at an infinite loss: its loss and its
gradient are 0. Where nothing counts, or the weights sum to 0, a mean is 0 with gradient 0, not 0/0.

Ignored tokens are found with one look at the targets' values, for which the host waits for a CUDA device
while that makes the first scores; all else leaves them out, whatever their rows hold. While a CUDA graph is
captured nothing can be looked at: every token goes through the products, an ignored one with weight 0 (its
rows must be finite), and a target outside the vocabulary makes the loss NaN instead of an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fullrank.errors import FullrankError


class Statistics(NamedTuple):
    """What a row keeps of its V scores, [R] each."""

    maximum: Tensor
    others: Tensor
    """S: the sum over all but the target of exp(a - maximum)."""
    target: Tensor

    @property
    def gap(self) -> Tensor:
        return self.target - self.maximum

    @property
    def nll(self) -> Tensor:
        return torch.log1p(self.others + torch.expm1(self.gap)) - self.gap

    @property
    def deficit(self) -> Tensor:
        """total * (p_y - 1), what stands at the target in place of its exponential: -S. A masked target is no
        score of the row, so nothing falls on it."""
        return torch.where(torch.isneginf(self.target), 0.0, -self.others)

    @property
    def total(self) -> Tensor:
        return self.others + torch.exp(self.gap)

    @property
    def lse(self) -> Tensor:
        return self.maximum + torch.log(self.total)

    def at(self, index: slice | Tensor) -> Statistics:
        return Statistics(self.maximum[index], self.others[index], self.target[index])

    def put(self, index: slice | Tensor, part: Statistics) -> None:
        for whole, piece in zip(self, part, strict=True):
            whole[index] = piece.view(whole[index].shape)


def zero_statistics(like: Tensor, dtype: torch.dtype, *shape: int) -> Statistics:
    return Statistics(*(like.new_zeros(shape, dtype=dtype) for _ in range(3)))


def posterior(log_prior: Tensor, nll: Tensor) -> tuple[Tensor, Tensor]:
    """Token loss [N] and posterior shares [N, K] from log priors and row losses [N, K]."""
    token = -torch.logsumexp(log_prior - nll, dim=1)
    share = torch.exp(log_prior - nll + token[:, None])
    # A token that no component can emit has no posterior: its shares are 0, not inf - inf.
    return token, torch.where(torch.isposinf(token)[:, None], 0.0, share)


def mixture_losses(log_prior: Tensor, row_nll: Tensor, counted: Tensor) -> Tensor:
    """Token losses [N] from log priors and row losses [N, K], differentiable; 0 where not `counted` [N].

    Neither an ignored token, whatever its prior holds, nor a token that no component can emit brings
    inf - inf to the gradient.
    """
    joint = log_prior.to(row_nll.dtype) - row_nll
    impossible = torch.isneginf(joint).all(1) & counted
    joint = torch.where((counted & ~impossible)[:, None], joint, 0.0)
    losses = torch.where(impossible, torch.inf, -torch.logsumexp(joint, dim=1))
    return torch.where(counted, losses, 0.0)


class Mode:
    """Running argmax and entropy of a chunk's mixtures, over tiles of tokens and blocks of the vocabulary."""

    def __init__(self, tokens: int, like: Tensor) -> None:
        self.best = torch.full((tokens,), -torch.inf, dtype=like.dtype, device=like.device)
        self.argmax = torch.zeros(tokens, dtype=torch.int64, device=like.device)
        self.entropy = torch.zeros_like(self.best)

    def add(self, tokens: slice, exponentials: Tensor, share: Tensor, start: int) -> None:
        """exponentials [tokens * K, block] are exp(a - maximum); share [tokens, K] is prior / total."""
        count, K = share.shape
        mixed = torch.bmm(share[:, None, :], exponentials.view(count, K, -1))[:, 0]
        best, index = mixed.max(1)
        better = best > self.best[tokens]
        self.argmax[tokens] = torch.where(better, index + start, self.argmax[tokens])
        self.best[tokens] = torch.where(better, best, self.best[tokens])
        self.entropy[tokens] += torch.special.entr(mixed).sum(1)


def reduce_losses(nll: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
    """The loss of tokens with losses nll [n] and weights [n], None for 1 each; differentiable in nll.

    Ignored tokens are not among them, or have weight 0.
    """
    if weight is not None:
        weight = weight.to(nll.dtype)
        nll = torch.where(weight == 0, 0.0, nll) * weight
    if reduction == "none":
        return nll
    total = nll.sum()
    return total if reduction == "sum" else total * inverse_mass(nll, weight)


def inverse_mass(nll: Tensor, weight: Tensor | None) -> Tensor | float:
    """What makes a mean of a sum over tokens: one over the sum of their weights, 0 where that is 0."""
    if weight is None:
        return 1.0 / nll.numel() if nll.numel() else 0.0
    mass = weight.to(nll.dtype).sum()
    return torch.where(mass == 0, 0.0, 1.0 / mass)


class Weights(NamedTuple):
    """Weights of all N tokens, where they are not all 1."""

    share: Tensor
    """[N] as given, 0 where ignored."""
    largest: Tensor
    """The greatest of their sizes, or 1. Gradients are made for weights of at most 1 and scaled once at the
    end: in fp16 a row times 1/N would be a subnormal number."""

    @property
    def at_most_one(self) -> Tensor:
        return self.share / self.largest


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The targets of one call and which of them count."""

    targets: Tensor
    """[N], safe to index with wherever `positions` points."""
    count: int | None
    """How many count; None while a graph is captured."""
    positions: Tensor | None = None
    """Of those that count, in order; None: all tokens go through the products."""
    ignored: Tensor | None = None
    """[N], only while a graph is captured."""
    wrong: Tensor | None = None
    """Whether any target is outside the vocabulary, only while a graph is captured."""

    def weights(self, token_weight: Tensor | None, dtype: torch.dtype) -> Weights | None:
        """None where every token that goes through the products weighs 1."""
        if token_weight is None and self.ignored is None:
            return None
        share = torch.ones_like(self.targets, dtype=dtype)
        if token_weight is not None:
            share = token_weight.to(dtype)
        left_out = self.ignored
        if self.positions is not None:
            left_out = torch.ones_like(self.targets, dtype=torch.bool).index_fill_(0, self.positions, False)
        if left_out is not None:
            share = share.masked_fill(left_out, 0.0)
        largest = share.abs().amax() if share.numel() else share.new_ones(())
        return Weights(share, torch.where(largest == 0, 1.0, largest))

    def blank(self, values: Tensor, filling: float) -> Tensor:
        """values [N, ...] with the filling where a token is ignored and yet went through the products."""
        if self.ignored is None:
            return values
        return values.masked_fill(self.ignored.view(-1, *[1] * (values.ndim - 1)), filling)

    def nan_if_wrong(self, values: Tensor) -> Tensor:
        """NaN where a target is outside the vocabulary and nobody could be told."""
        return values if self.wrong is None else torch.where(self.wrong, torch.nan, values)

    def loss(self, nll: Tensor, weights: Weights | None, *, mean: bool) -> tuple[Tensor, Tensor | float]:
        """The loss of nll [N], which is 0 where ignored, and the factor that gradients made for weights of at
        most 1 still lack."""
        if weights is None:
            if not mean:
                return nll.sum(), 1.0
            inverse = 1.0 / self.count if self.count else 0.0
            return nll.mean() if self.count == nll.shape[0] > 0 else nll.sum() * inverse, inverse
        factor = weights.largest
        if mean:
            factor = factor * inverse_mass(nll, weights.share)
        loss = reduce_losses(nll, weights.share, "mean" if mean else "sum")
        return self.nan_if_wrong(loss), self.nan_if_wrong(factor)


def capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph captures the current stream of the tensor's device."""
    if not tensor.is_cuda:
        return False
    # The question is about the current device, which may be another one.
    with torch.cuda.device(tensor.device):
        return torch.cuda.is_current_stream_capturing()


class Copy:
    """Values on the host: `here` waits for what stood before it on the device and for their copy, not for
    what is launched meanwhile. While a graph is captured there are none."""

    def __init__(self, values: Tensor) -> None:
        self._here, self._copied = values, None
        if values.is_cuda and not capturing(values):
            self._here = values.to("cpu", non_blocking=True)
            self._copied = torch.cuda.current_stream(values.device).record_event()

    def here(self) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._here


class Look:
    """One look at targets [N], as `Copy` has it."""

    def __init__(self, targets: Tensor, V: int, ignore_index: int | None) -> None:
        self.targets, self.V, self.ignore_index = targets, V, ignore_index
        self._copy = Copy(targets)

    def tokens(self) -> Tokens:
        """Raises for a target that no row of W belongs to, naming it."""
        targets, V, ignore_index = self.targets, self.V, self.ignore_index
        if capturing(targets):
            outside = (targets < 0) | (targets >= V)
            ignored = torch.zeros_like(outside) if ignore_index is None else targets == ignore_index
            safe = targets.masked_fill(outside | ignored, 0)
            return Tokens(targets=safe, count=None, ignored=ignored, wrong=(outside & ~ignored).any())
        N = targets.shape[0]
        if N == 0:
            return Tokens(targets=targets, count=0)
        here, left_out = self._copy.here(), 0
        least, most = (int(end) for end in here.aminmax())
        if ignore_index is not None and least <= ignore_index <= most:
            left_out = int((here == ignore_index).sum())
        if least < 0 or most >= V:
            bad = (here < 0) | (here >= V)
            if ignore_index is not None:
                bad &= here != ignore_index
            if bool(bad.any()):
                also = "" if ignore_index is None else f" or ignore_index={ignore_index}"
                raise FullrankError(
                    f"target {int(here[bad][0])} is outside the vocabulary: "
                    f"expected 0 <= target < V={V}{also}; check the tokenizer against the head"
                )
        if not left_out:
            return Tokens(targets=targets, count=N)
        # Found on the host and sent over: `nonzero` on the device would have to be waited for.
        positions = torch.ne(here, -1 if ignore_index is None else ignore_index).nonzero()[:, 0]
        return Tokens(
            targets=targets, count=N - left_out, positions=positions.to(targets.device, non_blocking=True)
        )


def count_targets(targets: Tensor, V: int, ignore_index: int | None) -> Tokens:
    """Find the targets that count; raise for one that no row of W belongs to, naming it."""
    return Look(targets, V, ignore_index).tokens()
