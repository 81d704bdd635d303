"""The public loss of mixtures and its torch operator: check, choose an implementation, reduce.

    impl="auto"        the fastest path that serves the call
    impl="chunked"     bounded workspace, gradient in the forward pass, on any device
    impl="triton"      the same with a kernel between the products, on CUDA; raises where it cannot
    impl="reference"   the definition, materialised; differentiable any number of times

`fullrank::mixture` is the loss of all tokens, with the gradients made on the way. All paths return fp32 (fp64
for fp64 inputs). Under autocast the products run in autocast's dtype, the rest as ever. A CUDA graph can
capture them after a warm-up call; what then changes for targets is in `reduce.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from fullrank.ops import arguments, autograd
from fullrank.ops.mixture import reference
from fullrank.ops.mixture.chunked import mixture_pass
from fullrank.ops.pointwise import IDENTITY, Pointwise, from_parts
from fullrank.ops.products import Needs, fake_sums, needs_of, sums_of
from fullrank.ops.reduce import Look, count_targets, mixture_losses, reduce_losses
from fullrank.ops.rows.operator import row_losses
from fullrank.ops.workspace import over_chunks


class TokenStats(NamedTuple):
    """What a pass knows of every token besides the loss; none of it carries gradients."""

    nll: Tensor
    """[N] nats, before token weights; 0 where ignored."""
    argmax: Tensor
    """[N] the most probable vocabulary entry of the mixture; -1 where ignored."""
    entropy: Tensor
    """[N] nats, of the mixture; 0 where ignored."""


@overload
def mixture_nll(
    rows: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = ...,
    pointwise: Pointwise = ..., reduction: str = ..., token_weight: Tensor | None = ...,
    ignore_index: int = ..., return_stats: Literal[False] = ..., workspace: int | None = ...,
    impl: str = ...,
) -> Tensor: ...  # fmt: skip
@overload
def mixture_nll(
    rows: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = ...,
    pointwise: Pointwise = ..., reduction: str = ..., token_weight: Tensor | None = ...,
    ignore_index: int = ..., return_stats: Literal[True], workspace: int | None = ..., impl: str = ...,
) -> tuple[Tensor, TokenStats]: ...  # fmt: skip
def mixture_nll(
    rows: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY, reduction: str = "mean", token_weight: Tensor | None = None,
    ignore_index: int = -100, return_stats: bool = False, workspace: int | None = None,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, TokenStats]:  # fmt: skip
    """Negative log-likelihood of a mixture of K softmaxes (or of what `pointwise` makes of them), in nats.

    rows [N, K, D], log_prior [N, K] (normalised over K; -inf switches a component off), weight [V, D],
    targets [N], bias [V] (-inf masks a vocabulary entry), token_weight [N].

    reduction="mean" divides by the summed weights of the counted tokens and "sum" does not: three products
    for forward and backward, two with W frozen, one without gradients. "none" returns [N], weights applied,
    for four (three with W frozen). Tokens whose target is `ignore_index` count nothing, whatever their rows
    hold, and a token of weight 0 counts nothing even at an infinite loss; if none is left, or the weights sum
    to 0, a mean is 0 with gradient 0. Signed weights call for "sum".

    return_stats=True returns (loss, TokenStats) from the same pass (with "none" and gradients: from one
    product more). `workspace` bounds the memory beyond inputs and gradients, in bytes; 256 MiB on a CPU by
    default, on CUDA 2 GiB or a sixteenth of the device's memory.
    """
    arguments.check_mixture(rows, log_prior, weight, targets, bias)
    arguments.check_reduction(targets, reduction, token_weight)
    arguments.check_implementation(impl)
    product = arguments.product_dtype(rows, weight, impl)
    needs = needs_of(rows, log_prior, weight, bias, pointwise.trained)

    def evaluate(mean: bool, stats: bool, needs: Needs, impl: str) -> tuple[Tensor, TokenStats]:
        loss, nll, argmax, entropy, *_ = mixture_loss(
            rows, log_prior, weight, targets.long(), bias, token_weight, pointwise.trained, pointwise.kind,
            pointwise.constant, mean, ignore_index, stats, needs, product, workspace, impl,
        )  # fmt: skip
        return loss, TokenStats(nll, argmax, entropy)

    stats: TokenStats | None = None
    if impl == "reference":
        count_targets(targets, weight.shape[0], ignore_index)
        loss = reference.mixture_nll(
            rows.to(product), log_prior, weight, targets, bias=bias, pointwise=pointwise,
            reduction=reduction, token_weight=token_weight, ignore_index=ignore_index,
        )  # fmt: skip
    elif reduction != "none":
        loss, stats = evaluate(reduction == "mean", return_stats, needs, impl)
    elif any(needs):
        loss = _loss_of_tokens(
            rows, log_prior, weight, targets, bias, pointwise, token_weight, ignore_index, workspace, impl
        )
    else:
        _, stats = evaluate(False, return_stats, needs, impl)
        loss = reduce_losses(stats.nll, token_weight, "none")
        if token_weight is not None:
            loss = torch.where(targets != ignore_index, loss, 0.0)
    if not return_stats:
        return loss
    if stats is None:
        with torch.no_grad():
            _, stats = evaluate(False, True, Needs(), "auto" if impl == "reference" else impl)
    return loss, stats


def _loss_of_tokens(
    rows: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None,
    pointwise: Pointwise, token_weight: Tensor | None, ignore_index: int, workspace: int | None,
    impl: str,
) -> Tensor:  # fmt: skip
    """reduction="none" with gradients [N]: from the losses of single rows, differentiable one by one."""
    *_, row_nll = row_losses(
        rows.flatten(0, 1), weight, targets.repeat_interleave(rows.shape[1]), bias, pointwise, workspace,
        impl, ignore_index,
    )  # fmt: skip
    counted = targets != ignore_index
    loss = mixture_losses(log_prior, row_nll.view(log_prior.shape), counted)
    return torch.where(counted, reduce_losses(loss, token_weight, "none"), 0.0)


MIXTURE = (
    "(Tensor rows, Tensor log_prior, Tensor weight, Tensor targets, Tensor? bias, Tensor? token_weight, "
    "Tensor? slopes, str kind, float constant, bool mean, SymInt ignore_index, bool stats, bool[] needs, "
    "ScalarType product, SymInt? workspace, str impl) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
"""loss, nll [N], argmax [N], entropy [N], factor, then the gradients of the differentiable inputs."""
MIXTURE_PLACES = (0, 1, 2, 4, 6)


def _make_mixture(
    rows: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None,
    token_weight: Tensor | None, slopes: Tensor | None, kind: str, constant: float, mean: bool,
    ignore_index: int, stats: bool, needs: Sequence[bool], product: torch.dtype, workspace: int | None,
    impl: str, *, narrow: bool = True,
) -> autograd.Result:  # fmt: skip
    wide, pointwise, wanted = (
        arguments.compute_dtype(product),
        from_parts(kind, constant, slopes),
        Needs(*needs),
    )
    with autograd.without_autocast(rows.device):
        # Inside the operator, where the values are known even under torch.compile.
        look = Look(targets, weight.shape[0], ignore_index)
        work = mixture_pass(
            rows, weight, bias, pointwise, needs=wanted, product=product, workspace=workspace, impl=impl,
            stats=stats, narrow=narrow,
        )  # fmt: skip
        work.score_ahead(targets)
        tokens = look.tokens()
        if tokens.positions is not None and work.d_rows is not None:
            work.d_rows.zero_()
        weights = tokens.weights(token_weight, wide)
        nll, d_prior = over_chunks(
            work, log_prior, tokens, None if weights is None else weights.at_most_one, size=work.size,
            wide=wide, prior_gradient=wanted.prior,
        )  # fmt: skip
        nll = tokens.blank(nll, 0.0)
        loss, factor = tokens.loss(nll, weights, mean=mean)
        beside: tuple[Tensor | None, ...] = (nll, None, None)
        if work.argmax is not None:
            beside = (nll, tokens.blank(work.argmax, -1), tokens.blank(work.entropy, 0.0))
        return autograd.Result(
            loss, beside, factor, (work.d_rows, d_prior, *sums_of(work.summed(), pointwise))
        )


@torch.library.custom_op("fullrank::mixture", mutates_args=(), schema=MIXTURE)
def mixture(*inputs: Any) -> tuple[Tensor, ...]:
    return _make_mixture(*inputs, narrow=False).as_tensors()


@mixture.register_fake
def _(
    rows: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None,
    token_weight: Tensor | None, slopes: Tensor | None, kind: str, constant: float, mean: bool,
    ignore_index: int,
    stats: bool, needs: Sequence[bool], product: torch.dtype, workspace: int | None, impl: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    wanted, wide, N = Needs(*needs), arguments.compute_dtype(product), rows.shape[0]
    nll = rows.new_empty(N, dtype=wide)
    beside = (nll.new_empty(N, dtype=torch.int64), nll.new_empty(N)) if stats else (None, None)
    gradients = (
        rows.new_empty(rows.shape) if wanted.rows else None,
        nll.new_empty(log_prior.shape) if wanted.prior else None,
        *fake_sums(wanted, weight, slopes, wide),
    )
    return (
        nll.new_empty(()),
        nll,
        *autograd.or_empty(nll, *beside),
        nll.new_empty(()),
        *autograd.or_empty(nll, *gradients),
    )


def _mixture_backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    return autograd.scaled(ctx, upstream, _make_mixture, places=MIXTURE_PLACES)


mixture.register_autograd(
    _mixture_backward, setup_context=partial(autograd.keep_tensors, places=MIXTURE_PLACES)
)
mixture_loss = autograd.Operator(
    mixture, _make_mixture, autograd.keep_made, _mixture_backward, autograd.LOSS_TENSORS
)
