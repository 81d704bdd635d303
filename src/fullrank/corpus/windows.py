"""Every token with the order - 1 tokens before it, as columns of integers in parquet.

A context of k = order - 1 tokens of b = ceil(log2 V) bits each is packed into ceil(k / floor(63 / b)) columns
of int64, the first token in the highest bits. The packing is one to one: contexts of any order are told apart
exactly, there are no collisions. Order 5 and V up to 32768 take one column.

    context_0 [context_1 ...]  int64   the context
    next                       int32   the token that followed
    block                      int32   block of the text that it stands in, for resampling
    part                       int32   a hash of the context, 0..parts-1

All windows of a context are in one part, so parts can be counted one after the other. A file holds one row
group a part that occurs, in ascending order, so an engine that looks for a part reads that row group alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullrank.errors import FullrankError

WIDEST = 63
"""Bits of a column: the sign is left alone."""
MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
"""Odd numbers whose products spread over all bits; Knuth's golden ratio, and one of splitmix64."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How the contexts of an order over a vocabulary become columns."""

    order: int
    vocabulary: int

    def __post_init__(self) -> None:
        if not 2 <= self.order <= 64:
            raise FullrankError(f"--order is {self.order}, expected 2 to 64: 5 is the published one")

    @property
    def length(self) -> int:
        """Tokens of a context."""
        return self.order - 1

    @property
    def bits(self) -> int:
        return max(1, math.ceil(math.log2(self.vocabulary)))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(f"context_{index}" for index in range(len(self.lengths)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens in every column."""
        most = WIDEST // self.bits
        return tuple(min(most, self.length - start) for start in range(0, self.length, most))

    def pack(self, tokens: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Columns of the contexts that begin at tokens 0, 1, ..., n - order of n tokens."""
        count, columns, start = max(len(tokens) - self.length, 0), [], 0
        for length in self.lengths:
            column = tokens[start : start + count].copy()
            for offset in range(start + 1, start + length):
                column <<= self.bits
                column |= tokens[offset : offset + count]
            columns.append(column)
            start += length
        return columns

    def unpack(self, columns: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """The tokens [contexts, order - 1] of packed contexts."""
        parts = []
        for column, length in zip(columns, self.lengths, strict=True):
            shifts = self.bits * np.arange(length - 1, -1, -1)
            parts.append((np.asarray(column)[:, None] >> shifts) & ((1 << self.bits) - 1))
        return np.concatenate(parts, axis=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """Contexts, what followed, and where."""

    contexts: list[NDArray[np.int64]]
    next: NDArray[np.int32]
    block: NDArray[np.int32]


def windows(
    packing: Packing,
    tokens: NDArray[np.int64],
    lengths: NDArray[np.int64],
    blocks: NDArray[np.int32],
) -> Windows:
    """Of runs of tokens laid end to end, `lengths[i]` of them in block `blocks[i]`; none crosses runs."""
    behind = packing.length
    contexts = packing.pack(tokens)
    ends = np.cumsum(lengths)
    # A window begins in a run if its last token, `behind` later, is still in that run.
    inside = np.ones(len(tokens), dtype=bool)
    for back in range(1, behind + 1):
        places = ends - back
        inside[places[places >= ends - lengths]] = False
    inside = inside[: max(len(tokens) - behind, 0)]
    chosen = np.flatnonzero(inside) if not inside.all() else slice(None)
    following = tokens[behind:].astype(np.int32)
    block = np.repeat(blocks, lengths)[behind:]
    return Windows(
        contexts=[column[chosen] for column in contexts], next=following[chosen], block=block[chosen]
    )


def mixed(contexts: Sequence[NDArray[np.int64]]) -> NDArray[np.uint64]:
    """A hash of every context, all of whose bits depend on all of the context's."""
    found = np.zeros(len(contexts[0]), dtype=np.uint64)
    for column in contexts:
        found ^= column.view(np.uint64)
        found *= np.uint64(MIX[0])
        found ^= found >> np.uint64(29)
    found *= np.uint64(MIX[1])
    return found


def part_of(contexts: Sequence[NDArray[np.int64]], parts: int) -> NDArray[np.uint16]:
    """A number 0..parts-1 for every context; `parts` is a power of two of at most 2^16."""
    if parts == 1:
        return np.zeros(len(contexts[0]), dtype=np.uint16)
    return (mixed(contexts) >> np.uint64(64 - parts.bit_length() + 1)).astype(np.uint16)


def write(path: Path, found: Windows, parts: int) -> None:
    """One parquet file, a row group a part; whole or not at all."""
    import pyarrow
    from pyarrow import parquet

    part = part_of(found.contexts, parts)
    # numpy sorts 16-bit numbers by radix, in linear time.
    order = np.argsort(part, kind="stable")
    bounds = np.searchsorted(part[order], np.arange(parts + 1))
    names = [f"context_{index}" for index in range(len(found.contexts))]
    columns = [(name, pyarrow.int64()) for name in names]
    columns += [(name, pyarrow.int32()) for name in ("next", "block", "part")]
    schema = pyarrow.schema(columns)
    sorted_columns: list[NDArray[Any]] = [column[order] for column in found.contexts]
    sorted_columns += [found.next[order], found.block[order]]
    partial = path.with_name(f".{path.name}")
    with parquet.ParquetWriter(
        partial, schema, compression="snappy", use_dictionary=["block", "part"], store_schema=False
    ) as file:
        for index in range(parts):
            low, high = bounds[index], bounds[index + 1]
            if low == high:
                continue
            numbers = np.full(high - low, index, dtype=np.int32)
            arrays = [pyarrow.array(column[low:high]) for column in (*sorted_columns,)]
            table = pyarrow.Table.from_arrays([*arrays, pyarrow.array(numbers)], schema=schema)
            file.write_table(table, row_group_size=high - low)
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    os.replace(partial, path)
