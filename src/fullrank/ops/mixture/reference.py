"""The definition of every operation, materialised: the specification that the fast paths are tested against.

    z = rows W^T + b          [R, V]      in the dtype of the products
    a = f(z)                  [R, V]      in fp32 (fp64 for fp64 inputs) from here on
    target = a_y,  lse = logsumexp_v a_v                       one number a row each
    nll_k = lse - target = log(1 + exp(logsumexp_{v != y} a_v - a_y))
    nll = -logsumexp_k (log_prior_k - nll_k)                   one number a token

It stores N x K x V numbers and differentiates through plain autograd, so it is also the path for second
derivatives. A vocabulary entry whose bias is -inf is masked: its probability is zero whatever f does to
-inf (a soft cap would lift it to -cap).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fullrank.ops.arguments import compute_dtype
from fullrank.ops.pointwise import IDENTITY, Pointwise
from fullrank.ops.reduce import reduce_losses

FAR = -1e30
"""The score of an entry that is left out of a sum: a finite one, so that a sum over none has a gradient."""
CAST = 4096
"""Rows of W that are cast at once: what a core's cache keeps."""


def scores_of(rows: Tensor, weight: Tensor) -> Tensor:
    """rows W^T [..., V] in the dtype of the rows; a W of another one is cast some rows at a time."""
    if weight.dtype == rows.dtype:
        return torch.matmul(rows, weight.t())
    return torch.cat([torch.matmul(rows, part.to(rows.dtype).t()) for part in weight.split(CAST)], dim=-1)


def bent_scores(rows: Tensor, weight: Tensor, bias: Tensor | None, pointwise: Pointwise) -> Tensor:
    """a = f(rows W^T + b), [..., V], with masked entries at -inf."""
    dtype = compute_dtype(rows.dtype)
    scores = scores_of(rows, weight).to(dtype)
    if bias is None:
        return pointwise(scores)
    masked = torch.isneginf(bias)
    # The mask goes on after f, and f sees a finite bias there so that no 0 * inf enters a gradient.
    bent = pointwise(scores + bias.to(dtype).masked_fill(masked, 0.0))
    return bent.masked_fill(masked, -torch.inf)


def linear_logprob(
    rows: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Target score, normaliser and loss of rows [..., D], each with a target [...]."""
    bent = bent_scores(rows, weight, bias, pointwise)
    y = targets.long()[..., None]
    target = bent.gather(-1, y)[..., 0]
    # lse - target without the difference of near numbers: how far all others together lie above the target.
    others = torch.logsumexp(bent.scatter(-1, y, FAR), dim=-1)
    return target, torch.logsumexp(bent, dim=-1), -functional.logsigmoid(target - others)


def mixture_log_probs(
    rows: Tensor, log_prior: Tensor, weight: Tensor, *, bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY,
) -> Tensor:  # fmt: skip
    """Log-probabilities of the mixture, normalised: rows [N, K, D], log_prior [N, K] -> [N, V]."""
    components = torch.log_softmax(bent_scores(rows, weight, bias, pointwise), dim=-1)
    if rows.shape[1] == 1:
        return components[:, 0] + log_prior.to(components.dtype)
    joint = components + log_prior.to(components.dtype)[:, :, None]
    # What no component can emit has probability zero and no gradient; logsumexp of -inf alone would give NaN.
    impossible = torch.isneginf(joint).all(dim=1)
    mixed = torch.logsumexp(joint.masked_fill(impossible[:, None], 0.0), dim=1)
    return mixed.masked_fill(impossible, -torch.inf)


def mixture_nll(
    rows: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY, reduction: str = "mean", token_weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Negative log-likelihood of the mixture; `mean` divides by the total weight of the counted tokens."""
    counted = targets != ignore_index
    rows, log_prior, targets = rows[counted], log_prior[counted], targets[counted]
    K = rows.shape[1]
    *_, each = linear_logprob(rows, weight, targets[:, None].expand(-1, K), bias=bias, pointwise=pointwise)
    joint = log_prior.to(each.dtype) - each
    # A token that no component can emit has an infinite loss and no gradient.
    impossible = torch.isneginf(joint).all(dim=1)
    nll = -torch.logsumexp(joint.masked_fill(impossible[:, None], 0.0), dim=1)
    nll = nll.masked_fill(impossible, torch.inf)
    loss = reduce_losses(nll, None if token_weight is None else token_weight[counted], reduction)
    if reduction != "none":
        return loss
    return torch.zeros(counted.shape, dtype=loss.dtype, device=loss.device).masked_scatter(counted, loss)
