"""Losses that keep the digits of a confident token, for heads whose scores the fused primitive cannot make.

lse - target is a difference of nearly equal numbers: at a margin of 40 nats it is 0 in fp64, loss and
gradient. So a loss is made from the odds against the target, which are small numbers of their own:

    of scores       nll = log(1 + exp(lse_{v != y} z_v - z_y))
    of parts        a target in a part with normaliser l, others with o:  nll = nll_part + log(1 + exp(o - l))
    of a mixture    1 - p = sum_k prior_k (1 - p_k) of a prior that sums to 1,   nll = -log(1 - (1 - p))

Every derivative is a sum of terms of one sign or a product, so gradients keep their digits as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.ops.memory.reference import masked_logsumexp


def score_nll(scores: Tensor, targets: Tensor) -> Tensor:
    """-log p(y) [n] of scores [n, m] and targets [n]; inf for a score of -inf."""
    column = targets[:, None]
    others = torch.isneginf(scores).logical_not().scatter(1, column, False)
    return against(masked_logsumexp(scores, others) - scores.gather(1, column)[:, 0])


def against(log_odds: Tensor) -> Tensor:
    """log(1 + exp(x)): the loss of a target with these log odds against it."""
    return torch.logaddexp(torch.zeros_like(log_odds), log_odds)


def mixed_nll(nll: Tensor, log_prior: Tensor) -> Tensor:
    """-log sum_k prior_k p_k [n] of losses -log p_k [n, K] and a normalised log prior [n, K]."""
    joint = log_prior - nll
    hopeless = torch.isneginf(joint).all(1)
    far = -torch.logsumexp(torch.where(hopeless[:, None], 0.0, joint), 1)
    # Where the target has most of the probability, from what the others have.
    likely = (far.detach() < 0.5) & ~hopeless
    near = torch.where(likely[:, None], nll, 1.0)
    missing = (log_prior.exp() * -torch.expm1(-near)).sum(1)
    close = -torch.log1p(-torch.where(likely, missing, 0.5))
    return torch.where(hopeless, torch.inf, torch.where(likely, close, far))
