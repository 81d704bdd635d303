"""Text to run a model on: drawn from everywhere in what a user named, the same every time.

The sources (`sources.py`) in a row are one text, documents parted by a blank line. `draw` takes n stretches
of it, one from a random place in each of n parts of about one length. So every source counts by its size, no
two stretches overlap, and the draw depends on nothing but the text, n, their length and the seed. A text that
is hardly longer than what is wanted comes whole.

Sources are read through once, but for large files of plain text or JSON lines, which are read only where a
stretch lies. How long a text is that streams by is not known before: of the stretches seen so far every s-th
is kept, and s doubles whenever there are too many. Of a dataset of the hub, which may have no end, enough is
taken in the random order that its library gives.
"""

from __future__ import annotations

import codecs
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from fullrank.errors import FullrankError
from fullrank.text import formats
from fullrank.text import sources as reading
from fullrank.text.documents import Read, first_cut, last_cut
from fullrank.text.formats import Chat
from fullrank.text.sources import Source, Texts

LARGE = 32 << 20
"""Bytes from which on a file is read only where a stretch lies."""
BETWEEN = "\n\n"
"""Parts documents."""
CONTINUATION = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that no character begins with."""
MOST_NAMES = 20
"""Sources that a record names."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Stretches of text in the order of the text."""

    stretches: tuple[str, ...]
    whole: bool
    """Whether no more is to be had: all the text is in these stretches, or they lie side by side."""
    sources: tuple[str, ...]
    replaced: int = 0
    """Places of the text that was read which were not valid Unicode and became U+FFFD."""


def draw(
    names: Sequence[str | Path], *, count: int, characters: int, seed: int = 0, chat: Chat | None = None
) -> Sample:
    """`count` stretches of `characters` each from all over the texts; all of a short text."""
    texts = reading.find(names)
    large = [source for source in texts.sources if source.seekable and source.bytes > LARGE]
    rest = [source for source in texts.sources if source not in large]
    read = Read()
    stream = _characters(texts, rest, chat, 4 * count * characters, read, seed)
    streamed, stride, length = _streamed(stream, 2 * count, characters)
    if stride == 1 and not large:
        text = "".join(streamed)
        if not text.strip():
            raise FullrankError(f"{texts.name} holds no text, only blank lines: give text with words in it")
        return Sample(stretches=(text,), whole=True, sources=_named(texts), replaced=read.replaced)
    more = sum(source.bytes for source in large)
    jitter = random.Random(seed)
    # Every source by its size; of equal parts of what was kept one stretch each, so that none comes twice.
    few = min(len(streamed), round(count * length / (length + more)))
    bounds = [len(streamed) * number // max(few, 1) for number in range(few + 1)]
    stretches = [streamed[jitter.randrange(low, high)] for low, high in itertools.pairwise(bounds)]
    many = min(count - few, more // characters)
    for number in range(many):
        # Inside of its part with all its length.
        place = int(more / many * number + jitter.random() * (more / many - characters))
        for source in large:
            if place < source.bytes:
                stretches.append(_within(source, place, characters, chat, read))
                break
            place -= source.bytes
    whole = 2 * count * characters > length + more
    return Sample(stretches=tuple(stretches), whole=whole, sources=_named(texts), replaced=read.replaced)


def beginning(names: Sequence[str | Path], characters: int, chat: Chat | None = None) -> Sample:
    """The first characters in order, for what must be read in order."""
    texts = reading.find(names)
    taken, left, read = [], characters, Read()
    for text in _characters(texts, list(texts.sources), chat, characters, read):
        taken.append(text[:left])
        left -= len(text)
        if left <= 0:
            break
    if not "".join(taken).strip():
        raise FullrankError(f"{texts.name} holds no text, only blank lines: give text with words in it")
    return Sample(stretches=("".join(taken),), whole=left > 0, sources=_named(texts), replaced=read.replaced)


def _named(texts: Texts) -> tuple[str, ...]:
    names = [source.name for source in texts.sources]
    more = len(names) - MOST_NAMES
    return (*names[:MOST_NAMES], *([f"and {more} more"] if more > 0 else []))


def _characters(
    texts: Texts, sources: list[Source], chat: Chat | None, limit: int, read: Read, seed: int | None = None
) -> Iterator[str]:
    """The text of sources in a row; of a dataset, which may have no end, about so many characters."""
    between = ""
    for dataset, group in itertools.groupby(sources, lambda source: source.kind == "dataset"):
        for source in group if dataset else ():
            taken = 0
            for row in formats.dataset(source.path, source.field, chat, read, seed):
                yield between + row
                between, taken = BETWEEN, taken + len(row)
                if taken > limit:
                    break
        if not dataset:
            for fragment in reading.fragments(replace(texts, sources=tuple(group)), read, chat):
                yield between if fragment.begins else ""
                yield fragment.text
                between = BETWEEN


def _streamed(texts: Iterator[str], most: int, characters: int) -> tuple[list[str], int, int]:
    """Every s-th stretch of a stream, at most so many; s; and the length of the stream."""
    kept: list[str] = []
    stride, number, length, pending = 1, 0, 0, ""

    def take(stretch: str) -> None:
        nonlocal kept, stride, number
        if number % stride == 0:
            kept.append(stretch)
        if len(kept) > most:
            kept, stride = kept[::2], 2 * stride
        number += 1

    for text in texts:
        length += len(text)
        pending += text
        start = 0
        while len(pending) - start >= 2 * characters:
            end = start + (last_cut(pending[start : start + characters]) or characters)
            take(pending[start:end])
            start = end
        pending = pending[start:]
    if pending:
        take(pending)
    return kept, stride, length


def _within(source: Source, place: int, characters: int, chat: Chat | None, read: Read) -> str:
    """So many characters of a large file from about a place on, or before its end."""
    with formats.opened(Path(source.path)) as file:
        file.seek(max(0, min(place, source.bytes - 4 * characters)))
        if source.kind == "rows":
            text = BETWEEN.join(_rows(file, source, characters, chat, read))
        else:
            data = file.read(4 * characters + 4)
            # The first character may have begun before.
            data = data[:3].lstrip(CONTINUATION) + data[3:]
            text = codecs.getincrementaldecoder("utf8")("replace").decode(data)
            read.replaced += text.count("\ufffd")
    if "\0" in text:
        raise FullrankError(f"{source.name} has NUL bytes, which no text has: give UTF-8 text")
    text = text[first_cut(text) :]
    return text[: last_cut(text[:characters]) or characters]


def _rows(file: BinaryIO, source: Source, characters: int, chat: Chat | None, read: Read) -> Iterator[str]:
    if file.tell():
        file.readline()
    left = 2 * characters
    for line in file:
        for text in formats.row_of(line, source.name, 0, source.field, chat, read):
            yield text
            left -= len(text)
        if left <= 0:
            return
