"""Log-probabilities of mixtures from the scores of their rows, or the most probable entries: two kernels.

    normalisers   maximum and sum of exp f(z) of every row, in segments of V
    mixture       log p_v = logsumexp_k (log_prior_k + f(z_kv) - l_k), or its maximum over a block of entries

The scores [N K, V] come from one product, which reads W once for all K rows of all tokens; what is made of
them is N V numbers, or for the most probable entry N (V / block). Many programs share a row, because a
decoding step has few: that is what these do and `triton.score_rows` does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.ops.pointwise import Pointwise
from fullrank.ops.triton import KINDS, jit, join, on_device, take, tl, triton

GROUP, LANES = 8, 128
SEGMENT = 4096
BLOCK = 1024


@jit
def normalisers_kernel(  # type: ignore[no-untyped-def]
    scores,
    bias,
    peaks_out,
    sums_out,
    constant,
    V,
    segments,
    KIND: tl.constexpr,
    BIASED: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    row = tl.program_id(0)
    segment = tl.program_id(1)
    line = scores + row.to(tl.int64) * V
    within = tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    peaks = tl.full([LANES], float("-inf"), tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    for start in range(0, SEGMENT, LANES * GROUP):
        column = segment * SEGMENT + start + within
        value, _slope = take(line, bias, column, V, V, constant, KIND, BIASED, True)
        peaks, sums = join(value, peaks, sums, column, -1, True)
    top = tl.max(peaks, axis=0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    tl.store(peaks_out + row * segments + segment, top)
    tl.store(sums_out + row * segments + segment, tl.sum(sums * tl.exp(peaks - anchor), axis=0))


@jit
def mixture_kernel(  # type: ignore[no-untyped-def]
    scores,
    bias,
    peaks,
    sums,
    log_prior,
    out,
    where_out,
    constant,
    V,
    segments,
    blocks,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BIASED: tl.constexpr,
    BEST: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, SEGMENTS)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(K):
        row = token * K + k
        top = tl.load(peaks + row * segments + part, mask=part < segments, other=float("-inf"))
        each = tl.load(sums + row * segments + part, mask=part < segments, other=0.0)
        over = tl.max(top, axis=0)
        anchor = tl.where(over == float("-inf"), 0.0, over)
        shift = tl.load(log_prior + row) - anchor - tl.log(tl.sum(each * tl.exp(top - anchor), axis=0))
        value, _slope = take(scores + row.to(tl.int64) * V, bias, column, V, V, constant, KIND, BIASED, True)
        # A masked entry stays at -inf: where all are masked, shift is inf.
        joint = tl.where(value == float("-inf"), float("-inf"), value + shift)
        higher = tl.maximum(highest, joint)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - anchor) + tl.exp(joint - anchor)
        highest = higher
    result = tl.where(highest == float("-inf"), float("-inf"), highest + tl.log(total))
    if BEST:
        best = tl.max(result, axis=0)
        at = tl.min(tl.where(result == best, column, V), axis=0)
        tl.store(out + token * blocks + block, best)
        tl.store(where_out + token * blocks + block, at.to(tl.int64))
    else:
        tl.store(out + token.to(tl.int64) * V + column, result, mask=column < V)


def mix_scores(
    scores: Tensor, log_prior: Tensor, bias: Tensor | None, pointwise: Pointwise, *, best: bool
) -> tuple[Tensor, Tensor]:
    """scores [N K, V], log_prior [N, K] and bias [V] in fp32 -> log-probabilities [N, V] and nothing, or with
    `best` the largest [N] and its entry [N], the first where several are."""
    (N, K), V = log_prior.shape, scores.shape[1]
    segments, blocks = -(-V // SEGMENT), -(-V // BLOCK)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return scores.new_empty(shape, dtype=dtype)

    peaks, sums = empty(N * K, segments), empty(N * K, segments)
    out = empty(N, blocks if best else V)
    where = empty(N, blocks if best else 0, dtype=torch.int64)
    shift = scores if bias is None else bias
    common = {"KIND": KINDS[pointwise.kind], "BIASED": bias is not None}
    if N:
        with on_device(scores):
            normalisers_kernel[(N * K, segments)](
                scores, shift, peaks, sums, pointwise.constant, V, segments,
                LANES=LANES, GROUP=GROUP, SEGMENT=SEGMENT, num_warps=4, **common,
            )  # fmt: skip
            mixture_kernel[(N, blocks)](
                scores, shift, peaks, sums, log_prior.contiguous(), out, where, pointwise.constant, V,
                segments, blocks, K=K, BEST=best, SEGMENTS=triton.next_power_of_2(segments), BLOCK=BLOCK,
                num_warps=4, **common,
            )  # fmt: skip
    if not best:
        return out, where
    values, block = out.max(1, keepdim=True)
    return values[:, 0], where.gather(1, block)[:, 0]
