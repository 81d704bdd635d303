"""Text to memory-mapped token files, built once and checked by hash.

    cache/<key>/  vocabulary.json [tokenizer.json]  train.tokens valid.tokens test.tokens  meta.json

The key is a hash of the source files and of the settings that matter to them. A token file is the ids alone,
little endian, two bytes each where V fits and four otherwise: int16 would turn the ids of a large vocabulary
negative. meta.json has the counts, and the size and sha256 of every file and of itself.

A folder is built under another name and renamed when whole, so a killed build leaves no half of one, and of
two processes that build at once one wins and both go on with its files. A file that does not match its hash
is never used: the folder is built again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.errors import FullrankError
from fullrank.results.files import sha256, write_whole
from fullrank.text import files as text_files
from fullrank.text import splits as texts
from fullrank.text import vocabulary as vocabularies
from fullrank.text.settings import DataConfig
from fullrank.text.splits import SPLITS, Sources
from fullrank.text.vocabulary import Bpe, Bytes, Vocabulary, Words

Progress = Callable[[str, float], None]
"""Hears what is done and the share of it that is done."""

FORMAT = 1
"""Of the folder; raised when the meaning of its files changes."""
META = "meta.json"
STALE = 24 * 3600.0
"""Seconds after which a build that nothing was written to is one that was killed."""


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
    """Files, or parts of files, that it came from."""
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

    def describe(self) -> dict[str, Any]:
        """What a result says about its data; file names, no paths."""
        return {
            "level": self.vocabulary.level,
            "vocabulary": self.vocabulary.size,
            "vocabulary_from": self.meta["vocabulary_from"],
            "split_by": self.meta["split_by"],
            "digest": self.digest,
            "splits": {
                name: {
                    "tokens": len(split.tokens),
                    "bytes": split.bytes,
                    "lines": split.lines,
                    "documents": split.documents,
                    "replaced": split.replaced,
                }
                for name, split in self.splits.items()
            },
            "sources": [dict(source) for source in self.meta["sources"]],
            "skipped": list(self.meta["skipped"]),
        }


def prepare(
    sources: Sequence[Path],
    config: DataConfig,
    cache: Path,
    progress: Progress = lambda label, share: None,
    warn: Callable[[str], None] = lambda message: warnings.warn(message, stacklevel=3),
) -> Corpus:
    """The corpus of files or a directory (`sources.py` says how it is split), built if it is not there."""
    progress("reading", 0.0)
    found = texts.find(sources, config, warn)
    folder = cache / _key(found, config)
    # Twice at most where nothing is wrong; more only if others damage what was just built.
    for _ in range(4):
        if folder.exists():
            try:
                return load(folder)
            except FullrankError as error:
                warn(f"the token files are built again, because {error}")
        with _written(cache), _building(folder) as building:
            _build(building, found, config, progress)
            _put(building, folder)
    return load(folder)


def load(folder: Path) -> Corpus:
    """Open a built corpus; every file is hashed first."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf8"))
        if meta["format"] != FORMAT:
            raise FullrankError(
                f"{folder} has format {meta['format']}, expected {FORMAT}: prepare the data again"
            )
        if meta["sha256"] != _meta_sha256(meta):
            raise FullrankError(f"{folder / META} is damaged, its sha256 is another: prepare the data again")
        for name, expected in meta["files"].items():
            path = folder / name
            if path.stat().st_size != expected["bytes"] or sha256(path) != expected["sha256"]:
                raise FullrankError(f"{path} is damaged, its sha256 is another: prepare the data again")
        vocabulary = vocabularies.load(folder)
        splits = {}
        for name in SPLITS:
            entry = meta["splits"][name]
            tokens = np.memmap(folder / f"{name}.tokens", dtype=np.dtype(meta["dtype"]), mode="r")
            splits[name] = Split(
                name=name,
                tokens=tokens,
                **{key: entry[key] for key in ("bytes", "lines", "documents", "replaced")},
            )
        return Corpus(
            vocabulary=vocabulary, splits=splits, digest=str(meta["digest"]), folder=folder, meta=meta
        )
    except FullrankError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FullrankError(f"{folder} holds no whole corpus ({error!r}): prepare the data again") from error


def _key(found: Sources, config: DataConfig) -> str:
    """Of everything that the token files depend on."""
    settings: dict[str, Any] = {"level": config.level}
    if config.level == "words":
        settings["vocabulary_from"] = config.vocabulary_from
    elif config.level == "bpe" and config.tokenizer:
        path = Path(os.path.expanduser(config.tokenizer))
        try:
            settings["tokenizer"] = sha256(path)
        except OSError as error:
            raise FullrankError(
                f"no tokeniser at {path} ({error.strerror}): set data.tokenizer to a tokenizer.json, or "
                "leave it empty to train one"
            ) from error
    elif config.level == "bpe":
        settings["bpe_size"] = config.bpe_size
    parts = {split: [(part.name, part.start, part.stop) for part in found.splits[split]] for split in SPLITS}
    whole = json.dumps([FORMAT, settings, found.files, parts, found.skipped])
    return hashlib.sha256(whole.encode("utf8", "surrogateescape")).hexdigest()[:24]


def _build(folder: Path, found: Sources, config: DataConfig, progress: Progress) -> None:
    vocabulary, origin = _vocabulary(found, config, progress)
    vocabulary.save(folder)
    dtype = np.dtype("<u2" if vocabulary.size <= 1 << 16 else "<u4")
    watched = _Watched("tokenising", found, SPLITS, progress)
    splits: dict[str, dict[str, int]] = {}
    for split in SPLITS:
        parts = found.splits[split]
        watched.blank = True
        tokens = replaced = 0
        with (folder / f"{split}.tokens").open("wb") as file:
            for part in parts:
                blocks = watched.blocks(part)
                for piece in vocabulary.stream(blocks, name=str(part.path), line=part.first_line):
                    file.write(piece.ids.astype(dtype).tobytes())
                    tokens += len(piece.ids)
                    replaced += piece.replaced
        if watched.blank:
            names = ", ".join(part.name for part in parts)
            raise FullrankError(
                f"the {split} split has only blank lines ({names}): give text with words in it"
            )
        splits[split] = {
            "tokens": tokens,
            "bytes": sum(part.bytes for part in parts),
            "lines": sum(part.lines for part in parts),
            "documents": len(parts),
            "replaced": replaced,
        }
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(folder.iterdir())
    }
    content = [vocabulary.digest(), dtype.str, [files[f"{split}.tokens"]["sha256"] for split in SPLITS]]
    meta: dict[str, Any] = {
        "format": FORMAT,
        "digest": hashlib.sha256(json.dumps(content).encode()).hexdigest(),
        "dtype": dtype.str,
        "vocabulary_from": origin,
        "split_by": found.split_by,
        "splits": splits,
        "files": files,
        "sources": [{"name": name, "bytes": size, "sha256": sha256} for name, size, sha256 in found.files],
        "skipped": found.skipped,
    }
    meta["sha256"] = _meta_sha256(meta)
    write_whole(folder / META, json.dumps(meta, indent=1) + "\n")


def _meta_sha256(meta: dict[str, Any]) -> str:
    content = {key: value for key, value in meta.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _vocabulary(found: Sources, config: DataConfig, progress: Progress) -> tuple[Vocabulary, str]:
    """And whose text it was made from."""
    if config.level == "bytes":
        return Bytes(), "bytes"
    if config.level == "words":
        splits = SPLITS if config.vocabulary_from == "all" else ("train",)
        watched = _Watched("collecting words", found, splits, progress)
        return Words.build(watched.documents()), config.vocabulary_from
    if config.tokenizer:
        return Bpe.read(Path(os.path.expanduser(config.tokenizer))), "tokenizer"
    watched = _Watched("training BPE", found, ("train",), progress)
    return Bpe.train((block for blocks in watched.documents() for block in blocks), config.bpe_size), "train"


class _Watched:
    """Blocks of text on their way, with the share that is read and whether there was any word."""

    def __init__(self, label: str, found: Sources, splits: Sequence[str], progress: Progress) -> None:
        self.blank = True
        self._label, self._progress = label, progress
        self._parts = [part for split in splits for part in found.splits[split]]
        self._total = sum(part.bytes for part in self._parts)
        self._before = 0

    def documents(self) -> Iterator[Iterator[str]]:
        return (self.blocks(part) for part in self._parts)

    def blocks(self, part: text_files.Part) -> Iterator[str]:
        read = 0
        for block in text_files.blocks(part):
            self._progress(self._label, min(1.0, (self._before + read) / self._total))
            self.blank = self.blank and block.isspace()
            # Characters, not bytes: close enough to show.
            read += len(block)
            yield block
        self._before += part.bytes


@contextlib.contextmanager
def _building(folder: Path) -> Iterator[Path]:
    """A folder beside the real one that goes away if it was not moved."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}.*"):
        # A build that was killed. One that lives has written within the last day.
        with contextlib.suppress(OSError):
            newest = max(path.stat().st_mtime for path in (left, *left.glob("*")))
            if time.time() - newest > STALE:
                shutil.rmtree(left, ignore_errors=True)
    building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        # mkdtemp makes it private; token files are as readable as any other file that the user writes.
        umask = os.umask(0)
        os.umask(umask)
        building.chmod(0o777 & ~umask)
        yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _put(building: Path, folder: Path) -> None:
    """Make the built folder the real one, unless another process was first and its folder is whole."""
    for _ in range(4):
        try:
            building.rename(folder)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        try:
            load(folder)
            return
        except FullrankError:
            # Damaged: out of the way. Whoever has its files open keeps them.
            aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
            with contextlib.suppress(OSError):
                folder.rename(aside / "damaged")
            shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _written(cache: Path) -> Iterator[None]:
    """System errors while writing are the user's to solve; those of reading say so themselves."""
    try:
        yield
    except OSError as error:
        raise FullrankError(
            f"the token files cannot be written to {cache} ({error.strerror}): free some space there or "
            "choose another --out"
        ) from error
