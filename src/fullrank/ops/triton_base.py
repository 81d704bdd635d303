"""What all kernels stand on: Triton itself where it is installed, what it can serve, f at some scores, and
out = x * factor.

This is the only module that imports Triton, and nothing imports this module before a call needs it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.ops.pointwise import IDENTITY, Identity, Pointwise, Sigsoftmax, Softcap

try:
    import triton  # type: ignore
    import triton.language as tl  # type: ignore
except ImportError:
    triton = tl = None

log = logging.getLogger(__name__)

KINDS = {Identity.kind: 0, Sigsoftmax.kind: 1, Softcap.kind: 2}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALED = 4096


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on tensors of the processor."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def obstacle(
    device: torch.device,
    dtype: torch.dtype,
    pointwise: Pointwise = IDENTITY,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> str | None:
    """Why kernels cannot serve products of this dtype on this device, or None where they can."""
    if triton is None:
        return "Triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"the rows are on {device}, expected CUDA"
    if dtype not in dtypes:
        names = [str(each).removeprefix("torch.") for each in dtypes]
        return f"the products run in {dtype}, expected {', '.join(names[:-1])} or {names[-1]}"
    if pointwise.kind not in KINDS:
        return f"the pointwise function is {pointwise.kind}, expected one of {', '.join(KINDS)}"
    if device.type == "cuda" and properties(device).major < 8:
        return f"{properties(device).name} is older than compute capability 8.0"
    return None


def refuse_or_say(impl: str, why: str | None, *, quiet: bool = False) -> bool:
    """Whether nothing is in the way of the kernels; impl="triton" raises where something is, and otherwise
    the log says so, once for every reason."""
    if why is None:
        return True
    if impl == "triton":
        raise FullrankError(f"impl='triton' cannot serve here: {why}; pass impl='auto' for any path that can")
    if not quiet:
        say_slower(why)
    return False


@functools.cache
def say_slower(why: str) -> None:
    log.warning("on CUDA without its kernels, slower with the same results: %s", why)


@functools.cache
def properties(device: torch.device) -> Any:
    """Of a CUDA device; torch looks them up anew every time."""
    return torch.cuda.get_device_properties(device)


def jit(function: Callable[..., Any]) -> Any:
    return function if triton is None else triton.jit(function)


def jit_for_any(*counts: str) -> Callable[[Callable[..., Any]], Any]:
    """As `jit`, but compiled once whatever these integers are, be they 1 or divisible by 16."""
    return lambda function: function if triton is None else triton.jit(function, do_not_specialize=counts)


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


@jit
def bend(scores, constant, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """f and f' of fp32 scores; f' of the identity is never used."""
    value = scores
    slope = scores
    if KIND == 1:
        small = tl.exp(-tl.abs(scores))
        value = scores + tl.minimum(scores, 0.0) - tl.log(1.0 + small)
        slope = 2.0 - tl.where(scores >= 0.0, 1.0, small) / (1.0 + small)
    if KIND == 2:
        ratio = scores / constant
        small = tl.exp(-2.0 * tl.abs(ratio))
        far = (1.0 - small) / (1.0 + small)
        # Near zero 1 - exp(-2x) would lose its digits: there the series.
        square = ratio * ratio
        series = -17.0 / 315.0 + square * (62.0 / 2835.0)
        near = ratio + ratio * square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * series))
        bent = tl.where(tl.abs(ratio) < 0.25, near, tl.where(ratio < 0.0, -far, far))
        value = constant * bent
        slope = 4.0 * small / ((1.0 + small) * (1.0 + small))
    return value, slope


@jit
def settle(  # type: ignore[no-untyped-def]
    score, bias, column, V, stride, constant, KIND: tl.constexpr, BIASED: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """f and f' of scores at some columns; what is masked or beyond V is -inf. Only a TAIL may go beyond V."""
    if BIASED:
        # As long as the stride, with -inf beyond V: the bias is the mask of the tail as well.
        shift = tl.load(bias + column, mask=column < stride, other=float("-inf"))
        masked = shift == float("-inf")
        score += tl.where(masked, 0.0, shift)
    value, slope = bend(score, constant, KIND)
    if BIASED:
        value = tl.where(masked, float("-inf"), value)
    elif TAIL:
        value = tl.where(column < V, value, float("-inf"))
    return value, slope


@jit
def take(  # type: ignore[no-untyped-def]
    scores, bias, column, V, stride, constant, KIND: tl.constexpr, BIASED: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """`settle` of the scores at some columns of a row."""
    if TAIL:
        # The bound is the stride, a multiple of 16, so that the loads stay 16 bytes wide for any V.
        score = tl.load(scores + column, mask=column < stride, other=0.0).to(tl.float32)
    else:
        score = tl.load(scores + column).to(tl.float32)
    value, slope = settle(score, bias, column, V, stride, constant, KIND, BIASED, TAIL)
    return value, slope


@jit
def power(x):  # type: ignore[no-untyped-def]
    """e^x in two instructions; Triton's own takes four, for the sake of results that are 0 here."""
    return tl.exp2(x * 1.4426950408889634)


@jit
def scale_part(  # type: ignore[no-untyped-def]
    x, out, block, length, numbers, width, factor, BLOCK: tl.constexpr
):
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    number = tl.load(numbers + at // width, mask=inside, other=0.0) * factor
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * number
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@jit
def scale_kernel(  # type: ignore[no-untyped-def]
    x, out, length, other, other_out, other_length, numbers, width, factor, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    blocks = tl.cdiv(length, BLOCK)
    if block < blocks:
        scale_part(x, out, block, length, numbers, width, factor, BLOCK)
    else:
        scale_part(other, other_out, block - blocks, other_length, numbers, width, factor, BLOCK)


def scale_all(pairs: list[tuple[Tensor, Tensor]], numbers: Tensor, factor: float = 1.0) -> None:
    """out = x * numbers * factor for every (x, out) of contiguous tensors, two a launch; numbers are in fp32,
    one a row of each x, or one for all."""
    for place in range(0, len(pairs), 2):
        (x, out), (other, other_out) = pairs[place], pairs[min(place + 1, len(pairs) - 1)]
        length, other_length = x.numel(), 0 if other is x else other.numel()
        blocks = -(-length // SCALED) - (-other_length // SCALED)
        # No entry lies beyond the width of a single number.
        width = max(length, other_length) if numbers.numel() == 1 else length // numbers.numel()
        if blocks:
            with on_device(numbers):
                scale_kernel[(blocks,)](
                    x, out, length, other, other_out, other_length, numbers, width, factor, BLOCK=SCALED,
                    num_warps=8,
                )  # fmt: skip
