"""Which text is for training, which for validation, which for the test.

- One directory or archive, or files, with names like train.txt, wiki.valid.tokens, test-2.jsonl.gz, or
  datasets NAME:CONFIG:SPLIT: a word of the name says which split a source is (train, training; valid,
  validation, val, dev; test). One split alone says nothing, two without train are an error. Other files of
  that directory are not read.
- Anything else is training text.
- Missing splits are cut from the training text, here and in `elsewhere.py`: the last `test_share` of every
  source is the test split, the `valid_share` before it the validation split, so that all three are of all
  sources. What is counted are the lines of plain text, else documents (rows, or what `documents` says). Many
  small files are dealt out whole. A dataset, whose end is not known, is cut in every stretch of a thousand
  rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fullrank.errors import FullrankError
from fullrank.text import formats
from fullrank.text import sources as reading
from fullrank.text.documents import Fragment, Read, parted
from fullrank.text.formats import Chat
from fullrank.text.settings import DataConfig
from fullrank.text.sources import Named, Source, Texts

SPLITS = ("train", "valid", "test")
ROLES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
FROM_TRAIN = "names, the end of train for the rest"
"""How a corpus was split whose names say train and not all of the others."""
MANY = 100
"""Files from which on each is in one split as a whole."""
STRETCH = 1000
"""Rows of a dataset that are cut together."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How texts are cut into splits."""

    by: str
    """Either names, lines or FROM_TRAIN."""
    missing: tuple[str, ...]
    """Splits that are cut from the training text."""
    bounds: tuple[tuple[int, int] | None, ...]
    """Of every source where validation and test begin, in its lines or documents; None for a dataset."""
    whole: bool
    """Whether files are dealt out whole: the bounds are 0 or 1 then."""


def role(name: str) -> str | None:
    """The split that a file's or a dataset's name says, if any."""
    if reading.DATASET.fullmatch(name) and name.count(":") == 2:
        name = name.rpartition(":")[2]
    for word in re.split("[^a-z]+", name.rpartition("/")[2].lower()):
        if word in ROLES:
            return ROLES[word]
    return None


def chosen(found: list[Named], given: Sequence[str | Path]) -> list[Named]:
    """Of all that was listed, the files whose names say their split; all where the names say nothing."""
    directory = len(given) == 1 and not any(one.given for one in found)
    candidates = [one for one in found if role(one.name) and not (directory and "/" in one.name)]
    roles = {role(one.name) for one in candidates}
    if (not directory and len(candidates) < len(found)) or len(roles) < 2:
        return found
    _require_train([one.name for one in candidates], str(given[0]) if directory else "the data")
    return sorted(candidates, key=lambda one: SPLITS.index(role(one.name) or ""))


def _require_train(names: Sequence[str], whose: str) -> None:
    """Raise where names that all say their split have none for train, from which the others can be cut."""
    files: dict[str | None, str] = {}
    for name in names:
        files.setdefault(role(name), name)
    if "train" not in files:
        present = " and ".join(f"{split} ({files[split]})" for split in SPLITS if split in files)
        raise FullrankError(
            f"{whose} has a split for {present}, none for train: add a file train.txt, or give files with "
            "other names to have them split by lines"
        )


def plan(texts: Texts, config: DataConfig, chat: Chat | None = None) -> Plan:
    """Sources that all say their split are that split; missing ones are cut from the sources of train, after
    a count of what these hold."""
    names = [source.name for source in texts.sources]
    roles = [role(name) for name in names]
    named = None not in roles and len(set(roles)) > 1
    if not named:
        roles = ["train"] * len(names)
    _require_train(names if named else ["train"], "the data")
    for split in SPLITS if named else ():
        own = [source for source, one in zip(texts.sources, roles, strict=True) if one == split]
        if own and not any(source.bytes or source.kind == "dataset" for source in own):
            empty = ", ".join(source.name for source in own)
            raise FullrankError(f"the {split} split is empty ({empty}): give a file with text")
    missing = tuple(split for split in SPLITS if split not in roles)
    check_shares(missing, config)
    train = [source for source, one in zip(texts.sources, roles, strict=True) if one == "train"]
    plain = texts.documents == "file" and all(source.kind == "text" for source in train)
    whole = bool(missing) and plain and len(train) >= MANY
    end = 1 << 62
    cuts: Iterator[tuple[int, int] | None] = iter([(end, end)] * len(train))
    if missing:
        counts = [
            None if source.kind == "dataset" else 1 if whole else _count(source, raw, texts, chat)
            for source, raw in reading.opened(train)
        ]
        cuts = _cut(counts, config, missing)
    places = {"valid": (0, end), "test": (0, 0)}
    by = ("names" if not missing else FROM_TRAIN) if named else "lines"
    bounds = tuple(next(cuts) if one == "train" else places[one or ""] for one in roles)
    return Plan(by=by, missing=missing, bounds=bounds, whole=whole)


def _shares(config: DataConfig) -> dict[str, float]:
    return {"valid": config.valid_share, "test": config.test_share}


def check_shares(missing: Sequence[str], config: DataConfig) -> None:
    """Raise where a missing split would get nothing, or everything."""
    for split in missing:
        share = _shares(config)[split]
        if not 0 < share < 1:
            raise FullrankError(
                f"data.{split}_share={share:g} leaves a split empty: expected more than 0, less than 1"
            )


def held_out(total: int, missing: Sequence[str], config: DataConfig) -> dict[str, int]:
    """How many of all lines, documents or tokens of train each missing split takes."""
    return {split: max(1, round(total * _shares(config)[split])) for split in missing}


def require_rest(total: int, held: dict[str, int], units: str) -> None:
    """Raise where what is held out leaves nothing to train on."""
    left = total - sum(held.values())
    if left < 1:
        beside = " and ".join(f"{count:,} for {split}" for split, count in held.items()) or "none"
        raise FullrankError(
            f"{total:,} {units} leave {max(left, 0)} for training beside {beside}: give more, smaller "
            "data.valid_share and data.test_share, or a file for each split"
        )


def _count(source: Source, raw: BinaryIO, texts: Texts, chat: Chat | None) -> int:
    if source.kind != "text":
        return sum(1 for row in reading.rows(source, raw, chat, Read()) if row.strip())
    blocks = formats.blocks(raw, source.name, Read())
    if texts.documents != "file":
        return sum(fragment.begins for fragment in parted(blocks, texts.documents, Read()))
    lines, last = 0, "\n"
    for block in blocks:
        lines += block.count("\n")
        last = block[-1]
    return lines + (last != "\n")


def _cut(
    counts: list[int | None], config: DataConfig, missing: Sequence[str] = ("valid", "test")
) -> Iterator[tuple[int, int] | None]:
    """Where validation and test begin in each source: shares of the sum so far, so that small ones count."""
    total = sum(count for count in counts if count is not None)
    held = held_out(total, missing, config)
    if None not in counts:
        require_rest(total, held, "lines or documents")
    valid, test = held.get("valid", 0), held.get("test", 0)
    before = tested = validated = 0
    for count in counts:
        if count is None:
            yield None
            continue
        before += count
        # Rounded down and to the nearest, so that a source of one line is not owed to both.
        own_test = min(test * before // max(total, 1) - tested, count)
        tested += own_test
        own_valid = min((2 * valid * before + total) // max(2 * total, 1) - validated, count - own_test)
        validated += own_valid
        yield count - own_test - own_valid, count - own_test


def assigned(
    texts: Texts, made: Plan, config: DataConfig, read: Read, chat: Chat | None = None
) -> Iterator[tuple[str, Source, int, Fragment]]:
    """Every fragment with its split, its source and its line there, or the number of its row."""
    bounds = dict(zip(texts.sources, made.bounds, strict=True))
    for source, raw in reading.opened(texts.sources):
        cut = bounds[source] or _stretch(config, made.missing)
        if source.kind == "text" and texts.documents == "file":
            lines = _Lines(formats.blocks(raw, source.name, read))
            ends: Sequence[int | None] = (*cut, None)
            if made.whole:
                # One line is the whole file: it is in the split of line 0.
                ends = [None if SPLITS[index] == _split(0, cut) else 0 for index in range(3)]
            for split, end in zip(SPLITS, ends, strict=True):
                line = lines.number + 1
                for fragment in parted(lines.until(end), "file", read):
                    yield split, source, line, fragment
                    line += fragment.text.count("\n")
            continue
        if source.kind == "text":
            documents = parted(formats.blocks(raw, source.name, read), texts.documents, read)
        else:
            rows = reading.rows(source, raw, chat, read)
            documents = (fragment for row in rows for fragment in parted(iter([row]), "file", read))
        number = -1
        for fragment in documents:
            number += fragment.begins
            place = number if bounds[source] else number % STRETCH
            yield _split(place, cut), source, number + 1, fragment


def _stretch(config: DataConfig, missing: Sequence[str]) -> tuple[int, int]:
    held = held_out(STRETCH, missing, config)
    test = STRETCH - held.get("test", 0)
    return test - held.get("valid", 0), test


def _split(number: int, cut: tuple[int, int]) -> str:
    return SPLITS[(number >= cut[0]) + (number >= cut[1])]


class _Lines:
    """Blocks of text, given out up to one line after another."""

    def __init__(self, blocks: Iterator[str]) -> None:
        self.number = 0
        """Lines that were given out."""
        self._blocks, self._rest = blocks, ""

    def until(self, end: int | None) -> Iterator[str]:
        """The text before line `end`, from 0; all that is left without one."""
        while end is None or self.number < end:
            text = self._rest or next(self._blocks, "")
            if not text:
                return
            count, self._rest = text.count("\n"), ""
            if end is not None and count >= end - self.number:
                place = 0
                for _ in range(end - self.number):
                    place = text.index("\n", place) + 1
                text, self._rest, count = text[:place], text[place:], end - self.number
            self.number += count
            yield text
