"""Three kernels for K rows that share a trunk: the K x V scores exist in registers alone.

With the trunk's scores z [T, V] in memory, private parts p_k [T, r] and their columns of W, w [V, r],

    s_k = z + p_k w^T                   one small product on the way, [tokens, entries]
    statistics     maximum, sum without the target and target score of every s_k
    private parts  g_k Q_k w, with Q_k = exp(s_k - lse_k), and -S_k / total_k at the target
    vocabulary     sum_k (g_k Q_k)^T p_k, and in place of z the trunk's gradient sum_k g_k Q_k

as flash attention does it: the first two take a block of tokens and a component and go over V, the third
takes a block of V and goes over tokens and components. z is read K times from the second-level cache, because
the K programs of a block of tokens are neighbours. All arithmetic is fp32, products take the narrow dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullrank.ops.statistics import Statistics
from fullrank.ops.triton import interpreted, jit, on_device, properties, tl, triton

DTYPES = (torch.bfloat16, torch.float16)
WIDEST = 128


class Blocks(NamedTuple):
    """How a kernel is cut."""

    tokens: int
    entries: int
    warps: int
    stages: int


def obstacle(device: torch.device, dtype: torch.dtype, private: int) -> str | None:
    """Why the kernels cannot serve, or None where they can."""
    if triton is None:
        return "Triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"the rows are on {device}, expected CUDA"
    if dtype not in DTYPES:
        return f"the products run in {dtype}, expected bfloat16 or float16"
    if private > WIDEST:
        return f"private parts are {private} wide, expected at most {WIDEST}"
    if device.type == "cuda" and properties(device).major < 8:
        return f"{properties(device).name} is older than compute capability 8.0"
    return None


# By the padded width of the private parts; entries divide the stride.
STRIDE = 128
STATISTICS = {64: Blocks(64, 64, 4, 3), 128: Blocks(64, 64, 4, 3)}
PRIVATE = {64: Blocks(64, 64, 4, 3), 128: Blocks(64, 64, 4, 3)}
VOCABULARY = {64: Blocks(64, 64, 4, 4), 128: Blocks(64, 64, 4, 3)}


def blocks(table: dict[int, Blocks], width: int) -> Blocks:
    return table[min(size for size in table if size >= width)]


LOG2E = 1.4426950408889634


@jit
def statistics_kernel(  # type: ignore[no-untyped-def]
    trunk,
    private,
    weight,
    targets,
    at_target,
    maximum,
    others,
    target,
    tokens,
    log2e,
    r: tl.constexpr,
    K: tl.constexpr,
    stride: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    k = tl.program_id(0) % K
    m = tl.program_id(0) // K * TOKENS + tl.arange(0, TOKENS)
    here = m < tokens
    m = tl.where(here, m, 0)
    d = tl.arange(0, WIDTH)
    inside = (d < r)[None, :]
    within = tl.arange(0, ENTRIES)
    p = tl.load(private + (m * K + k)[:, None] * r + d[None, :], mask=inside, other=0.0)
    y = tl.load(targets + m)
    own_w = tl.load(weight + y[:, None] * r + d[None, :], mask=inside, other=0.0)
    own = tl.load(at_target + m) + tl.sum(p.to(tl.float32) * own_w.to(tl.float32), axis=1)
    z_places = trunk + m.to(tl.int64)[:, None] * stride + within[None, :]
    w_places = weight + within[:, None] * r + d[None, :]
    peaks = tl.full([TOKENS], float("-inf"), tl.float32)
    sums = tl.zeros([TOKENS], tl.float32)
    for start in range(0, stride, ENTRIES):
        w = tl.load(w_places + start * r, mask=inside, other=0.0)
        s = tl.dot(p, tl.trans(w), tl.load(z_places + start).to(tl.float32))
        higher = tl.maximum(peaks, tl.max(s, axis=1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher) * log2e
        sums = sums * tl.exp2(peaks * log2e - anchor) + tl.sum(tl.exp2(s * log2e - anchor[:, None]), axis=1)
        peaks = higher
    top = tl.maximum(peaks, own)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    tl.store(maximum + m * K + k, top, mask=here)
    tl.store(others + m * K + k, sums * tl.exp(peaks - anchor), mask=here)
    tl.store(target + m * K + k, own, mask=here)


@jit
def private_kernel(  # type: ignore[no-untyped-def]
    trunk,
    private,
    weight,
    targets,
    shift,
    entry,
    d_private,
    tokens,
    log2e,
    r: tl.constexpr,
    K: tl.constexpr,
    stride: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    k = tl.program_id(0) % K
    m = tl.program_id(0) // K * TOKENS + tl.arange(0, TOKENS)
    here = m < tokens
    m = tl.where(here, m, 0)
    d = tl.arange(0, WIDTH)
    inside = (d < r)[None, :]
    within = tl.arange(0, ENTRIES)
    p = tl.load(private + (m * K + k)[:, None] * r + d[None, :], mask=inside, other=0.0)
    anchor = tl.load(shift + m * K + k)[:, None]
    z_places = trunk + m.to(tl.int64)[:, None] * stride + within[None, :]
    w_places = weight + within[:, None] * r + d[None, :]
    total = tl.zeros([TOKENS, WIDTH], tl.float32)
    for start in range(0, stride, ENTRIES):
        w = tl.load(w_places + start * r, mask=inside, other=0.0)
        s = tl.dot(p, tl.trans(w), tl.load(z_places + start).to(tl.float32))
        q = tl.exp2(s * log2e - anchor)
        total = tl.dot(q.to(w.dtype), w, total)
    y = tl.load(targets + m)
    own_w = tl.load(weight + y[:, None] * r + d[None, :], mask=inside, other=0.0)
    total += tl.load(entry + m * K + k)[:, None] * own_w.to(tl.float32)
    place = d_private + (m * K + k)[:, None] * r + d[None, :]
    tl.store(place, total.to(d_private.dtype.element_ty), mask=inside & here[:, None])


@jit
def vocabulary_kernel(  # type: ignore[no-untyped-def]
    trunk,
    private,
    weight,
    shift,
    d_weight,
    tokens,
    log2e,
    r: tl.constexpr,
    K: tl.constexpr,
    stride: tl.constexpr,
    NEEDED: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    column = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    d = tl.arange(0, WIDTH)
    inside = (d < r)[None, :]
    w = tl.load(weight + column[:, None] * r + d[None, :], mask=inside, other=0.0)
    total_w = tl.zeros([ENTRIES, WIDTH], tl.float32)
    first = 0
    # Triton's interpreter cannot count to a number that it is given.
    while first < tokens:
        m = first + tl.arange(0, TOKENS)
        here = m < tokens
        m = tl.where(here, m, 0)
        places = trunk + m.to(tl.int64)[:, None] * stride + column[None, :]
        z = tl.load(places).to(tl.float32)
        total = tl.zeros([TOKENS, ENTRIES], tl.float32)
        for k in range(K):
            p = tl.load(private + (m * K + k)[:, None] * r + d[None, :], mask=inside, other=0.0)
            anchor = tl.where(here, tl.load(shift + m * K + k), float("inf"))
            s = tl.dot(p, tl.trans(w), z)
            q = tl.exp2(s * log2e - anchor[:, None])
            total += q
            if NEEDED:
                total_w = tl.dot(tl.trans(q.to(p.dtype)), p, total_w)
        tl.store(places, total.to(trunk.dtype.element_ty), mask=here[:, None])
        first += TOKENS
    if NEEDED:
        places = d_weight + column[:, None] * r + d[None, :]
        tl.store(places, tl.load(places, mask=inside, other=0.0) + total_w, mask=inside)


class Scores:
    """What all three kernels read. Built from the trunk's scores as they are, which it changes.

    The target's score is hidden behind -inf, as is what lies beyond V: so no kernel asks which entry it has
    at hand, and the target's part of everything is added apart.
    """

    def __init__(
        self, trunk: Tensor, private: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, V: int
    ) -> None:
        """trunk [T, stride] (z), private [T, K, r], weight [stride, r] with 0 beyond V, bias [stride] fp32
        with -inf beyond V, targets [T]."""
        self.trunk, self.private, self.weight, self.targets = trunk, private, weight, targets
        if bias is not None:
            trunk += bias
        elif trunk.shape[1] > V:
            trunk[:, V:] = -torch.inf
        y = targets[:, None]
        self.at_target = trunk.gather(1, y)[:, 0].float()
        trunk.scatter_(1, y, -torch.inf)

    def sizes(self) -> tuple[int, float]:
        return self.private.shape[0], LOG2E

    def constants(self, cut: Blocks) -> dict[str, Any]:
        return {
            "r": self.private.shape[2], "K": self.private.shape[1], "stride": self.trunk.stride(0),
            "WIDTH": max(16, triton.next_power_of_2(self.private.shape[2])),
            "TOKENS": cut.tokens, "ENTRIES": cut.entries, "num_warps": cut.warps, "num_stages": cut.stages,
        }  # fmt: skip

    def statistics(self) -> Statistics:
        """[T, K] each."""
        tokens, K, r = self.private.shape
        out = Statistics(*(self.trunk.new_empty(tokens, K, dtype=torch.float32) for _ in range(3)))
        cut = blocks(STATISTICS, r)
        with on_device(self.trunk):
            statistics_kernel[(-(-tokens // cut.tokens) * K,)](
                self.trunk, self.private, self.weight, self.targets, self.at_target, *out, *self.sizes(),
                **self.constants(cut),
            )  # fmt: skip
        return out

    def gradients(
        self,
        lse: Tensor,
        entry: Tensor,
        factor: Tensor,
        *,
        d_private: Tensor | None,
        d_weight: Tensor | None,
    ) -> Tensor:
        """From the normalisers, the entries at the target and the factors g, [T, K] each.

        d_private [T, K, r] takes the private parts' gradient, that of their columns of W is added to d_weight
        [stride, r], and the gradient of the trunk's scores comes in their place.
        """
        tokens, K, r = self.private.shape
        # exp(s - lse) g as one power of two; g = 0 makes it 0.
        shift = torch.sub(lse * LOG2E, factor.log2())
        entry = entry * factor
        with on_device(self.trunk):
            if d_private is not None:
                cut = blocks(PRIVATE, r)
                private_kernel[(-(-tokens // cut.tokens) * K,)](
                    self.trunk, self.private, self.weight, self.targets, shift, entry, d_private,
                    *self.sizes(), **self.constants(cut),
                )  # fmt: skip
            cut = blocks(VOCABULARY, r)
            vocabulary_kernel[(self.trunk.stride(0) // cut.entries,)](
                self.trunk, self.private, self.weight, shift, self.weight if d_weight is None else d_weight,
                *self.sizes(), NEEDED=d_weight is not None, **self.constants(cut),
            )  # fmt: skip
        self.trunk.scatter_(1, self.targets[:, None], entry.sum(1, keepdim=True).to(self.trunk.dtype))
        if d_weight is not None:
            # Autocast reaches into operators and would multiply in the narrow dtype.
            with torch.autocast(entry.device.type, enabled=False):
                own = torch.bmm(entry[:, None], self.private.float())[:, 0]
            d_weight.index_add_(0, self.targets, own)
        return self.trunk
