"""Files and datasets as text: decompressed, decoded, and refused where they are no text.

Text is UTF-8; .gz, .xz and .zst files are decompressed. A byte order mark is dropped. Bytes that are not
UTF-8 become U+FFFD and are counted; where more than 1% of the characters of a file would, or where there are
NUL bytes, it is no text.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fullrank.errors import FullrankError
from fullrank.text.documents import Read

READ = 1 << 18
"""Bytes read at once."""
LOOK = 1 << 16
"""Bytes of a file that are looked at to see whether it is text."""
LARGEST_BAD_SHARE = 0.01
"""Of characters that could not be decoded."""
COMPRESSED = {".gz": 4, ".xz": 5, ".zst": 4}
"""Suffixes of compressed text, and how much larger than the file its text is taken to be."""
TABLES = (".parquet", ".pq")


def decoded(path: Path, name: str, read: Read) -> Iterator[str]:
    """The text of a file in blocks; raises where it turns out to be none."""
    decoder = codecs.getincrementaldecoder("utf8")("replace")
    characters = replaced = 0
    with opened(path) as file:
        first = True
        while True:
            try:
                data = file.read(READ)
            # The decompressors' own errors, zstandard's too, which is no OSError.
            except Exception as error:
                raise FullrankError(
                    f"{name} cannot be read on ({error}): is it whole? Copy it again, or leave it out"
                ) from error
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


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file as bytes, decompressed by its suffix."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".gz":
            import gzip

            with gzip.open(path, "rb") as file:
                yield file  # type: ignore[misc]
        elif suffix == ".xz":
            import lzma

            with lzma.open(path, "rb") as file:
                yield file  # type: ignore[misc]
        elif suffix == ".zst":
            zstandard = _needed("zstandard", f"{path.name} is compressed with zstd")
            with (
                path.open("rb") as raw,
                zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as file,
            ):
                yield file
        else:
            with path.open("rb") as file:
                yield file
    except OSError as error:
        # gzip says with an OSError without a reason of the system's that a file is none of its own.
        if error.strerror is None:
            raise
        raise FullrankError(
            f"{path} cannot be read ({error.strerror}): give text files that you may read"
        ) from error


def look(path: Path) -> str:
    """Why a file is no text, and the remedy; empty if its beginning is text."""
    if path.suffix.lower() in TABLES:
        return ""
    try:
        with opened(path) as file:
            data = file.read(LOOK)
    except FullrankError:
        raise
    except Exception as error:
        return f"cannot be decompressed ({error}): is it whole? Copy it again, or leave it out"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "is UTF-16, expected UTF-8: save it as UTF-8"
    if b"\0" in data:
        return "is binary, it has NUL bytes: give a file of UTF-8 text"
    text = codecs.getincrementaldecoder("utf8")("replace").decode(data)
    bad = text.count("\ufffd")
    if bad > LARGEST_BAD_SHARE * max(len(text), 1):
        return (
            f"looks binary or not UTF-8 ({bad:,} of its first {len(text):,} characters): save it as UTF-8, "
            "for instance with iconv"
        )
    return ""


def text_bytes(path: Path) -> int:
    if path.suffix.lower() in TABLES:
        pyarrow = _needed("pyarrow.parquet", f"{path.name} is a parquet file")
        try:
            metadata = pyarrow.ParquetFile(path).metadata
        except Exception as error:
            raise FullrankError(
                f"{path} is no parquet file ({error}): write it again, or leave it out"
            ) from error
        return sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
    return path.stat().st_size * COMPRESSED.get(path.suffix.lower(), 1)


def table(path: Path, name: str, column: str) -> Iterator[str]:
    parquet = _needed("pyarrow.parquet", f"{name} is a parquet file")
    file = parquet.ParquetFile(path)
    if column not in file.schema_arrow.names:
        names = ", ".join(file.schema_arrow.names)
        raise FullrankError(f"{name} has no column {column!r}, it has {names}: name one with --column")
    for batch in file.iter_batches(batch_size=1024, columns=[column]):
        for value in batch.column(0).to_pylist():
            yield from _row(value, name, column)


def _row(value: Any, name: str, column: str) -> Iterator[str]:
    if value is None:
        return
    if not isinstance(value, str):
        raise FullrankError(
            f"column {column!r} of {name} holds {type(value).__name__}, expected text: name another one with "
            "--column"
        )
    yield value


def dataset(given: str, column: str) -> Iterator[str]:
    datasets = _needed("datasets", f"{given} is no file here, so it is taken for a dataset", "datasets")
    name, _, rest = given.partition(":")
    config, _, split = rest.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        for row in rows:
            if column not in row:
                raise FullrankError(
                    f"dataset {given} has no column {column!r}, it has {', '.join(row)}: name one with "
                    "--column"
                )
            yield from _row(row[column], given, column)
    except FullrankError:
        raise
    # The library and the hub raise many kinds.
    except Exception as error:
        raise FullrankError(
            f"dataset {given} cannot be read ({type(error).__name__}: {error}): give files, or check "
            "its name (NAME:CONFIG:SPLIT) and the network"
        ) from error


def dataset_digest(name: str) -> str:
    _needed("datasets", f"{name} is no file here, so it is taken for a dataset", "datasets")
    return hashlib.sha256(name.encode()).hexdigest()


def _needed(module: str, why: str, package: str = "'fullrank[corpus]'") -> Any:
    if importlib.util.find_spec(module.split(".")[0]) is None:
        raise FullrankError(f"{why}, which needs {module.split('.')[0]}: pip install {package}")
    return importlib.import_module(module)
