"""Would scores that leave their product as exponentials pay? A product of our own against cuBLAS and a pass.

    python -m benchmarks.score_product --out runs/score_product.json          on a GPU
    TRITON_INTERPRET=1 python -m benchmarks.score_product --check             anywhere: is it right?

Today a chunk of the mixture is cuBLAS's scores, a kernel that reads and writes them, and two products
(`ops/mixture/fused.py`). Here the pass goes into the epilogue of a first product in Triton:

    g_r = max(a_y, a_v over the first 64 v)     before, by a small kernel: an anchor near the row's maximum
    E_rv = f'(z) exp(a_rv - g_r), 0 at the target, in bf16, and the sum of exp(a - g) of each tile
    S_r = the tiles' sums; -S_r at the target   after, by a small kernel

bf16 has the exponents of fp32, so one anchor a row serves as long as the maximum lies within 88 nats of it,
and both gradient products stay cuBLAS's: 1 / (S + exp(a_y - g)) is a factor of the row. Where a row lies
further out its sum is infinite, and the last kernel makes the row anew with its true maximum.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from benchmarks.measure import in_rounds
from fullrank.ops.triton_base import jit, power, properties, tl, triton
from fullrank.results import provenance, write_whole

SAMPLE = 64
SHAPES = ((768, 50304), (2048, 128256), (280, 33280), (4096, 128256))


@dataclass(frozen=True)
class Tile:
    """How the product is cut."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    persistent: bool
    halves: bool = False
    """The epilogue takes half of the columns at a time."""

    @property
    def name(self) -> str:
        way = "persistent" if self.persistent else "plain"
        return f"{self.rows}x{self.columns}x{self.depth}w{self.warps}s{self.stages} {way}" + (
            " halves" if self.halves else ""
        )


TILES = tuple(
    Tile(*sizes, persistent=persistent, halves=halves)
    for sizes in (
        (128, 128, 64, 4, 2), (128, 128, 64, 4, 3), (128, 128, 64, 4, 4), (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4), (256, 128, 64, 8, 3),
    )
    for persistent in (False, True)
    for halves in (False, True)
)  # fmt: skip


@jit
def anchor_kernel(  # type: ignore[no-untyped-def]
    x, w, targets, anchors, own, rows, V, D, ROWS: tl.constexpr, SAMPLE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The target's score of each row, and an anchor near its maximum."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    y = tl.minimum(tl.maximum(tl.load(targets + row, mask=here, other=0), 0), V - 1).to(tl.int64)
    first = tl.arange(0, SAMPLE)
    sample = tl.zeros([ROWS, SAMPLE], tl.float32)
    score = tl.zeros([ROWS], tl.float32)
    for start in range(0, D, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        inside = depth < D
        a = tl.load(
            x + row[:, None].to(tl.int64) * D + depth[None, :],
            mask=here[:, None] & inside[None, :],
            other=0.0,
        )
        b = tl.load(
            w + first[:, None] * D + depth[None, :], mask=(first < V)[:, None] & inside[None, :], other=0.0
        )
        mine = tl.load(w + y[:, None] * D + depth[None, :], mask=inside[None, :], other=0.0)
        sample = tl.dot(a, tl.trans(b), sample)
        score += tl.sum(a.to(tl.float32) * mine.to(tl.float32), axis=1)
    sample = tl.where((first < V)[None, :], sample, float("-inf"))
    tl.store(own + row, score, mask=here)
    tl.store(anchors + row, tl.maximum(score, tl.max(sample, axis=1)), mask=here)


@jit
def raise_part(  # type: ignore[no-untyped-def]
    scores, e, y, anchor, first_row, first_column, V, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scores of a tile become exponentials, which are stored; their sum a row."""
    column = first_column + tl.arange(0, COLUMNS)
    raised = power(scores - anchor[:, None])
    raised = tl.where((column[None, :] == y[:, None]) | (column >= V)[None, :], 0.0, raised)
    e.store([first_row, first_column], raised.to(tl.bfloat16))
    return tl.sum(raised, axis=1)


@jit
def raise_tile(  # type: ignore[no-untyped-def]
    tile, x, w, e, targets, anchors, sums, rows, V, D, row_tiles, column_tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    # Neighbours share rows and columns, so that both stay in the second-level cache.
    band = tile // (GROUP * column_tiles)
    height = tl.minimum(row_tiles - band * GROUP, GROUP)
    m = band * GROUP + tile % (GROUP * column_tiles) % height
    n = tile % (GROUP * column_tiles) // height
    scores = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, D, DEPTH):
        a = x.load([m * ROWS, start])
        b = w.load([n * COLUMNS, start])
        scores = tl.dot(a, b.T, scores)
    row = m * ROWS + tl.arange(0, ROWS)
    here = row < rows
    y = tl.load(targets + row, mask=here, other=-1).to(tl.int32)
    anchor = tl.load(anchors + row, mask=here, other=0.0)
    if HALVES:
        halves = tl.permute(tl.reshape(scores, [ROWS, 2, COLUMNS // 2]), [0, 2, 1])
        left, right = tl.split(halves)
        found = raise_part(left, e, y, anchor, m * ROWS, n * COLUMNS, V, COLUMNS // 2)
        found += raise_part(right, e, y, anchor, m * ROWS, n * COLUMNS + COLUMNS // 2, V, COLUMNS // 2)
    else:
        found = raise_part(scores, e, y, anchor, m * ROWS, n * COLUMNS, V, COLUMNS)
    tl.store(sums + n * rows + row, found, mask=here)


@jit
def raise_kernel(  # type: ignore[no-untyped-def]
    x, w, e, targets, anchors, sums, rows, V, D, row_tiles, column_tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    HALVES: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """E of all rows by all entries of W, and the sums of each tile's exponentials [column tiles, rows]."""
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
            raise_tile(
                tile, x, w, e, targets, anchors, sums, rows, V, D, row_tiles, column_tiles,
                ROWS, COLUMNS, DEPTH, GROUP, HALVES,
            )  # fmt: skip
    else:
        raise_tile(
            tl.program_id(0), x, w, e, targets, anchors, sums, rows, V, D, row_tiles, column_tiles,
            ROWS, COLUMNS, DEPTH, GROUP, HALVES,
        )  # fmt: skip


@jit
def finish_kernel(  # type: ignore[no-untyped-def]
    x, w, e, targets, anchors, own, sums, rest, rows, V, D, stride, column_tiles,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """S of a row, and -S at its target; a row whose exponentials passed fp32 is made anew."""
    row = tl.program_id(0)
    line = e + row.to(tl.int64) * stride
    y = tl.minimum(tl.maximum(tl.load(targets + row), 0), V - 1)
    within = tl.arange(0, BLOCK)
    total = 0.0
    for start in range(0, column_tiles, BLOCK):
        tile = start + within
        total += tl.sum(
            tl.load(sums + tile.to(tl.int64) * rows + row, mask=tile < column_tiles, other=0.0), axis=0
        )
    if total > 3.0e38:
        highest = tl.load(own + row)
        for first in range(0, V, BLOCK):
            column = first + within
            score = tl.zeros([BLOCK], tl.float32)
            for start in range(0, D, DEPTH):
                depth = start + tl.arange(0, DEPTH)
                a = tl.load(x + row.to(tl.int64) * D + depth, mask=depth < D, other=0.0).to(tl.float32)
                b = tl.load(
                    w + column[:, None].to(tl.int64) * D + depth[None, :],
                    mask=(column < V)[:, None] & (depth < D)[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
                score += tl.sum(a[None, :] * b, axis=1)
            score = tl.where(column < V, score, float("-inf"))
            highest = tl.maximum(highest, tl.max(score, axis=0))
        total = 0.0
        for first in range(0, V, BLOCK):
            column = first + within
            score = tl.zeros([BLOCK], tl.float32)
            for start in range(0, D, DEPTH):
                depth = start + tl.arange(0, DEPTH)
                a = tl.load(x + row.to(tl.int64) * D + depth, mask=depth < D, other=0.0).to(tl.float32)
                b = tl.load(
                    w + column[:, None].to(tl.int64) * D + depth[None, :],
                    mask=(column < V)[:, None] & (depth < D)[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
                score += tl.sum(a[None, :] * b, axis=1)
            raised = tl.where((column == y) | (column >= V), 0.0, power(score - highest))
            tl.store(line + column, raised.to(tl.bfloat16), mask=column < V)
            total += tl.sum(raised, axis=0)
        tl.store(anchors + row, highest)
        tl.debug_barrier()
    tl.store(rest + row, total)
    tl.store(line + y, -total)


@dataclass
class Chunk:
    """Rows [R, D] and W [V, D] in bf16, targets [R], and room for what is made."""

    x: Tensor
    w: Tensor
    targets: Tensor
    e: Tensor
    anchors: Tensor
    own: Tensor
    rest: Tensor
    sums: Tensor

    @classmethod
    def of(cls, x: Tensor, w: Tensor, targets: Tensor) -> Chunk:
        rows, V = x.shape[0], w.shape[0]
        anchors, own, rest = (x.new_empty(rows, dtype=torch.float32) for _ in range(3))
        sums = x.new_empty(-(-V // 64), rows, dtype=torch.float32)
        e = x.new_empty(rows, -(-V // 64) * 64, dtype=torch.bfloat16)
        return cls(x, w, targets, e, anchors, own, rest, sums)


def anchored(chunk: Chunk) -> None:
    rows, D = chunk.x.shape
    anchor_kernel[(-(-rows // 64),)](
        chunk.x, chunk.w, chunk.targets, chunk.anchors, chunk.own, rows, chunk.w.shape[0], D,
        ROWS=64, SAMPLE=SAMPLE, DEPTH=64, num_warps=4,
    )  # fmt: skip


def raised(chunk: Chunk, tile: Tile) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore

    rows, D = chunk.x.shape
    V = chunk.w.shape[0]
    row_tiles, column_tiles = -(-rows // tile.rows), -(-V // tile.columns)
    width = tile.columns // 2 if tile.halves else tile.columns
    programs = row_tiles * column_tiles
    if tile.persistent and chunk.x.is_cuda:
        # Two tiles of 128 by 128 fit a multiprocessor, of the larger ones one.
        each = 2 if tile.rows * tile.columns <= 128 * 128 else 1
        programs = min(programs, each * int(properties(chunk.x.device).multi_processor_count))
    elif tile.persistent:
        programs = min(programs, 3)
    raise_kernel[(programs,)](
        TensorDescriptor.from_tensor(chunk.x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(chunk.w, [tile.columns, tile.depth]),
        TensorDescriptor.from_tensor(chunk.e, [tile.rows, width]),
        chunk.targets, chunk.anchors, chunk.sums, rows, V, D, row_tiles, column_tiles,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=8, HALVES=tile.halves,
        PERSISTENT=tile.persistent, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def finished(chunk: Chunk, tile: Tile) -> None:
    rows, D = chunk.x.shape
    V = chunk.w.shape[0]
    finish_kernel[(rows,)](
        chunk.x, chunk.w, chunk.e, chunk.targets, chunk.anchors, chunk.own, chunk.sums, chunk.rest, rows, V,
        D, chunk.e.stride(0), -(-V // tile.columns), BLOCK=128, DEPTH=32, num_warps=4,
    )  # fmt: skip


def draw(rows: int, D: int, V: int, device: str, *, scale: float = 1.0) -> Chunk:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device)

    # Triton's interpreter multiplies no bf16.
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    x, w = (scale * normal(rows, D)).to(dtype), (normal(V, D) / math.sqrt(D)).to(dtype)
    return Chunk.of(x, w, torch.randint(V, (rows,), generator=generator, device=device))


def error(chunk: Chunk, tile: Tile) -> float:
    """Of E and S over total, against fp64: the largest in units of what bf16 rounds."""
    anchored(chunk)
    raised(chunk, tile)
    finished(chunk, tile)
    V = chunk.w.shape[0]
    scores = chunk.x.double() @ chunk.w.double().t()
    exact = scores.softmax(1)
    p = exact.gather(1, chunk.targets[:, None])
    exact.scatter_(1, chunk.targets[:, None], p - 1)
    total = chunk.rest.double() + (chunk.own - chunk.anchors).double().exp()
    found = chunk.e[:, :V].double() / total[:, None]
    return float(((found - exact).abs() / exact.abs().clamp_min(1e-9)).max()) * 256


@dataclass(frozen=True, kw_only=True)
class Config:
    """Time the product with its epilogue against cuBLAS and the kernel behind it."""

    check: bool = False
    """Only see that it is right, at a small size."""
    out: Path | None = None
    rows: int = 8192
    repeats: int = 7
    device: str = "cuda"


def check() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for scale in (1.0, 8.0, 60.0):
        for tile in (Tile(128, 128, 64, 4, 3, False), Tile(128, 128, 64, 4, 3, True, True)):
            found = error(draw(150, 72, 300, device, scale=scale), tile)
            print(f"scores of spread {scale:g}, {tile.name}: {found:.2f} roundings of bf16 at most")
            # The interpreter cuts off what a GPU rounds.
            if found > (1.1 if device == "cuda" else 2.1):
                raise SystemExit("wrong")


def measured(config: Config, D: int, V: int) -> dict[str, Any]:
    from fullrank.ops.mixture.kernels import score_rows
    from fullrank.ops.pointwise import IDENTITY
    from fullrank.ops.reduce import Statistics

    chunk = draw(config.rows, D, V, config.device)
    scores, d_rows, d_weight = torch.empty_like(chunk.e), torch.empty_like(chunk.x), torch.empty_like(chunk.w)
    places = Statistics(*(torch.empty_like(chunk.own) for _ in range(3)))

    def product() -> None:
        torch.mm(chunk.x, chunk.w.t(), out=scores)

    def gradients() -> None:
        torch.mm(scores, chunk.w, out=d_rows)
        torch.mm(scores.t(), chunk.x, out=d_weight)

    def between() -> None:
        score_rows(scores, None, chunk.targets, IDENTITY, places=places, gradient=True, raised=True)

    def today() -> None:
        product()
        between()

    steps: dict[str, Any] = {"product": product, "gradients": gradients, "product and pass": today}
    for tile in TILES:

        def whole(tile: Tile = tile) -> None:
            anchored(chunk)
            raised(chunk, tile)
            finished(chunk, tile)

        steps[tile.name] = whole
    times, failed = in_rounds(steps, config.device, config.repeats)
    found = {name: 1e3 * statistics.median(taken) for name, taken in times.items()}
    bare = found["product"] + found["gradients"]
    best = min((name for name in found if "x" in name), key=found.__getitem__, default=None)
    print(
        f"D {D}, V {V}, {config.rows} rows: all three products {bare:.3f} ms, scores {found['product']:.3f}"
    )
    for name in sorted(found, key=found.__getitem__):
        print(f"  {name:42s} {found[name]:8.3f} ms, the chunk over its products "
              f"{(found[name] + found['gradients']) / bare:.3f}")  # fmt: skip
    for name, why in failed.items():
        print(f"  {name}: {why}")
    return {
        "width": D,
        "vocab": V,
        "rows": config.rows,
        "milliseconds": found,
        "best": best,
        "failed": failed,
    }


def main(config: Config) -> None:
    check()
    if config.check:
        return
    rows = [measured(config, D, V) for D, V in SHAPES]
    if config.out is not None:
        made = provenance(seed=0, device=torch.cuda.get_device_name())
        document = {
            "kind": "score_product", "version": 1, "made": dataclasses.asdict(made), "rows": rows,
        }  # fmt: skip
        write_whole(config.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    if triton is None:
        raise SystemExit("Triton is not installed")
    main(tyro.cli(Config))
