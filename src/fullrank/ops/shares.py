"""The posterior shares of a mixture's components: which component emitted the target, as the model has it.

    r_k = exp(log_prior_k - nll_k + nll)

with nll_k the loss of component k alone and nll that of the mixture. The share is the factor of a row in
every gradient, so `row_skip` of `mixture_nll` is a bound on it, and (shares > row_skip) the rows that it
keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.ops import autograd
from fullrank.ops.arguments import check_mixture, product_dtype
from fullrank.ops.gradients import Needs
from fullrank.ops.mixture.operator import check_implementation
from fullrank.ops.pointwise import IDENTITY, Pointwise


@torch.no_grad()
def posterior_shares(
    rows: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY,
    ignore_index: int = -100,
    workspace: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """r [N, K] of arguments as in `mixture_nll`, without gradients; one product.

    The shares of a token sum to 1; those of an ignored one, or of one that no component can emit, are 0.
    """
    check_mixture(rows, log_prior, weight, targets, bias)
    check_implementation(impl)
    if impl == "reference":
        impl = "chunked"
    # A share is minus the gradient of the summed loss in its log prior.
    found: tuple[Tensor, ...] = autograd.mixture(
        rows.to(product_dtype(rows, weight)), log_prior, weight, targets.long(), bias, None,
        pointwise.trained, pointwise.kind, pointwise.constant, False, ignore_index, False,
        Needs(prior=True), workspace, impl,
    )  # fmt: skip
    return found[6].neg()
