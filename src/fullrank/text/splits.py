"""Which bytes of which files are the training, validation and test text.

Splits come from file names or from lines:

- One directory, or files, with names like train.txt, wiki.valid.tokens, test-2.txt: a word of the name says
  which split a file is (train, training; valid, validation, val, dev; test). Two of the three without the
  third is an error; one alone says nothing. Other files of that directory are not read.
- Anything else: all text files, directories recursively and in the order of their paths, hidden ones and
  binary ones left out. Their lines, in order, are cut into three contiguous blocks: the last `test_share`
  of the lines is the test split, the `valid_share` before it the validation split, the rest is trained on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullrank.errors import FullrankError
from fullrank.text.files import NoTextError, Part, TextFile, offset, survey
from fullrank.text.settings import DataConfig

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
    files: list[TextFile] = []
    skipped: list[str] = []
    for split in SPLITS:
        surveyed = []
        for path in roles[split]:
            try:
                surveyed.append(survey(path, path.name))
            except NoTextError as error:
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
    files: list[TextFile] = []
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
                files.append(survey(file, name))
            except NoTextError as error:
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


def _lines(files: list[TextFile], first: int, last: int) -> Iterator[Part]:
    """Lines first to last (from 0, the last not included) of all files in a row, as parts."""
    before = 0
    for file in files:
        low, high = max(first - before, 0), min(last - before, file.lines)
        before += file.lines
        if low >= high:
            continue
        start, stop = offset(file, low), offset(file, high)
        yield Part(
            path=file.path, name=file.name, start=start, stop=stop, first_line=low + 1, lines=high - low
        )


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


def _whole(file: TextFile) -> Part:
    return Part(
        path=file.path, name=file.name, start=file.start, stop=file.size, first_line=1, lines=file.lines
    )


def _named(files: list[TextFile]) -> tuple[tuple[str, int, str], ...]:
    return tuple((file.name, file.size, file.sha256) for file in files)
