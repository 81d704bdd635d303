"""Text to memory-mapped token files, built once by all cores and shared by all runs and processes.

    cache/tokens-<key>/   vocabulary.json [tokenizer.json]  train.tokens [train-00001.tokens ...] ...
                          manifest.json: counts, size and sha256 of every file and of itself
    cache/starts/         which folder a list of files had, by their sizes and times

The key is a hash of the source files and of the settings that matter to them. A split is one array over its
shards (`shards.py`). Every document ends with the vocabulary's end token; of words every line does.

Files are hashed when they are written. A start looks at sizes and at the hash of the manifest, nothing else;
`verify` reads every byte. A source whose size or time has changed is hashed again before it is believed. A
folder is whole or not there, and built by one process while others wait for it (`stages.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fullrank.errors import FullrankError
from fullrank.results.files import write_whole
from fullrank.results.reading import read_json
from fullrank.text import build, formats, shards, stages, tokenisers, workers
from fullrank.text import sources as reading
from fullrank.text import splits as splitting
from fullrank.text import vocabulary as vocabularies
from fullrank.text.build import Built, Progress, Warn
from fullrank.text.settings import DataConfig
from fullrank.text.splits import SPLITS
from fullrank.text.vocabulary import Vocabulary

Make = Callable[[], tuple[str, Callable[[Path], Built]]]
"""Gives the key of a folder and what fills it."""

FORMAT = 2
"""Of the folder; raised when the meaning of its files changes."""
STARTS = "starts"
SETTLED = 2.0
"""Seconds after its last change from which on a file goes by its time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """One split of a corpus as tokens."""

    name: str
    tokens: np.ndarray
    """[tokens], memory-mapped and read-only, uint16 or uint32."""
    bytes: int
    """Of its text in UTF-8: the denominator of bits per byte."""
    lines: int
    documents: int
    replaced: int
    """Tokens that stand for a word outside the vocabulary. They make a text easier: say so with its loss."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A vocabulary and three splits."""

    vocabulary: Vocabulary
    splits: dict[str, Split]
    digest: str
    """sha256 of the vocabulary and all tokens: two corpora with one digest are the same to a model."""
    folder: Path
    meta: dict[str, Any]

    def require(self, digest: str) -> None:
        """Raise unless these are the tokens that were read before; an empty digest is any."""
        if digest not in ("", self.digest):
            raise FullrankError(
                "this is another text than the runs to be compared with it have read: go on with the text or "
                "tokens that they were begun with, or choose another --out"
            )

    def cut_note(self) -> str:
        """A sentence about splits that were cut from the training text; empty where each was named."""
        sizes = [
            f"{name} ({len(self.splits[name].tokens):,} tokens)" for name in self.meta.get("from_train", ())
        ]
        were = "were" if len(sizes) > 1 else "was"
        return f"{' and '.join(sizes)} {were} cut from the end of train" if sizes else ""

    def describe(self) -> dict[str, Any]:
        """What a result says about its data; file names, no paths."""
        counts = ("bytes", "lines", "documents", "replaced")
        return {
            "level": self.vocabulary.level,
            "vocabulary": self.vocabulary.size,
            "vocabulary_from": self.meta["vocabulary_from"],
            "split_by": self.meta["split_by"],
            "digest": self.digest,
            "splits": {
                name: {"tokens": len(split.tokens), **{count: getattr(split, count) for count in counts}}
                for name, split in self.splits.items()
            },
            "sources": [dict(source) for source in self.meta["sources"]],
            "skipped": list(self.meta["skipped"]),
        }


def prepare(
    sources: Sequence[str | Path],
    config: DataConfig,
    cache: Path,
    progress: Progress = lambda label, share: None,
    warn: Warn = lambda message: warnings.warn(message, stacklevel=3),
    *,
    verify: bool = False,
) -> Corpus:
    """The corpus of files, directories or datasets (`splits.py` says how it is split), built if need be."""
    progress("reading", 0.0)
    listing = splitting.chosen(reading.listed(sources), sources)
    settings = dataclasses.asdict(config)
    # The kind too: another version may read a suffix in another way.
    named = [[one.name, one.field, formats.kind_of(one.name)] for one in listing]
    start = start_of([settings, named], _files(listing, config))

    def make() -> tuple[str, Callable[[Path], Built]]:
        texts = build.look(listing, sources, config, warn)
        texts = reading.hashed(texts, lambda share: progress("reading", share))
        chat = tokenisers.chat_of(config.tokenizer) if build.conversations(texts) else None
        material = build.Material(texts, splitting.plan(texts, config, chat), config, chat)
        return build.key_of(material, FORMAT), lambda folder: build.build(folder, material, progress, warn)

    return kept(cache, start, make, warn, verify=verify)


def kept(
    cache: Path,
    start: Start,
    make: Make,
    warn: Warn,
    *,
    verify: bool = False,
) -> Corpus:
    """The folder that an earlier start left, or a new one."""
    known = start.read(cache)
    if known is not None:
        with contextlib.suppress(FullrankError):
            return load(cache / known, verify=verify)
    workers.refuse_nested()
    key, fill = make()

    def whole(folder: Path) -> dict[str, Any]:
        # What a killed build left is of no use: a tokeniser takes minutes, not days.
        _clear(folder)
        try:
            return _manifest(fill(folder))
        except BaseException:
            _clear(folder)
            folder.rmdir()
            raise

    folder = stages.made(cache, "tokens", key, whole, warn, every_byte=verify)
    start.write(cache, folder.name)
    return load(folder)


def load(folder: Path, *, verify: bool = False) -> Corpus:
    """Open a built corpus: sizes and the hash of the manifest are looked at, with `verify` every byte."""
    try:
        stages.check(folder, every_byte=verify)
        meta = stages.read_manifest(folder)
        if meta["format"] != FORMAT:
            raise FullrankError(
                f"{folder} has format {meta['format']}, expected {FORMAT}: prepare the data again"
            )
        vocabulary = vocabularies.load(folder)
        splits = {}
        for name in SPLITS:
            entry = dict(meta["splits"][name])
            files = [folder / shard for shard in entry.pop("shards")]
            tokens = shards.mapped(files, np.dtype(meta["dtype"]), entry.pop("tokens"))
            splits[name] = Split(name=name, tokens=tokens, **entry)
        return Corpus(
            vocabulary=vocabulary, splits=splits, digest=str(meta["digest"]), folder=folder, meta=meta
        )
    except FullrankError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FullrankError(f"{folder} holds no whole corpus ({error!r}): prepare the data again") from error


def _manifest(built: Built) -> dict[str, Any]:
    vocabulary, writers, about = built
    dtype = shards.dtype_of(vocabulary.size)
    content = [vocabulary.digest(), dtype.str, [writers[split].whole.hexdigest() for split in SPLITS]]
    counts = ("tokens", "bytes", "lines", "documents", "replaced")
    return {
        "format": FORMAT,
        "digest": hashlib.sha256(json.dumps(content).encode()).hexdigest(),
        "dtype": dtype.str,
        "splits": {
            split: {**{count: getattr(writer, count) for count in counts}, "shards": list(writer.shards)}
            for split, writer in writers.items()
        },
        # Hashed while they were written.
        "files": {name: entry for writer in writers.values() for name, entry in writer.shards.items()},
        **about,
    }


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


class Start(NamedTuple):
    """A list of files as it was, by settings, sizes and times."""

    name: str
    settled: bool
    """Whether no file was changed just before: one that is changed again within a tick keeps its time."""

    def read(self, cache: Path) -> str | None:
        """The key that these files had."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return str(read_json(cache / STARTS / self.name)["key"])
        return None

    def write(self, cache: Path, key: str) -> None:
        if self.settled:
            with contextlib.suppress(OSError):
                write_whole(cache / STARTS / self.name, json.dumps({"key": key}) + "\n")


def start_of(settings: Any, files: Iterable[Path]) -> Start:
    """Files by all that changes when their content does."""
    content, newest = [], 0.0
    for path in files:
        with contextlib.suppress(OSError):
            found = path.stat()
            content.append([str(path.absolute()), found.st_size, found.st_mtime_ns, found.st_ino])
            newest = max(newest, found.st_mtime)
    whole = json.dumps([FORMAT, settings, content]).encode("utf8", "surrogateescape")
    return Start(f"{hashlib.sha256(whole).hexdigest()[:24]}.json", time.time() - newest > SETTLED)


def _files(listing: list[reading.Named], config: DataConfig) -> list[Path]:
    files = [one.path for one in listing if one.path is not None]
    if config.tokenizer:
        path = Path(os.path.expanduser(config.tokenizer))
        files += sorted([*path.glob("*token*"), *path.glob("*template*")]) if path.is_dir() else [path]
    return files
