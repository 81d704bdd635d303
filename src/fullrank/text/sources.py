"""What a user named as text: files, directories, archives, datasets; listed, looked at, read in order.

A name is a path or a dataset NAME:CONFIG:SPLIT of the hub, with #FIELD behind it where the text of its rows
is not in the field `text`: chats.jsonl#messages. A file that is no text (`formats.py`) is refused where it
was named; one that was found in a directory or an archive is left out and said so. Hidden files are not
looked at, nor a compressed copy beside the file itself. A file is read once, however often it is named.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

from fullrank.errors import FullrankError
from fullrank.results.files import sha256
from fullrank.text import documents as cutting
from fullrank.text import formats
from fullrank.text.documents import Documents, Fragment, Read, parted
from fullrank.text.formats import Chat

DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]*){0,2}")
"""NAME, NAME:CONFIG or NAME:CONFIG:SPLIT of the datasets library."""
FIELD = "text"


@dataclass(frozen=True, kw_only=True)
class Named:
    """A file or a dataset that was named, or a file of a directory that was."""

    name: str
    """As it was given, or relative to the directory that was given; never a whole path."""
    path: Path | None
    """None for a dataset."""
    field: str
    given: bool
    """Whether it was itself named."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file, a file in an archive, or a dataset, looked at but not read."""

    name: str
    kind: Literal["text", "rows", "json", "table", "dataset"]
    path: str
    """Of the file or the archive; of a dataset NAME:CONFIG:SPLIT."""
    member: str = ""
    """The file's name in the archive."""
    field: str = FIELD
    bytes: int
    """Of its text as far as it is known without reading it all; 0 for a dataset."""
    sha256: str = ""
    """Of the file or the archive; empty until `hashed`."""

    @property
    def seekable(self) -> bool:
        """Whether its text can be read from the middle."""
        compressed = Path(self.path).suffix.lower() in formats.COMPRESSED
        return self.kind in ("text", "rows") and not self.member and not compressed


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What a user named, looked at but not read."""

    name: str
    sources: tuple[Source, ...]
    documents: Documents
    skipped: tuple[str, ...]
    """Names of files in a directory or an archive that are no text."""
    reasons: tuple[str, ...]
    """Why not, of each."""

    @property
    def bytes(self) -> int:
        """Of its text, estimated where it is compressed or not here."""
        return sum(source.bytes for source in self.sources)

    @property
    def digest(self) -> str:
        """Of all that its fragments depend on."""
        content = [[one.kind, one.sha256, one.member, one.field] for one in self.sources]
        whole = json.dumps([content, self.documents, cutting.FRAGMENT, cutting.LONGEST])
        return hashlib.sha256(whole.encode("utf8", "surrogateescape")).hexdigest()


def find(names: Sequence[str | Path], *, documents: Documents = "file", field: str = FIELD) -> Texts:
    """List and look at what was named; no file is read whole."""
    return look(listed(names, field), names, documents)


def listed(names: Sequence[str | Path], field: str = FIELD) -> list[Named]:
    """The files and datasets of what was named, by their names alone."""
    if not names:
        raise FullrankError("no text was given: name files, directories or a dataset")
    found: list[Named] = []
    seen: set[tuple[Path, str]] = set()
    for given in dict.fromkeys(map(str, names)):
        path, own, rest = Path(os.path.expanduser(given)), field, given
        if not path.exists() and "#" in given:
            rest, _, own = given.rpartition("#")
            path = Path(os.path.expanduser(rest))
        if path.is_file() or path.is_dir():
            for file in [path] if path.is_file() else _inside(path):
                # The same text twice would stand in the training split and be judged on again.
                if (file.resolve(), own) not in seen:
                    seen.add((file.resolve(), own))
                    name = file.name if file == path else file.relative_to(path).as_posix()
                    found.append(Named(name=name, path=file, field=own, given=file == path))
        elif path.exists():
            raise FullrankError(f"{given} is no regular file: save the text to a file and give that")
        elif _is_dataset(rest):
            formats.needed("datasets", f"{rest} is no file here, so it is taken for a dataset", "datasets")
            found.append(Named(name=rest, path=None, field=own, given=True))
        else:
            raise FullrankError(
                f"no such text: {given}; give files, directories, or a dataset as NAME:CONFIG:SPLIT"
            )
    return found


def look(found: Iterable[Named], names: Sequence[str | Path], documents: Documents = "file") -> Texts:
    """Look at the beginning of every file."""
    sources: list[Source] = []
    skipped: dict[str, str] = {}
    for one in found:
        if one.path is None:
            sources.append(Source(name=one.name, kind="dataset", path=one.name, field=one.field, bytes=0))
            continue
        try:
            inside = formats.look(one.path, one.field)
        except FullrankError as error:
            if one.given or not formats.is_archive(one.path):
                raise
            skipped[one.name] = str(error)
            continue
        for part in inside:
            name = f"{one.name}/{part.member}" if part.member else one.name
            if part.reason and one.given and not part.member:
                raise FullrankError(f"{one.path} {part.reason}")
            if part.reason:
                skipped[name] = f"{one.path}{'/' * bool(part.member)}{part.member} {part.reason}"
            else:
                sources.append(
                    Source(
                        name=name,
                        kind=part.kind,
                        path=str(one.path),
                        member=part.member,
                        field=one.field,
                        bytes=part.bytes,
                    )
                )
    if not any(source.bytes or source.kind == "dataset" for source in sources):
        given = ", ".join(map(str, names))
        if skipped:
            more = f", and {len(skipped) - 1} more files are none" if len(skipped) > 1 else ""
            raise FullrankError(f"{given} holds no text{more}: {next(iter(skipped.values()))}")
        raise FullrankError(f"{given} holds no text: give files of UTF-8 text")
    first = Path(str(names[0]))
    title = (first.resolve().name if first.exists() else str(first)) or str(first)
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return Texts(
        name=title + more,
        sources=tuple(sources),
        documents=documents,
        skipped=tuple(skipped),
        reasons=tuple(skipped.values()),
    )


def hashed(texts: Texts, progress: Callable[[float], None] = lambda share: None) -> Texts:
    """The same with the hash of every file; a dataset goes by its name."""
    digests: dict[str, str] = {}
    sources, done = [], 0
    for source in texts.sources:
        if source.path not in digests:
            name = hashlib.sha256(source.path.encode()).hexdigest()
            digests[source.path] = name if source.kind == "dataset" else _hash(Path(source.path))
        sources.append(replace(source, sha256=digests[source.path]))
        done += source.bytes
        progress(done / max(texts.bytes, 1))
    return replace(texts, sources=tuple(sources))


def fragments(texts: Texts, read: Read | None = None, chat: Chat | None = None) -> Iterator[Fragment]:
    """The whole text in order."""
    read = Read() if read is None else read
    for source, raw in opened(texts.sources):
        if source.kind == "text":
            yield from parted(formats.blocks(raw, source.name, read), texts.documents, read)
        else:
            for row in rows(source, raw, chat, read):
                yield from parted(iter([row]), "file", read)


def rows(source: Source, raw: BinaryIO, chat: Chat | None, read: Read) -> Iterator[str]:
    """The documents of a source that is no plain text."""
    if source.kind == "rows":
        return formats.rows(raw, source.name, source.field, chat, read)
    if source.kind == "json":
        return formats.json_rows(raw, source.name, source.field, chat, read)
    if source.kind == "table":
        return formats.table(raw, source.name, source.field, chat, read)
    return formats.dataset(source.path, source.field, chat, read)


def opened(sources: Iterable[Source]) -> Iterator[tuple[Source, BinaryIO]]:
    """Every source with its content; those of one archive that follow each other are read in one go."""
    for (path, _), group in itertools.groupby(sources, key=lambda source: (source.path, source.field)):
        together = list(group)
        if together[0].kind == "dataset":
            # Its rows come from the hub, not from bytes.
            yield from ((source, io.BytesIO()) for source in together)
        elif not together[0].member:
            with formats.opened(Path(path)) as raw:
                yield together[0], raw
        else:
            wanted = {source.member: source for source in together}
            with contextlib.closing(formats.members(Path(path))) as members:
                for name, _, raw in members:
                    if name in wanted:
                        yield wanted.pop(name), raw


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


def _inside(directory: Path) -> list[Path]:
    try:
        found = {
            path
            for path in directory.rglob("*")
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)
        }
    except OSError as error:
        raise FullrankError(
            f"{directory} cannot be read ({error.strerror}): give a directory that you may read"
        ) from error
    # train.txt.gz beside train.txt is the same text again.
    copies = {path for path in found if path.suffix in formats.COMPRESSED and path.with_suffix("") in found}
    return sorted(found - copies)
