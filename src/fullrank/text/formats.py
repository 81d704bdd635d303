"""Files as text: decompressed, taken out of archives, decoded, and refused where they are no text.

    plain     any UTF-8 file: one document, or its lines or paragraphs (`documents.py`)
    rows      .jsonl, .ndjson: a line is an object, and one of its fields a document
    json      .json: an array of such objects (`json_records.py`)
    table     .parquet, .pq: a row is a document
    archive   .zip, .tar and compressed tars: every file in it is one of the above

Each may be compressed (.gz, .bz2, .xz, .zst), in an archive too. A byte order mark is dropped. Bytes that are
not UTF-8, and lone surrogates (JSON's "\\ud800" without its second half), become U+FFFD and are counted. A
file is refused if its beginning, or all of a plain file, has NUL bytes or more than 1% of characters that are
not UTF-8. A field that holds a conversation, a list of messages, becomes text by the reader's chat template.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib
import importlib.util
import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from fullrank.errors import FullrankError
from fullrank.results.reading import require_regular
from fullrank.text import json_records
from fullrank.text.documents import Read, valid_unicode

Kind = Literal["text", "rows", "json", "table"]
Chat = Callable[[list[Any]], str]
"""Makes a text of the messages of a conversation."""

READ = 1 << 18
"""Bytes read at once."""
LOOK = 1 << 16
"""Bytes of a file that are looked at to see whether it is text."""
LARGEST_BAD_SHARE = 0.01
"""Of characters that could not be decoded."""
COMPRESSED = {".gz": 4, ".tgz": 4, ".bz2": 4, ".tbz2": 4, ".xz": 5, ".txz": 5, ".zst": 4}
"""Suffixes of compressed files, and how much larger than the file its content is taken to be."""
TARS = (".tar", ".tgz", ".tbz2", ".txz")
KINDS: dict[str, Kind] = {
    ".jsonl": "rows", ".ndjson": "rows", ".json": "json", ".parquet": "table", ".pq": "table"
}  # fmt: skip
"""By suffix; all others are plain text."""
MOST_NAMED = 10
"""Fields that an error names."""
SHUFFLED = 10_000
"""Rows of a dataset that are mixed with each other, beside its files."""
BINARY = "is binary, it has NUL bytes: give a file of UTF-8 text"


class Found(NamedTuple):
    """A file, or a file in an archive, looked at."""

    member: str
    """Its name in the archive; empty for a file of its own."""
    kind: Kind
    bytes: int
    """Of its text, estimated where it is compressed."""
    reason: str
    """Why it is no text, and the remedy; empty if its beginning is text."""


def kind_of(name: str) -> Kind:
    return KINDS.get(Path(_uncompressed(name)).suffix.lower(), "text")


def is_archive(path: Path) -> bool:
    return path.suffix.lower() == ".zip" or _is_tar(path.name)


def look(path: Path, field: str) -> list[Found]:
    """What a file holds: itself, or the files of an archive; `field` is that of its records."""
    if not is_archive(path):
        with opened(path) as raw:
            return [_look("", path.name, path.stat().st_size, raw, field)]
    found: dict[str, Found] = {}
    for name, size, raw in members(path):
        # An archive may hold a name twice; the first is read.
        if name not in found:
            found[name] = _look(name, name, size, raw, field)
    if not found:
        raise FullrankError(f"{path} is an archive without files: give one with text in it")
    return list(found.values())


def _look(member: str, name: str, size: int, raw: BinaryIO, field: str) -> Found:
    kind = kind_of(name)
    size *= COMPRESSED.get(Path(name).suffix.lower(), 1)
    if kind == "table":
        try:
            metadata = _parquet(raw, name).metadata
        except FullrankError as error:
            if member:
                return Found(member, kind, size, str(error).removeprefix(f"{name} "))
            raise
        groups = range(metadata.num_row_groups)
        return Found(member, kind, sum(metadata.row_group(index).total_byte_size for index in groups), "")
    try:
        data = decompressed(raw, name).read(LOOK)
    except FullrankError:
        raise
    # The decompressors' own errors, zstandard's too, which is no OSError.
    except Exception as error:
        reason = f"cannot be decompressed ({error}): is it whole? Copy it again, or leave it out"
        return Found(member, kind, size, reason)
    reason = _reason(data)
    if kind == "json" and not reason:
        # Directories hold settings as .json beside the texts.
        reason = _no_record(data, name, field)
    return Found(member, kind, size, reason)


def _no_record(data: bytes, name: str, field: str) -> str:
    """Why the beginning of a .json file has no record with the field; empty if it has, or is too short."""
    text = data.removeprefix(codecs.BOM_UTF8).decode("utf8", "surrogateescape")
    try:
        record = next(json_records.records(iter([text]), name, field), None)
        if record is not None:
            _require(field, record, name)
    except FullrankError as error:
        cut_off = len(data) == LOOK and isinstance(error, json_records.UnfinishedError)
        return "" if cut_off else str(error).removeprefix(f"{name} ")
    return ""


def _reason(data: bytes) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "is UTF-16, expected UTF-8: save it as UTF-8"
    if b"\0" in data:
        return BINARY
    text = codecs.getincrementaldecoder("utf8")("replace").decode(data, final=len(data) < LOOK)
    bad = text.count("\ufffd")
    if bad > LARGEST_BAD_SHARE * max(len(text), 1):
        return (
            f"looks binary or is not UTF-8 ({bad:,} of its first {len(text):,} characters, the first at byte "
            f"{len(text[: text.index(chr(0xFFFD))].encode())}): save it as UTF-8, for instance with iconv"
        )
    return ""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file as bytes, as they are on disk; errors of the system become ours."""
    require_regular(path)
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        # gzip says with an OSError without a reason of the system's that a file is none of its own.
        if error.strerror is None:
            raise
        raise FullrankError(
            f"{path} cannot be read ({error.strerror}): give text files that you may read"
        ) from error


def decompressed(raw: BinaryIO, name: str) -> BinaryIO:
    """The content of a file by the suffix of its name."""
    suffix = Path(name).suffix.lower()
    if suffix in (".gz", ".tgz"):
        import gzip

        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if suffix in (".bz2", ".tbz2"):
        import bz2

        return bz2.BZ2File(raw)  # type: ignore[return-value]
    if suffix in (".xz", ".txz"):
        import lzma

        return lzma.LZMAFile(raw)  # type: ignore[return-value]
    if suffix == ".zst":
        zstandard = needed("zstandard", f"{name} is compressed with zstd")
        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return io.BufferedReader(reader, READ)
    return raw


def members(path: Path) -> Generator[tuple[str, int, BinaryIO], None, None]:
    """Name, size and content of every file in an archive, in its order; a tar is read through once."""
    try:
        with opened(path) as raw:
            if path.suffix.lower() == ".zip":
                with zipfile.ZipFile(raw) as archive:
                    for entry in archive.infolist():
                        if not entry.is_dir() and not _hidden(entry.filename):
                            with archive.open(entry) as file:
                                yield entry.filename, entry.file_size, file  # type: ignore[misc]
                return
            with tarfile.open(fileobj=decompressed(raw, path.name), mode="r|") as tar:
                for one in tar:
                    file_of = tar.extractfile(one) if one.isfile() and not _hidden(one.name) else None
                    if file_of is not None:
                        yield one.name, one.size, file_of  # type: ignore[misc]
    except FullrankError:
        raise
    # An archive that is damaged, has a password, or is none at all: many kinds, none with a remedy.
    except (tarfile.TarError, zipfile.BadZipFile, RuntimeError, EOFError, OSError, ValueError) as error:
        raise FullrankError(
            f"{path} is no archive that can be read ({error}): is it whole? Write it again, or unpack it and "
            "give the files"
        ) from error


def blocks(raw: BinaryIO, name: str, read: Read) -> Iterator[str]:
    """The text of a plain file in blocks; raises where it turns out to be none."""
    decoder = codecs.getincrementaldecoder("utf8")("replace")
    characters = replaced = 0
    file, first = decompressed(raw, name), True
    while True:
        try:
            data = file.read(READ)
        except Exception as error:
            raise _broken(name, error) from error
        if b"\0" in data:
            raise FullrankError(f"{name} has NUL bytes, which no text has: give UTF-8 text")
        if first:
            data, first = data.removeprefix(codecs.BOM_UTF8), False
        text = decoder.decode(data, final=not data)
        characters += len(text)
        replaced += text.count("\ufffd")
        if text:
            yield text
        if not data:
            break
    if replaced > LARGEST_BAD_SHARE * max(characters, 1):
        raise FullrankError(
            f"{name} is not UTF-8 ({replaced:,} of {characters:,} characters): save it as UTF-8, for "
            "instance with iconv"
        )
    read.replaced += replaced


def rows(raw: BinaryIO, name: str, field: str, chat: Chat | None, read: Read) -> Iterator[str]:
    """The documents of a file of JSON lines."""
    file = iter(decompressed(raw, name))
    number = 0
    while True:
        number += 1
        try:
            line = next(file, None)
        except Exception as error:
            raise _broken(name, error) from error
        if line is None:
            return
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if line.strip():
            yield from row_of(line, name, number, field, chat, read)


def row_of(line: bytes, name: str, number: int, field: str, chat: Chat | None, read: Read) -> Iterator[str]:
    """The document of one line of JSON, if its field is not null."""
    try:
        # Bytes that are not UTF-8 become lone surrogates, which `_field` replaces and counts.
        row = json.loads(line.decode("utf8", "surrogateescape"))
    # The second for brackets in brackets without end.
    except (ValueError, RecursionError) as error:
        raise FullrankError(
            f"line {number} of {name} is no JSON ({error}): expected an object a line, such as "
            '{"text": "..."}; give plain text another suffix'
        ) from error
    if not isinstance(row, dict):
        raise FullrankError(
            f"line {number} of {name} is a {type(row).__name__}, expected an object such as "
            '{"text": "..."}; give plain text another suffix'
        )
    yield from _field(row, name, field, chat, read)


def json_rows(raw: BinaryIO, name: str, field: str, chat: Chat | None, read: Read) -> Iterator[str]:
    """The documents of a .json file."""
    for record in json_records.records(_decoded(raw, name), name, field):
        yield from _field(record, name, field, chat, read)


def _decoded(raw: BinaryIO, name: str) -> Iterator[str]:
    """A file in blocks of text; bytes that are not UTF-8 as lone surrogates."""
    decoder = codecs.getincrementaldecoder("utf8")("surrogateescape")
    file, first = decompressed(raw, name), True
    while True:
        try:
            data = file.read(READ)
        except Exception as error:
            raise _broken(name, error) from error
        if first:
            data, first = data.removeprefix(codecs.BOM_UTF8), False
        yield decoder.decode(data, final=not data)
        if not data:
            return


def table(raw: BinaryIO, name: str, field: str, chat: Chat | None, read: Read) -> Iterator[str]:
    """The documents of a parquet file."""
    file = _parquet(raw, name)
    _require(field, file.schema_arrow.names, name)
    for batch in file.iter_batches(batch_size=1024, columns=[field]):
        for value in _values(batch.column(0), name, field):
            yield from _field({field: value}, name, field, chat, read)


def _values(column: Any, name: str, field: str) -> list[Any]:
    """The values of a column of a parquet file; bytes that are not UTF-8 as lone surrogates."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError as error:
        try:
            encoded = column.cast("large_binary").to_pylist()
        # The library's own error, for a column of another kind than text.
        except Exception:
            raise FullrankError(
                f"field {field!r} of {name} is not UTF-8 ({error.reason}): write the file again from UTF-8"
            ) from error
    return [None if data is None else data.decode("utf8", "surrogateescape") for data in encoded]


def dataset(given: str, field: str, chat: Chat | None, read: Read, seed: int | None = None) -> Iterator[str]:
    """The documents of NAME:CONFIG:SPLIT of the datasets library, streamed; with a seed in random order."""
    datasets = needed("datasets", f"{given} is no file here, so it is taken for a dataset", "datasets")
    name, _, rest = given.partition(":")
    config, _, split = rest.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        for row in rows if seed is None else rows.shuffle(seed=seed, buffer_size=SHUFFLED):
            yield from _field(row, f"dataset {given}", field, chat, read)
    except FullrankError:
        raise
    # The library and the hub raise many kinds.
    except Exception as error:
        raise FullrankError(
            f"dataset {given} cannot be read ({type(error).__name__}: {error}): give files, or check "
            "its name (NAME:CONFIG:SPLIT) and the network"
        ) from error


def _field(row: dict[str, Any], name: str, field: str, chat: Chat | None, read: Read) -> Iterator[str]:
    """The document of a row, if its field is not null."""
    _require(field, row, name)
    value = row[field]
    if isinstance(value, list) and chat is not None:
        value = chat(value)
    if value is None:
        return
    if not isinstance(value, str):
        raise FullrankError(
            f"field {field!r} of {name} holds {type(value).__name__}, expected text: name another one, as "
            "FILE#FIELD or with --column; a list of messages needs a tokenizer with a chat template"
        )
    text, replaced = valid_unicode(value)
    read.replaced += replaced
    yield text


def _require(field: str, there: Any, name: str) -> None:
    if field not in there:
        names = list(map(str, there))
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        raise FullrankError(
            f"{name} has no field {field!r}, it has {', '.join(names[:MOST_NAMED]) or 'none'}{more}: name "
            "one, as FILE#FIELD or with --column, or join several into one first"
        )


def _parquet(raw: BinaryIO, name: str) -> Any:
    parquet = needed("pyarrow.parquet", f"{name} is a parquet file")
    try:
        # Its end is read first, and only a file on disk can be read from its end.
        plain = KINDS.get(Path(name).suffix.lower()) == "table" and isinstance(
            getattr(raw, "raw", None), io.FileIO
        )
        return parquet.ParquetFile(raw if plain else io.BytesIO(decompressed(raw, name).read()))
    except Exception as error:
        raise FullrankError(
            f"{name} is no parquet file ({error}): write it again, or leave it out"
        ) from error


def needed(module: str, why: str, package: str = "'fullrank[text]'") -> Any:
    """An optional library, or what to do to have it."""
    if importlib.util.find_spec(module.split(".")[0]) is None:
        raise FullrankError(f"{why}, which needs {module.split('.')[0]}: pip install {package}")
    return importlib.import_module(module)


def _broken(name: str, error: Exception) -> FullrankError:
    return FullrankError(f"{name} cannot be read on ({error}): is it whole? Copy it again, or leave it out")


def _uncompressed(name: str) -> str:
    return name[: -len(Path(name).suffix)] if Path(name).suffix.lower() in COMPRESSED else name


def _is_tar(name: str) -> bool:
    return name.lower().endswith((*TARS, *(f".tar{suffix}" for suffix in COMPRESSED)))


def _hidden(name: str) -> bool:
    return any((part.startswith(".") and part != ".") or part == "__MACOSX" for part in Path(name).parts)
