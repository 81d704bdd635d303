"""The mixture's gradients in fp64, in pieces that fit any device: what every implementation is held against.

With p_k the softmax of row k's scores and r_k the posterior share of component k at the target y,

    d scores_k = r_k (p_k - 1_y) / N,      d rows = d scores W,      d W = d scores^T rows,
    d log_prior_k = -r_k / N

for the mean loss over N tokens. The inputs are taken as they are: their rounding to bf16 is nobody's error.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Scores of a piece; the normaliser holds them a second time.
PIECE_BYTES = 2 << 30


class Gradients(NamedTuple):
    rows: Tensor
    """[N, K, D]"""
    log_prior: Tensor
    """[N, K]"""
    weight: Tensor
    """[V, D]"""
    share: Tensor
    """[N, K], the posterior r: no gradient, but a factor of all of them."""


@torch.no_grad()
def exact_gradients(rows: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor) -> Gradients:
    """rows [N, K, D], log_prior [N, K], weight [V, D], targets [N]; all results in fp64."""
    (N, K, D), V = rows.shape, weight.shape[0]
    wide = weight.double()
    d_rows = torch.zeros(N, K, D, dtype=torch.float64, device=rows.device)
    d_weight = torch.zeros_like(wide)
    share = torch.zeros(N, K, dtype=torch.float64, device=rows.device)
    step = max(1, PIECE_BYTES // (8 * K * V))
    for start in range(0, N, step):
        tokens = slice(start, start + step)
        part = rows[tokens].double().flatten(0, 1)
        y = targets[tokens].repeat_interleave(K)[:, None]
        scores = part @ wide.t()
        own = scores.gather(1, y)[:, 0]
        normaliser = scores.logsumexp(1)
        joint = log_prior[tokens].double() + (own - normaliser).view(-1, K)
        share[tokens] = joint.softmax(1)
        scores.sub_(normaliser[:, None]).exp_()
        scores.scatter_add_(1, y, torch.full_like(scores[:, :1], -1.0))
        scores.mul_(share[tokens].flatten()[:, None] / N)
        d_rows[tokens] = (scores @ wide).view(-1, K, D)
        d_weight.addmm_(scores.t(), part)
    return Gradients(d_rows, -share / N, d_weight, share)


def relative_error(found: Tensor | None, exact: Tensor) -> float | None:
    """|found - exact| / |exact|, Frobenius; None where nothing was found."""
    if found is None:
        return None
    return float((found.double() - exact).norm() / exact.norm())
