"""Target score, normaliser and loss of single rows, differentiable one by one.

    z = rows W^T + b,   target = f(z_y),   lse = logsumexp_v f(z_v),   nll = lse - target

For upstream gradients of all three that only the backward pass knows, with Q, S and total as in
`mixture/chunked.py` but 0 at the target,

    d rows = g (Q W) + g_y f'(z_y) W_y,   g = g_nll + g_lse,
    g_y = -g_nll S / total + g_lse exp(d) / total + g_target

so the forward pass keeps two numbers a row and the backward pass makes the scores again: four products.

    fullrank::rows            the forward pass
    fullrank::rows_gradient   the backward pass
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullrank.ops import autograd
from fullrank.ops.arguments import (
    check_implementation,
    check_reduction,
    check_rows,
    compute_dtype,
    product_dtype,
    widest_dtype,
)
from fullrank.ops.mixture import reference
from fullrank.ops.mixture.chunked import mixture_pass
from fullrank.ops.pointwise import IDENTITY, Pointwise, from_parts
from fullrank.ops.products import Gradients, Needs, fake_sums, needs_of, sums_of
from fullrank.ops.reduce import Statistics, count_targets, reduce_losses, zero_statistics
from fullrank.ops.workspace import pieces

TENSORS = 5  # How many of the first arguments of `rows` are tensors; the plain options follow.


def linear_logprob(
    rows: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY, workspace: int | None = None, impl: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Target score f(z_y) and normaliser logsumexp_v f(z_v) of every row, both differentiable.

    rows [R, D], weight [V, D], targets [R], bias [V] -> ([R], [R]). Four products for forward and backward,
    three with W frozen. `workspace` bounds the extra memory in bytes.
    """
    target, lse, _ = row_losses(rows, weight, targets, bias, pointwise, workspace, impl)
    return target, lse


def linear_nll(
    rows: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY, reduction: str = "none", ignore_index: int = -100,
    workspace: int | None = None, impl: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-log p(y) = lse - f(z_y) and the normaliser lse [R] of every row: as `linear_logprob`, but the loss of
    a confident row keeps its digits.

    `reduction` applies to the loss, and `ignore_index` is as in `mixture_nll`: a row whose target is ignored
    is not scored, whatever it holds; its loss and its normaliser are 0.
    """
    check_reduction(targets, reduction, None)
    _, lse, nll = row_losses(rows, weight, targets, bias, pointwise, workspace, impl, ignore_index)
    counted = None if reduction == "none" else targets != ignore_index
    return reduce_losses(nll, counted, reduction), lse


def row_losses(
    rows: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, pointwise: Pointwise,
    workspace: int | None, impl: str, ignore_index: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Target score, normaliser and loss of every row, [R] each; 0 where ignored."""
    check_rows(rows, weight, targets, bias)
    check_implementation(impl)
    product = product_dtype(rows, weight, impl)
    if impl == "reference":
        return _reference_losses(rows.to(product), weight, targets, bias, pointwise, ignore_index)
    needs = needs_of(rows, None, weight, bias, pointwise.trained)
    target, lse, nll, *_ = rows_operator(
        rows, weight, targets.long(), bias, pointwise.trained, pointwise.kind, pointwise.constant,
        ignore_index, needs, product, workspace, impl,
    )  # fmt: skip
    return target, lse, nll


def _reference_losses(
    rows: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, pointwise: Pointwise,
    ignore_index: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`row_losses` by the definition."""
    count_targets(targets, weight.shape[0], ignore_index)
    if ignore_index is None:
        return reference.linear_logprob(rows, weight, targets, bias=bias, pointwise=pointwise)
    counted = targets != ignore_index
    target, lse, nll = (
        values.new_zeros(targets.shape).masked_scatter(counted, values)
        for values in reference.linear_logprob(
            rows[counted], weight, targets[counted], bias=bias, pointwise=pointwise
        )
    )
    return target, lse, nll


def _row_statistics(
    rows: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, slopes: Tensor | None, kind: str,
    constant: float, ignore_index: int | None, needs: Sequence[bool], product: torch.dtype,
    workspace: int | None, impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """target [R], lse [R], nll [R], then what the backward pass keeps: maximum [R] and others [R]."""
    pointwise, R = from_parts(kind, constant, slopes), rows.shape[0]
    with autograd.without_autocast(rows.device):
        tokens = count_targets(targets, weight.shape[0], ignore_index)
        work = mixture_pass(
            rows[:, None], weight, bias, pointwise, needs=Needs(), product=product, workspace=workspace,
            impl=impl,
        )  # fmt: skip
        found = zero_statistics(rows, compute_dtype(product), R)
        for index in pieces(R, tokens.positions, work.size):
            found.put(index, work.statistics(work.chunk_rows(index), tokens.targets[index]))
        found = Statistics(*(tokens.blank(column, 0.0) for column in found))
        nll = tokens.blank(found.nll, 0.0)
        if tokens.positions is not None:
            counted = torch.zeros_like(tokens.targets, dtype=torch.bool).index_fill_(
                0, tokens.positions, True
            )
            nll = torch.where(counted, nll, 0.0)
        target, lse, nll = (tokens.nan_if_wrong(each) for each in (found.target, found.lse, nll))
    return target, lse, nll, found.maximum, found.others


row_statistics = torch.library.custom_op("fullrank::rows", _row_statistics, mutates_args=())


@row_statistics.register_fake
def _(
    rows: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, slopes: Tensor | None, kind: str,
    constant: float, ignore_index: int | None, needs: Sequence[bool], product: torch.dtype,
    workspace: int | None, impl: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(rows.new_empty(rows.shape[0], dtype=compute_dtype(product)) for _ in range(5))


def _rows_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    target, _lse, _nll, *kept = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*inputs[:TENSORS], target, *kept)
    ctx.options = inputs[TENSORS:]
    return output


def _rows_backward(
    ctx: Any, g_target: Tensor | None, g_lse: Tensor | None, g_nll: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    autograd.refuse_second_derivative()
    rows, weight, targets, bias, slopes, target, maximum, others = ctx.saved_tensors
    statistics = Statistics(maximum, others, target)
    # The gradient in f(z_y), from each output by itself: in their sum the loss would lose its digits.
    upstream, at_target = torch.zeros_like(target), torch.zeros_like(target)
    if g_nll is not None:
        upstream, at_target = upstream + g_nll, at_target + g_nll * statistics.deficit / statistics.total
    if g_lse is not None:
        upstream, at_target = upstream + g_lse, at_target + g_lse * statistics.gap.exp() / statistics.total
    if g_target is not None:
        # A masked target is constant.
        at_target = at_target + torch.where(torch.isneginf(target), 0.0, g_target)
    gradients = rows_gradient(
        rows, weight, targets, bias, slopes, target, maximum, others, upstream, at_target, *ctx.options
    )
    d_rows, d_weight, d_bias, d_slopes = (
        # An empty gradient means that nobody asked.
        None if tensor is None or gradient.shape != tensor.shape else gradient.to(tensor.dtype)
        for gradient, tensor in zip(gradients, (rows, weight, bias, slopes), strict=True)
    )
    return (d_rows, d_weight, None, d_bias, d_slopes, *[None] * len(ctx.options))


row_statistics.register_autograd(_rows_backward, setup_context=_rows_setup)
rows_operator = autograd.Operator(row_statistics, _row_statistics, _rows_setup, _rows_backward, TENSORS)


@torch.library.custom_op("fullrank::rows_gradient", mutates_args=())
def rows_gradient(
    rows: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, slopes: Tensor | None,
    target: Tensor, maximum: Tensor, others: Tensor, upstream: Tensor, at_target: Tensor, kind: str,
    constant: float, ignore_index: int | None, needs: Sequence[bool], product: torch.dtype,
    workspace: int | None, impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """upstream [R] is the gradient of the normalisers outside the target, at_target [R] that of f(z_y)."""
    pointwise, wanted = from_parts(kind, constant, slopes), Needs(*needs)
    with autograd.without_autocast(rows.device):
        tokens = count_targets(targets, weight.shape[0], ignore_index)
        work = mixture_pass(
            # The rows' gradient gets the targets' part as well, and is put together here.
            rows[:, None], weight, bias, pointwise, needs=Needs(False, *wanted[1:]), product=product,
            workspace=workspace, impl=impl,
        )  # fmt: skip
        work.make_room()
        statistics = Statistics(maximum, others, target)
        d_rows = rows.new_zeros(rows.shape) if wanted.rows else None
        for index in pieces(rows.shape[0], tokens.positions, work.size):
            some, y = work.chunk_rows(index), tokens.targets[index]
            d_some = work.row_gradient(some) if wanted.rows else None
            work.late_gradients(some, y, statistics.at(index), upstream[index], d_some)
            add_targets(some, y, at_target[index], weight, bias, pointwise, work.sums, d_some)
            if d_rows is not None and d_some is not None:
                d_rows[index] = d_some.to(rows.dtype)
        return autograd.or_empty(upstream, d_rows, *sums_of(work.summed(), pointwise))  # type: ignore[return-value]


@rows_gradient.register_fake
def _(
    rows: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, slopes: Tensor | None, target: Tensor,
    maximum: Tensor, others: Tensor, upstream: Tensor, at_target: Tensor, kind: str, constant: float,
    ignore_index: int | None, needs: Sequence[bool], product: torch.dtype, workspace: int | None, impl: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    wanted = Needs(*needs)
    sums = fake_sums(wanted, weight, slopes, upstream.dtype)
    return autograd.or_empty(upstream, rows.new_empty(rows.shape) if wanted.rows else None, *sums)


def add_targets(
    rows: Tensor, targets: Tensor, upstream: Tensor, weight: Tensor, bias: Tensor | None,
    pointwise: Pointwise, sums: Gradients, d_rows: Tensor | None,
) -> None:  # fmt: skip
    """The targets' part of the gradients, for upstream [rows] in f(z_y): row y of W goes to the row's
    gradient, the row goes to row y of W's."""
    own = weight[targets].to(rows.dtype)
    scores = torch.linalg.vecdot(rows, own).to(upstream.dtype)
    if bias is not None:
        at_targets = bias[targets].to(upstream.dtype)
        # Nothing falls on a masked target, and f must see a finite score.
        scores = scores + at_targets.masked_fill(torch.isneginf(at_targets), 0.0)
    bent = pointwise.evaluate_(scores[:, None], gradient=True)
    step = upstream if bent.slope is None else upstream * bent.slope[:, 0]
    sums.add_slopes(bent, upstream.to(widest_dtype(upstream.device), copy=True)[:, None])
    if d_rows is not None:
        d_rows.add_(own * step[:, None])
    del own
    if sums.weight is not None:
        sums.weight.index_add_(0, targets, (rows * step[:, None]).to(sums.weight.dtype))
    if sums.bias is not None:
        sums.bias.index_add_(0, targets, step)
