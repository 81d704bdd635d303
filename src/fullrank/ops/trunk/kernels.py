"""Kernels for K rows that share a trunk: the K x V scores exist in registers alone.

With the trunk's scores z [T, V] in memory, private parts p_k [T, r] and their columns of W, w [V, r],

    s_k = z + p_k w^T   one small product on the way, [tokens, entries]
    rows                sum_v exp(s_kv) and sum_v exp(s_kv) w_v without the target, in parts of V
    finish              from these normaliser and target score of every s_k, and Q_k w with
                        Q_k = exp(s_k - lse_k), and -S_k / total_k at the target
    vocabulary          sum_k (g_k Q_k)^T p_k, and in place of z the trunk's gradient sum_k g_k Q_k

`rows` is flash attention with w for keys and values: a block of tokens and a component go over V.
`vocabulary` takes a block of V and goes over tokens and components. All arithmetic is fp32, products take the
narrow dtype. Each makes 2 K r / D of a product and K V exponentials a token, and on an H200 the one does not
overlap the other as well as it should: blocks and registers are such that three or four programs share a
multiprocessor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullrank.ops.products import scale
from fullrank.ops.reduce import Statistics
from fullrank.ops.triton_base import jit, on_device, properties, tl, triton
from fullrank.ops.trunk.chunked import normaliser_and_entry

DTYPES = (torch.bfloat16, torch.float16)
WIDEST = 128


class Blocks(NamedTuple):
    """How a kernel is cut."""

    tokens: int
    entries: int
    warps: int
    stages: int
    registers: int | None = None
    """What a thread may have: with fewer, more programs share a multiprocessor."""


# By the padded width of the private parts; entries divide the stride.
STRIDE = 128
ROWS = {64: Blocks(64, 64, 4, 3, 128), 128: Blocks(64, 128, 4, 3)}
VOCABULARY = {64: Blocks(32, 64, 4, 4, 168), 128: Blocks(64, 64, 4, 3)}


# Rows that a program finishes.
FINISHED = 16
# A sum over V of exponentials up to which none of them has left the dtype of the products.
MOST = {torch.bfloat16: 1e30, torch.float16: 3e4}


def parts_of(programs: int, steps: int, cut: Blocks, device: torch.device) -> int:
    """Into how many parts of V the work of a program is cut, so that few multiprocessors wait for the last
    programs: of 1, 2 and 4, as far as the steps can be divided."""
    if device.type != "cuda":
        return 2 - steps % 2
    resident = 65536 // ((cut.registers or 255) * cut.warps * 32)
    room = int(properties(device).multi_processor_count) * max(1, resident)

    def rounds(parts: int) -> float:
        return -(-programs * parts // room) / parts

    return min((parts for parts in (1, 2, 4) if steps % parts == 0), key=lambda parts: (rounds(parts), parts))


def blocks(table: dict[int, Blocks], width: int) -> Blocks:
    return table[min(size for size in table if size >= width)]


LOG2E = 1.4426950408889634


@jit
def in_registers(x, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """x as it is: Triton takes a product's left side from registers where that is the result of a product,
    which spares the shared memory one of two readings."""
    d = tl.arange(0, WIDTH)
    return tl.dot(x, (d[:, None] == d[None, :]).to(x.dtype)).to(x.dtype)


@jit
def highest_scores(  # type: ignore[no-untyped-def]
    p, z_places, w_places, inside, stop: tl.constexpr, r: tl.constexpr, TOKENS: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """The maximum of s over the first entries."""
    peaks = tl.full([TOKENS], float("-inf"), tl.float32)
    for start in range(0, stop, ENTRIES):
        w = tl.load(w_places + start * r, mask=inside, other=0.0)
        s = tl.dot(p, tl.trans(w), tl.load(z_places + start).to(tl.float32))
        peaks = tl.maximum(peaks, tl.max(s, axis=1))
    return peaks


@jit
def sum_scores(  # type: ignore[no-untyped-def]
    p, z_places, w_places, inside, anchor, log2e, r: tl.constexpr, stop: tl.constexpr,
    GRADIENT: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """sum_v exp(s_v - anchor) over the first entries and, with GRADIENT, sum_v exp(s_v - anchor) w_v."""
    sums = tl.zeros([TOKENS], tl.float32)
    total = tl.zeros([TOKENS, WIDTH], tl.float32)
    low = (anchor * log2e)[:, None]
    # Triton fetches ahead what a product multiplies, w, but not what it adds to: z is fetched by hand.
    ahead = tl.load(z_places)
    for start in range(0, stop, ENTRIES):
        w = tl.load(w_places + start * r, mask=inside, other=0.0)
        z = ahead.to(tl.float32)
        ahead = tl.load(z_places + tl.minimum(start + ENTRIES, stop - ENTRIES))
        e = tl.exp2(tl.dot(p, tl.trans(w), z) * log2e - low)
        sums += tl.sum(e, axis=1)
        if GRADIENT:
            total = tl.dot(e.to(w.dtype), w, total)
    return sums, total


@jit
def rows_kernel(  # type: ignore[no-untyped-def]
    trunk, private, weight, anchors, sums_out, totals, tokens, log2e, r: tl.constexpr, K: tl.constexpr,
    stride: tl.constexpr, PARTS: tl.constexpr, GRADIENT: tl.constexpr, MOST: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    LENGTH: tl.constexpr = stride // PARTS
    k = tl.program_id(0) % K
    part = tl.program_id(0) // K % PARTS
    m = tl.program_id(0) // (K * PARTS) * TOKENS + tl.arange(0, TOKENS)
    here = m < tokens
    m = tl.where(here, m, 0)
    d = tl.arange(0, WIDTH)
    inside = (d < r)[None, :]
    column = part * LENGTH + tl.arange(0, ENTRIES)
    p = tl.load(private + (m * K + k)[:, None] * r + d[None, :], mask=inside, other=0.0)
    z_places = trunk + m.to(tl.int64)[:, None] * stride + column[None, :]
    w_places = weight + column[:, None] * r + d[None, :]
    # Sums relative to the maximum of the first entries are as exact as to that of all, as long as nothing
    # overflows, and nobody has to look for a maximum on the way. Where that fails it is found after all.
    peaks = highest_scores(p, z_places, w_places, inside, ENTRIES, r, TOKENS, ENTRIES)
    sums = tl.zeros([TOKENS], tl.float32)
    total = tl.zeros([TOKENS, WIDTH], tl.float32)
    anchor = sums
    turns = 2
    while turns > 0:
        anchor = tl.where(peaks == float("-inf"), 0.0, peaks)
        sums, total = sum_scores(
            p, z_places, w_places, inside, anchor, log2e, r, LENGTH, GRADIENT, WIDTH, TOKENS, ENTRIES
        )
        failed = (tl.max(sums, axis=0) > MOST) | (tl.min(peaks, axis=0) == float("-inf"))
        turns = tl.where(failed, turns - 1, 0)
        if turns > 0:
            peaks = highest_scores(p, z_places, w_places, inside, LENGTH, r, TOKENS, ENTRIES)
    row = (part * tokens + m) * K + k
    tl.store(anchors + row, anchor, mask=here)
    tl.store(sums_out + row, sums, mask=here)
    if GRADIENT:
        place = totals + row.to(tl.int64)[:, None] * r + d[None, :]
        tl.store(place, total, mask=inside & here[:, None])


@jit
def finish_kernel(  # type: ignore[no-untyped-def]
    private, weight, targets, at_target, anchors, sums, totals, maximum, others, target, product, rows,
    r: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, GRADIENT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    row = tl.where(here, row, 0)
    d = tl.arange(0, WIDTH)
    inside = (d < r)[None, :]
    own_places = private + row.to(tl.int64)[:, None] * r + d[None, :]
    y = tl.load(targets + row // K)
    own_w = tl.load(weight + y[:, None] * r + d[None, :], mask=inside, other=0.0).to(tl.float32)
    p = tl.load(own_places, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(at_target + row // K) + tl.sum(p * own_w, axis=1)
    level = tl.full([ROWS], float("-inf"), tl.float32)
    for part in range(PARTS):
        some = tl.load(sums + part * rows + row)
        here_level = tl.load(anchors + part * rows + row) + tl.log(some)
        here_level = tl.where(some == 0.0, float("-inf"), here_level)
        higher = tl.maximum(level, here_level)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        joined = base + tl.log(tl.exp(level - base) + tl.exp(here_level - base))
        level = tl.where(higher == float("-inf"), float("-inf"), joined)
    # In place of the maximum the larger of the target and all others together: S is at most 1.
    top = tl.maximum(level, own)
    base = tl.where(top == float("-inf"), 0.0, top)
    rest = tl.exp(level - base)
    tl.store(maximum + row, top, mask=here)
    tl.store(others + row, rest, mask=here)
    tl.store(target + row, own, mask=here)
    if GRADIENT:
        whole = rest + tl.exp(own - base)
        inverse = 1.0 / tl.where(whole == 0.0, 1.0, whole)
        # A masked target is no score of the row: nothing falls on it.
        mean = tl.where(own == float("-inf"), 0.0, -rest * inverse)[:, None] * own_w
        for part in range(PARTS):
            some = tl.load(sums + part * rows + row)
            scale = inverse * tl.exp(tl.load(anchors + part * rows + row) - base)
            place = totals + (part * rows + row).to(tl.int64)[:, None] * r + d[None, :]
            total = tl.load(place, mask=inside, other=0.0)
            mean += tl.where((some == 0.0)[:, None], 0.0, total * scale[:, None])
        place = product + row.to(tl.int64)[:, None] * r + d[None, :]
        tl.store(place, mean.to(product.dtype.element_ty), mask=inside & here[:, None])


@jit
def vocabulary_kernel(  # type: ignore[no-untyped-def]
    trunk, private, weight, shift, sign, d_weight, tokens, room, d_stride, log2e, r: tl.constexpr,
    K: tl.constexpr, stride: tl.constexpr, NEEDED: tl.constexpr, SIGNED: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    d = tl.arange(0, WIDTH)
    inside = (d < r)[None, :]
    w = in_registers(tl.load(weight + column[:, None] * r + d[None, :], mask=inside, other=0.0), WIDTH)
    total_w = tl.zeros([ENTRIES, WIDTH], tl.float32)
    token = tl.arange(0, TOKENS)
    last = tokens - 1
    # Entries by tokens, so that Q is a product's left side as it comes out of the one before.
    ahead = tl.load(trunk + tl.minimum(token, last).to(tl.int64)[None, :] * stride + column[:, None])
    first = 0
    # Triton's interpreter cannot count to a number that it is given.
    while first < tokens:
        m = first + token
        z = ahead.to(tl.float32)
        following = tl.minimum(m + TOKENS, last).to(tl.int64)
        ahead = tl.load(trunk + following[None, :] * stride + column[:, None])
        total = tl.zeros([ENTRIES, TOKENS], tl.float32)
        row = tl.minimum(m, last) * K
        for k in range(K):
            p = tl.load(private + (row + k)[:, None] * r + d[None, :], mask=inside, other=0.0)
            anchor = tl.load(shift + k * room + m)
            s = tl.dot(w, tl.trans(p), z)
            q = tl.exp2(s * log2e - anchor[None, :])
            total += q
            if NEEDED:
                if SIGNED:
                    p = (p * tl.load(sign + m)[:, None]).to(p.dtype)
                total_w = tl.dot(q.to(p.dtype), p, total_w)
        if SIGNED:
            total *= tl.load(sign + m)[None, :]
        places = trunk + m.to(tl.int64)[None, :] * stride + column[:, None]
        tl.store(places, total.to(trunk.dtype.element_ty), mask=(m < tokens)[None, :])
        first += TOKENS
    if NEEDED:
        places = d_weight + column.to(tl.int64)[:, None] * d_stride + d[None, :]
        tl.store(places, tl.load(places, mask=inside, other=0.0) + total_w, mask=inside)


class KernelComponents:
    """What the kernels read. Built from the trunk's scores as they are, which it changes.

    The target's score is hidden behind -inf, as is what lies beyond V: so no kernel asks which entry it has
    at hand, and the target's part of everything is added apart.
    """

    def __init__(
        self, trunk: Tensor, private: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, V: int,
        d_private: Tensor | None, *, signed: bool,
    ) -> None:  # fmt: skip
        """trunk [T, stride] (z), private [T, K, r], weight [stride, r] with 0 beyond V, bias [stride] fp32
        with -inf beyond V, targets [T]; d_private [T, K, r] takes the private parts' gradient. `signed`:
        factors may be negative, all of a token alike."""
        self.trunk, self.private, self.weight = trunk, private, weight
        # Inside the vocabulary whatever they are: the host may have yet to look.
        self.targets = targets.clamp(0, V - 1)
        self.d_private, self.signed = d_private, signed
        if bias is not None:
            trunk += bias
        elif trunk.shape[1] > V:
            trunk[:, V:] = -torch.inf
        y = self.targets[:, None]
        self.at_target = trunk.gather(1, y)[:, 0].float()
        trunk.scatter_(1, y, -torch.inf)

    def constants(self, cut: Blocks) -> dict[str, Any]:
        return {
            "r": self.private.shape[2], "K": self.private.shape[1], "stride": self.trunk.stride(0),
            "WIDTH": max(16, triton.next_power_of_2(self.private.shape[2])),
            "TOKENS": cut.tokens, "ENTRIES": cut.entries, "num_warps": cut.warps, "num_stages": cut.stages,
            "maxnreg": cut.registers,
        }  # fmt: skip

    def statistics(self) -> Statistics:
        """[T, K] each; d_private becomes Q_k w."""
        (tokens, K, r), stride = self.private.shape, self.trunk.stride(0)

        def empty(*shape: int) -> Tensor:
            return self.trunk.new_empty(shape, dtype=torch.float32)

        gradient = self.d_private is not None
        out = Statistics(*(empty(tokens, K) for _ in range(3)))
        cut = blocks(ROWS, r)
        programs = -(-tokens // cut.tokens) * K
        parts = parts_of(programs, stride // cut.entries, cut, self.trunk.device)
        sums = empty(parts, tokens, K), empty(parts, tokens, K), empty(parts, tokens, K, r if gradient else 0)
        options = self.constants(cut) | {"PARTS": parts, "GRADIENT": gradient}
        most = MOST[self.private.dtype]
        with on_device(self.trunk):
            rows_kernel[(programs * parts,)](
                self.trunk, self.private, self.weight, *sums, tokens, LOG2E, MOST=most, **options
            )
            finish_kernel[(-(-tokens * K // FINISHED),)](
                self.private, self.weight, self.targets, self.at_target, *sums, *out,
                self.private if self.d_private is None else self.d_private, tokens * K,
                r=r, K=K, PARTS=parts, GRADIENT=gradient, WIDTH=options["WIDTH"], ROWS=FINISHED, num_warps=4,
            )  # fmt: skip
        return out

    def gradients(self, statistics: Statistics, factor: Tensor, d_weight: Tensor | None) -> Tensor:
        """d_private gets its factor, the gradient of w is added to d_weight [stride, r], whose rows may lie
        apart, and the gradient of the trunk's scores comes in their place."""
        (tokens, K, r), cut = self.private.shape, blocks(VOCABULARY, self.private.shape[2])
        lse, entry = normaliser_and_entry(statistics)
        # exp(s - lse) |g| as one power of two, a component after the other; g = 0 makes it 0, as do tokens
        # beyond the last.
        room = -(-tokens // cut.tokens) * cut.tokens
        shift = lse.new_full((K, room), torch.inf)
        torch.sub(lse.t() * LOG2E, factor.t().abs().log2(), out=shift[:, :tokens])
        sign = shift
        if self.signed:
            sign = lse.new_ones(room)
            sign[:tokens] = torch.where(factor.amin(1) < 0, -1.0, 1.0)
        entry = entry * factor
        if self.d_private is not None:
            flat = self.d_private.view(-1, r)
            scale(flat, factor.flatten(), out=flat)
        with on_device(self.trunk):
            vocabulary_kernel[(self.trunk.stride(0) // cut.entries,)](
                self.trunk, self.private, self.weight, shift, sign,
                self.weight if d_weight is None else d_weight,
                tokens, room, 0 if d_weight is None else d_weight.stride(0), LOG2E,
                NEEDED=d_weight is not None, SIGNED=self.signed, **self.constants(cut),
            )  # fmt: skip
        self.trunk.scatter_(1, self.targets[:, None], entry.sum(1, keepdim=True).to(self.trunk.dtype))
        if d_weight is not None:
            d_weight.index_add_(0, self.targets, torch.bmm(entry[:, None], self.private.float())[:, 0])
        return self.trunk
