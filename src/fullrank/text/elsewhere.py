"""Tokens made elsewhere: flat files of ids, taken into a store once.

    DIR/train.bin  val.bin  [test.bin]      uint16 or uint32 ids, one after another, as nanoGPT writes them
    DIR/train_0001.npy ...                  or arrays of numpy; several files of a split follow each other
    DIR/tokens.json                         {"vocabulary_size": 50257, "dtype": "uint16", "end": 50256,
                                             "tokenizer": "tokenizer.json"}, each of them optional

A word of a file's name says its split (`splits.py`). Missing splits are cut from the end of the training
tokens, by the rule of text. The size of the vocabulary comes from tokens.json, data.vocabulary_size or the
tokenizer; every id is checked against it. A store of our own is taken as it is. Without a tokenizer a
model can be trained and evaluated, and neither read nor write text; bits per byte are then unknown. With one
the bytes of the text are those of its tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.errors import FullrankError
from fullrank.results.files import sha256
from fullrank.results.reading import NotRegularError, read_json, require_plain
from fullrank.text import shards, splits, store, tokenisers
from fullrank.text.build import Built, Progress, Warn
from fullrank.text.settings import DataConfig
from fullrank.text.splits import SPLITS, role
from fullrank.text.stages import MANIFEST
from fullrank.text.store import Corpus, kept, load, start_of
from fullrank.text.vocabulary import Bpe, Numbers, Vocabulary

DESCRIPTION = "tokens.json"
SUFFIXES = (".bin", ".npy")
AT_ONCE = 1 << 22
"""Tokens copied at once."""
KNOWN = ("vocabulary_size", "dtype", "end", "tokenizer")


def prepare(
    directory: Path,
    config: DataConfig,
    cache: Path,
    progress: Progress = lambda label, share: None,
    warn: Warn = lambda message: None,
    *,
    verify: bool = False,
) -> Corpus:
    """The corpus of a directory of tokens."""
    directory = Path(os.path.expanduser(directory))
    if (directory / MANIFEST).is_file():
        return load(directory, verify=verify)
    files = _files(directory)
    said = _said(directory)
    given = [*(path for paths in files.values() for path in paths), directory / DESCRIPTION]
    named = config.tokenizer or said.get("tokenizer") or ""
    # A path in the description is meant from where that lies.
    if not config.tokenizer and named and (directory / named).exists():
        named = str(directory / named)
    shares = (config.valid_share, config.test_share, config.vocabulary_size, named)
    start = start_of(["tokens", *shares], [*given, Path(named)] if named else given)

    def make() -> tuple[str, Any]:
        vocabulary = _vocabulary(named, said, config, warn)
        hashes = {path.name: sha256(path) for paths in files.values() for path in paths}
        content = ["tokens", store.FORMAT, said, shares[:2], vocabulary.digest(), hashes]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]
        return key, lambda folder: _copy(folder, files, hashes, vocabulary, said, config, progress)

    return kept(cache, start, make, warn, verify=verify)


def _files(directory: Path) -> dict[str, list[Path]]:
    if not directory.is_dir():
        raise FullrankError(f"no directory {directory}: give --tokens one with train.bin or train.npy")
    require_plain(directory)
    found: dict[str, list[Path]] = {}
    for path in sorted(directory.iterdir()):
        own = role(path.name) if path.suffix.lower() in SUFFIXES else None
        if own is not None:
            found.setdefault(own, []).append(path)
    if "train" not in found:
        names = ", ".join(sorted(path.name for path in directory.iterdir())[:4]) or "nothing"
        raise FullrankError(
            f"{directory} has no training tokens (it has {names}): expected train.bin or train.npy, and "
            f"valid and test beside it if there are any, or a store with {MANIFEST}"
        )
    return {split: found[split] for split in SPLITS if split in found}


def _said(directory: Path) -> dict[str, Any]:
    path = directory / DESCRIPTION
    if not path.exists():
        return {}
    try:
        said = read_json(path)
        unknown = sorted(set(said) - set(KNOWN))
    except NotRegularError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise FullrankError(f"{path} is no JSON object ({error}): expected {', '.join(KNOWN)}") from error
    if unknown or not isinstance(said, dict) or str(said.get("dtype", "uint16")) not in ("uint16", "uint32"):
        raise FullrankError(
            f"{path} says {unknown or said}: expected {', '.join(KNOWN)}, and dtype uint16 or uint32"
        )
    for name, kind, words in (
        ("vocabulary_size", int, "a whole number"), ("end", int, "a whole number"),
        ("tokenizer", str, "a path or a name"),
    ):  # fmt: skip
        value = said.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise FullrankError(f"{path} says {name} is {value!r}: expected {words}, or nothing")
    return said


def _vocabulary(named: str, said: dict[str, Any], config: DataConfig, warn: Warn) -> Vocabulary:
    size = config.vocabulary_size or said.get("vocabulary_size") or 0
    if named:
        tokenizer, end = tokenisers.loaded(named)
        return Bpe.loaded(tokenizer, named, end, size=size)
    if not size:
        raise FullrankError(
            f"the size of the vocabulary is not known: say it in {DESCRIPTION} or with --set "
            "data.vocabulary_size=50257, or name a tokenizer with --set data.tokenizer"
        )
    if said.get("end") is None:
        warn(f"{DESCRIPTION} names no end token: token 0 is taken to begin a text")
    eos = said.get("end") or 0
    if not 0 <= eos < size:
        raise FullrankError(f"the end token {eos} lies outside the vocabulary of {size}: say another one")
    return Numbers(size, eos)


def _tokens(paths: list[Path], said: dict[str, Any]) -> list[np.ndarray]:
    """The files of a split, mapped."""
    found = []
    for path in paths:
        try:
            if path.suffix.lower() == ".npy":
                array = np.load(path, mmap_mode="r", allow_pickle=False)
            else:
                array = np.memmap(path, dtype="<u4" if said.get("dtype") == "uint32" else "<u2", mode="r")
        except (OSError, ValueError) as error:
            raise FullrankError(
                f"{path} cannot be read as tokens ({error}): expected uint16 or uint32 ids, one after another"
            ) from error
        if array.ndim != 1 or array.dtype.kind not in "ui":
            raise FullrankError(
                f"{path} holds {array.dtype} of shape {array.shape}, expected whole numbers [tokens]"
            )
        found.append(array)
    return found


def _copy(
    folder: Path,
    files: dict[str, list[Path]],
    hashes: dict[str, str],
    vocabulary: Vocabulary,
    said: dict[str, Any],
    config: DataConfig,
    progress: Progress,
) -> Built:
    vocabulary.save(folder)
    arrays = {split: _tokens(paths, said) for split, paths in files.items()}
    counts = {split: sum(map(len, group)) for split, group in arrays.items()}
    missing = [split for split in SPLITS if split not in arrays]
    splits.check_shares(missing, config)
    held = splits.held_out(counts["train"], missing, config)
    splits.require_rest(counts["train"], held, "tokens")
    # Where each split ends in the training files.
    ends, place = {}, counts["train"] - sum(held.values())
    for split, count in {"train": 0, **held}.items():
        ends[split] = place = place + count
    sizes = vocabulary.byte_lengths() if isinstance(vocabulary, Bpe) else np.zeros(vocabulary.size, np.int64)
    done = 0
    with shards.writers(folder, vocabulary.size) as writers:
        for split, group in arrays.items():
            before = 0
            for part in _parts(group):
                progress("copying tokens", done / sum(counts.values()))
                done += len(part)
                for own, end in ends.items() if split == "train" else {split: counts[split]}.items():
                    taken = part[: max(0, end - before)]
                    writers[own].add(taken)
                    writers[own].bytes += int(sizes[taken].sum())
                    before, part = before + len(taken), part[len(taken) :]
        for split, writer in writers.items():
            if not writer.tokens:
                raise FullrankError(f"the {split} split has no token: give longer files, or one of its own")
            writer.documents = max(1, len(files.get(split, ())))
    sources = [
        {"name": path.name, "bytes": path.stat().st_size, "sha256": hashes[path.name]}
        for paths in files.values()
        for path in paths
    ]
    by = splits.FROM_TRAIN if missing else "names"
    about = {"vocabulary_from": "tokens", "split_by": by, "from_train": missing, "sources": sources}
    return Built(vocabulary, writers, {**about, "skipped": []})


def _parts(group: list[np.ndarray]) -> Iterator[np.ndarray]:
    for array in group:
        if len(array) and array.dtype.kind == "i" and int(array.min()) < 0:
            raise FullrankError(f"token {int(array.min())} is negative: expected ids from 0")
        for start in range(0, len(array), AT_ONCE):
            yield np.asarray(array[start : start + AT_ONCE])
