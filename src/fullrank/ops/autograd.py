"""What makes a torch operator of a pass: a registered one for compilers and tracers, else a plain function.

So autograd, torch.compile and autocast see one opaque call. The transforms of torch.func (grad, vmap, jvp)
cannot look into it and are refused with the remedy, impl="reference". Autograd never sees the gradients that
a loss makes on the way as something to differentiate: the backward pass scales them by the upstream gradient
and hands the buffers over, so that W's gradient exists once. A second backward pass over the same graph finds
them gone and makes them again. Second derivatives raise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fullrank.errors import FullrankError
from fullrank.ops.products import scale_all

Optional = Tensor | None

# As a decorator `torch.compiler.disable` imports torch._dynamo, 1.6 s; this one imports it at the first call.
outside_graphs = torch._disable_dynamo

LOSS_TENSORS = 7  # How many of a loss's first arguments are tensors; the plain options follow.


def or_empty(like: Tensor, *tensors: Optional) -> tuple[Tensor, ...]:
    """An operator returns tensors only: nothing is an empty one."""
    return tuple(like.new_empty(0) if tensor is None else tensor for tensor in tensors)


def _room(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Where a gradient goes when it is scaled: in place, so that W's exists once, but for one that changes
    its dtype on CUDA, in one kernel; a processor would scale into a copy first."""
    return (
        torch.empty_like(gradient, dtype=dtype) if gradient.is_cuda and gradient.dtype != dtype else gradient
    )


def refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise FullrankError(
            "fullrank's fused loss is differentiable once, got backward(create_graph=True): "
            "pass impl='reference' for second derivatives"
        )


def refuse_transforms() -> None:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise FullrankError(
            "fullrank's fused loss is one opaque call, which a transform of torch.func (grad, vmap, jvp, "
            "...) cannot look into: pass impl='reference', or use torch.autograd"
        )


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast reaches into operators, which have decided what they multiply in."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


class Result(NamedTuple):
    """What a loss makes of its inputs."""

    loss: Tensor
    beside: tuple[Optional, ...]
    """What is handed out beside it, without gradients."""
    factor: Tensor | float
    """What the gradients still lack."""
    gradients: tuple[Optional, ...]

    def as_tensors(self) -> tuple[Tensor, ...]:
        """As an operator returns it: nothing is an empty tensor."""
        factor = self.factor if isinstance(self.factor, Tensor) else self.loss.new_full((), self.factor)
        return self.loss, *or_empty(self.loss, *self.beside), factor, *or_empty(self.loss, *self.gradients)


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
        """Differentiable; beside a loss stands what the operator has, or None in place of an empty tensor."""
        compiling = torch.compiler.is_compiling()
        if not compiling:
            refuse_transforms()
        if not compiling and _plain(*inputs[: self.tensors]):
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
    kinds = {type(tensor) for tensor in tensors if tensor is not None}
    return kinds <= {Tensor, torch.nn.Parameter} and not is_in_torch_dispatch_mode()


def _keep(ctx: Any, inputs: tuple[Any, ...], factor: Tensor | float, gradients: Sequence[Optional]) -> None:
    """What the backward pass of a loss needs."""
    tensors = inputs[:LOSS_TENSORS]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.options = inputs[LOSS_TENSORS:]
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
    # Not saved through autograd: the first backward pass takes these buffers out and gives them away.
    ctx.factor, ctx.gradients = factor, gradients


def keep_made(ctx: Any, inputs: tuple[Any, ...], made: Result) -> tuple[Optional, ...]:
    ctx.mark_non_differentiable(*(tensor for tensor in made.beside if tensor is not None))
    _keep(ctx, inputs, made.factor, made.gradients)
    return made.loss, *made.beside


def keep_tensors(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], *, places: tuple[int, ...]
) -> None:
    """The same of what a registered operator returned: an empty gradient is none."""
    ctx.mark_non_differentiable(*output[1:])
    *_, factor = output[: -len(places)]
    gradients = [
        None if inputs[place] is None or gradient.shape != inputs[place].shape else gradient
        for place, gradient in zip(places, output[-len(places) :], strict=True)
    ]
    _keep(ctx, inputs, factor, gradients)


def scaled(
    ctx: Any, upstream: Optional, make: Callable[..., Result], *, places: tuple[int, ...]
) -> tuple[Optional, ...]:
    """The finished gradients times the upstream one, at the places of their inputs."""
    refuse_second_derivative()
    found: list[Optional] = [None] * (LOSS_TENSORS + len(ctx.options))
    if upstream is None:
        return tuple(found)
    gradients, ctx.gradients = ctx.gradients, None
    if gradients is None:
        with torch.no_grad():
            gradients = make(*ctx.saved_tensors, *ctx.options).gradients
    dtypes = [ctx.dtypes[place] for place in places]
    for place, gradient in zip(places, scaled_to(dtypes, gradients, upstream, ctx.factor), strict=True):
        found[place] = gradient
    return tuple(found)


def scaled_to(
    dtypes: Sequence[torch.dtype | None], gradients: Sequence[Optional], number: Tensor,
    factor: Tensor | float = 1.0,
) -> list[Optional]:  # fmt: skip
    """Finished gradients times number [] times factor, in their inputs' dtypes: one pass over each, in place
    where it can be. None where there is no gradient or no input."""
    found: list[Optional] = [None] * len(gradients)
    asked = [
        (place, gradient, dtype)
        for place, (gradient, dtype) in enumerate(zip(gradients, dtypes, strict=True))
        if gradient is not None and dtype is not None
    ]
    if any(type(gradient) is not Tensor for _, gradient, _ in asked):
        # A traced gradient is the graph's, which may not change it.
        for place, gradient, dtype in asked:
            found[place] = (gradient * (number * factor)).to(dtype)
        return found
    pairs = [(gradient, _room(gradient, dtype)) for _, gradient, dtype in asked]
    scale_all(pairs, number, factor)
    for (place, _, dtype), (_, out) in zip(asked, pairs, strict=True):
        found[place] = out.to(dtype)
    return found
