"""The chunked pass as torch operators, so that autograd, torch.compile and autocast see one opaque call.

    fullrank::mixture         loss of all tokens, with the gradients made on the way
    fullrank::trunk           the same for rows that share a trunk
    fullrank::rows            target score, normaliser and loss of every row, differentiable one by one
    fullrank::rows_gradient   the backward pass of `rows`

How autograd sees their gradients is in `operators.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fullrank.ops import late
from fullrank.ops.gradients import Gradients, Needs
from fullrank.ops.mixture import chunked
from fullrank.ops.mixture.reference import compute_dtype
from fullrank.ops.operators import (
    LOSS_TENSORS,
    Made,
    Operator,
    Optional,
    keep_made,
    keep_tensors,
    or_empty,
    refuse_second_derivative,
    scaled,
)
from fullrank.ops.pointwise import from_parts
from fullrank.ops.reduce import reduced, weights_of
from fullrank.ops.statistics import Statistics
from fullrank.ops.targets import Asked, count_targets
from fullrank.ops.targets import check_targets as check_targets
from fullrank.ops.trunk.chunked import trunk_forward

# How many of the first arguments of `rows` are tensors; the plain options follow.
ROWS_TENSORS = 5


def _cast(gradient: Tensor, tensor: Optional) -> Optional:
    """A gradient in the dtype of its input; an empty one means that nobody asked."""
    return None if tensor is None or gradient.shape != tensor.shape else gradient.to(tensor.dtype)


def _fake_summed(needs: Needs, weight: Tensor, slopes: Optional, wide: torch.dtype) -> tuple[Optional, ...]:
    return (
        weight.new_empty(weight.shape, dtype=wide) if needs.weight else None,
        weight.new_empty(weight.shape[0], dtype=wide) if needs.bias else None,
        slopes.new_empty(slopes.shape, dtype=torch.float64) if needs.slopes and slopes is not None else None,
    )


def _summed(gradients: Gradients, kind: str, constant: float, slopes: Optional) -> tuple[Optional, ...]:
    return gradients.weight, gradients.bias, gradients.slopes(from_parts(kind, constant, slopes))


MIXTURE = (
    "(Tensor rows, Tensor log_prior, Tensor weight, Tensor targets, Tensor? bias, Tensor? token_weight, "
    "Tensor? slopes, str kind, float constant, bool mean, SymInt ignore_index, bool stats, bool[] needs, "
    "SymInt? workspace, str impl='auto', float row_skip=0.0) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
"""loss, nll [N], argmax [N], entropy [N], factor, then the gradients of the differentiable inputs."""
MIXTURE_PLACES = (0, 1, 2, 4, 6)


def _make_mixture(
    rows: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    token_weight: Tensor | None,
    slopes: Tensor | None,
    kind: str,
    constant: float,
    mean: bool,
    ignore_index: int,
    stats: bool,
    needs: Sequence[bool],
    workspace: int | None,
    impl: str = "auto",
    row_skip: float = 0.0,
    *,
    narrow: bool = True,
) -> Made:
    # Inside the operator, where the values are known even under torch.compile.
    asked = Asked(targets, weight.shape[0], ignore_index)
    wide = compute_dtype(rows.dtype)
    weights = weights_of(asked, token_weight, ignore_index, wide)
    out = chunked.mixture_forward(
        rows, log_prior, weight, asked, bias, None if weights is None else weights.at_most_one,
        from_parts(kind, constant, slopes), needs=Needs(*needs), late=False, stats=stats,
        workspace=workspace, impl=impl, row_skip=row_skip, narrow=narrow,
    )  # fmt: skip
    counted = asked.answer()
    nll = counted.blank(out.nll, 0.0)
    loss, factor = reduced(nll, counted, weights, mean=mean)
    told: tuple[Optional, ...] = (nll, None, None)
    if out.argmax is not None and out.entropy is not None:
        told = (nll, counted.blank(out.argmax, -1), counted.blank(out.entropy, 0.0))
    summed = _summed(out.gradients, kind, constant, slopes)
    return Made(loss, told, factor, (out.d_rows, out.d_prior, *summed))


@torch.library.custom_op("fullrank::mixture", mutates_args=(), schema=MIXTURE)
def mixture(*inputs: Any) -> tuple[Tensor, ...]:
    return _make_mixture(*inputs, narrow=False).as_tensors()


@mixture.register_fake
def _(rows: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    slopes, stats, needs = rest[2], rest[7], Needs(*rest[8])
    wide = compute_dtype(rows.dtype)
    nll = rows.new_empty(rows.shape[0], dtype=wide)
    return (
        nll.new_empty(()),
        nll,
        *or_empty(
            nll,
            nll.new_empty(rows.shape[0], dtype=torch.int64) if stats else None,
            nll.new_empty(rows.shape[0]) if stats else None,
        ),
        nll.new_empty(()),
        *or_empty(
            nll,
            rows.new_empty(rows.shape) if needs.rows else None,
            nll.new_empty(rows.shape[:2]) if needs.prior else None,
            *_fake_summed(needs, weight, slopes, wide),
        ),
    )


def _mixture_backward(ctx: Any, upstream: Optional, *_: Optional) -> tuple[Optional, ...]:
    return scaled(ctx, upstream, _make_mixture, places=MIXTURE_PLACES)


mixture.register_autograd(_mixture_backward, setup_context=partial(keep_tensors, places=MIXTURE_PLACES))
mixture_loss = Operator(mixture, _make_mixture, keep_made, _mixture_backward, LOSS_TENSORS)


TRUNK = (
    "(Tensor trunk, Tensor private, Tensor log_prior, Tensor weight, Tensor targets, Tensor? bias, "
    "Tensor? token_weight, bool mean, SymInt ignore_index, bool[] needs, SymInt? workspace, "
    "str impl='auto') -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
"""loss, nll [N], factor, then the gradients of the differentiable inputs."""
TRUNK_PLACES = (0, 1, 2, 3, 5)


def _make_trunk(
    trunk: Tensor,
    private: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    token_weight: Tensor | None,
    mean: bool,
    ignore_index: int,
    needs: Sequence[bool],
    workspace: int | None,
    impl: str = "auto",
) -> Made:
    asked = Asked(targets, weight.shape[0], ignore_index)
    weights = weights_of(asked, token_weight, ignore_index, compute_dtype(trunk.dtype))
    out = trunk_forward(
        trunk, private, log_prior, weight, asked, bias, None if weights is None else weights.at_most_one,
        needs=Needs(*needs), workspace=workspace, impl=impl,
    )  # fmt: skip
    counted = asked.answer()
    nll = counted.blank(out.nll, 0.0)
    loss, factor = reduced(nll, counted, weights, mean=mean)
    gradients = (out.d_trunk, out.d_private, out.d_prior, out.d_weight, out.d_bias)
    return Made(loss, (nll,), factor, gradients)


@torch.library.custom_op("fullrank::trunk", mutates_args=(), schema=TRUNK)
def trunk_mixture(*inputs: Any) -> tuple[Tensor, ...]:
    return _make_trunk(*inputs).as_tensors()


@trunk_mixture.register_fake
def _(trunk: Tensor, private: Tensor, log_prior: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    needs, wide = Needs(*rest[5]), compute_dtype(trunk.dtype)
    nll = trunk.new_empty(trunk.shape[0], dtype=wide)
    return (
        nll.new_empty(()),
        nll,
        nll.new_empty(()),
        *or_empty(
            nll,
            torch.empty_like(trunk) if needs.rows else None,
            torch.empty_like(private) if needs.rows else None,
            nll.new_empty(log_prior.shape) if needs.prior else None,
            *_fake_summed(needs, weight, None, wide)[:2],
        ),
    )


def _trunk_backward(ctx: Any, upstream: Optional, *_: Optional) -> tuple[Optional, ...]:
    return scaled(ctx, upstream, _make_trunk, places=TRUNK_PLACES)


trunk_mixture.register_autograd(_trunk_backward, setup_context=partial(keep_tensors, places=TRUNK_PLACES))
trunk_loss = Operator(trunk_mixture, _make_trunk, keep_made, _trunk_backward, LOSS_TENSORS)


def _rows_statistics(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    kind: str,
    constant: float,
    ignore_index: int | None,
    needs: Sequence[bool],
    workspace: int | None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """target [R], lse [R], nll [R], then what the backward pass keeps: maximum [R], others [R] and, where all
    but the rows is frozen, Q W [R, D]."""
    asked = Asked(targets, weight.shape[0], ignore_index)
    out = chunked.mixture_forward(
        rows[:, None, :], rows.new_zeros(rows.shape[0], 1), weight, asked, bias, None,
        from_parts(kind, constant, slopes),
        needs=Needs(*needs), late=True, stats=False, workspace=workspace, impl=impl,
    )  # fmt: skip
    counted = asked.answer()
    assert out.statistics is not None
    statistics = Statistics(*(counted.blank(column.flatten(), 0.0) for column in out.statistics))
    ready = rows.new_empty(0) if out.d_rows is None else out.d_rows.flatten(1)
    target, nll = counted.spoil(statistics.target), counted.spoil(counted.blank(out.nll, 0.0))
    return target, counted.spoil(statistics.lse), nll, statistics.maximum, statistics.others, ready


rows_statistics = torch.library.custom_op("fullrank::rows", _rows_statistics, mutates_args=())


@rows_statistics.register_fake
def _(rows: Tensor, weight: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    per_row = [rows.new_empty(rows.shape[0], dtype=compute_dtype(rows.dtype)) for _ in range(5)]
    return *per_row, rows.new_empty(rows.shape if Needs(*rest[5]).rows_alone else 0)


def _rows_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    target, _lse, _nll, *kept = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*inputs[:ROWS_TENSORS], target, *kept)
    ctx.options = inputs[ROWS_TENSORS:]
    return output


def _rows_backward(
    ctx: Any, g_target: Optional, g_lse: Optional, g_nll: Optional, *_: Optional
) -> tuple[Optional, ...]:
    refuse_second_derivative()
    rows, weight, targets, bias, slopes, target, maximum, others, ready = ctx.saved_tensors
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
        rows, weight, targets, bias, slopes, target, maximum, others, ready, upstream, at_target, *ctx.options
    )
    tensors = [rows, weight, bias, slopes]
    d_rows, d_weight, d_bias, d_slopes = (_cast(*pair) for pair in zip(gradients, tensors, strict=True))
    return (d_rows, d_weight, None, d_bias, d_slopes, *[None] * len(ctx.options))


rows_statistics.register_autograd(_rows_backward, setup_context=_rows_setup)

rows_losses = Operator(rows_statistics, _rows_statistics, _rows_setup, _rows_backward, ROWS_TENSORS)


@torch.library.custom_op("fullrank::rows_gradient", mutates_args=())
def rows_gradient(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    target: Tensor,
    maximum: Tensor,
    others: Tensor,
    ready: Tensor,
    upstream: Tensor,
    at_target: Tensor,
    kind: str,
    constant: float,
    ignore_index: int | None,
    needs: Sequence[bool],
    workspace: int | None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wanted = Needs(*needs)
    counted = count_targets(targets, weight.shape[0], ignore_index)
    d_rows, gradients = late.rows_backward(
        rows, weight, counted.targets, bias, from_parts(kind, constant, slopes),
        Statistics(maximum, others, target), upstream, at_target,
        ready=ready if wanted.rows_alone else None, positions=counted.positions, needs=wanted,
        workspace=workspace, impl=impl,
    )  # fmt: skip
    return or_empty(upstream, d_rows, *_summed(gradients, kind, constant, slopes))  # type: ignore[return-value]


@rows_gradient.register_fake
def _(rows: Tensor, weight: Tensor, targets: Tensor, bias: Optional, *rest: Any) -> tuple[Tensor, ...]:
    slopes, upstream, needs = rest[0], rest[5], Needs(*rest[10])
    summed = _fake_summed(needs, weight, slopes, upstream.dtype)
    return or_empty(upstream, rows.new_empty(rows.shape) if needs.rows else None, *summed)
