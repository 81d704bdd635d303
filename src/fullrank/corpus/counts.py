"""What counting leaves behind: how often each token followed each context, as arrays on disk.

Contexts are numbered 0..C-1 in an order without meaning. The entries of context c are
`indptr[c]:indptr[c + 1]` of `next` (the distinct tokens that followed it, ascending) and `count` (how often).
That is the CSR form of the C x V table of counts.

For resampling, the text is cut into blocks of consecutive documents (`tokenise.py`). The counts of entry e by
block are `start[e]:start[e + 1]` of `block` (ascending) and `count`; they add up to the entry's count.

All arrays are .npy files, memory-mapped, so a table larger than memory can be read a piece at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullrank.errors import FullrankError
from fullrank.text.stages import read_manifest


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The C x V table of counts; `next` and `count` have one element an entry that is not zero."""

    indptr: NDArray[np.int64]
    """Of length C + 1."""
    next: NDArray[np.int32]
    count: NDArray[np.int64]
    vocabulary: int
    """Tokens that the tokeniser has, V, whether they occur or not."""
    tokens: int
    """Of the text. The counts add up to less: the first order - 1 of a document follow no whole context."""

    @property
    def contexts(self) -> int:
        return len(self.indptr) - 1

    @property
    def entries(self) -> int:
        return len(self.next)


@dataclass(frozen=True, kw_only=True)
class BlockCounts:
    """The counts of every entry of a `Counts`, by block of text."""

    start: NDArray[np.int64]
    """Of length entries + 1."""
    block: NDArray[np.int16]
    count: NDArray[np.int32]
    blocks: int
    """Number of blocks; they hold about the same amount of text."""


def load_counts(directory: Path) -> Counts:
    """The counts that `count.count` wrote to a directory, memory-mapped."""
    manifest = read_manifest(directory)
    return Counts(
        indptr=_mapped(directory / "indptr.npy"),
        next=_mapped(directory / "next.npy"),
        count=_mapped(directory / "count.npy"),
        vocabulary=int(manifest["vocabulary"]),
        tokens=int(manifest["tokens"]),
    )


def load_blocks(directory: Path) -> BlockCounts:
    """The counts by block of the same directory, memory-mapped."""
    manifest = read_manifest(directory)
    return BlockCounts(
        start=_mapped(directory / "block_start.npy"),
        block=_mapped(directory / "block.npy"),
        count=_mapped(directory / "block_count.npy"),
        blocks=int(manifest["blocks"]),
    )


def _mapped(path: Path) -> NDArray[Any]:
    try:
        # An empty array cannot be mapped.
        array = np.load(path, mmap_mode="r" if path.stat().st_size > 128 else None)
    except (OSError, ValueError) as error:
        raise FullrankError(
            f"{path} cannot be read ({error}): remove its directory and run the command again"
        ) from error
    return np.asarray(array)
