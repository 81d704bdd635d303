"""What is kept of V scores: three numbers a row, and the loss, shares, argmax and entropy of a mixture.

For a row with scores z, a = f(z), y its target, m = max_v a_v:

    d = a_y - m,   S = sum_{v != y} exp(a_v - m)
    nll = log1p(S + expm1(d)) - d          lse = m + log(S + e^d)
    p_y - 1 = -S / (S + e^d)

S leaves the target out, so that neither nll nor p_y - 1 is a difference of nearly equal numbers: a confident
row keeps its digits. The K rows of a token make its loss and the posterior share r_k of each,

    nll = -logsumexp_k (log_prior_k - nll_k),   r_k = exp(log_prior_k - nll_k + nll)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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


def posterior(log_prior: Tensor, nll: Tensor) -> tuple[Tensor, Tensor]:
    """Token loss [N] and posterior shares [N, K] from log priors and row losses [N, K]."""
    token = -torch.logsumexp(log_prior - nll, dim=1)
    share = torch.exp(log_prior - nll + token[:, None])
    # A token that no component can emit has no posterior: its shares are 0, not inf - inf.
    return token, torch.where(torch.isposinf(token)[:, None], 0.0, share)


class Mode:
    """Running argmax and entropy of a chunk's mixtures, over tiles of tokens and blocks of the vocabulary."""

    def __init__(self, tokens: int, like: Tensor) -> None:
        self.best = torch.full((tokens,), -torch.inf, dtype=like.dtype, device=like.device)
        self.argmax = torch.zeros(tokens, dtype=torch.int64, device=like.device)
        self.entropy = torch.zeros_like(self.best)

    def add(self, tokens: slice, exponentials: Tensor, share: Tensor, start: int) -> None:
        """exponentials [tokens * K, block] are exp(a - maximum); share [tokens, K] is prior / total."""
        count, K = share.shape
        # Autocast reaches into operators and would mix in bf16.
        with torch.autocast(share.device.type, enabled=False):
            mixed = torch.bmm(share[:, None, :], exponentials.view(count, K, -1))[:, 0]
        best, index = mixed.max(1)
        better = best > self.best[tokens]
        self.argmax[tokens] = torch.where(better, index + start, self.argmax[tokens])
        self.best[tokens] = torch.where(better, best, self.best[tokens])
        self.entropy[tokens] += torch.special.entr(mixed).sum(1)
