"""How a mixture uses its components: prior entropy, shares and pairwise divergence, as one small record.

A mixture can collapse onto few components or keep K copies of one; its loss shows neither. Shares near 0 say
the first, divergences near 0 the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullrank.ops import Pointwise, mixture_log_probs

RECORD_BYTES = 128 << 20


@dataclass(frozen=True, kw_only=True)
class MixtureRecord:
    """A mixture of K components over some tokens."""

    tokens: int
    prior_entropy: float
    """Mean entropy of a token's prior, nats: 0 for one component in use, log K for all alike."""
    shares: tuple[float, ...]
    """Mean prior of each component; a dead component has share 0."""
    divergence: tuple[tuple[float, ...], ...]
    """`divergence[i][j]`: mean KL(component i || component j), nats; 0 off the diagonal is a copy."""


def describe_mixture(
    rows: Tensor, log_prior: Tensor, weight: Tensor, *, bias: Tensor | None, pointwise: Pointwise
) -> MixtureRecord:
    """rows [N, K, D], log_prior [N, K]; the K distributions are held for a few tokens at a time."""
    N, K, _ = rows.shape
    V = weight.shape[0]
    prior = log_prior.double().exp()
    entropy = torch.special.entr(prior).sum(1)
    divergence = torch.zeros(K, K, dtype=torch.float64, device=rows.device)
    for piece in rows.split(max(1, RECORD_BYTES // (4 * 4 * K * V))):
        alone = piece.new_zeros(piece.shape[0] * K, 1, dtype=torch.float32)
        flat = piece.reshape(-1, 1, piece.shape[-1])
        log_probs = mixture_log_probs(flat, alone, weight, bias=bias, pointwise=pointwise).view(-1, K, V)
        probs = log_probs.exp()
        # A masked token has log-probability -inf in every component and adds nothing: 0 log 0 = 0. One whose
        # probability merely underflows keeps its logarithm: that is what tells sharp components apart.
        log_probs = log_probs.masked_fill(torch.isneginf(log_probs), 0.0)
        cross = torch.bmm(probs, log_probs.transpose(1, 2))
        own = torch.diagonal(cross, dim1=1, dim2=2)
        divergence += (own[:, :, None] - cross).sum(0)
    mean = (divergence / max(N, 1)).clamp_min(0.0).cpu()
    return MixtureRecord(
        tokens=N,
        prior_entropy=float(entropy.mean()) if N else 0.0,
        shares=tuple(prior.mean(0).tolist()) if N else (0.0,) * K,
        divergence=tuple(tuple(row) for row in mean.tolist()),
    )
