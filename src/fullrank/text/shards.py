"""Token files: the ids of a split in shards, written and hashed in one go, read as one array.

The ids alone, little endian, two bytes each where V fits and four otherwise: int16 would turn the ids of a
large vocabulary negative.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fullrank.errors import FullrankError
from fullrank.text.splits import SPLITS

SHARD = 1 << 27
"""Tokens of a file: a multiple of every size of a page."""


def dtype_of(vocabulary: int) -> np.dtype:
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


class Writer:
    """Writes the tokens of a split."""

    def __init__(self, folder: Path, split: str, vocabulary: int) -> None:
        self.tokens = self.bytes = self.lines = self.documents = self.replaced = 0
        self.shards: dict[str, dict[str, Any]] = {}
        """Names, sizes and hashes of its files."""
        self.whole = hashlib.sha256()
        """Of the split, however it is cut into shards."""
        self._folder, self._split, self._vocabulary = folder, split, vocabulary
        self._file: BinaryIO | None = None
        self._name = ""

    def add(self, ids: np.ndarray) -> None:
        if len(ids) and int(ids.max()) >= self._vocabulary:
            raise FullrankError(
                f"token {int(ids.max())} of the {self._split} split lies outside the vocabulary of "
                f"{self._vocabulary}: give its size with --set data.vocabulary_size, or another tokenizer"
            )
        while len(ids):
            part = ids[: SHARD - self.tokens % SHARD]
            data = part.astype(dtype_of(self._vocabulary)).tobytes()
            if self._file is None or self.tokens % SHARD == 0:
                self.close()
                number = self.tokens // SHARD
                self._name = f"{self._split}-{number:05d}.tokens" if number else f"{self._split}.tokens"
                self._file, self._hash = (self._folder / self._name).open("wb"), hashlib.sha256()
            self._file.write(data)
            self._hash.update(data)
            self.whole.update(data)
            self.tokens += len(part)
            ids = ids[len(part) :]

    def close(self) -> None:
        """On disk, not in a buffer of the system: a name must not outlive a content that power took away."""
        if self._file is not None:
            with self._file as file:
                file.flush()
                os.fsync(file.fileno())
                self.shards[self._name] = {"bytes": file.tell(), "sha256": self._hash.hexdigest()}
            self._file = None


@contextlib.contextmanager
def writers(folder: Path, vocabulary: int) -> Iterator[dict[str, Writer]]:
    """One for every split, closed at the end."""
    made = {split: Writer(folder, split, vocabulary) for split in SPLITS}
    try:
        yield made
    finally:
        for writer in made.values():
            writer.close()


def mapped(shards: list[Path], dtype: np.dtype, count: int) -> np.ndarray:
    """The tokens of files as one read-only array; no byte is read before it is asked for."""
    if len(shards) == 1:
        return np.memmap(shards[0], dtype=dtype, mode="r", shape=(count,))
    # numpy maps one file. Room for all of them is set aside, and each is put into its place of it.
    room = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    tokens = np.frombuffer(room, dtype=dtype)
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    place, fixed = tokens.ctypes.data, 0x10
    for shard in shards:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            flags = mmap.MAP_SHARED | fixed
            if library.mmap(place, size, mmap.PROT_READ, flags, file.fileno(), 0) != place:
                raise OSError(ctypes.get_errno(), f"{shard} cannot be mapped")
        place += size
    return tokens
