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
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fullrank.ops.pointwise import IDENTITY, Identity, Pointwise, Sigsoftmax, Softcap
from fullrank.ops.statistics import Statistics

try:
    import triton  # type: ignore
    import triton.language as tl  # type: ignore
except ImportError:
    triton = tl = None

KINDS = {Identity.kind: 0, Sigsoftmax.kind: 1, Softcap.kind: 2}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Bytes that a lane takes at a time; lanes of a program, which takes a row; programs for a multiprocessor.
# With a gradient few are in work at once (two of 1024 lanes fill a multiprocessor): a row must stay in the
# second-level cache between its two passes.
GROUP_BYTES = 16
LANES = {True: 1024, False: 256}
PROGRAMS = 8

SCALED = 4096


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on tensors of the processor."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def obstacle(device: torch.device, dtype: torch.dtype, pointwise: Pointwise = IDENTITY) -> str | None:
    """Why the kernels cannot serve such scores, or None where they can."""
    if triton is None:
        return "Triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"the rows are on {device}, expected CUDA"
    if dtype not in DTYPES:
        return f"the products run in {dtype}, expected bfloat16, float16 or float32"
    if pointwise.kind not in KINDS:
        return f"the pointwise function is {pointwise.kind}, expected one of {', '.join(KINDS)}"
    if device.type == "cuda" and properties(device).major < 8:
        return f"{properties(device).name} is older than compute capability 8.0"
    return None


@functools.cache
def properties(device: torch.device) -> Any:
    """Of a CUDA device; torch looks them up anew every time."""
    return torch.cuda.get_device_properties(device)


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
def take(  # type: ignore[no-untyped-def]
    scores,
    bias,
    column,
    V,
    stride,
    constant,
    KIND: tl.constexpr,
    BIASED: tl.constexpr,
    TAIL: tl.constexpr,
):
    """f and f' at some columns of a row; what is masked or beyond V is -inf. Only a TAIL may go beyond V."""
    if TAIL:
        # The bound is the stride, a multiple of 16, so that the loads stay 16 bytes wide for any V.
        score = tl.load(scores + column, mask=column < stride, other=0.0).to(tl.float32)
    else:
        score = tl.load(scores + column).to(tl.float32)
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
def join(value, peaks, sums, column, y, HIDDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """One block of values into the running maximum and sum of each lane."""
    higher = tl.maximum(peaks, tl.max(value, axis=1))
    # A lane may have seen masked entries only: exp(-inf - (-inf)) is no number.
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp(value - anchor[:, None])
    if not HIDDEN:
        weight = tl.where(column == y, 0.0, weight)
    return higher, sums * tl.exp(peaks - anchor) + tl.sum(weight, axis=1)


@jit
def write_gradient(  # type: ignore[no-untyped-def]
    line,
    place,
    bias,
    y,
    top,
    rest,
    own,
    own_slope,
    constant,
    V: tl.constexpr,
    stride: tl.constexpr,
    KIND: tl.constexpr,
    BIASED: tl.constexpr,
    LATE: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Q of a row from its scores at `line` and its statistics, to `place`, which may be the same."""
    BLOCK: tl.constexpr = LANES * GROUP
    FULL: tl.constexpr = V // BLOCK * BLOCK
    within = tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    anchor = tl.where(top == float("-inf"), 0.0, top)
    inverse = 1.0 / (rest + tl.exp(own - anchor))
    entry = 0.0
    if not LATE:
        # A masked target is no score of the row: nothing falls on it.
        entry = tl.where(own == float("-inf"), 0.0, -rest * inverse)
    if KIND != 0:
        entry *= own_slope
    for start in range(0, FULL, BLOCK):
        column = start + within
        value, slope = take(line, bias, column, V, stride, constant, KIND, BIASED, False)
        gradient = tl.exp(value - anchor) * inverse
        if KIND != 0:
            gradient *= slope
        tl.store(place + column, gradient.to(place.dtype.element_ty))
    if stride > FULL:
        column = FULL + within
        value, slope = take(line, bias, column, V, stride, constant, KIND, BIASED, True)
        gradient = tl.exp(value - anchor) * inverse
        if KIND != 0:
            gradient *= slope
        tl.store(place + column, gradient.to(place.dtype.element_ty), mask=column < stride)
    # What stands at the target's column now is wrong: its own entry comes last.
    tl.debug_barrier()
    tl.store(place + y, entry)


@jit
def score_rows_kernel(  # type: ignore[no-untyped-def]
    scores,
    bias,
    targets,
    maximum,
    others,
    target,
    constant,
    rows,
    V: tl.constexpr,
    stride: tl.constexpr,
    KIND: tl.constexpr,
    BIASED: tl.constexpr,
    GRADIENT: tl.constexpr,
    LATE: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    BLOCK: tl.constexpr = LANES * GROUP
    FULL: tl.constexpr = V // BLOCK * BLOCK
    # A soft cap would lift the -inf that hides the target.
    HIDDEN: tl.constexpr = GRADIENT and KIND != 2
    within = tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row = tl.program_id(0)
    while row < rows:
        # Rows times stride may pass 2^31.
        line = scores + row.to(tl.int64) * stride
        y = tl.load(targets + row).to(tl.int32)
        own, own_slope = take(line, bias, y, V, stride, constant, KIND, BIASED, True)
        if HIDDEN:
            # Then no entry has to ask whether it is the target's. Every lane reads it before one hides it.
            tl.debug_barrier()
            tl.store(line + y, float("-inf"))
            tl.debug_barrier()

        peaks = tl.full([LANES], float("-inf"), tl.float32)
        sums = tl.zeros([LANES], tl.float32)
        for start in range(0, FULL, BLOCK):
            column = start + within
            value, _slope = take(line, bias, column, V, stride, constant, KIND, BIASED, False)
            peaks, sums = join(value, peaks, sums, column, y, HIDDEN)
        if V > FULL:
            column = FULL + within
            value, _slope = take(line, bias, column, V, stride, constant, KIND, BIASED, True)
            peaks, sums = join(value, peaks, sums, column, y, HIDDEN)
        highest = tl.max(peaks, axis=0)
        # Over all entries, where the target was hidden as well.
        top = tl.maximum(highest, own)
        anchor = tl.where(top == float("-inf"), 0.0, top)
        rest = tl.sum(sums * tl.exp(peaks - anchor), axis=0)
        tl.store(maximum + row, top)
        tl.store(others + row, rest)
        tl.store(target + row, own)

        if GRADIENT:
            write_gradient(
                line, line, bias, y, top, rest, own, own_slope, constant,
                V, stride, KIND, BIASED, LATE, LANES, GROUP,
            )  # fmt: skip
        row += tl.num_programs(0)


@jit
def gradient_rows_kernel(  # type: ignore[no-untyped-def]
    scores,
    out,
    kept,
    bias,
    targets,
    maximum,
    others,
    target,
    constant,
    rows,
    V: tl.constexpr,
    stride: tl.constexpr,
    KIND: tl.constexpr,
    BIASED: tl.constexpr,
    SOME: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    row = number
    if SOME:
        row = tl.load(kept + number)
    line = scores + row * stride
    y = tl.load(targets + row).to(tl.int32)
    _own, own_slope = take(line, bias, y, V, stride, constant, KIND, BIASED, True)
    # Every lane has read the target's score before it is overwritten.
    tl.debug_barrier()
    write_gradient(
        line, out + number * stride, bias, y, tl.load(maximum + row), tl.load(others + row),
        tl.load(target + row), own_slope, constant, V, stride, KIND, BIASED, False, LANES, GROUP,
    )  # fmt: skip


def gradient_rows(
    scores: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    pointwise: Pointwise,
    statistics: Statistics,
    *,
    kept: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Q of rows whose statistics are known: of all, in place, or of the rows `kept` into out [kept, stride].

    scores, bias and targets as in `score_rows`.
    """
    rows, V = (scores.shape[0] if kept is None else kept.shape[0]), scores.shape[1]
    place = scores if out is None else out
    if rows:
        lanes, group, warps = launch_sizes(V, scores.itemsize, gradient=False)
        with on_device(scores):
            gradient_rows_kernel[(rows,)](
                scores, place, targets if kept is None else kept, scores if bias is None else bias,
                targets.contiguous(), *statistics, pointwise.constant, rows,
                V=V, stride=scores.stride(0), KIND=KINDS[pointwise.kind], BIASED=bias is not None,
                SOME=kept is not None, LANES=lanes, GROUP=group, num_warps=warps,
            )  # fmt: skip
    return place


@jit
def look_kernel(targets, seen, tokens, V, ignored, IGNORES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    outside = tl.zeros([BLOCK], tl.int32)
    left_out = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < tokens:
        at = start + tl.arange(0, BLOCK)
        target = tl.load(targets + at, mask=at < tokens, other=0)
        outside += ((target < 0) | (target >= V)).to(tl.int32)
        if IGNORES:
            left_out += ((target == ignored) & (at < tokens)).to(tl.int32)
        start += BLOCK
    tl.store(seen, tl.sum(outside, axis=0).to(tl.int64))
    tl.store(seen + 1, tl.sum(left_out, axis=0).to(tl.int64))


def look_at_targets(targets: Tensor, V: int, ignore_index: int | None) -> Tensor:
    """As `targets.look` has it."""
    seen = targets.new_empty(2, dtype=torch.int64)
    with on_device(targets):
        look_kernel[(1,)](
            targets.contiguous(), seen, targets.shape[0], V, ignore_index or 0,
            IGNORES=ignore_index is not None, BLOCK=4096, num_warps=8,
        )  # fmt: skip
    return seen


@jit
def mix_rows_kernel(  # type: ignore[no-untyped-def]
    maximum,
    others,
    target,
    log_prior,
    nll,
    share,
    tokens,
    K,
    COMPONENTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, COMPONENTS)
    here = (token < tokens)[:, None] & (k < K)[None, :]
    at = token[:, None] * K + k[None, :]
    top = tl.load(maximum + at, mask=here, other=0.0)
    rest = tl.load(others + at, mask=here, other=1.0)
    own = tl.load(target + at, mask=here, other=0.0)
    prior = tl.load(log_prior + at, mask=here, other=float("-inf"))
    gap = tl.where(own == float("-inf"), own, own - top)
    # Where the target is the maximum, log(1 + S), by its series where S is small; elsewhere S is at least 1.
    series = rest * (1.0 - rest * (0.5 - rest * (1.0 / 3.0 - rest * (0.25 - rest * 0.2))))
    sure = tl.where(rest < 0.02, series, tl.log(1.0 + rest))
    row = tl.where(gap == 0.0, sure, tl.log(rest + tl.exp(gap)) - gap)
    joint = prior - row
    peak = tl.max(joint, axis=1)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    parts = tl.exp(joint - anchor[:, None])
    total = tl.sum(parts, axis=1)
    tl.store(nll + token, -(anchor + tl.log(total)), mask=token < tokens)
    # A token that no component can emit has no posterior: its shares are 0.
    parts = tl.where(peak[:, None] == float("-inf"), 0.0, parts / total[:, None])
    tl.store(share + at, parts, mask=here)


def mix_rows(statistics: Statistics, log_prior: Tensor, nll: Tensor) -> Tensor:
    """`statistics.posterior` of rows [tokens * K]: losses into nll [tokens], shares [tokens, K] out."""
    tokens, K = log_prior.shape
    share = torch.empty_like(log_prior, memory_format=torch.contiguous_format)
    if tokens:
        components = triton.next_power_of_2(K)
        block = max(1, 1024 // components)
        with on_device(log_prior):
            mix_rows_kernel[(-(-tokens // block),)](
                *statistics, log_prior.contiguous(), nll, share, tokens, K,
                COMPONENTS=components, TOKENS=block, num_warps=4,
            )  # fmt: skip
    return share


@jit
def scale_rows_kernel(x, factor, out, width, length, SINGLE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    if SINGLE:  # noqa: SIM108 - a ternary would be an expression of both
        scale = tl.load(factor)
    else:
        scale = tl.load(factor + at // width, mask=inside, other=0.0)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def scale_rows(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """As `scaling.py` has it, for contiguous tensors."""
    length = x.numel()
    if length:
        width = length // x.shape[0] if factor.ndim else 1
        with on_device(x):
            scale_rows_kernel[(-(-length // SCALED),)](
                x, factor, out, width, length, SINGLE=factor.ndim == 0, BLOCK=SCALED, num_warps=8
            )
    return out


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def launch_sizes(V: int, itemsize: int, *, gradient: bool) -> tuple[int, int, int]:
    """Lanes, scores that a lane takes at a time, and warps."""
    group = GROUP_BYTES // itemsize
    lanes = max(32, min(LANES[gradient], triton.next_power_of_2(-(-V // group))))
    return lanes, group, lanes // 32


def programs(rows: int, device: torch.device) -> int:
    """How many programs share the rows; outside CUDA two, so that a program goes through several."""
    if device.type != "cuda":
        return min(rows, 2)
    return min(rows, PROGRAMS * int(properties(device).multi_processor_count))


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

    scores may have padded rows, whose padding is overwritten; bias is fp32, as long as the stride and -inf
    beyond V. `late` leaves 0 at the target.
    """
    rows, V = scores.shape
    out = Statistics(*(scores.new_empty(rows, dtype=torch.float32) for _ in range(3)))
    if rows == 0:
        return out
    lanes, group, warps = launch_sizes(V, scores.itemsize, gradient=gradient)
    with on_device(scores):
        score_rows_kernel[(programs(rows, scores.device) if gradient else rows,)](
            scores, scores if bias is None else bias, targets.contiguous(), *out, pointwise.constant, rows,
            V=V, stride=scores.stride(0), KIND=KINDS[pointwise.kind], BIASED=bias is not None,
            GRADIENT=gradient, LATE=late, LANES=lanes, GROUP=group, num_warps=warps,
        )  # fmt: skip
    return out
