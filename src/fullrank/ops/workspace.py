"""How a pass over the scores is cut so that it stays inside a workspace of a given number of bytes.

The scores of a chunk of whole tokens lie in one buffer that every chunk reuses. On a CPU two sizes matter:
the products want hundreds of rows, the elementwise work wants tiles that stay in the cache. When the
workspace cannot hold all V scores of enough rows, the vocabulary is cut into blocks as well and the gradient
recomputes the scores of each block: one product more, but no bound on K or V.

A kernel that does the elementwise work in place (`score_kernels.py`) needs no tiles, but rows that start at a
multiple of 16 bytes, as do the fast products: each row is padded to its stride.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from fullrank.errors import FullrankError

MIB = 1 << 20
DEFAULT_WORKSPACE = {"cpu": 256 * MIB}
# On a device: what 12288 rows of 80,000 scores in bf16 need, but no more than this part of its memory.
DEVICE_WORKSPACE = 2048 * MIB
DEVICE_PART = 16

# Rows in a chunk beyond which the products gain nothing; below the least, re-reading W for every chunk costs
# more than the extra product of cutting the vocabulary.
MOST_ROWS = {"cpu": 512}
DEVICE_MOST_ROWS = 12288
LEAST_ROWS = 64
# On a device, a chunk of so many rows is as fast as a larger one. Where a single chunk would take more bytes
# than these, two take half the memory in the same time; below, launches cost more than memory does.
DEVICE_ENOUGH_ROWS = 4096
DEVICE_ENOUGH_BYTES = 640 * MIB

# Bytes of scores in an elementwise tile: what a core's cache keeps on a CPU, what fills the chip elsewhere.
TILE_BYTES = {"cpu": 2 * MIB}
DEVICE_TILE_BYTES = 128 * MIB

STRIDE = 64
ROUND_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of one pass. `block == V` means that a chunk's scores are kept between its two uses."""

    tokens: int
    """Tokens in a chunk; a chunk holds all K rows of each."""
    block: int
    """Vocabulary entries scored at a time."""
    tile_tokens: int
    """Tokens in an elementwise tile."""
    slice_rows: int
    """Rows of W's gradient that one low-precision product makes before it is added in fp32."""
    kernel: bool = False
    """One kernel does the elementwise work of a chunk, without tiles."""
    buffers: int = 1
    """Chunks whose scores are in memory at once."""
    copy_rows: int = 0
    """Where rows are skipped: rows of the buffer that move at a time, or rows of Q that a kernel makes at a
    time beside it."""

    @property
    def stride(self) -> int:
        """Scores from one row of the buffer to the next."""
        return padded(self.block) if self.kernel else self.block


def padded(V: int) -> int:
    return -(-V // STRIDE) * STRIDE


@functools.cache
def default_workspace(device: torch.device) -> int:
    if device.type == "cuda" and torch.cuda.is_available():
        return min(DEVICE_WORKSPACE, torch.cuda.get_device_properties(device).total_memory // DEVICE_PART)
    return DEFAULT_WORKSPACE.get(device.type, DEVICE_WORKSPACE)


def make_plan(
    *,
    N: int,
    K: int,
    D: int,
    V: int,
    product: torch.dtype,
    device: torch.device,
    tile_buffers: int,
    workspace: int,
    kernel: bool = False,
    skip: bool = False,
) -> Plan:
    """Cut N tokens of K rows of width D against V entries; raises where one token cannot fit.

    tile_buffers is how many buffers of a tile's size in the wide dtype are alive at once, at worst. `kernel`
    asks for a plan without tiles and gets one where the vocabulary need not be cut. `skip` makes room to move
    rows of the buffer.
    """
    wide = 8 if product == torch.float64 else 4
    narrow = product.itemsize
    # A row's share outside the scores: the row, its scaled copy, and its gradient in both precisions.
    row_bytes = D * (2 * narrow + 2 * wide)
    most_rows = MOST_ROWS.get(device.type, DEVICE_MOST_ROWS)
    most_tokens = max(1, min(N, most_rows // K))
    if kernel:
        whole = V * D * (narrow + wide) if narrow < wide else 0
        slice_bytes = min(whole, max(workspace // 8, D * (narrow + wide)))
        line_bytes = padded(V) * narrow
        # Where rows are skipped two chunks are in memory at once, and most of a third.
        buffers = 2 if skip else 1
        copied = -(-most_tokens * K * 3 // 4)
        copy_bytes = max(line_bytes, min(copied * line_bytes, workspace // 4)) if skip else 0
        room = workspace - slice_bytes - copy_bytes
        tokens = min(most_tokens, room // (K * (buffers * line_bytes + row_bytes)))
        if tokens * K >= min(LEAST_ROWS, most_tokens * K):
            if tokens * K * line_bytes > DEVICE_ENOUGH_BYTES:
                tokens = min(tokens, max(DEVICE_ENOUGH_ROWS // K, -(-N // 2), 1))
            # Chunks of one size, the same number of them in less memory, but of sizes that products like.
            even = -(-max(N, 1) // -(-max(N, 1) // tokens))
            unit = ROUND_ROWS // math.gcd(K, ROUND_ROWS)
            tokens = min(tokens, -(-even // unit) * unit)
            slice_rows = slice_bytes // (D * (narrow + wide)) if slice_bytes else V
            return Plan(
                tokens=tokens, block=V, tile_tokens=tokens, slice_rows=slice_rows, kernel=True,
                buffers=buffers, copy_rows=copy_bytes // line_bytes,
            )  # fmt: skip
    # Tiles take a quarter of the workspace at most. The tile that the cache wants grows to one whole token
    # where that is still within the quarter.
    best_tile = TILE_BYTES.get(device.type, DEVICE_TILE_BYTES)
    tile_bytes = max(min(max(best_tile, K * V * wide), workspace // (4 * tile_buffers)), K * wide)
    # The fp32 sum of a low-precision product needs that product once, slice by slice.
    slice_bytes = max(workspace // 8, D * (narrow + wide)) if narrow < wide else 0
    budget = workspace - tile_buffers * tile_bytes - slice_bytes
    smallest = K * row_bytes + K * min(V, 128) * (narrow + tile_buffers * wide)
    if smallest > budget:
        need = -(-2 * (smallest + slice_bytes) // MIB)
        raise FullrankError(
            f"a workspace of {workspace} bytes cannot hold one token of {K} rows of width {D}: "
            f"pass workspace={need * MIB} ({need} MiB) or more"
        )
    slice_rows = min(V, slice_bytes // (D * (narrow + wide))) if slice_bytes else V

    def tokens_for(columns: int) -> int:
        return budget // (K * (columns * narrow + row_bytes))

    def plan_of(tokens: int, block: int) -> Plan:
        tile_tokens = min(tokens, max(1, min(best_tile, tile_bytes) // (K * block * wide)))
        # Rows move when the last tile is done and its room is free.
        return Plan(
            tokens=tokens, block=block, tile_tokens=tile_tokens, slice_rows=slice_rows,
            copy_rows=tile_tokens * K if skip else 0,
        )  # fmt: skip

    tokens = min(most_tokens, tokens_for(V))
    if K * V * wide <= tile_bytes and tokens * K >= min(LEAST_ROWS, most_tokens * K):
        return plan_of(tokens, V)
    columns = (budget // (most_tokens * K) - row_bytes) // narrow
    tokens = most_tokens
    if columns < min(V, 1024):
        tokens = max(1, tokens_for(min(V, 1024)))
        columns = (budget // (tokens * K) - row_bytes) // narrow
    # One token's tile must fit as well: K rows of a block.
    columns = min(columns, max(tile_bytes // (K * wide), 1), V)
    columns = columns // 64 * 64 if columns > 64 else max(columns, 1)
    return plan_of(tokens, columns)
