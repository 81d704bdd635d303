"""Log-probabilities of mixtures from the scores of their rows, or the most probable entries: three kernels.

    normalisers   maximum and sum of exp f(z) of every row, in segments of V
    mixture       log p_v = logsumexp_k (log_prior_k + f(z_kv) - l_k), or its maximum over a block of entries
    best          the maximum over the blocks of a token, and its entry

The scores [N K, V] come from one product, which reads W once for all K rows of all tokens; what is made of
them is N V numbers, or for the most probable entry N (V / block). Many programs share a row, because a
decoding step has few: that is what these do and `score_kernels.score_rows` does not.

No term of the mixture is above a = max_k (log_prior_k + max_v f(z_kv) - l_k), so sum_k exp(term_kv - a)
ranks the entries of a token without a logarithm for each. It is 1 or more at the entry that attains a: the
best entry cannot underflow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.ops.pointwise import Pointwise
from fullrank.ops.triton_base import KINDS, bend, jit, on_device, power, take, tl, triton

SEGMENT = 4096
# Entries of a program, the larger where that still makes FILLING programs: four for each of an H200's 132
# multiprocessors. A warp takes WARP of them, all components in one lane, so that what pads the components
# to a power of two is known when the kernel is compiled and costs nothing.
SMALL, LARGE = 256, 1024
FILLING = 528
WARP = 256
# Components whose scores a program holds at once.
COMPONENTS = 16


@jit
def normalisers_kernel(  # type: ignore[no-untyped-def]
    scores, bias, peaks_out, sums_out, constant, V, segments, KIND: tl.constexpr, BIASED: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    segment = tl.program_id(1)
    column = segment * SEGMENT + tl.arange(0, SEGMENT)
    value, _slope = take(scores + row.to(tl.int64) * V, bias, column, V, V, constant, KIND, BIASED, True)
    top = tl.max(value, axis=0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    tl.store(peaks_out + row * segments + segment, top)
    tl.store(sums_out + row * segments + segment, tl.sum(power(value - anchor), axis=0))


@jit
def mixture_kernel(  # type: ignore[no-untyped-def]
    scores, bias, peaks, sums, log_prior, out, where_out, constant, V, segments, blocks, K: tl.constexpr,
    KIND: tl.constexpr, BIASED: tl.constexpr, BEST: tl.constexpr, COMPONENTS: tl.constexpr,
    SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # In base 2: Triton's exp2 is one instruction, its exp four.
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    token = tl.program_id(0)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, SEGMENTS)
    inside = column < V
    kept = inside
    if BIASED:
        # Once for all components, which `take` would not do.
        shift = tl.load(bias + column, mask=inside, other=float("-inf"))
        kept = shift != float("-inf")
        shift = tl.where(kept, shift, 0.0)
    highest = tl.full([] if BEST else [BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, K, COMPONENTS):
        k = first + tl.arange(0, COMPONENTS)
        present = k < K
        row = token * K + k
        # The scores first: the normalisers need a barrier, and no load is moved across it.
        lines = scores + row.to(tl.int64)[:, None] * V
        score = tl.load(lines + column[None, :], mask=present[:, None] & inside[None, :], other=0.0)
        # Components along the second axis: along the first, Triton would lay the scores out as these.
        at = row[None, :] * segments + part[:, None]
        known = present[None, :] & (part < segments)[:, None]
        top = tl.load(peaks + at, mask=known, other=float("-inf"))
        each = tl.load(sums + at, mask=known, other=0.0)
        prior = tl.load(log_prior + row, mask=present, other=float("-inf"))

        over = tl.max(top, axis=0)
        over = tl.where(over == float("-inf"), 0.0, over)
        mass = tl.sum(each * tl.exp(top - over[None, :]), axis=0)
        # The largest term of a component; one whose entries are all masked has none.
        bound = tl.where(mass == 0.0, float("-inf"), (prior - tl.log(mass)) * LOG2E)

        score = score.to(tl.float32)
        if BIASED:
            score += shift[None, :]
        value, _slope = bend(score, constant, KIND)
        below = (value - over[:, None]) * LOG2E
        if BEST:
            higher = tl.maximum(highest, tl.max(bound, axis=0))
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(below + (bound - anchor)[:, None])
        else:
            joint = tl.where(present[:, None], below + bound[:, None], float("-inf"))
            higher = tl.maximum(highest, tl.max(joint, axis=0))
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(joint - anchor[None, :])
        weight = tl.where(present[:, None], weight, 0.0)
        total = total * tl.exp2(highest - anchor) + tl.sum(weight, axis=0)
        highest = higher
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    # What is masked goes only here, once an entry and not once a component.
    if BEST:
        total = tl.where(kept, total, 0.0)
        best = tl.max(total, axis=0)
        entry = tl.min(tl.where(total == best, column, V), axis=0)
        tl.store(out + token * blocks + block, (anchor + tl.log2(best)) * LN2)
        tl.store(where_out + token * blocks + block, entry)
    else:
        result = tl.where(kept, (anchor + tl.log2(total)) * LN2, float("-inf"))
        tl.store(out + token.to(tl.int64) * V + column, result, mask=inside)


@jit
def best_kernel(values, entries, out, where_out, V, blocks, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0)
    # The last block again, which needs no mask.
    at = token * blocks + tl.minimum(tl.arange(0, BLOCKS), blocks - 1)
    value = tl.load(values + at)
    best = tl.max(value, axis=0)
    entry = tl.min(tl.where(value == best, tl.load(entries + at), V), axis=0)
    tl.store(out + token, best)
    # Nothing equals NaN: the first entry then.
    tl.store(where_out + token, tl.where(entry < V, entry, 0).to(tl.int64))


def block_size(N: int, V: int) -> int:
    """Entries of a program of the mixture."""
    return LARGE if N * -(-V // LARGE) >= FILLING else SMALL


def mix_scores(
    scores: Tensor, log_prior: Tensor, bias: Tensor | None, pointwise: Pointwise, *, best: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """scores [N K, V], log_prior [N, K] and bias [V] in fp32 -> log-probabilities [N, V] and nothing, or with
    `best` the largest [N] and its entry [N], the first where several are. `out` takes the log-probabilities.
    """
    (N, K), V = log_prior.shape, scores.shape[1]
    block = block_size(N, V)
    segments, blocks = -(-V // SEGMENT), -(-V // block)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return scores.new_empty(shape, dtype=dtype)

    peaks, sums = empty(N * K, segments), empty(N * K, segments)
    table = empty(N, blocks if best else V) if out is None else out
    where = empty(N, blocks if best else 0, dtype=torch.int32)
    shift = scores if bias is None else bias.contiguous()
    common = {"KIND": KINDS[pointwise.kind], "BIASED": bias is not None}
    if N:
        with on_device(scores):
            normalisers_kernel[(N * K, segments)](
                scores, shift, peaks, sums, pointwise.constant, V, segments, SEGMENT=SEGMENT, num_warps=4,
                **common,
            )  # fmt: skip
            mixture_kernel[(N, blocks)](
                scores, shift, peaks, sums, log_prior.contiguous(), table, where, pointwise.constant, V,
                segments, blocks, K=K, BEST=best, COMPONENTS=min(COMPONENTS, triton.next_power_of_2(K)),
                SEGMENTS=triton.next_power_of_2(segments), BLOCK=block, num_warps=block // WARP, **common,
            )  # fmt: skip
    return best_of(table, where, V) if best else (table, where)


def best_of(values: Tensor, entries: Tensor, V: int) -> tuple[Tensor, Tensor]:
    """The largest [N] of values [N, blocks] and its entry [N], the lowest where several are."""
    N, blocks = values.shape
    best, where = values.new_empty(N), entries.new_empty(N, dtype=torch.int64)
    if N:
        with on_device(values):
            best_kernel[(N,)](
                values, entries, best, where, V, blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=1
            )
    return best, where
