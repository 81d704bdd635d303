"""The chunked pass as torch operators, so that autograd, torch.compile and autocast see one opaque call.

    fullrank::mixture         loss of all tokens, with the gradients made on the way
    fullrank::trunk           the same for rows that share a trunk
    fullrank::rows            target score, normaliser and loss of every row, differentiable one by one
    fullrank::rows_gradient   the backward pass of `rows`

Autograd never sees the gradients that `mixture` returns as something to differentiate: the backward pass
scales them by the upstream gradient and hands the buffers over, so that W's gradient exists once. A second
backward pass over the same graph finds them gone and makes them again. Second derivatives raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fullrank.errors import FullrankError
from fullrank.ops import chunked, late
from fullrank.ops.gradients import Gradients, Needs
from fullrank.ops.pointwise import from_parts
from fullrank.ops.reference import compute_dtype
from fullrank.ops.scaling import scale_all
from fullrank.ops.statistics import Statistics
from fullrank.ops.targets import Asked, Counted, count_targets
from fullrank.ops.targets import check_targets as check_targets
from fullrank.ops.trunk import trunk_forward

Optional = Tensor | None

# How many of an operator's first arguments are tensors; the plain options follow.
MIXTURE_TENSORS, ROWS_TENSORS = 7, 5


def _or_empty(like: Tensor, *tensors: Optional) -> tuple[Tensor, ...]:
    """An operator returns tensors only: nothing is an empty one."""
    return tuple(like.new_empty(0) if tensor is None else tensor for tensor in tensors)


def _cast(gradient: Tensor, tensor: Optional) -> Optional:
    """A gradient in the dtype of its input; an empty one means that nobody asked."""
    return None if tensor is None or gradient.shape != tensor.shape else gradient.to(tensor.dtype)


def _room(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Where a gradient goes when it is scaled: in place, so that W's exists once, but for one that changes
    its dtype on CUDA, in one kernel; a processor would scale into a copy first."""
    return (
        torch.empty_like(gradient, dtype=dtype) if gradient.is_cuda and gradient.dtype != dtype else gradient
    )


def _fake_summed(needs: Needs, weight: Tensor, slopes: Optional, wide: torch.dtype) -> tuple[Optional, ...]:
    return (
        weight.new_empty(weight.shape, dtype=wide) if needs.weight else None,
        weight.new_empty(weight.shape[0], dtype=wide) if needs.bias else None,
        slopes.new_empty(slopes.shape, dtype=torch.float64) if needs.slopes and slopes is not None else None,
    )


def _summed(gradients: Gradients, kind: str, constant: float, slopes: Optional) -> tuple[Optional, ...]:
    return gradients.weight, gradients.bias, gradients.slopes(from_parts(kind, constant, slopes))


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise FullrankError(
            "fullrank's fused loss is differentiable once, got backward(create_graph=True): "
            "pass impl='reference' for second derivatives"
        )


class Weights(NamedTuple):
    """Weights of all tokens where they are not all 1: share [N] as given, `largest` of them.

    The gradients are made for weights of at most 1 and scaled once at the end: in fp16 a row times 1/N would
    be a subnormal number.
    """

    share: Tensor
    largest: Tensor

    @property
    def at_most_one(self) -> Tensor:
        return self.share / self.largest


def _weights(asked: Asked, token_weight: Optional, ignore_index: int, wide: torch.dtype) -> Weights | None:
    targets = asked.targets
    if token_weight is None and not asked.captured:
        return None
    share = torch.ones_like(targets, dtype=wide) if token_weight is None else token_weight.to(wide)
    share = torch.where(targets != ignore_index, share, 0.0)
    largest = share.abs().amax() if share.numel() else share.new_ones(())
    return Weights(share, torch.where(largest == 0, 1.0, largest))


def _reduced(
    nll: Tensor, counted: Counted, weights: Weights | None, *, mean: bool
) -> tuple[Tensor, Tensor | float]:
    """The loss, and the factor that the gradients still lack."""
    if weights is None:
        if not mean:
            return nll.sum(), 1.0
        count = counted.count or 0
        # Nothing counted, nothing lost: loss 0 and gradient 0, not 0/0.
        inverse = 1.0 / max(count, 1)
        return nll.mean() if count == nll.shape[0] > 0 else nll.sum() * inverse, inverse
    # A token that is given no weight counts nothing, even at an infinite loss.
    loss, factor = torch.where(weights.share == 0, 0.0, nll * weights.share).sum(), weights.largest.clone()
    if mean:
        mass = weights.share.sum()
        scale = torch.where(mass == 0, 0.0, 1.0 / mass)
        loss, factor = loss * scale, factor * scale
    return counted.spoil(loss), counted.spoil(factor)


class Made(NamedTuple):
    """What a loss makes of its inputs."""

    loss: Tensor
    told: tuple[Optional, ...]
    """What is handed out beside it, without gradients."""
    factor: Tensor | float
    """What the gradients still lack."""
    gradients: tuple[Optional, ...]

    def as_tensors(self) -> tuple[Tensor, ...]:
        """As an operator returns it: nothing is an empty tensor."""
        factor = self.factor if isinstance(self.factor, Tensor) else self.loss.new_full((), self.factor)
        return self.loss, *_or_empty(self.loss, *self.told), factor, *_or_empty(self.loss, *self.gradients)


class Operator(NamedTuple):
    """An operator and what it consists of."""

    registered: Any
    """For compilers, tracers and tensors of other kinds."""
    run: Callable[..., Any]
    setup: Callable[[Any, tuple[Any, ...], Any], tuple[Optional, ...]]
    """Keeps what the backward pass needs, returns what is handed out."""
    backward: Callable[..., tuple[Optional, ...]]
    tensors: int
    """How many of the first arguments are tensors; the plain options follow."""

    def __call__(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Differentiable; what was told is the operator's, or None in place of an empty tensor."""
        if _plain(*inputs[: self.tensors]):
            return Fullrank.apply(self, inputs[self.tensors :], *inputs[: self.tensors])
        return self.registered(*inputs)


class Fullrank(torch.autograd.Function):
    """An operator with its layers left out: what the dispatcher does for a compiler and for other devices
    takes a fifth of a millisecond a call, in which a GPU has nothing to do."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, options: tuple[Any, ...], *tensors: Optional) -> Any:
        inputs = (*tensors, *options)
        ctx.operator = operator
        return operator.setup(ctx, inputs, operator.run(*inputs))

    @staticmethod
    def backward(ctx: Any, *upstream: Optional) -> tuple[Optional, ...]:
        gradients = ctx.operator.backward(ctx, *upstream)
        return (None, None, *gradients[: ctx.operator.tensors])


def _plain(*tensors: Optional) -> bool:
    """Whether nobody looks on who must see an operator: no compiler, no tracer, no subclass."""
    if torch.compiler.is_compiling():
        return False
    kinds = {type(tensor) for tensor in tensors if tensor is not None}
    return kinds <= {Tensor, torch.nn.Parameter} and not is_in_torch_dispatch_mode()


def _keep(ctx: Any, inputs: tuple[Any, ...], factor: Tensor | float, gradients: Sequence[Optional]) -> None:
    """What the backward pass of a loss needs."""
    tensors = inputs[:MIXTURE_TENSORS]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.options = inputs[MIXTURE_TENSORS:]
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
    # Not saved through autograd: the first backward pass takes these buffers out and gives them away.
    ctx.factor, ctx.gradients = factor, gradients


def _keep_made(ctx: Any, inputs: tuple[Any, ...], made: Made) -> tuple[Optional, ...]:
    ctx.mark_non_differentiable(*(tensor for tensor in made.told if tensor is not None))
    _keep(ctx, inputs, made.factor, made.gradients)
    return made.loss, *made.told


def _keep_tensors(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], *, places: tuple[int, ...]
) -> None:
    """The same of what a registered operator returned: an empty gradient is none."""
    ctx.mark_non_differentiable(*output[1:])
    *_, factor = output[: -len(places)]
    gradients = zip(places, output[-len(places) :], strict=True)
    _keep(ctx, inputs, factor, [
        None if inputs[place] is None or gradient.shape != inputs[place].shape else gradient
        for place, gradient in gradients
    ])  # fmt: skip


def _scaled(
    ctx: Any, upstream: Optional, make: Callable[..., Made], *, places: tuple[int, ...]
) -> tuple[Optional, ...]:
    """The finished gradients times the upstream one, at the places of their inputs."""
    _refuse_second_derivative()
    found: list[Optional] = [None] * (MIXTURE_TENSORS + len(ctx.options))
    if upstream is None:
        return tuple(found)
    gradients, ctx.gradients = ctx.gradients, None
    if gradients is None:
        with torch.no_grad():
            gradients = make(*ctx.saved_tensors, *ctx.options).gradients
    asked = [
        (place, gradient)
        for place, gradient in zip(places, gradients, strict=True)
        if gradient is not None and ctx.dtypes[place] is not None
    ]
    if any(type(gradient) is not Tensor for _, gradient in asked):
        # A traced gradient is the graph's, which may not change it.
        for place, gradient in asked:
            found[place] = (gradient * (upstream * ctx.factor)).to(ctx.dtypes[place])
        return tuple(found)
    pairs = [(gradient, _room(gradient, ctx.dtypes[place])) for place, gradient in asked]
    scale_all(pairs, upstream, ctx.factor)
    for (place, _), (_, out) in zip(asked, pairs, strict=True):
        found[place] = out.to(ctx.dtypes[place])
    return tuple(found)


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
    weights = _weights(asked, token_weight, ignore_index, wide)
    out = chunked.mixture_forward(
        rows, log_prior, weight, asked, bias, None if weights is None else weights.at_most_one,
        from_parts(kind, constant, slopes), needs=Needs(*needs), late=False, stats=stats,
        workspace=workspace, impl=impl, row_skip=row_skip, narrow=narrow,
    )  # fmt: skip
    counted = asked.answer()
    nll = counted.blank(out.nll, 0.0)
    loss, factor = _reduced(nll, counted, weights, mean=mean)
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
        *_or_empty(
            nll,
            nll.new_empty(rows.shape[0], dtype=torch.int64) if stats else None,
            nll.new_empty(rows.shape[0]) if stats else None,
        ),
        nll.new_empty(()),
        *_or_empty(
            nll,
            rows.new_empty(rows.shape) if needs.rows else None,
            nll.new_empty(rows.shape[:2]) if needs.prior else None,
            *_fake_summed(needs, weight, slopes, wide),
        ),
    )


def _mixture_backward(ctx: Any, upstream: Optional, *_: Optional) -> tuple[Optional, ...]:
    return _scaled(ctx, upstream, _make_mixture, places=MIXTURE_PLACES)


mixture.register_autograd(_mixture_backward, setup_context=partial(_keep_tensors, places=MIXTURE_PLACES))
mixture_loss = Operator(mixture, _make_mixture, _keep_made, _mixture_backward, MIXTURE_TENSORS)


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
    weights = _weights(asked, token_weight, ignore_index, compute_dtype(trunk.dtype))
    out = trunk_forward(
        trunk, private, log_prior, weight, asked, bias, None if weights is None else weights.at_most_one,
        needs=Needs(*needs), workspace=workspace, impl=impl,
    )  # fmt: skip
    counted = asked.answer()
    nll = counted.blank(out.nll, 0.0)
    loss, factor = _reduced(nll, counted, weights, mean=mean)
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
        *_or_empty(
            nll,
            torch.empty_like(trunk) if needs.rows else None,
            torch.empty_like(private) if needs.rows else None,
            nll.new_empty(log_prior.shape) if needs.prior else None,
            *_fake_summed(needs, weight, None, wide)[:2],
        ),
    )


def _trunk_backward(ctx: Any, upstream: Optional, *_: Optional) -> tuple[Optional, ...]:
    return _scaled(ctx, upstream, _make_trunk, places=TRUNK_PLACES)


trunk_mixture.register_autograd(_trunk_backward, setup_context=partial(_keep_tensors, places=TRUNK_PLACES))
trunk_loss = Operator(trunk_mixture, _make_trunk, _keep_made, _trunk_backward, MIXTURE_TENSORS)


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
    _refuse_second_derivative()
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
    return _or_empty(upstream, d_rows, *_summed(gradients, kind, constant, slopes))  # type: ignore[return-value]


@rows_gradient.register_fake
def _(rows: Tensor, weight: Tensor, targets: Tensor, bias: Optional, *rest: Any) -> tuple[Tensor, ...]:
    slopes, upstream, needs = rest[0], rest[5], Needs(*rest[10])
    summed = _fake_summed(needs, weight, slopes, upstream.dtype)
    return _or_empty(upstream, rows.new_empty(rows.shape) if needs.rows else None, *summed)
