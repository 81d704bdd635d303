"""Records of a .json file: an array of objects, objects one after another, or an object that holds an array.

An array is parsed while it is read, one record at a time. An object is read whole: of an object without the
wanted field, such as {"version": 1, "data": [...]}, the records are those of its only array of objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from fullrank.errors import FullrankError
from fullrank.results.reading import COPIES, memory

DECODER = json.JSONDecoder()
BLANK = re.compile(r"[ \t\n\r]*")
CUT = 12
"""Characters before the end of a block within which an error may be of a value that goes on after it."""
REMEDY = 'expected an array of objects such as [{"text": "..."}]; give plain text another suffix'


class UnfinishedError(FullrankError):
    """The text ends within a value."""


def records(blocks: Iterator[str], name: str, field: str) -> Iterator[dict[str, Any]]:
    """The records of a file in blocks of text; a blank file has none."""
    values = _Values(blocks, name)
    if values.peek() == "[":
        yield from _array(values, name)
        return
    while values.peek():
        record = values.take()
        # Only an object that stands alone can hold the records.
        alone = values.taken == 1 and isinstance(record, dict) and field not in record and not values.peek()
        yield from _held(record, name) if alone else [_checked(record, values.taken, name)]


def _array(values: _Values, name: str) -> Iterator[dict[str, Any]]:
    values.skip()
    closed = values.peek() == "]"
    while not closed:
        record = values.take()
        yield _checked(record, values.taken, name)
        follows = values.peek()
        if follows not in (",", "]"):
            raise values.wrong(f"{follows!r} follows it") if follows else values.unfinished()
        closed = follows == "]"
        if not closed:
            values.skip()
    values.skip()
    if values.peek():
        raise FullrankError(f"{name} goes on after the end of its array: {REMEDY}")


def _held(record: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """The records in an object that is none itself; the object where it holds none."""
    arrays = {
        key: value
        for key, value in record.items()
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    }
    if len(arrays) > 1:
        raise FullrankError(
            f"{name} holds several arrays of records ({', '.join(list(arrays)[:10])}): save the one to be "
            "read in a file of its own"
        )
    yield from next(iter(arrays.values()), [record])


def _checked(record: Any, number: int, name: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise FullrankError(f"{name} holds a {type(record).__name__} as record {number}: {REMEDY}")
    return record


class _Values:
    """JSON values, taken one after another out of blocks of text."""

    def __init__(self, blocks: Iterator[str], name: str) -> None:
        self.taken = 0
        self._blocks, self._name = blocks, name
        self._text, self._place = "", 0

    def peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            match = BLANK.match(self._text, self._place)
            self._place = match.end() if match else self._place
            if self._place < len(self._text):
                return self._text[self._place]
            if not self._read():
                return ""

    def skip(self) -> None:
        self._place += 1

    def take(self) -> Any:
        if not self.peek():
            raise self.unfinished()
        self.taken += 1
        while True:
            try:
                value, self._place = DECODER.raw_decode(self._text, self._place)
                return value
            except json.JSONDecodeError as error:
                unfinished = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - CUT
                if unfinished and self._read():
                    continue
                raise (self.unfinished(error.msg) if unfinished else self.wrong(error.msg)) from error
            except RecursionError as error:
                raise self.wrong("it is nested too deeply") from error

    def wrong(self, why: str) -> FullrankError:
        return FullrankError(f"{self._name} is no JSON at record {self.taken} ({why}): {REMEDY}")

    def unfinished(self, why: str = "the array has no end") -> FullrankError:
        return UnfinishedError(
            f"{self._name} is no JSON at its end, record {self.taken} ({why}): is it whole? Copy it again, "
            "or give plain text another suffix"
        )

    def _read(self) -> bool:
        """Read about as much again as is held, so that a long value is not parsed too often; False at the
        end."""
        held = self._text[self._place :]
        if COPIES * len(held) > memory():
            raise FullrankError(
                f"{self._name} has a record of more than {len(held):,} characters, too many for this "
                "machine: save the records as JSON lines"
            )
        blocks, size = [held], 0
        for block in self._blocks:
            blocks.append(block)
            size += len(block)
            if size > len(held):
                break
        self._text, self._place = "".join(blocks), 0
        return size > 0
