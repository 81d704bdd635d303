"""Whether a GGUF file can hold what its header says, looked at before a library believes it.

    "GGUF", version u32, tensors u64, fields u64
    field     key string, type u32, value
    array     type u32, length u64, values
    string    length u64, bytes
    tensor    name string, dimensions u32, each u64, type u32, offset u64 in the data that follows the header

The reader of the gguf package takes every count and length as it stands, and a file of a hundred bytes can
ask it for years of work. Here each is held against the bytes that are left, and a tensor against the file.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

from fullrank.errors import FullrankError
from fullrank.results.reading import memory, require_regular

MAGIC = b"GGUF"
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by its type: u8 i8 u16 i16 u32 i32 f32 bool, u64 i64 f64."""
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4
DEEPEST = 4
"""Arrays of arrays that are followed."""
LEAST_FIELD, LEAST_TENSOR = 13, 32
"""Bytes that a field and a tensor's description take at least."""


def check(file: Path) -> None:
    """Raise FullrankError where the header promises more than the file has, or more than fits into memory."""
    require_regular(file)
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            entries = _Header(opened, size).read()
    except OSError as error:
        raise FullrankError(f"{file} cannot be read ({error.strerror}): check its permissions") from error
    except _Impossible as error:
        raise FullrankError(f"{file} is damaged or cut short ({error}): download it again") from error
    if 4 * entries > memory():
        raise FullrankError(
            f"{file} holds {entries:,} weights, {4 * entries / (1 << 30):,.1f} GiB as fp32, where this "
            f"machine has {memory() / (1 << 30):,.1f} GiB: give a smaller model"
        )


class _Impossible(Exception):  # noqa: N818  (a signal, not an error)
    """The header cannot be true."""


class _Header:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size, self.order = file, size, "<"

    def read(self) -> int:
        """Weights in all tensors."""
        magic = self._take(4)
        if magic != MAGIC:
            raise _Impossible("it does not start as GGUF does")
        version = self._number("I")
        if version & 0xFFFF == 0:
            # Written on a machine of the other byte order.
            self.order = ">"
        tensors, fields = self._number("Q"), self._number("Q")
        self._room(tensors, LEAST_TENSOR, "tensors")
        self._room(fields, LEAST_FIELD, "fields")
        for _ in range(fields):
            self._skip_string()
            self._skip_value(self._number("I"), 0)
        found = [self._tensor() for _ in range(tensors)]
        # The data begin after the header; how far they are moved to a round address is not needed here.
        for entries, end in found:
            if self.file.tell() + end > self.size:
                raise _Impossible(f"a tensor of {entries:,} weights in a file of {self.size:,} bytes")
        return sum(entries for entries, _ in found)

    def _tensor(self) -> tuple[int, int]:
        """Its weights, and where its data end."""
        import gguf

        self._skip_string()
        dimensions = self._number("I")
        if dimensions > MOST_DIMENSIONS:
            raise _Impossible(f"a tensor of {dimensions:,} dimensions")
        entries = 1
        for _ in range(dimensions):
            entries *= self._number("Q")
        kind, offset = self._number("I"), self._number("Q")
        try:
            block, stored = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (ValueError, KeyError) as error:
            raise _Impossible(f"a tensor of the unknown type {kind}") from error
        return entries, offset + entries // block * stored

    def _skip_value(self, kind: int, depth: int) -> None:
        if kind in SIZES:
            self._skip(SIZES[kind])
        elif kind == STRING:
            self._skip_string()
        elif kind == ARRAY:
            inner, length = self._number("I"), self._number("Q")
            if depth == DEEPEST:
                raise _Impossible("arrays in arrays without end")
            self._room(length, SIZES.get(inner, 8), "values in an array")
            if inner in SIZES:
                self._skip(length * SIZES[inner])
            else:
                for _ in range(length):
                    self._skip_value(inner, depth + 1)
        else:
            raise _Impossible(f"a value of the unknown type {kind}")

    def _skip_string(self) -> None:
        self._skip(self._number("Q"))

    def _skip(self, count: int) -> None:
        self._room(count, 1, "bytes")
        self.file.seek(count, os.SEEK_CUR)

    def _room(self, count: int, each: int, what: str) -> None:
        """What is left of the file can hold so many of these."""
        if count * each > self.size - self.file.tell():
            raise _Impossible(f"it says {count:,} {what}, more than {self.size:,} bytes can hold")

    def _number(self, code: str) -> int:
        return int(struct.unpack(self.order + code, self._take(struct.calcsize(code)))[0])

    def _take(self, count: int) -> bytes:
        found = self.file.read(count)
        if len(found) < count:
            raise _Impossible("it ends in its header")
        return found
