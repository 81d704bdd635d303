"""Text to run a model on: drawn from everywhere in what a user named, the same every time.

The sources (`sources.py`) in a row are one text of S characters, documents parted by a blank line. `draw`
takes n stretches of it, one from a random place in each of n equal parts of S. So every source counts by its
size, no two stretches overlap, and the draw depends on nothing but the text, n, their length and the seed. A
text that is hardly longer than what is wanted comes whole.

Sources are read through once, but for large files of plain text or JSON lines, which are read only where a
stretch lies. Texts that cannot be read from the middle and are of unknown length are handled as they stream
by: of the stretches seen so far every s-th is kept, and s doubles whenever too many are.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fullrank.errors import FullrankError
from fullrank.text import formats
from fullrank.text import sources as reading
from fullrank.text.documents import first_cut, last_cut
from fullrank.text.formats import Chat
from fullrank.text.sources import Source, Texts

LARGE = 32 << 20
"""Bytes from which on a file is read only where a stretch lies."""
BETWEEN = "\n\n"
"""Parts documents."""
MOST_NAMES = 20
"""Sources that a record names."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Stretches of text in the order of the text."""

    stretches: tuple[str, ...]
    whole: bool
    """Whether no more is to be had: all the text is in these stretches, or they lie side by side."""
    sources: tuple[str, ...]


def draw(
    names: Sequence[str | Path], *, count: int, characters: int, seed: int = 0, chat: Chat | None = None
) -> Sample:
    """`count` stretches of `characters` each from all over the texts; all of a short text."""
    texts = reading.find(names)
    large = [source for source in texts.sources if source.seekable and source.bytes > LARGE]
    rest = [source for source in texts.sources if source not in large]
    streamed, stride, length = _streamed(_characters(texts, rest, chat), 2 * count, characters)
    total = length + sum(source.bytes for source in large)
    sources = _named(texts)
    if stride == 1 and not large:
        text = "".join(streamed)
        if not text.strip():
            raise FullrankError(f"{texts.name} holds no text, only blank lines: give text with words in it")
        return Sample(stretches=(text,), whole=True, sources=sources)
    jitter = random.Random(seed)
    count = min(count, max(1, total // characters))
    stretches, part = [], total / count
    for number in range(count):
        # Inside of its part with all its length, where that is long enough, so that no two overlap.
        place = part * number + jitter.random() * max(0.0, part - characters)
        if place < length:
            stretches.append(streamed[min(int(place / characters / stride), len(streamed) - 1)])
            continue
        place -= length
        for source in large:
            if place < source.bytes:
                stretches.append(_within(source, int(place), characters, chat))
                break
            place -= source.bytes
    return Sample(stretches=tuple(stretches), whole=2 * count * characters > total, sources=sources)


def beginning(names: Sequence[str | Path], characters: int, chat: Chat | None = None) -> Sample:
    """The first characters in order, for what must be read in order."""
    texts = reading.find(names)
    taken, left = [], characters
    for text in _characters(texts, list(texts.sources), chat):
        taken.append(text[:left])
        left -= len(text)
        if left <= 0:
            break
    if not "".join(taken).strip():
        raise FullrankError(f"{texts.name} holds no text, only blank lines: give text with words in it")
    return Sample(stretches=("".join(taken),), whole=left > 0, sources=_named(texts))


def _named(texts: Texts) -> tuple[str, ...]:
    names = [source.name for source in texts.sources]
    more = len(names) - MOST_NAMES
    return (*names[:MOST_NAMES], *([f"and {more} more"] if more > 0 else []))


def _characters(texts: Texts, sources: list[Source], chat: Chat | None) -> Iterator[str]:
    """The text of sources in a row."""
    between = ""
    for fragment in reading.fragments(Texts(**{**texts.__dict__, "sources": tuple(sources)}), chat=chat):
        if fragment.begins:
            yield between
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


def _within(source: Source, place: int, characters: int, chat: Chat | None) -> str:
    """So many characters of a large file from about a place on, or before its end."""
    with formats.opened(Path(source.path)) as file:
        file.seek(max(0, min(place, source.bytes - 4 * characters)))
        if source.kind == "rows":
            text = BETWEEN.join(_rows(file, source, characters, chat))
        else:
            data = file.read(4 * characters + 4)
            text = codecs.getincrementaldecoder("utf8")("ignore").decode(data)
    if "\0" in text:
        raise FullrankError(f"{source.name} has NUL bytes, which no text has: give UTF-8 text")
    text = text[first_cut(text) :]
    return text[: last_cut(text[:characters]) or characters]


def _rows(file: BinaryIO, source: Source, characters: int, chat: Chat | None) -> Iterator[str]:
    if file.tell():
        file.readline()
    left = 2 * characters
    for line in file:
        for text in formats.row_of(line, source.name, 0, source.field, chat):
            yield text
            left -= len(text)
        if left <= 0:
            return
