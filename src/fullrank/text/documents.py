"""Documents out of a stream of text: whole files, lines or paragraphs; long ones in fragments.

Documents do not run into each other. A document longer than `FRAGMENT` characters comes in fragments, so it
may be larger than memory. Blank documents are left out.

A fragment ends between two words, so that both sides have the tokens that they have together: after one line
break or before one space, with a character on either side. There words end, and so do the pieces into which
GPT-2's tokeniser and its heirs split a text before they merge bytes: a space belongs to the word after it,
and of several line breaks the last stands alone only before a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Documents = Literal["file", "line", "blank"]
"""What is one in a file of text: all of it, a line, or what stands between blank lines."""

FRAGMENT = 1 << 18
"""Characters after which a document is cut at the next place between words."""
LONGEST = 16 << 20
"""Characters after which a text is cut wherever it is, if no place between two words came."""
CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")
"""A place between two words."""
SURROGATE = re.compile("[\ud800-\udfff]")


class Fragment(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    begins: bool
    """Whether the document begins here."""
    ends: bool
    position: int
    """Characters of the corpus before it."""


@dataclass
class Read:
    """What reading found, for the record; filled while `fragments` runs."""

    documents: int = 0
    characters: int = 0
    replaced: int = 0
    """Places that were not valid Unicode and became U+FFFD: bytes that are not UTF-8, lone surrogates."""


def replacement_note(count: int) -> str:
    """A sentence about `count` places that became U+FFFD."""
    return f"{count:,} places of the text were not valid Unicode and became U+FFFD"


def valid_unicode(text: str) -> tuple[str, int]:
    """The text with U+FFFD for every lone surrogate, and how many there were.

    JSON can hold half of a surrogate pair, a command line undecodable bytes, and no tokenizer takes either.
    """
    # ASCII is known without a search.
    return (text, 0) if text.isascii() else SURROGATE.subn("\ufffd", text)


def parted(blocks: Iterator[str], documents: Documents, read: Read) -> Iterator[Fragment]:
    """Blocks of text as documents; blank ones are left out."""
    if documents == "file":
        yield from _document(blocks, read)
        return
    separator = "\n" if documents == "line" else "\n\n"
    rest, begins = "", True
    for block in blocks:
        rest += block
        if separator not in rest:
            if len(rest) >= FRAGMENT and (cut := last_cut(rest, LONGEST)):
                yield _fragment(rest[:cut], begins, False, read)
                rest, begins = rest[cut:], False
            continue
        *whole, rest = rest.split(separator)
        for text in whole:
            # What is left of a document that began earlier may be blank, and is its end all the same.
            if not begins or text.strip():
                yield from _long(text.strip("\n"), begins, read)
            begins = True
    if not begins or rest.strip():
        yield from _long(rest.strip("\n"), begins, read)


def _long(text: str, begins: bool, read: Read) -> Iterator[Fragment]:
    """The end of a document, cut where it is long."""
    while len(text) > 2 * FRAGMENT and (cut := last_cut(text[:FRAGMENT], FRAGMENT)):
        yield _fragment(text[:cut], begins, False, read)
        text, begins = text[cut:], False
    yield _fragment(text, begins, True, read)


def _document(blocks: Iterator[str], read: Read) -> Iterator[Fragment]:
    pending, begins = "", True
    for block in blocks:
        pending += block
        while len(pending) >= FRAGMENT:
            # Not all is looked through, or a giant line would be searched again and again.
            cut = last_cut(pending[: 2 * FRAGMENT], LONGEST) if len(pending) < 2 * LONGEST else LONGEST
            if not cut:
                cut = len(pending) if len(pending) >= LONGEST else 0
            if not cut:
                break
            # Something is left for the end, which must know whether its last line is broken off.
            cut = min(cut, len(pending) - 1)
            yield _fragment(pending[:cut], begins, False, read)
            pending, begins = pending[cut:], False
    if pending.strip() or not begins:
        yield _fragment(pending, begins, True, read)


def _fragment(text: str, begins: bool, ends: bool, read: Read) -> Fragment:
    made = Fragment(text, begins, ends, read.characters)
    read.characters += len(text)
    read.documents += begins
    return made


def last_cut(text: str, longest: int = LONGEST) -> int:
    """The last place between two words, 0 if there is none and the text is not too long to wait for one."""
    for begin in (max(0, len(text) - 4096), 0):
        last = 0
        for match in CUT.finditer(text, begin):
            last = match.start()
        if last:
            return last
    return len(text) if len(text) >= longest else 0


def first_cut(text: str) -> int:
    """The first place between two words, 0 if there is none."""
    match = CUT.search(text)
    return match.start() if match else 0
