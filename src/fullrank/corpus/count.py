"""The table of counts as arrays, from what an engine counted.

What comes back of a part (`engines.py`) is sorted here, contexts are numbered on, and arrays are appended to
the files that `counts.py` describes. A context lies in one part, so nothing is merged between parts. After
every part the lengths of the files are written down; a killed run cuts them to these lengths and goes on with
the next part.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fullrank.corpus.engines import Columns, Resources, check_engine, counted
from fullrank.corpus.windows import MIX, Packing, mixed
from fullrank.errors import FullrankError
from fullrank.results.files import write_whole
from fullrank.results.reading import read_json

ARRAYS = {
    "indptr": "<i8",
    "next": "<i4",
    "count": "<i8",
    "block_start": "<i8",
    "block": "<i2",
    "block_count": "<i4",
}
"""Files of the stage, without .npy, and the type of their numbers."""
HEADER = 128
"""Bytes of an .npy file before its numbers; it is written last, when their number is known."""
STATE = "state.json"
SYNC_SECONDS = 5.0
"""Between two times that the state is written down: as much is lost when a run is killed."""


def count(
    folder: Path,
    windows: Path,
    packing: Packing,
    manifest: dict[str, Any],
    resources: Resources,
    progress: Callable[[str, float], None] = lambda label, share: None,
) -> dict[str, Any]:
    """Fill `folder` with the arrays of the windows; `manifest` is theirs. Returns the stage's manifest."""
    check_engine(resources)
    parts = int(manifest["parts"])
    files = [windows / name for name in manifest["files"]]
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    with contextlib.closing(_Arrays(folder)) as arrays:
        arrays.begin()
        begun, first = time.monotonic(), arrays.windows
        left = range(arrays.part, parts)
        for part, rows in counted(files, left, packing, resources, scratch, rows_of):
            arrays.append(part, rows)
            rate = (arrays.windows - first) / max(time.monotonic() - begun, 1e-9) / 1e6
            progress(f"counting: {arrays.windows / 1e6:.1f}M windows, {rate:.2f}M/s", (part + 1) / parts)
        said = arrays.finish()
    shutil.rmtree(scratch, ignore_errors=True)
    if said["windows"] != manifest["windows"]:
        raise FullrankError(
            f"{resources.engine} counted {said['windows']} windows of {manifest['windows']}: run the command "
            "again, and with another --engine if that does not help"
        )
    carried = {name: manifest[name] for name in ("tokens", "documents", "blocks", "replaced")}
    return {**said, **carried, "vocabulary": packing.vocabulary, "order": packing.order}


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The table of a part: contexts, entries and their blocks, numbered from 0 in this part."""

    ends: NDArray[np.int64]
    """Where the entries of a context end, one a context."""
    next: NDArray[np.int32]
    count: NDArray[np.int64]
    block_ends: NDArray[np.int64]
    """Where the blocks of an entry end, one an entry."""
    block: NDArray[np.int32]
    block_count: NDArray[np.int64]


def rows_of(columns: Columns) -> Rows:
    """The table of counted rows, which come in any order, no two alike."""
    contexts, following, block, counts = columns
    if len(counts) and int(counts.max()) > np.iinfo(ARRAYS["block_count"]).max:
        raise FullrankError(
            f"one token follows one context {int(counts.max())} times in one block, too often to write down: "
            "give more --blocks"
        )
    order, begins = order_of(contexts, following, block)
    following, block, counts = following[order], block[order], counts[order]
    new = begins.copy()
    new[1:] |= following[1:] != following[:-1]
    entries = np.flatnonzero(new)
    return Rows(
        ends=np.append(np.flatnonzero(begins[entries])[1:], len(entries)) if len(entries) else entries,
        next=following[entries],
        count=np.add.reduceat(counts, entries) if len(entries) else counts,
        block_ends=np.append(entries[1:], len(counts)) if len(entries) else entries,
        block=block,
        block_count=counts,
    )


def order_of(
    contexts: Sequence[NDArray[np.int64]], following: NDArray[np.int32], block: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """An order of rows that brings contexts together, within them next and block ascending; and which of the
    ordered rows begin a context.

    numpy sorts numbers several times faster than it finds their order. So what is sorted is a number that has
    the row in its low bits and a hash of the context above; the few contexts that share a hash are set right
    after. Most contexts of a natural text are seen once: only rows that share theirs are sorted again.
    """
    count = len(following)
    width = np.uint64(max(count - 1, 1).bit_length())
    # Hashed on, because the highest bits are the same in all of a part.
    key = mixed(contexts)
    key ^= key >> np.uint64(32)
    key *= np.uint64(MIX[0])
    key >>= width
    key <<= width
    key |= np.arange(count, dtype=np.uint64)
    key.sort()
    order = (key & ((np.uint64(1) << width) - np.uint64(1))).astype(np.int64)
    key >>= width
    alike = key[1:] == key[:-1]
    del key
    begins = _changes(contexts, order)
    if (collided := np.flatnonzero(alike & begins[1:])).size:
        run = np.append(0, np.cumsum(~alike))
        flagged = np.zeros(int(run[-1]) + 1, dtype=bool)
        flagged[run[collided]] = True
        places = np.flatnonzero(flagged[run])
        rows = order[places]
        order[places] = rows[np.lexsort([*(column[rows] for column in contexts), run[places]])]
        begins = _changes(contexts, order)
    shared = ~begins
    shared[:-1] |= ~begins[1:]
    places = np.flatnonzero(shared)
    if len(places):
        rows = order[places]
        # Numbers of contexts; nothing is lost by leaving the others out.
        rank = np.cumsum(begins[places], dtype=np.int64)
        order[places] = rows[_order_within(rank, following[rows], block[rows])]
    return order, begins


def _changes(contexts: Sequence[NDArray[np.int64]], order: NDArray[np.int64]) -> NDArray[np.bool_]:
    begins = np.zeros(len(order), dtype=bool)
    begins[:1] = True
    for column in contexts:
        ordered = column[order]
        begins[1:] |= ordered[1:] != ordered[:-1]
    return begins


def _order_within(
    rank: NDArray[np.int64], following: NDArray[np.int32], block: NDArray[np.int32]
) -> NDArray[np.int64]:
    """The order by all three, packed into one number with the row where they fit."""
    widths = [int(column.max()).bit_length() for column in (following, block)]
    widths.append(max(len(rank) - 1, 1).bit_length())
    if int(rank[-1]).bit_length() + sum(widths) > 63:
        return np.lexsort((block, following, rank))
    packed = rank.copy()
    columns: tuple[NDArray[Any], ...] = (following, block, np.arange(len(rank)))
    for column, width in zip(columns, widths, strict=True):
        packed <<= width
        packed |= column
    packed.sort()
    packed &= (1 << widths[-1]) - 1
    return packed


class _Arrays:
    """The files of the counts, appended to part by part."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.part = self._contexts = self._entries = self._rows = self.windows = 0
        lengths = dict.fromkeys(ARRAYS, HEADER)
        with contextlib.suppress(OSError, ValueError, KeyError):
            state = read_json(folder / STATE)
            if all(_size(self._path(name)) >= state["lengths"][name] for name in ARRAYS):
                lengths = state["lengths"]
                self.part, self._contexts, self._entries = state["part"], state["contexts"], state["entries"]
                self._rows, self.windows = state["rows"], state["windows"]
        self._kept = time.monotonic()
        self._files: dict[str, BinaryIO] = {}
        for name in ARRAYS:
            path = self._path(name)
            path.touch()
            file = path.open("r+b")
            file.truncate(lengths[name])
            file.seek(lengths[name])
            self._files[name] = file

    def begin(self) -> None:
        """Both arrays of starts have one more element than what they start."""
        if not self.part:
            self._write(indptr=np.zeros(1), block_start=np.zeros(1))

    def append(self, part: int, rows: Rows) -> None:
        """The table of a part; what is on disk is written down every few seconds."""
        self._write(
            indptr=self._entries + rows.ends,
            next=rows.next,
            count=rows.count,
            block_start=self._rows + rows.block_ends,
            block=rows.block,
            block_count=rows.block_count,
        )
        self._contexts += len(rows.ends)
        self._entries += len(rows.next)
        self._rows += len(rows.block)
        self.windows += int(rows.count.sum())
        self.part = part + 1
        if time.monotonic() - self._kept >= SYNC_SECONDS:
            self._keep()

    def _keep(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        state = {
            "part": self.part,
            "contexts": self._contexts,
            "entries": self._entries,
            "rows": self._rows,
            "windows": self.windows,
            "lengths": {name: file.tell() for name, file in self._files.items()},
        }
        write_whole(self._folder / STATE, json.dumps(state))
        self._kept = time.monotonic()

    def finish(self) -> dict[str, Any]:
        """Write the headers; what the stage's manifest says of the arrays."""
        sizes = {"indptr": self._contexts + 1, "next": self._entries, "count": self._entries}
        sizes |= {"block_start": self._entries + 1, "block": self._rows, "block_count": self._rows}
        for name, file in self._files.items():
            file.seek(0)
            file.write(_header(ARRAYS[name], sizes[name]))
            file.flush()
            os.fsync(file.fileno())
        (self._folder / STATE).unlink(missing_ok=True)
        return {"contexts": self._contexts, "entries": self._entries, "windows": self.windows}

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _write(self, **arrays: NDArray[Any]) -> None:
        for name, array in arrays.items():
            self._files[name].write(array.astype(ARRAYS[name], copy=False).tobytes())

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npy"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _header(dtype: str, length: int) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": (length,)})
    header = buffer.getvalue()
    # The layout leaves room for larger numbers, so this length holds for any array with one axis.
    assert len(header) == HEADER
    return header
