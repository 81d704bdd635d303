"""Kernels over a number a row or a token: small work that would take torch many launches.

    mix      losses and posterior shares of tokens from the statistics of their K rows
    keep     which rows have a posterior share above a bound
    scale    out = x * factor, a factor a row; `gather` of some rows of x, `scatter` to some rows of out; one
             factor for several tensors

All arithmetic is fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.ops.mixture.kernels import row_loss
from fullrank.ops.statistics import Statistics
from fullrank.ops.triton_base import jit, on_device, tl, triton

SCALED = 4096
COUNTED = 4096


@jit
def mix_rows_kernel(  # type: ignore[no-untyped-def]
    maximum,
    others,
    target,
    log_prior,
    nll,
    share,
    factor,
    tokens,
    K,
    LACKING: tl.constexpr,
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
    joint = prior - row_loss(top, rest, own)
    peak = tl.max(joint, axis=1)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    parts = tl.exp(joint - anchor[:, None])
    total = tl.sum(parts, axis=1)
    tl.store(nll + token, -(anchor + tl.log(total)), mask=token < tokens)
    # A token that no component can emit has no posterior: its shares are 0.
    parts = tl.where(peak[:, None] == float("-inf"), 0.0, parts / total[:, None])
    tl.store(share + at, parts, mask=here)
    if LACKING:
        whole = rest + tl.exp(tl.where(own == float("-inf"), own, own - top))
        tl.store(factor + at, parts / tl.where(whole == 0.0, 1.0, whole), mask=here)


def mix_rows(
    statistics: Statistics, log_prior: Tensor, nll: Tensor, *, lacking: bool = False
) -> tuple[Tensor, Tensor]:
    """`statistics.posterior` of rows [tokens * K]: losses into nll [tokens], shares [tokens, K] out, and the
    same again, with `lacking` divided by `total`."""
    tokens, K = log_prior.shape
    share = torch.empty_like(log_prior, memory_format=torch.contiguous_format)
    factor = torch.empty_like(share) if lacking else share
    if tokens:
        components = triton.next_power_of_2(K)
        block = max(1, 1024 // components)
        with on_device(log_prior):
            mix_rows_kernel[(-(-tokens // block),)](
                *statistics, log_prior.contiguous(), nll, share, factor, tokens, K,
                LACKING=lacking, COMPONENTS=components, TOKENS=block, num_warps=4,
            )  # fmt: skip
    return share, factor


@jit
def keep_rows_kernel(share, kept, count, rows, bound, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    found = 0
    start = 0
    while start < rows:
        at = start + tl.arange(0, BLOCK)
        # Not share > bound: a share that is no number stays, and shows in the gradients.
        keep = (at < rows) & ~(tl.load(share + at, mask=at < rows, other=0.0) <= bound)
        number = tl.cumsum(keep.to(tl.int32), axis=0)
        tl.store(kept + found + number - 1, at.to(tl.int64), mask=keep)
        found += tl.sum(keep.to(tl.int32), axis=0)
        start += BLOCK
    tl.store(count, found)


def keep_rows(share: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Ascending numbers of the rows with a share above the bound, in a tensor that is long enough for all of
    them, and how many they are, [1]."""
    share = share.flatten()
    kept = share.new_empty(share.shape[0], dtype=torch.int64)
    count = share.new_zeros(1, dtype=torch.int64)
    if share.shape[0]:
        with on_device(share):
            keep_rows_kernel[(1,)](share, kept, count, share.shape[0], bound, BLOCK=COUNTED, num_warps=8)
    return kept, count


@jit
def scale_rows_kernel(x, factor, out, width, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    scale = tl.load(factor + at // width, mask=inside, other=0.0)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def scale_rows(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """As `scaling.py` has it, for contiguous tensors."""
    length = x.numel()
    if length:
        with on_device(x):
            scale_rows_kernel[(-(-length // SCALED),)](
                x, factor, out, length // x.shape[0], length, BLOCK=SCALED, num_warps=8
            )
    return out


@jit
def scale_part(x, out, block, length, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@jit
def scale_both_kernel(  # type: ignore[no-untyped-def]
    x, out, length, other, other_out, other_length, number, factor, BLOCK: tl.constexpr
):
    scale = tl.load(number) * factor
    block = tl.program_id(0)
    blocks = tl.cdiv(length, BLOCK)
    if block < blocks:
        scale_part(x, out, block, length, scale, BLOCK)
    else:
        scale_part(other, other_out, block - blocks, other_length, scale, BLOCK)


def scale_all(pairs: list[tuple[Tensor, Tensor]], number: Tensor, factor: float) -> None:
    """out = x * number * factor for all (x, out) of contiguous tensors, number [] in fp32; two a launch."""
    for place in range(0, len(pairs), 2):
        (x, out), (other, other_out) = pairs[place], pairs[min(place + 1, len(pairs) - 1)]
        length, other_length = x.numel(), 0 if other is x else other.numel()
        blocks = -(-length // SCALED) - (-other_length // SCALED)
        if blocks:
            with on_device(number):
                scale_both_kernel[(blocks,)](
                    x, out, length, other, other_out, other_length, number, factor, BLOCK=SCALED, num_warps=8
                )


@jit
def move_rows_kernel(  # type: ignore[no-untyped-def]
    x, factor, numbers, out, width, length, GATHER: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    row = at // width
    number = tl.load(numbers + row, mask=inside, other=0)
    there = number * width + at - row * width
    scale = tl.load(factor + number, mask=inside, other=0.0)
    if GATHER:
        value = tl.load(x + there, mask=inside, other=0.0).to(tl.float32) * scale
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    else:
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        tl.store(out + there, value.to(out.dtype.element_ty), mask=inside)


def gather_rows(x: Tensor, factor: Tensor, numbers: Tensor) -> Tensor:
    """x[numbers] * factor[numbers] of contiguous rows x [R, D]."""
    out = x.new_empty(numbers.shape[0], x.shape[1])
    move_rows(x, factor, numbers, out, gather=True)
    return out


def scatter_rows(x: Tensor, factor: Tensor, numbers: Tensor, out: Tensor) -> None:
    """out[numbers] = x * factor[numbers], to contiguous rows out [R, D]."""
    move_rows(x, factor, numbers, out, gather=False)


def move_rows(x: Tensor, factor: Tensor, numbers: Tensor, out: Tensor, *, gather: bool) -> None:
    width = x.shape[1]
    length = numbers.shape[0] * width
    if length:
        with on_device(x):
            move_rows_kernel[(-(-length // SCALED),)](
                x, factor, numbers, out, width, length, GATHER=gather, BLOCK=SCALED, num_warps=8
            )
