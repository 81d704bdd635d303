"""Which bytes of which files are the training, validation and test text, and how they are read.

Splits come from file names or from lines:

- One directory, or files, with names like train.txt, wiki.valid.tokens, test-2.txt: a word of the name says
  which split a file is (train, training; valid, validation, val, dev; test). Two of the three without the
  third is an error; one alone says nothing. Other files of that directory are not read.
- Anything else: all text files, directories recursively and in the order of their paths, hidden ones and
  binary ones left out. Their lines, in order, are cut into three contiguous blocks: the last `test_share`
  of the lines is the test split, the `valid_share` before it the validation split, the rest is trained on.

Text is UTF-8. A byte order mark is dropped, nothing else is changed. A line ends with "\\n" and nothing else.
The text is read in blocks of about a million characters, so that a file may be larger than memory and its
lines as long as they like.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fullrank.errors import FullrankError
from fullrank.train.config import DataConfig

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
READ = 1 << 20
"""Bytes read at once."""
LONGEST = 16 << 20
"""Characters after which a block ends wherever it is, if no place between two words came."""

# Between two words: after one line break or before one space, with a character on either side. There words
# end, and so do the pieces into which GPT-2's tokeniser and its heirs split a text before they merge bytes: a
# space belongs to the word after it, and of several line breaks the last stands alone only before a word.
_CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")


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
class Sources:
    """The text of a corpus, surveyed."""

    splits: dict[str, tuple[Part, ...]]
    files: tuple[tuple[str, int, str], ...]
    """Name, bytes and sha256 of every file, in order."""
    split_by: str
    """Either names or lines."""
    skipped: tuple[str, ...]
    """Names of files in a directory that are no text."""


@dataclass(frozen=True, kw_only=True)
class _File:
    path: Path
    name: str
    start: int
    size: int
    lines: int
    sha256: str


class _NoTextError(FullrankError):
    """A file that is not UTF-8 text; `binary` where it is not even meant to be."""

    def __init__(self, message: str, *, binary: bool) -> None:
        super().__init__(message)
        self.binary = binary


def find(
    sources: Sequence[Path], config: DataConfig, warn: Callable[[str], None] = lambda message: None
) -> Sources:
    """Survey files and directories; every byte is read once, for its hash and to see that it is text."""
    given = list(dict.fromkeys(Path(os.path.expanduser(path)) for path in sources))
    if not given:
        raise FullrankError("no data was given: name a directory or files of text with --data")
    for path in given:
        if not path.exists():
            raise FullrankError(f"no such data: {path}; give a directory or files of text")
        if not path.is_dir() and not path.is_file():
            raise FullrankError(f"{path} is no regular file: save the text to a file and give that")
    roles = _roles(given)
    if roles:
        return _by_names(roles)
    return _by_lines(given, config, warn)


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
            cut = _last_cut(pending)
            if cut:
                yield pending[:cut]
                pending = pending[cut:]
    if pending:
        yield pending


def _last_cut(text: str) -> int:
    """The last place between two words, 0 if there is none and the text is not too long to wait for one."""
    for begin in (max(0, len(text) - 4096), 0):
        last = 0
        for match in _CUT.finditer(text, begin):
            last = match.start()
        if last:
            return last
    return len(text) if len(text) >= LONGEST else 0


def role(name: str) -> str | None:
    """The split that a file's name says, if any."""
    for word in re.split("[^a-z]+", name.lower()):
        if word in ROLES:
            return ROLES[word]
    return None


def _roles(given: list[Path]) -> dict[str, list[Path]]:
    """Files by split, where their names say so; empty where they do not."""
    directory = given[0] if len(given) == 1 and given[0].is_dir() else None
    if directory is not None:
        candidates = [path for path in _listed(directory, recursive=False) if role(path.name)]
    else:
        candidates = given
        if any(path.is_dir() or role(path.name) is None for path in given):
            return {}
    found: dict[str, list[Path]] = {}
    for path in candidates:
        found.setdefault(role(path.name) or "", []).append(path)
    if len(found) < 2:
        return {}
    for split in SPLITS:
        if split not in found:
            present = " and ".join(f"{name} ({found[name][0].name})" for name in SPLITS if name in found)
            raise FullrankError(
                f"{directory or 'the data'} has a split for {present}, none for {split}: add a file "
                f"{split}.txt, or give files with other names to have them split by lines"
            )
    return found


def _by_names(roles: dict[str, list[Path]]) -> Sources:
    splits: dict[str, tuple[Part, ...]] = {}
    files: list[_File] = []
    skipped: list[str] = []
    for split in SPLITS:
        surveyed = []
        for path in roles[split]:
            try:
                surveyed.append(_survey(path, path.name))
            except _NoTextError as error:
                # train.txt.gz beside train.txt is no mistake, a train.txt in Latin-1 is one.
                if not error.binary or len(roles[split]) == 1:
                    raise
                skipped.append(path.name)
        if not any(file.size > file.start for file in surveyed):
            names = ", ".join(str(path) for path in roles[split])
            raise FullrankError(f"the {split} split is empty ({names}): give a file with text")
        files += surveyed
        splits[split] = tuple(_whole(file) for file in surveyed if file.size > file.start)
    return Sources(splits=splits, files=_named(files), split_by="names", skipped=tuple(skipped))


def _by_lines(given: list[Path], config: DataConfig, warn: Callable[[str], None]) -> Sources:
    files: list[_File] = []
    skipped: list[str] = []
    seen: set[Path] = set()
    for path in given:
        inside = [path] if path.is_file() else _listed(path, recursive=True)
        for file in inside:
            # The same text twice would stand in the training split and be judged on again.
            if file.resolve() in seen:
                continue
            seen.add(file.resolve())
            name = file.name if file == path else file.relative_to(path).as_posix()
            try:
                files.append(_survey(file, name))
            except _NoTextError as error:
                if file == path:
                    raise
                skipped.append(name)
                if not error.binary:
                    warn(f"left out: {error}")
    files = [file for file in files if file.size > file.start]
    if not files:
        also = f"; {len(skipped)} files are no UTF-8 text ({skipped[0]})" if skipped else ""
        raise FullrankError(f"{', '.join(map(str, given))} holds no text{also}: give files of UTF-8 text")
    total = sum(file.lines for file in files)
    sizes = _sizes(total, config)
    splits: dict[str, tuple[Part, ...]] = {}
    first = 0
    for split in SPLITS:
        splits[split] = tuple(_lines(files, first, first + sizes[split]))
        first += sizes[split]
    return Sources(splits=splits, files=_named(files), split_by="lines", skipped=tuple(skipped))


def _sizes(total: int, config: DataConfig) -> dict[str, int]:
    """Lines of each split."""
    for name, share in (("valid_share", config.valid_share), ("test_share", config.test_share)):
        if not 0 < share < 1:
            raise FullrankError(
                f"data.{name}={share:g} leaves a split empty: expected more than 0, less than 1"
            )
    test = max(1, round(total * config.test_share))
    valid = max(1, round(total * config.valid_share))
    train = total - valid - test
    if train < 1:
        raise FullrankError(
            f"{total} lines leave {max(train, 0)} for training beside {valid} for validation and {test} for "
            "test: give more lines, smaller data.valid_share and data.test_share, or a directory with "
            "train.txt, valid.txt and test.txt"
        )
    return {"train": train, "valid": valid, "test": test}


def _lines(files: list[_File], first: int, last: int) -> Iterator[Part]:
    """Lines first to last (from 0, the last not included) of all files in a row, as parts."""
    before = 0
    for file in files:
        low, high = max(first - before, 0), min(last - before, file.lines)
        before += file.lines
        if low >= high:
            continue
        start, stop = _offset(file, low), _offset(file, high)
        yield Part(
            path=file.path, name=file.name, start=start, stop=stop, first_line=low + 1, lines=high - low
        )


def _offset(file: _File, line: int) -> int:
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


def _survey(path: Path, name: str) -> _File:
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder("utf8")("strict")
    size = lines = start = 0
    last = b""
    with _opened(path) as file:
        while data := file.read(READ):
            if size == 0:
                if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise _NoTextError(f"{path} is UTF-16, expected UTF-8: save it as UTF-8", binary=False)
                start = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
            if (nul := data.find(b"\0")) >= 0:
                raise _NoTextError(
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
    return _File(path=path, name=name, start=start, size=size, lines=lines, sha256=digest.hexdigest())


def _decode(
    decoder: codecs.IncrementalDecoder, data: bytes, *, path: Path, before: int, final: bool = False
) -> None:
    waiting = len(decoder.getstate()[0])
    try:
        decoder.decode(data, final)
    except UnicodeDecodeError as error:
        raise _NoTextError(
            f"{path} is not UTF-8 at byte offset {before - waiting + error.start} ({error.reason}): save "
            "it as UTF-8, for instance with iconv, or give other files",
            binary=False,
        ) from error


def _listed(directory: Path, *, recursive: bool) -> list[Path]:
    try:
        entries = directory.rglob("*") if recursive else directory.iterdir()
        return sorted(
            path
            for path in entries
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)
        )
    except OSError as error:
        raise FullrankError(
            f"{directory} cannot be read ({error.strerror}): give a directory that you may read"
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


def _whole(file: _File) -> Part:
    return Part(
        path=file.path, name=file.name, start=file.start, stop=file.size, first_line=1, lines=file.lines
    )


def _named(files: list[_File]) -> tuple[tuple[str, int, str], ...]:
    return tuple((file.name, file.size, file.sha256) for file in files)
