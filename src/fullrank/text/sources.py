"""What a user named as the text of a corpus: files, directories, parquet files, datasets.

A file that is no text (`formats.py`) is refused where it was named; one that was found in a directory is left
out and said so. Hidden files are not looked at. A file is one document, or each of its lines or paragraphs is
(`documents.py`); a row of a parquet file or of a dataset is one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fullrank.errors import FullrankError
from fullrank.results.files import sha256
from fullrank.text import documents as cutting
from fullrank.text import formats
from fullrank.text.documents import Documents, Fragment, Read, parted

DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]*){0,2}")
"""NAME, NAME:CONFIG or NAME:CONFIG:SPLIT of the datasets library."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file or a dataset."""

    name: str
    """As it was given, or relative to the directory that was given; never a whole path."""
    kind: Literal["text", "table", "dataset"]
    path: str
    """Of a file; of a dataset NAME:CONFIG:SPLIT."""
    bytes: int
    """Of its text as far as it is known without reading it all; 0 for a dataset."""
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What a user named, looked at but not read."""

    name: str
    sources: tuple[Source, ...]
    documents: Documents
    column: str
    """Of tables and datasets."""
    skipped: tuple[str, ...]
    """Names of files in a directory that are no text."""

    @property
    def bytes(self) -> int:
        """Of its text, estimated where it is compressed or not here."""
        return sum(source.bytes for source in self.sources)

    @property
    def digest(self) -> str:
        """Of all that its fragments depend on."""
        content = [[source.kind, source.sha256] for source in self.sources]
        whole = json.dumps([content, self.documents, self.column, cutting.FRAGMENT, cutting.LONGEST])
        return hashlib.sha256(whole.encode()).hexdigest()


def find(
    names: Sequence[str | Path],
    *,
    documents: Documents = "file",
    column: str = "text",
    before: Callable[[int], None] = lambda size: None,
    progress: Callable[[float], None] = lambda share: None,
) -> Corpus:
    """Look at files, directories and datasets; `before` hears the size of the text before any is hashed."""
    if not names:
        raise FullrankError("no text was given: name files, directories or a dataset")
    found: list[tuple[str, str, str, int]] = []
    skipped: list[str] = []
    seen: set[Path] = set()
    for given in dict.fromkeys(map(str, names)):
        path = Path(os.path.expanduser(given))
        if path.is_file() or path.is_dir():
            for file in [path] if path.is_file() else _listed(path):
                if file.resolve() in seen:
                    continue
                seen.add(file.resolve())
                name = file.name if file == path else file.relative_to(path).as_posix()
                reason = formats.look(file)
                if reason and file == path:
                    raise FullrankError(f"{given} {reason}")
                if reason:
                    skipped.append(name)
                    continue
                kind = "table" if file.suffix.lower() in formats.TABLES else "text"
                found.append((name, kind, str(file), formats.text_bytes(file)))
        elif path.exists():
            raise FullrankError(f"{given} is no regular file: save the text to a file and give that")
        elif _is_dataset(given):
            found.append((given, "dataset", given, 0))
        else:
            raise FullrankError(
                f"no such text: {given}; give files, directories, or a dataset as NAME:CONFIG:SPLIT"
            )
    if not any(size or kind == "dataset" for _, kind, _, size in found):
        also = f" ({len(skipped)} files are no text, such as {skipped[0]})" if skipped else ""
        raise FullrankError(f"{', '.join(map(str, names))} holds no text{also}: give files of UTF-8 text")
    total = sum(size for *_, size in found)
    before(total)
    sources, hashed = [], 0
    for name, kind, place, size in found:
        digest = formats.dataset_digest(place) if kind == "dataset" else _hash(Path(place))
        sources.append(Source(name=name, kind=kind, path=place, bytes=size, sha256=digest))  # type: ignore[arg-type]
        hashed += size
        progress(hashed / max(total, 1))
    first = Path(str(names[0]))
    title = (first.resolve().name if first.exists() else str(first)) or str(first)
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return Corpus(
        name=title + more, sources=tuple(sources), documents=documents, column=column, skipped=tuple(skipped)
    )


def fragments(corpus: Corpus, read: Read | None = None) -> Iterator[Fragment]:
    """The whole text in order."""
    read = Read() if read is None else read
    for source in corpus.sources:
        if source.kind == "text":
            yield from parted(formats.decoded(Path(source.path), source.name, read), corpus.documents, read)
            continue
        rows = (
            formats.table(Path(source.path), source.name, corpus.column)
            if source.kind == "table"
            else formats.dataset(source.path, corpus.column)
        )
        for row in rows:
            yield from parted(iter([row]), "file", read)


def _is_dataset(given: str) -> bool:
    # A mistyped file name is likelier than a dataset whose name has a suffix.
    return bool(DATASET.fullmatch(given)) and not Path(given.split(":")[0]).suffix and given.count("/") <= 1


def _hash(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise FullrankError(
            f"{path} cannot be read ({error.strerror}): give text files that you may read"
        ) from error


def _listed(directory: Path) -> list[Path]:
    try:
        return sorted(
            path
            for path in directory.rglob("*")
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)
        )
    except OSError as error:
        raise FullrankError(
            f"{directory} cannot be read ({error.strerror}): give a directory that you may read"
        ) from error
