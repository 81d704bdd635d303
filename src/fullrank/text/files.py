"""Files of text: surveyed once, and read in blocks.

Text is UTF-8. A byte order mark is dropped, nothing else is changed. A line ends with "\\n" and nothing else.
The text is read in blocks of about a million characters, so that a file may be larger than memory and its
lines as long as they like.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fullrank.errors import FullrankError
from fullrank.text.cuts import LONGEST, last_cut

READ = 1 << 20
"""Bytes read at once."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A range of bytes of a file: a document of a split."""

    path: Path
    name: str
    """Of the file, relative to the directory that was given; never a whole path."""
    start: int
    """First byte, a byte order mark left out."""
    stop: int
    first_line: int
    """Number of the first line, from 1."""
    lines: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A whole file, surveyed."""

    path: Path
    name: str
    start: int
    """First byte, a byte order mark left out."""
    size: int
    lines: int
    sha256: str


class NoTextError(FullrankError):
    """A file that is not UTF-8 text; `binary` where it is not even meant to be."""

    def __init__(self, message: str, *, binary: bool) -> None:
        super().__init__(message)
        self.binary = binary


def survey(path: Path, name: str) -> TextFile:
    """Read a file once, for its hash and to see that it is text."""
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder("utf8")("strict")
    size = lines = start = 0
    last = b""
    with _opened(path) as file:
        while data := file.read(READ):
            if size == 0:
                if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise NoTextError(f"{path} is UTF-16, expected UTF-8: save it as UTF-8", binary=False)
                start = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
            if (nul := data.find(b"\0")) >= 0:
                raise NoTextError(
                    f"{path} has a NUL byte at offset {size + nul}, which no text has: give a file of "
                    "UTF-8 text",
                    binary=True,
                )
            _decode(decoder, data, path=path, before=size)
            digest.update(data)
            size += len(data)
            lines += data.count(b"\n")
            last = data[-1:]
        _decode(decoder, b"", path=path, before=size, final=True)
    if size > start and last != b"\n":
        lines += 1
    return TextFile(path=path, name=name, start=start, size=size, lines=lines, sha256=digest.hexdigest())


def _decode(
    decoder: codecs.IncrementalDecoder, data: bytes, *, path: Path, before: int, final: bool = False
) -> None:
    waiting = len(decoder.getstate()[0])
    try:
        decoder.decode(data, final)
    except UnicodeDecodeError as error:
        raise NoTextError(
            f"{path} is not UTF-8 at byte offset {before - waiting + error.start} ({error.reason}): save "
            "it as UTF-8, for instance with iconv, or give other files",
            binary=False,
        ) from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise FullrankError(
            f"{path} cannot be read ({error.strerror}): give text files that you may read"
        ) from error


def offset(file: TextFile, line: int) -> int:
    """The byte that line `line` (from 0) begins at; 0x0a is a line break wherever it stands in UTF-8."""
    if line == 0:
        return file.start
    if line == file.lines:
        return file.size
    with _opened(file.path) as opened:
        position = 0
        while data := opened.read(READ):
            count = data.count(b"\n")
            if count >= line:
                place = -1
                for _ in range(line):
                    place = data.index(b"\n", place + 1)
                return position + place + 1
            line -= count
            position += len(data)
    raise FullrankError(f"{file.path} became shorter while it was read: give files at rest")


def blocks(part: Part) -> Iterator[str]:
    """The text of a part, in blocks that end between words where that is possible."""
    decoder = codecs.getincrementaldecoder("utf8")("strict")
    pending = ""
    with _opened(part.path) as file:
        file.seek(part.start)
        left = part.bytes
        while left:
            data = file.read(min(READ, left))
            if not data:
                raise FullrankError(f"{part.path} became shorter while it was read: give files at rest")
            left -= len(data)
            try:
                pending += decoder.decode(data, final=not left)
            except UnicodeDecodeError as error:
                raise FullrankError(
                    f"{part.path} changed while it was read ({error.reason}): give files at rest"
                ) from error
            if not left:
                break
            cut = last_cut(pending, LONGEST)
            if cut:
                yield pending[:cut]
                pending = pending[cut:]
    if pending:
        yield pending
