"""How a pass over the tokens is cut so that it stays inside a workspace of a given number of bytes, and the
one loop over the pieces.

A pass goes over chunks of whole tokens. The scores of a chunk lie in one buffer that every chunk reuses, and
two sizes matter: the products want hundreds of rows, elementwise work wants tiles that stay in the cache.
When the workspace cannot hold all V scores of enough rows, the vocabulary is cut into blocks as well and the
gradient makes the scores of each block again: one product more, but no bound on K or V.

An operation gives the loop a `Work`: losses of a chunk and the posterior shares of its rows, then, with the
shares times the tokens' weights, its gradients. So a gradient needs nothing that outlives its chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.ops.reduce import Tokens

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

# Bytes of scores in an elementwise tile: what a core's cache keeps on a CPU, what fills the chip elsewhere.
TILE_BYTES = {"cpu": 2 * MIB}
DEVICE_TILE_BYTES = 128 * MIB

Index = slice | Tensor


@functools.cache
def default_workspace(device: torch.device) -> int:
    if device.type == "cuda" and torch.cuda.is_available():
        return min(DEVICE_WORKSPACE, torch.cuda.get_device_properties(device).total_memory // DEVICE_PART)
    return DEFAULT_WORKSPACE.get(device.type, DEVICE_WORKSPACE)


def workspace_of(workspace: int | None, device: torch.device) -> int:
    return default_workspace(device) if workspace is None else workspace


def most_rows(device: torch.device) -> int:
    return MOST_ROWS.get(device.type, DEVICE_MOST_ROWS)


def too_small(workspace: int, what: str, need: int) -> FullrankError:
    whole = -(-need // MIB)
    return FullrankError(
        f"a workspace of {workspace} bytes cannot hold {what}: "
        f"pass workspace={whole * MIB} ({whole} MiB) or more"
    )


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some whole tokens of a pass."""

    index: Index
    """Which of all tokens: side by side, or those at some positions."""
    targets: Tensor
    """[T]"""
    log_prior: Tensor
    """[T, K], in fp32 or wider."""
    weight: Tensor | None
    """[T]; None is 1 for every token."""

    @property
    def row_targets(self) -> Tensor:
        """[T K], the target of each row."""
        K = self.log_prior.shape[1]
        return self.targets if K == 1 else self.targets[:, None].expand(-1, K).flatten()

    def upstream(self, share: Tensor, tokens: slice = slice(None)) -> Tensor:
        """g of each row of some tokens, from their posterior shares [t, K]: times the token's weight."""
        return (share if self.weight is None else share * self.weight[tokens, None]).flatten()


class Work(Protocol):
    """What an operation does with a chunk; what it keeps between the two calls is its own."""

    def losses(self, chunk: Chunk, nll: Tensor) -> Tensor | None:
        """The tokens' losses into nll [T]; the posterior shares [T, K], or None where all of them are 1 and
        nobody asked for more than the gradients of `gradients`."""

    def gradients(self, chunk: Chunk, upstream: Tensor | None) -> None:
        """Make or add the gradients of sum_rows upstream [T K] nll_row; None is 1 for every row."""


def over_chunks(
    work: Work, log_prior: Tensor, tokens: Tokens, token_weight: Tensor | None, *, size: int,
    wide: torch.dtype, prior_gradient: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Losses [N] of all tokens, 0 where ignored, and the log prior's gradient of sum_i weight_i nll_i."""
    N, K = log_prior.shape
    # Where every token goes through the products all is written, and nothing need be zero before.
    fill = log_prior.new_empty if tokens.positions is None else log_prior.new_zeros
    nll = fill(N, dtype=wide)
    d_prior = fill(N, K, dtype=wide) if prior_gradient else None
    for index in pieces(N, tokens.positions, size):
        chunk = Chunk(
            index=index,
            targets=at(tokens.targets, index),
            log_prior=at(log_prior, index).to(wide),
            weight=None if token_weight is None else at(token_weight, index).to(wide),
        )
        in_place = isinstance(index, slice)
        own = at(nll, index) if in_place else nll.new_empty(chunk.targets.shape)
        share = work.losses(chunk, own)
        if not in_place:
            nll[index] = own
        upstream = None if share is None else chunk.upstream(share)
        if d_prior is not None and upstream is not None:
            d_prior[index] = upstream.view(-1, K).neg()
        work.gradients(chunk, upstream)
    return nll, d_prior


def pieces(N: int, positions: Tensor | None, size: int) -> Iterator[Index]:
    """Pieces of the positions, or slices of all N tokens where none are given."""
    if positions is not None:
        # An empty tensor splits into one empty piece, not into none.
        yield from positions.split(size) if positions.numel() else ()
        return
    for start in range(0, N, size):
        yield slice(start, min(start + size, N))


def at(tensor: Tensor, index: Index) -> Tensor:
    """tensor[index], and the tensor itself where that is all of it."""
    if isinstance(index, slice) and index.start == 0 and index.stop == tensor.shape[0]:
        return tensor
    return tensor[index]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of a pass with torch's operations; `block == V` keeps a chunk's scores between their two uses."""

    tokens: int
    """Tokens in a chunk; a chunk holds all K rows of each."""
    block: int
    """Vocabulary entries scored at a time."""
    tile_tokens: int
    """Tokens in an elementwise tile."""
    matrix_rows: int
    """Rows of W that are cast at a time, or of its gradient that exist in the narrow dtype before they are
    added in fp32; V where W needs no cast."""


def make_plan(
    *, N: int, K: int, D: int, V: int, product: torch.dtype, given: torch.dtype, device: torch.device,
    tile_buffers: int, workspace: int,
) -> Plan:  # fmt: skip
    """Cut N tokens of K rows of width D against V entries; raises where one token cannot fit.

    Products run in the dtype `product`, on a W of the dtype `given`. tile_buffers is how many buffers of a
    tile's size in the wide dtype are alive at once, at worst.
    """
    wide = 8 if product == torch.float64 else 4
    narrow = product.itemsize
    # A row's share outside the scores: the row, its scaled copy, and its gradient in both precisions.
    row_bytes = D * (2 * narrow + 2 * wide)
    most_tokens = max(1, min(N, most_rows(device) // K))
    # Tiles take a quarter of the workspace at most. The tile that the cache wants grows to one whole token
    # where that is still within the quarter.
    best_tile = TILE_BYTES.get(device.type, DEVICE_TILE_BYTES)
    tile_bytes = max(min(max(best_tile, K * V * wide), workspace // (4 * tile_buffers)), K * wide)
    # What is made of W in another dtype than it has, or of its gradient.
    moved = product != given or narrow < wide
    matrix_bytes = min(max(workspace // 8, D * (narrow + wide)), V * D * (narrow + wide)) if moved else 0
    budget = workspace - tile_buffers * tile_bytes - matrix_bytes
    smallest = K * row_bytes + K * min(V, 128) * (narrow + tile_buffers * wide)
    if smallest > budget:
        raise too_small(workspace, f"one token of {K} rows of width {D}", 2 * (smallest + matrix_bytes))
    matrix_rows = min(V, matrix_bytes // (D * (narrow + wide))) if moved else V

    def tokens_for(columns: int) -> int:
        return budget // (K * (columns * narrow + row_bytes))

    def plan_of(tokens: int, block: int) -> Plan:
        tile_tokens = min(tokens, max(1, min(best_tile, tile_bytes) // (K * block * wide)))
        return Plan(tokens=tokens, block=block, tile_tokens=tile_tokens, matrix_rows=matrix_rows)

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
