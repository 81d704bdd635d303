"""The kernels between the products of the mixture's pass: scores are read once and written once.

One program a row goes over the row's V scores twice; the second time they come from the cache. With the
notation of `reduce.py` and `chunked.py`, first

    maximum = max_v a_v,   others = S = sum_{v != y} exp(a_v - maximum),   target = a_y

as a running maximum and a running sum, one pair a lane, merged at the end; then, in place,

    Q_v = f'(z_v) exp(a_v - maximum) / total,   Q_y = -f'(z_y) S / total,   total = S + exp(a_y - maximum)

in the dtype of the product. Where a row has a factor to be multiplied by anyway, Q is left without 1 / total
(RAISED): then the first time is for the maximum alone, and every entry costs one exponential. A softmax whose
tokens weigh 1 has no factor, and its kernel makes the losses as well (ALONE). All arithmetic is fp32.

A lane takes 16 bytes at a time, which needs rows that start at a multiple of 16 bytes: the buffer's rows are
padded to a stride, and what lies between V and the stride is the kernel's to overwrite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.ops.pointwise import Pointwise
from fullrank.ops.reduce import Statistics
from fullrank.ops.triton_base import KINDS, jit, on_device, power, properties, take, tl, triton

# Bytes that a lane takes at a time; lanes of a program, which takes a row; programs for a multiprocessor.
# With a gradient few are in work at once (two of 1024 lanes fill a multiprocessor): a row must stay in the
# second-level cache between its two passes.
GROUP_BYTES = 16
LANES = {True: 1024, False: 256}
PROGRAMS = 8


@jit
def target_of(targets, row, V: tl.constexpr):  # type: ignore[no-untyped-def]
    """Inside the vocabulary whatever it is: while a graph is captured nobody can check."""
    return tl.minimum(tl.maximum(tl.load(targets + row), 0), V - 1).to(tl.int32)


@jit
def join(value, peaks, sums, column, y, HIDDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """One block of values into the running maximum and sum of each lane."""
    higher = tl.maximum(peaks, tl.max(value, axis=1))
    # A lane may have seen masked entries only: exp(-inf - (-inf)) is no number.
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    weight = power(value - anchor[:, None])
    if not HIDDEN:
        weight = tl.where(column == y, 0.0, weight)
    return higher, sums * power(peaks - anchor) + tl.sum(weight, axis=1)


@jit
def row_loss(top, rest, own):  # type: ignore[no-untyped-def]
    """-log p(y) of rows from their statistics."""
    gap = tl.where(own == float("-inf"), own, own - top)
    # Where the target is the maximum, log(1 + S), by its series where S is small; elsewhere S is at least 1.
    series = rest * (1.0 - rest * (0.5 - rest * (1.0 / 3.0 - rest * (0.25 - rest * 0.2))))
    sure = tl.where(rest < 0.02, series, tl.log(1.0 + rest))
    return tl.where(gap == 0.0, sure, tl.log(rest + tl.exp(gap)) - gap)


@jit
def write_gradient(  # type: ignore[no-untyped-def]
    line, bias, y, top, rest, own, own_slope, factor, constant, V: tl.constexpr, stride: tl.constexpr,
    KIND: tl.constexpr, BIASED: tl.constexpr, LATE: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Q of a row times a factor in place of its scores at `line`."""
    BLOCK: tl.constexpr = LANES * GROUP
    FULL: tl.constexpr = V // BLOCK * BLOCK
    within = tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    anchor = tl.where(top == float("-inf"), 0.0, top)
    total = rest + tl.exp(own - anchor)
    # A row that is masked from end to end has no normaliser.
    inverse = factor / tl.where(total == 0.0, 1.0, total)
    entry = 0.0
    if not LATE:
        # A masked target is no score of the row: nothing falls on it.
        entry = tl.where(own == float("-inf"), 0.0, -rest * inverse)
    if KIND != 0:
        entry *= own_slope
    for start in range(0, FULL, BLOCK):
        column = start + within
        value, slope = take(line, bias, column, V, stride, constant, KIND, BIASED, False)
        gradient = power(value - anchor) * inverse
        if KIND != 0:
            gradient *= slope
        tl.store(line + column, gradient.to(line.dtype.element_ty))
    if stride > FULL:
        column = FULL + within
        value, slope = take(line, bias, column, V, stride, constant, KIND, BIASED, True)
        gradient = power(value - anchor) * inverse
        if KIND != 0:
            gradient *= slope
        tl.store(line + column, gradient.to(line.dtype.element_ty), mask=column < stride)
    # What stands at the target's column now is wrong: its own entry comes last.
    tl.debug_barrier()
    tl.store(line + y, entry)


@jit
def raise_block(  # type: ignore[no-untyped-def]
    line, bias, column, y, anchor, sums, constant, V: tl.constexpr, stride: tl.constexpr,
    KIND: tl.constexpr, BIASED: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """A block of scores becomes f' exp(a - anchor), which without f' joins the sum of each lane."""
    value, slope = take(line, bias, column, V, stride, constant, KIND, BIASED, TAIL)
    raised = power(value - anchor)
    if KIND == 2:
        raised = tl.where(column == y, 0.0, raised)
    sums += tl.sum(raised, axis=1)
    if KIND != 0:
        raised *= slope
    if TAIL:
        tl.store(line + column, raised.to(line.dtype.element_ty), mask=column < stride)
    else:
        tl.store(line + column, raised.to(line.dtype.element_ty))
    return sums


@jit
def score_rows_kernel(  # type: ignore[no-untyped-def]
    scores, bias, targets, first, second, third, constant, rows, V: tl.constexpr, stride: tl.constexpr,
    KIND: tl.constexpr, BIASED: tl.constexpr, GRADIENT: tl.constexpr, RAISED: tl.constexpr,
    LATE: tl.constexpr, ALONE: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`first` to `third` are the places of the statistics; where ALONE, the log prior and the place of the
    loss, and one that is not used. LATE leaves 0 at the target, and `first` holds a factor of each row."""
    BLOCK: tl.constexpr = LANES * GROUP
    FULL: tl.constexpr = V // BLOCK * BLOCK
    # A soft cap would lift the -inf that hides the target.
    HIDDEN: tl.constexpr = GRADIENT and KIND != 2
    within = tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row = tl.program_id(0)
    while row < rows:
        # Rows times stride may pass 2^31.
        line = scores + row.to(tl.int64) * stride
        y = target_of(targets, row, V)
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
            if RAISED:
                peaks = tl.maximum(peaks, tl.max(value, axis=1))
            else:
                peaks, sums = join(value, peaks, sums, column, y, HIDDEN)
        if V > FULL:
            column = FULL + within
            value, _slope = take(line, bias, column, V, stride, constant, KIND, BIASED, True)
            if RAISED:
                peaks = tl.maximum(peaks, tl.max(value, axis=1))
            else:
                peaks, sums = join(value, peaks, sums, column, y, HIDDEN)
        # Over all entries, where the target was hidden as well.
        top = tl.maximum(tl.max(peaks, axis=0), own)
        anchor = tl.where(top == float("-inf"), 0.0, top)
        if RAISED:
            # A soft cap's target was not hidden: every lane has read it before it is overwritten.
            tl.debug_barrier()
            for start in range(0, FULL, BLOCK):
                sums = raise_block(
                    line, bias, start + within, y, anchor, sums, constant, V, stride, KIND, BIASED, False
                )
            if stride > FULL:
                sums = raise_block(
                    line, bias, FULL + within, y, anchor, sums, constant, V, stride, KIND, BIASED, True
                )
            rest = tl.sum(sums, axis=0)
        else:
            rest = tl.sum(sums * tl.exp(peaks - anchor), axis=0)
        factor = 1.0
        if ALONE:
            loss = row_loss(top, rest, own) - tl.load(first + row)
            tl.store(second + row, loss)
            # A token that its only component cannot emit has no posterior.
            factor = tl.where(loss == float("inf"), 0.0, 1.0)
        elif LATE:
            factor = tl.load(first + row)
        else:
            tl.store(first + row, top)
            tl.store(second + row, rest)
            tl.store(third + row, own)
        if RAISED:
            # A masked target is no score of the row: nothing falls on it.
            entry = tl.where(own == float("-inf"), 0.0, -rest)
            if KIND != 0:
                entry *= own_slope
            # What stands at the target's column now is wrong: its own entry comes last.
            tl.debug_barrier()
            tl.store(line + y, entry)
        elif GRADIENT:
            write_gradient(
                line, bias, y, top, rest, own, own_slope, factor, constant,
                V, stride, KIND, BIASED, LATE, LANES, GROUP,
            )  # fmt: skip
        row += tl.num_programs(0)


@jit
def mix_rows_kernel(  # type: ignore[no-untyped-def]
    maximum, others, target, log_prior, nll, share, factors, tokens, K, NARROW: tl.constexpr,
    COMPONENTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, COMPONENTS)
    here = (token < tokens)[:, None] & (k < K)[None, :]
    at = token[:, None] * K + k[None, :]
    top = tl.load(maximum + at, mask=here, other=0.0)
    rest = tl.load(others + at, mask=here, other=1.0)
    own = tl.load(target + at, mask=here, other=0.0)
    prior = tl.load(log_prior + at, mask=here, other=float("-inf"))
    joint = prior - row_loss(top, rest, own)
    peak = tl.max(joint, axis=1)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    parts = tl.exp(joint - anchor[:, None])
    total = tl.sum(parts, axis=1)
    tl.store(nll + token, -(anchor + tl.log(total)), mask=token < tokens)
    # A token that no component can emit has no posterior: its shares are 0.
    parts = tl.where(peak[:, None] == float("-inf"), 0.0, parts / total[:, None])
    tl.store(share + at, parts, mask=here)
    whole = rest + tl.exp(tl.where(own == float("-inf"), own, own - top))
    factor = parts / tl.where(whole == 0.0, 1.0, whole)
    if NARROW:
        # -S stands at the target in bf16: the row's factor makes its rounding good, for all other entries
        # together are at most as large.
        kept = rest.to(tl.bfloat16).to(tl.float32)
        factor *= tl.where(kept == 0.0, 1.0, rest / kept)
    tl.store(factors + at, factor, mask=here)


def mix_rows(
    statistics: Statistics, log_prior: Tensor, nll: Tensor, *, narrow: bool = False
) -> tuple[Tensor, Tensor]:
    """`reduce.posterior` of rows [tokens * K]: losses into nll [tokens]; shares [tokens, K], and shares over
    totals, `narrow` where -S stands at the targets in bf16."""
    tokens, K = log_prior.shape
    share, factor = (torch.empty_like(log_prior, memory_format=torch.contiguous_format) for _ in range(2))
    if tokens:
        components = triton.next_power_of_2(K)
        block = max(1, 1024 // components)
        with on_device(log_prior):
            mix_rows_kernel[(-(-tokens // block),)](
                *statistics, log_prior.contiguous(), nll, share, factor, tokens, K, NARROW=narrow,
                COMPONENTS=components, TOKENS=block, num_warps=4,
            )  # fmt: skip
    return share, factor


def score_rows(
    scores: Tensor, bias: Tensor | None, targets: Tensor, pointwise: Pointwise, *,
    places: Statistics | tuple[Tensor, Tensor] | None, gradient: bool = False, raised: bool = False,
    late: Tensor | None = None,
) -> None:  # fmt: skip
    """Statistics of scores [R, V] into `places`, or, where these are log prior and nll [R], losses of rows
    that are tokens by themselves. With `gradient` the scores become Q, in place; `raised` leaves Q * total,
    not for fp16, which cannot hold what stands at the target; with `late`, a factor [R], nothing is told but
    Q, times the factor and 0 at the target.

    scores may have padded rows, whose padding is overwritten; bias is fp32, as long as the stride and -inf
    beyond V.
    """
    rows, V = scores.shape
    if rows == 0:
        return
    if late is not None:
        places = Statistics(late, late, late)
    assert places is not None
    group = GROUP_BYTES // scores.itemsize
    lanes = max(32, min(LANES[gradient], triton.next_power_of_2(-(-V // group))))
    # How many programs share the rows; outside CUDA two, so that a program goes through several.
    programs = PROGRAMS * int(properties(scores.device).multi_processor_count) if scores.is_cuda else 2
    with on_device(scores):
        score_rows_kernel[(min(rows, programs) if gradient else rows,)](
            scores, scores if bias is None else bias, targets.contiguous(), *places[:2], places[-1],
            pointwise.constant, rows, V=V, stride=scores.stride(0), KIND=KINDS[pointwise.kind],
            BIASED=bias is not None, GRADIENT=gradient, RAISED=raised, LATE=late is not None,
            ALONE=not isinstance(places, Statistics), LANES=lanes, GROUP=group, num_warps=lanes // 32,
        )  # fmt: skip
