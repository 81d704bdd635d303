"""The definition of every operation, materialised: the specification that the fast paths are tested against.

    z = rows W^T + b          [R, V]      in the dtype of the inputs
    a = f(z)                  [R, V]      in fp32 (fp64 for fp64 inputs) from here on
    target = a_y,  lse = logsumexp_v a_v                       one number a row each
    nll = -logsumexp_k (log_prior_k + target_k - lse_k)        one number a token

It stores N x K x V numbers and differentiates through plain autograd, so it is also the path for second
derivatives. A vocabulary entry whose bias is -inf is masked: its probability is zero whatever f does to
-inf (a soft cap would lift it to -cap).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.ops.pointwise import IDENTITY, Pointwise


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of everything after the product."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def bent_scores(rows: Tensor, weight: Tensor, bias: Tensor | None, pointwise: Pointwise) -> Tensor:
    """a = f(rows W^T + b), [..., V], with masked entries at -inf."""
    dtype = compute_dtype(rows.dtype)
    scores = torch.matmul(rows, weight.t()).to(dtype)
    if bias is None:
        return pointwise(scores)
    masked = torch.isneginf(bias)
    # The mask goes on after f, and f sees a finite bias there so that no 0 * inf enters a gradient.
    bent = pointwise(scores + bias.to(dtype).masked_fill(masked, 0.0))
    return bent.masked_fill(masked, -torch.inf)


def linear_logprob(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY,
) -> tuple[Tensor, Tensor]:
    """Target score and normaliser of every row: rows [R, D], targets [R] -> ([R], [R])."""
    bent = bent_scores(rows, weight, bias, pointwise)
    target = bent.gather(1, targets.long()[:, None])[:, 0]
    return target, torch.logsumexp(bent, dim=1)


def mixture_log_probs(
    rows: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY,
) -> Tensor:
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
    rows: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY,
    reduction: str = "mean",
    token_weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Negative log-likelihood of the mixture; `mean` divides by the total weight of the counted tokens."""
    counted = targets != ignore_index
    rows, log_prior, targets = rows[counted], log_prior[counted], targets[counted]
    log_probs = mixture_log_probs(rows, log_prior, weight, bias=bias, pointwise=pointwise)
    nll = -log_probs.gather(1, targets.long()[:, None])[:, 0]
    share = torch.ones_like(nll) if token_weight is None else token_weight[counted].to(nll.dtype)
    if reduction == "none":
        every = torch.zeros(counted.shape, dtype=nll.dtype, device=nll.device)
        return every.masked_scatter(counted, nll * share)
    total = (nll * share).sum()
    if reduction == "sum":
        return total
    mass = share.sum()
    # Nothing counted, nothing lost: the loss is 0 with gradient 0, not 0/0.
    return total / mass if bool(mass != 0) else total * 0.0
