"""The elementwise part of a kept chunk as one CUDA kernel: the scores are read once and written once.

One program a row goes over the row's V scores twice; the second time they come from the cache. With the
notation of `statistics.py` and `tiles.py`, first

    maximum = max_v a_v,   others = S = sum_{v != y} exp(a_v - maximum),   target = a_y

as a running maximum and a running sum, one pair a lane, merged at the end; then, in place,

    Q_v = f'(z_v) exp(a_v - maximum) / total,   Q_y = -f'(z_y) S / total,   total = S + exp(a_y - maximum)

in the dtype of the product. Q is normalised in every dtype, so a row's factor lacks nothing. All arithmetic
is fp32. A lane takes 16 bytes at a time, which needs rows that start at a multiple of 16 bytes: the buffer's
rows are padded to `stride`, and what lies between V and the stride is the kernel's to overwrite.

This is the only module that imports Triton, and nothing imports this module before a call needs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fullrank.ops.pointwise import Identity, Pointwise, Sigsoftmax, Softcap
from fullrank.ops.statistics import Statistics

try:
    import triton  # type: ignore
    import triton.language as tl  # type: ignore
except ImportError:
    triton = tl = None

KINDS = {Identity.kind: 0, Sigsoftmax.kind: 1, Softcap.kind: 2}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Scores that a program holds at once, and the bytes of a row from which on it takes the whole multiprocessor:
# the rows in work must fit the second-level cache together, or the second pass reads memory again.
BLOCK = 8192
WIDE_ROW = 80 * 1024


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on tensors of the processor."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def obstacle(device: torch.device, dtype: torch.dtype, pointwise: Pointwise) -> str | None:
    """Why the kernel cannot serve such scores, or None where it can."""
    if triton is None:
        return "Triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"the rows are on {device}, expected CUDA"
    if dtype not in DTYPES:
        return f"the products run in {dtype}, expected bfloat16, float16 or float32"
    if pointwise.kind not in KINDS:
        return f"the pointwise function is {pointwise.kind}, expected one of {', '.join(KINDS)}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return None


def jit(function: Callable[..., Any]) -> Any:
    return function if triton is None else triton.jit(function)


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
def take(scores, bias, column, V, stride, constant, KIND: tl.constexpr, BIASED: tl.constexpr):  # type: ignore[no-untyped-def]
    """f and f' at some columns of a row; what is masked or beyond V is -inf."""
    # The bound is the stride, a multiple of 16, so that the loads stay 16 bytes wide for any V.
    inside = column < stride
    score = tl.load(scores + column, mask=inside, other=0.0).to(tl.float32)
    kept = column < V
    if BIASED:
        shift = tl.load(bias + column, mask=inside, other=0.0)
        masked = shift == float("-inf")
        kept = kept & (masked == 0)
        score += tl.where(masked, 0.0, shift)
    value, slope = bend(score, constant, KIND)
    return tl.where(kept, value, float("-inf")), slope


@jit
def score_rows_kernel(  # type: ignore[no-untyped-def]
    scores,
    bias,
    targets,
    maximum,
    others,
    target,
    constant,
    V: tl.constexpr,
    stride: tl.constexpr,
    KIND: tl.constexpr,
    BIASED: tl.constexpr,
    GRADIENT: tl.constexpr,
    LATE: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Rows times stride may pass 2^31.
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    y = tl.load(targets + row).to(tl.int32)
    own, _own_slope = take(scores, bias, y, V, stride, constant, KIND, BIASED)

    within = tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    peaks = tl.full([LANES], float("-inf"), tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    for start in range(0, V, LANES * GROUP):
        column = start + within
        value, slope = take(scores, bias, column, V, stride, constant, KIND, BIASED)
        higher = tl.maximum(peaks, tl.max(value, axis=1))
        # A lane may have seen masked entries only: exp(-inf - (-inf)) is no number.
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.where(column == y, 0.0, tl.exp(value - anchor[:, None]))
        sums = sums * tl.exp(peaks - anchor) + tl.sum(weight, axis=1)
        peaks = higher
    top = tl.max(peaks, axis=0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    rest = tl.sum(sums * tl.exp(peaks - anchor), axis=0)
    tl.store(maximum + row, top)
    tl.store(others + row, rest)
    tl.store(target + row, own)

    if GRADIENT:
        inverse = 1.0 / (rest + tl.exp(own - top))
        entry = 0.0
        if not LATE:
            # A masked target is no score of the row: nothing falls on it.
            entry = tl.where(own == float("-inf"), 0.0, -rest * inverse)
        for start in range(0, V, LANES * GROUP):
            column = start + within
            value, slope = take(scores, bias, column, V, stride, constant, KIND, BIASED)
            gradient = tl.where(column == y, entry, tl.exp(value - top) * inverse)
            if KIND != 0:
                gradient *= slope
            tl.store(scores + column, gradient.to(scores.dtype.element_ty), mask=column < stride)


def launch_sizes(V: int, itemsize: int) -> tuple[int, int, int]:
    """Lanes, scores that a lane takes at a time, and warps."""
    group = 16 // itemsize
    block = min(BLOCK * (2 if V * itemsize > WIDE_ROW else 1), max(512, triton.next_power_of_2(V)))
    return block // group, group, max(1, min(32, block // 512))


def score_rows(
    scores: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    pointwise: Pointwise,
    *,
    gradient: bool,
    late: bool = False,
) -> Statistics:
    """Statistics of scores [R, V]; with `gradient` the scores become Q, in place.

    scores may have padded rows, whose padding is overwritten; bias is fp32 and as long as the stride, so that
    it is loaded as the scores are. `late` leaves 0 at the target.
    """
    rows, V = scores.shape
    out = Statistics(*(scores.new_empty(rows, dtype=torch.float32) for _ in range(3)))
    if rows == 0:
        return out
    lanes, group, warps = launch_sizes(V, scores.itemsize)
    here = torch.cuda.device(scores.device) if scores.device.type == "cuda" else contextlib.nullcontext()
    with here:
        score_rows_kernel[(rows,)](
            scores, scores if bias is None else bias, targets.contiguous(), *out, pointwise.constant,
            V=V, stride=scores.stride(0), KIND=KINDS[pointwise.kind], BIASED=bias is not None,
            GRADIENT=gradient, LATE=late, LANES=lanes, GROUP=group, num_warps=warps,
        )  # fmt: skip
    return out
