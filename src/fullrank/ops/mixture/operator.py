"""The public operations: check the arguments, choose an implementation.

    impl="auto"        the fastest path that serves the call
    impl="chunked"     bounded workspace, gradient in the forward pass, on any device
    impl="triton"      the same with one kernel for the elementwise work, on CUDA; raises where it cannot
    impl="reference"   the definition, materialised; differentiable any number of times

All return fp32 (fp64 for fp64 inputs). Under autocast the products run in autocast's dtype, the rest as ever.
A CUDA graph can capture them after a warm-up call; what then changes for targets is in `targets.py`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.ops import autograd
from fullrank.ops.arguments import (
    check_mixture,
    check_reduction,
    check_shapes,
    needs_of,
    product_dtype,
    shape_of,
)
from fullrank.ops.gradients import Needs
from fullrank.ops.mixture import reference
from fullrank.ops.pointwise import IDENTITY, Pointwise
from fullrank.ops.trunk.chunked import trunk_serves

IMPLEMENTATIONS = ("auto", "triton", "chunked", "reference")


class TokenStats(NamedTuple):
    """What a pass knows of every token besides the loss; none of it carries gradients."""

    nll: Tensor
    """[N] nats, before token weights; 0 where ignored."""
    argmax: Tensor
    """[N] the most probable vocabulary entry of the mixture; -1 where ignored."""
    entropy: Tensor
    """[N] nats, of the mixture; 0 where ignored."""


def linear_logprob(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY,
    workspace: int | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Target score f(z_y) and normaliser logsumexp_v f(z_v) of every row, both differentiable.

    rows [R, D], weight [V, D], targets [R], bias [V] -> ([R], [R]). Four products for forward and backward,
    two with everything but the rows frozen. `workspace` bounds the extra memory in bytes.
    """
    check_rows(rows, weight, targets, bias)
    product = product_dtype(rows, weight)
    rows = rows.to(product)
    check_implementation(impl)
    if impl == "reference":
        autograd.check_targets(targets, weight.shape[0], None)
        return reference.linear_logprob(rows, weight.to(product), targets, bias=bias, pointwise=pointwise)
    target, lse, *_ = autograd.rows_losses(
        rows, weight, targets.long(), bias, pointwise.trained, pointwise.kind, pointwise.constant, None,
        needs_of(rows, None, weight, bias, pointwise), workspace, impl,
    )  # fmt: skip
    return target, lse


def linear_nll(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY,
    workspace: int | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """-log p(y) = normaliser - f(z_y) and the normaliser of every row: as `linear_logprob`, but here a
    confident row keeps its digits."""
    if impl == "reference":
        target, lse = linear_logprob(rows, weight, targets, bias=bias, pointwise=pointwise, impl=impl)
        return lse - target, lse
    check_rows(rows, weight, targets, bias)
    check_implementation(impl)
    rows = rows.to(product_dtype(rows, weight))
    _, lse, nll, *_ = autograd.rows_losses(
        rows, weight, targets.long(), bias, pointwise.trained, pointwise.kind, pointwise.constant, None,
        needs_of(rows, None, weight, bias, pointwise), workspace, impl,
    )  # fmt: skip
    return nll, lse


@overload
def mixture_nll(
    rows: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = ...,
    pointwise: Pointwise = ...,
    reduction: str = ...,
    token_weight: Tensor | None = ...,
    ignore_index: int = ...,
    return_stats: Literal[False] = ...,
    workspace: int | None = ...,
    impl: str = ...,
    row_skip: float = ...,
) -> Tensor: ...
@overload
def mixture_nll(
    rows: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = ...,
    pointwise: Pointwise = ...,
    reduction: str = ...,
    token_weight: Tensor | None = ...,
    ignore_index: int = ...,
    return_stats: Literal[True],
    workspace: int | None = ...,
    impl: str = ...,
    row_skip: float = ...,
) -> tuple[Tensor, TokenStats]: ...
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
    return_stats: bool = False,
    workspace: int | None = None,
    impl: str = "auto",
    row_skip: float = 0.0,
) -> Tensor | tuple[Tensor, TokenStats]:
    """Negative log-likelihood of a mixture of K softmaxes (or of what `pointwise` makes of them), in nats.

    rows [N, K, D], log_prior [N, K] (normalised over K; -inf switches a component off), weight [V, D],
    targets [N], bias [V] (-inf masks a vocabulary entry), token_weight [N].

    reduction="mean" divides by the summed weights of the counted tokens and "sum" does not: three products
    for forward and backward, two with W frozen, one without gradients. "none" returns [N], weights applied,
    for four (two with W frozen). Tokens whose target is `ignore_index` count nothing, whatever their rows
    hold; if none is left, or the weights sum to 0, a mean is 0 with gradient 0. Signed weights call for
    "sum".

    return_stats=True returns (loss, TokenStats) from the same pass (with "none" and gradients: from one
    product more). `workspace` bounds the memory beyond inputs and gradients, in bytes; 256 MiB on a CPU by
    default, on CUDA 2 GiB or a sixteenth of the device's memory.

    row_skip > 0 leaves rows with a posterior share of at most row_skip out of the gradients of rows, weight
    and bias where that saves time: 1 + 2 (kept rows / all rows) products instead of 3. Such a row gets
    gradient 0 instead of one of norm at most 2 row_skip w max|f'| max_v |W_v|, with w the token's weight; W's
    gradient misses at most 2 max|f'| times the sum over the skipped rows of share w |row|, in the sum of the
    norms of its V rows. The loss and all other gradients stay exact, and so does everything with 0, with one
    component, with reduction="none" and its unknown upstream gradient, with impl="reference", in a captured
    CUDA graph, and for a chunk of tokens that keeps most of its rows. `posterior_shares` tells which rows are
    above a bound.
    """
    check_mixture(rows, log_prior, weight, targets, bias)
    check_reduction(targets, reduction, token_weight)
    if not 0.0 <= row_skip < 1.0:
        raise FullrankError(
            f"row_skip={row_skip!r} is no bound on a posterior share: expected 0 <= row_skip < 1; "
            "pass 0 to skip nothing"
        )
    product = product_dtype(rows, weight)
    rows = rows.to(product)
    check_implementation(impl)
    needs = needs_of(rows, log_prior, weight, bias, pointwise)
    function = (pointwise.trained, pointwise.kind, pointwise.constant)

    def evaluate(mean: bool, stats: bool, needs: Needs) -> tuple[Tensor, TokenStats]:
        loss, nll, argmax, entropy, *_ = autograd.mixture_loss(
            rows, log_prior, weight, targets.long(), bias, token_weight, *function, mean, ignore_index,
            stats, needs, workspace, impl, float(row_skip),
        )  # fmt: skip
        return loss, TokenStats(nll, argmax, entropy)

    if impl == "reference":
        autograd.check_targets(targets, weight.shape[0], ignore_index)
        loss = reference.mixture_nll(
            rows, log_prior, weight.to(product), targets, bias=bias, pointwise=pointwise,
            reduction=reduction, token_weight=token_weight, ignore_index=ignore_index,
        )  # fmt: skip
    elif reduction != "none" or not any(needs):
        loss, stats = evaluate(reduction == "mean", return_stats, needs)
        if reduction == "none":
            loss = stats.nll
            if token_weight is not None:
                loss = torch.where(targets != ignore_index, loss * token_weight.to(loss.dtype), 0.0)
        return (loss, stats) if return_stats else loss
    else:
        _, _, row_nll, *_ = autograd.rows_losses(
            rows.flatten(0, 1), weight, targets.long().repeat_interleave(rows.shape[1]), bias, *function,
            ignore_index, needs, workspace, impl,
        )  # fmt: skip
        joint = log_prior.to(row_nll.dtype) - row_nll.view(log_prior.shape)
        counted = targets != ignore_index
        # Neither an ignored token, whatever its prior holds, nor one that no component can emit may bring
        # inf - inf to the gradient.
        hopeless = torch.isneginf(joint).all(1)
        joint = torch.where((counted & ~hopeless)[:, None], joint, 0.0)
        loss = torch.where(hopeless, torch.inf, -torch.logsumexp(joint, dim=1))
        if token_weight is not None:
            loss = loss * token_weight.to(loss.dtype)
        loss = torch.where(counted, loss, 0.0)
    if not return_stats:
        return loss
    with torch.no_grad():
        return loss, evaluate(False, True, Needs())[1]


def trunk_nll(
    trunk: Tensor,
    private: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    reduction: str = "mean",
    token_weight: Tensor | None = None,
    ignore_index: int = -100,
    workspace: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """`mixture_nll` of rows [trunk; private_k]: trunk [N, D - r], private [N, K, r], the rest as there.

    The trunk's part of every product is made once and not K times: see `trunk.py`. reduction="none" with
    gradients goes the way of whole rows, as on CUDA does what the kernels cannot serve (private parts wider
    than 128, fp32).
    """
    if trunk.ndim != 2 or private.ndim != 3 or private.shape[:1] != trunk.shape[:1]:
        raise FullrankError(
            f"trunk has shape {shape_of(trunk)} and private {shape_of(private)}, "
            "expected [N, D - r] and [N, K, r]"
        )
    width = trunk.shape[1] + private.shape[2]
    # A row of the right shape without its memory: the checks ask for no more.
    check_mixture(private[:, :, :1].expand(-1, -1, width), log_prior, weight, targets, bias)
    check_reduction(targets, reduction, token_weight)
    check_implementation(impl)
    needs = needs_of(trunk, log_prior, weight, bias, IDENTITY)
    needs = Needs(needs.rows or (private.requires_grad and torch.is_grad_enabled()), *needs[1:])
    product = product_dtype(trunk, weight)
    unserved = impl == "auto" and not trunk_serves(trunk.device, product, private.shape[2])
    if impl == "reference" or unserved or (reduction == "none" and any(needs)) or trunk.shape[1] == 0:
        rows = torch.cat([trunk[:, None].expand(-1, private.shape[1], -1), private], dim=2)
        return mixture_nll(
            rows, log_prior, weight, targets, bias=bias, reduction=reduction, token_weight=token_weight,
            ignore_index=ignore_index, workspace=workspace, impl=impl,
        )  # fmt: skip
    loss, nll, *_ = autograd.trunk_loss(
        trunk.to(product), private.to(product), log_prior, weight, targets.long(), bias, token_weight,
        reduction == "mean", ignore_index, needs, workspace, impl,
    )  # fmt: skip
    if reduction != "none":
        return loss
    if token_weight is not None:
        nll = torch.where(targets != ignore_index, nll * token_weight.to(nll.dtype), 0.0)
    return nll


def check_rows(rows: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    if rows.ndim != 2:
        raise FullrankError(
            f"rows have shape {shape_of(rows)}, expected [R, D]: flatten what leads the width"
        )
    check_shapes(rows, weight, targets, bias)


def check_implementation(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise FullrankError(f"impl={impl!r} is unknown: expected one of {', '.join(IMPLEMENTATIONS)}")
