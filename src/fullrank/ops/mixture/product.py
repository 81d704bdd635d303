"""The score product with the exponentials in its epilogue: no pass between the products.

With the notation of `reduce.py` and `kernels.py`, where Q keeps its factor 1 / total for the rows,

    g_r = max of a_y and of a_v at 64 entries v     first, by a small kernel: an anchor near the row's maximum
    Q_rv = f'(z_rv) exp(a_rv - g_r), 0 at y, and the sum of exp(a - g) over each tile      by the product
    S_r = the sum of these; Q_ry = -f'(z_ry) S_r     last, by a small kernel

g is the score of a token, so S is 1 at least wherever the target is not g itself, as with the maximum. bf16
reaches as far as fp32 does, so g need not be the maximum: only a row whose maximum lies some 70 nats above
its anchor is made anew, one entry at a time, by the last kernel. Scores are never rounded to bf16 on the way.

bf16 only, D a multiple of 8 (tiles come by descriptors), and on a chip where a product of Triton's keeps up
with cuBLAS's: `tile_for` has what was measured on an H200 for Hopper; a newer chip measures once for each
shape, and takes the product and the pass of `fused.py` where these are faster.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fullrank.ops.mixture.kernels import score_rows
from fullrank.ops.pointwise import IDENTITY, Pointwise
from fullrank.ops.reduce import Statistics
from fullrank.ops.triton_base import (
    KINDS,
    interpreted,
    jit,
    jit_for_any,
    on_device,
    power,
    properties,
    settle,
    tl,
)

log = logging.getLogger(__name__)

SAMPLE = 64
# Above this a sum of exponentials times an entry of W could pass what fp32 holds.
MOST = 1e30


@dataclass(frozen=True)
class Tile:
    """How the product is cut: rows by columns of scores, and how many programs share a multiprocessor."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    programs: int


TILES = (
    Tile(128, 256, 64, 8, 4, 1),
    Tile(128, 256, 64, 8, 3, 1),
    Tile(128, 128, 64, 4, 3, 2),
)
SMALL = Tile(64, 64, 32, 4, 2, 1)
"""For the interpreter."""


@jit
def targets_of(targets, row, here, V):  # type: ignore[no-untyped-def]
    """Inside the vocabulary whatever they are, as `kernels.target_of`."""
    return tl.minimum(tl.maximum(tl.load(targets + row, mask=here, other=0), 0), V - 1).to(tl.int32)


@jit_for_any("rows")
def anchor_kernel(  # type: ignore[no-untyped-def]
    x, w, bias, targets, anchors, slopes, own, constant, rows, V, stride, step,
    D: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, SAMPLE: tl.constexpr,
    DEPTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of each row the target's score with f' there, and an anchor near the maximum."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    y = targets_of(targets, row, here, V)
    entry = tl.arange(0, SAMPLE) * step
    sample = tl.zeros([ROWS, SAMPLE], tl.float32)
    score = tl.zeros([ROWS], tl.float32)
    for start in range(0, D, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        inside = (depth < D)[None, :]
        a = tl.load(
            x + row[:, None].to(tl.int64) * D + depth[None, :], mask=here[:, None] & inside, other=0.0
        )
        b = tl.load(
            w + entry[:, None].to(tl.int64) * D + depth[None, :],
            mask=(entry < V)[:, None] & inside,
            other=0.0,
        )
        mine = tl.load(w + y[:, None].to(tl.int64) * D + depth[None, :], mask=inside, other=0.0)
        score += tl.sum(a.to(tl.float32) * mine.to(tl.float32), axis=1)
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        sample = tl.dot(a, tl.trans(b), sample)
    others, _slope = settle(sample, bias, entry[None, :], V, stride, constant, KIND, BIASED, True)
    value, slope = settle(score, bias, y, V, stride, constant, KIND, BIASED, True)
    tl.store(own + row, value, mask=here)
    tl.store(slopes + row, slope, mask=here)
    tl.store(anchors + row, tl.maximum(value, tl.max(others, axis=1)), mask=here)


@jit
def raise_part(  # type: ignore[no-untyped-def]
    scores, e, bias, y, anchor, constant, first_row, first_column, V, stride,
    KIND: tl.constexpr, BIASED: tl.constexpr, TAIL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scores of a tile become Q, which is stored; the sum of the exponentials of each row."""
    column = (first_column + tl.arange(0, COLUMNS))[None, :]
    value, slope = settle(scores, bias, column, V, stride, constant, KIND, BIASED, TAIL)
    raised = tl.where(column == y[:, None], 0.0, power(value - anchor[:, None]))
    sums = tl.sum(raised, axis=1)
    if KIND != 0:
        raised *= slope
    e.store([first_row, first_column], raised.to(tl.bfloat16))
    return sums


@jit_for_any("rows", "row_tiles", "column_tiles")
def raise_kernel(  # type: ignore[no-untyped-def]
    x, w, e, bias, targets, anchors, sums, constant, rows, V, stride, D, row_tiles, column_tiles,
    KIND: tl.constexpr, BIASED: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Q of all rows but for the targets' entries, and the sums [column tiles, rows]; x, w and e are
    descriptors. The epilogue takes half of the columns at a time, for the sake of registers."""
    HALF: tl.constexpr = COLUMNS // 2
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        # Neighbours share rows and columns, so that both stay in the second-level cache.
        band = tile // (GROUP * column_tiles)
        height = tl.minimum(row_tiles - band * GROUP, GROUP)
        m = (band * GROUP + tile % (GROUP * column_tiles) % height) * ROWS
        n = tile % (GROUP * column_tiles) // height
        scores = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, D, DEPTH):
            a, b = x.load([m, start]), w.load([n * COLUMNS, start])
            if WIDE:
                a, b = a.to(tl.float32), b.to(tl.float32)
            scores = tl.dot(a, b.T, scores)
        row = m + tl.arange(0, ROWS)
        here = row < rows
        y = targets_of(targets, row, here, V)
        anchor = tl.load(anchors + row, mask=here, other=0.0)
        anchor = tl.where(anchor == float("-inf"), 0.0, anchor)
        left, right = tl.split(tl.permute(tl.reshape(scores, [ROWS, 2, HALF]), [0, 2, 1]))
        found = raise_part(
            left, e, bias, y, anchor, constant, m, n * COLUMNS, V, stride, KIND, BIASED, TAIL, HALF
        )
        found += raise_part(
            right, e, bias, y, anchor, constant, m, n * COLUMNS + HALF, V, stride, KIND, BIASED, TAIL, HALF
        )
        tl.store(sums + n * rows + row, found, mask=here)


@jit
def row_scores(  # type: ignore[no-untyped-def]
    x, w, bias, row, column, constant, V, stride, D, KIND: tl.constexpr, BIASED: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """f and f' of one row at some columns, without a product's tile."""
    score = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, D, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        a = tl.load(x + row.to(tl.int64) * D + depth, mask=depth < D, other=0.0).to(tl.float32)
        b = tl.load(
            w + column[:, None].to(tl.int64) * D + depth[None, :],
            mask=(column < V)[:, None] & (depth < D)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        score += tl.sum(a[None, :] * b, axis=1)
    value, slope = settle(score, bias, column, V, stride, constant, KIND, BIASED, True)
    return value, slope


@jit_for_any("rows", "column_tiles")
def finish_kernel(  # type: ignore[no-untyped-def]
    x, w, e, bias, targets, anchors, others, own, sums, constant, rows, V, stride, column_tiles, most,
    D: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """S of each row, in place of the target's f', and the target's entry."""
    within = tl.arange(0, ROWS)
    row = tl.program_id(0) * ROWS + within
    here = row < rows
    y = targets_of(targets, row, here, V)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, column_tiles, TILES):
        tile = start + tl.arange(0, TILES)
        total += tl.sum(
            tl.load(
                sums + tile[:, None] * rows + row[None, :],
                mask=(tile < column_tiles)[:, None] & here[None, :], other=0.0,
            ), axis=0,
        )  # fmt: skip
    anchor = tl.load(anchors + row, mask=here, other=0.0)
    mine = tl.load(own + row, mask=here, other=0.0)
    lost = (here & ((total > most) | (anchor == float("-inf")))).to(tl.int32)
    if tl.max(lost, axis=0) > 0:
        for place in range(ROWS):
            if tl.sum(tl.where(within == place, lost, 0), axis=0) > 0:
                this = tl.program_id(0) * ROWS + place
                line = e + this.to(tl.int64) * stride
                target = tl.sum(tl.where(within == place, y, 0), axis=0)
                highest = tl.max(tl.where(within == place, mine, float("-inf")), axis=0)
                for first in range(0, V, COLUMNS):
                    column = first + tl.arange(0, COLUMNS)
                    value, _slope = row_scores(
                        x, w, bias, this, column, constant, V, stride, D, KIND, BIASED, COLUMNS, DEPTH
                    )
                    highest = tl.maximum(highest, tl.max(value, axis=0))
                base = tl.where(highest == float("-inf"), 0.0, highest)
                again = 0.0
                for first in range(0, V, COLUMNS):
                    column = first + tl.arange(0, COLUMNS)
                    value, slope = row_scores(
                        x, w, bias, this, column, constant, V, stride, D, KIND, BIASED, COLUMNS, DEPTH
                    )
                    raised = tl.where(column == target, 0.0, power(value - base))
                    again += tl.sum(raised, axis=0)
                    if KIND != 0:
                        raised *= slope
                    tl.store(line + column, raised.to(tl.bfloat16), mask=column < V)
                total = tl.where(within == place, again, total)
                anchor = tl.where(within == place, highest, anchor)
        tl.store(anchors + row, anchor, mask=here)
        tl.debug_barrier()
    # A masked target is no score of the row: nothing falls on it.
    entry = tl.where(mine == float("-inf"), 0.0, -total)
    if KIND != 0:
        entry *= tl.load(others + row, mask=here, other=0.0)
    tl.store(others + row, total, mask=here)
    tl.store(e + row.to(tl.int64) * stride + y, entry.to(tl.bfloat16), mask=here)


def tile_for(weight: Tensor, product: torch.dtype) -> Tile | None:
    """How rows are multiplied by W [V, D]; None where that is cuBLAS's to do."""
    V, D = weight.shape
    if product != torch.bfloat16 or D % 8 or not weight.is_contiguous() or weight.data_ptr() % 16:
        return None
    if not weight.is_cuda:
        return SMALL if interpreted() else None
    major = properties(weight.device).major
    if major == 9:
        return TILES[1] if D >= 2048 else TILES[0]
    return measured_tile(weight.device, V, D) if major > 9 else None


@functools.cache
def measured_tile(device: torch.device, V: int, D: int) -> Tile | None:
    """The fastest on this chip, tried once a shape: not while a graph is captured, which needs a warm-up call
    anyway."""
    try:
        times = {tile: _milliseconds(step) for tile, step in candidates(device, 1024, V, D).items()}
    except torch.OutOfMemoryError:
        return None
    best = min(times, key=times.__getitem__)
    gain = times[None] / times[best]
    way = "cuBLAS and a pass" if best is None else f"{best}, {gain:.2f} times as fast as cuBLAS and a pass"
    log.info("scores of V=%d by D=%d on %s: %s", V, D, properties(device).name, way)
    return best


def candidates(device: torch.device, R: int, V: int, D: int) -> dict[Tile | None, Callable[[], None]]:
    """Ways to Q of R random rows: a tile each, and the product and the pass."""
    # The caller's random numbers go on as they were.
    generator = torch.Generator(device).manual_seed(0)
    rows, weight = (
        torch.empty(size, D, device=device, dtype=torch.bfloat16).normal_(std=std, generator=generator)
        for size, std in ((R, 1.0), (V, D**-0.5))
    )
    targets = torch.zeros(R, dtype=torch.int64, device=device)
    out = rows.new_empty(R, V)
    places = Statistics(*(targets.new_empty(R, dtype=torch.float32) for _ in range(3)))

    def passed() -> None:
        torch.mm(rows, weight.t(), out=out)
        score_rows(out, None, targets, IDENTITY, places=places, gradient=True, raised=True)

    def raised(tile: Tile) -> None:
        raise_rows(rows, weight, None, targets, IDENTITY, places=places, out=out, V=V, tile=tile)

    return {None: passed, **{tile: functools.partial(raised, tile) for tile in TILES}}


def _milliseconds(step: Callable[[], None]) -> float:
    """The least of five, after one that compiles; infinite where the chip cannot."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken = []
    try:
        for _ in range(6):
            start.record()
            step()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        log.debug("a tile that this chip cannot: %s", error)
        return math.inf
    return min(taken[1:])


def raise_rows(
    rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, pointwise: Pointwise, *,
    places: Statistics, out: Tensor, V: int, tile: Tile,
) -> None:  # fmt: skip
    """Q * total of rows [R, D] into out [R, stride], 0 beyond V, and what is known of each row into places.

    weight [stride, D] and rows are contiguous; bias is fp32, as long as the stride and -inf beyond V.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore

    (R, D), stride = rows.shape, out.stride(0)
    if R == 0:
        return
    targets = targets.contiguous()
    row_tiles, column_tiles = -(-R // tile.rows), -(-stride // tile.columns)
    sums = places.others.new_empty(column_tiles, R)
    programs = row_tiles * column_tiles
    # Outside CUDA three, so that a program goes through several tiles.
    together = int(properties(rows.device).multi_processor_count) if rows.is_cuda else 3
    shift = out if bias is None else bias
    kind: dict[str, object] = {"KIND": KINDS[pointwise.kind], "BIASED": bias is not None}
    with on_device(rows):
        anchor_kernel[(-(-R // 32),)](
            rows, weight, shift, targets, *places, pointwise.constant, R, V, stride, max(V // SAMPLE, 1),
            **kind, D=D, ROWS=32, SAMPLE=SAMPLE, DEPTH=64, WIDE=not rows.is_cuda, num_warps=4,
        )  # fmt: skip
        raise_kernel[(min(programs, tile.programs * together),)](
            TensorDescriptor.from_tensor(rows, [tile.rows, tile.depth]),
            TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
            TensorDescriptor.from_tensor(out, [tile.rows, tile.columns // 2]),
            shift, targets, places.maximum, sums, pointwise.constant, R, V, stride, D, row_tiles,
            column_tiles, **kind, TAIL=V % tile.columns != 0, ROWS=tile.rows, COLUMNS=tile.columns,
            DEPTH=tile.depth, GROUP=8, WIDE=not rows.is_cuda, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        finish_kernel[(-(-R // 32),)](
            rows, weight, out, shift, targets, *places, sums, pointwise.constant, R, V, stride,
            column_tiles, MOST, **kind, D=D, ROWS=32, TILES=64, COLUMNS=128, DEPTH=32, num_warps=4,
        )  # fmt: skip
