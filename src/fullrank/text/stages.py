"""Stages on disk: made once, checked before they are believed, continued where a killed run stopped.

    <cache>/<stage>-<key>/             files and manifest.json, whole
    <cache>/.<stage>-<key>.partial/    the same, being made

The key is a hash of everything that the files depend on. A stage is made in the partial folder under a lock
and renamed when whole: a folder with the final name holds all its files or does not exist, whatever killed
the process. What lies in a partial folder may be continued by its maker, who believes only steps that were
written down after they were on disk. manifest.json has size and sha256 of every file; a stage whose files do
not match is made again. Whoever reads gigabytes at every start may look at sizes alone (`every_byte=False`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fullrank import filelock
from fullrank.errors import FullrankError
from fullrank.results.files import sha256, write_whole
from fullrank.results.reading import read_json

FORMAT = 1
"""Of all stages; raised when the meaning of their files changes, so that old ones are left alone."""
MANIFEST = "manifest.json"
KEY_LENGTH = 24


def key_of(settings: dict[str, Any]) -> str:
    """The name of what depends on these settings, which must be JSON."""
    text = json.dumps({"format": FORMAT, **settings}, sort_keys=True)
    return hashlib.sha256(text.encode("utf8", "surrogateescape")).hexdigest()[:KEY_LENGTH]


def made(
    cache: Path,
    stage: str,
    key: str,
    make: Callable[[Path], dict[str, Any]],
    warn: Callable[[str], None] = lambda message: None,
    *,
    every_byte: bool = True,
) -> Path:
    """The folder of a stage, made by `make(partial folder) -> manifest` if it is not there whole."""
    folder = cache / f"{stage}-{key}"
    partial = cache / f".{stage}-{key}.partial"
    filelock.require()
    with written(cache):
        cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f".{stage}-{key}.lock"):
        if folder.exists():
            try:
                check(folder, every_byte=every_byte)
            except FullrankError as error:
                warn(f"{stage} is made again: {error}")
                _remove(folder, partial)
            else:
                return folder
        with written(cache):
            partial.mkdir(exist_ok=True)
            manifest = make(partial)
            _seal(partial, manifest)
            partial.rename(folder)
    return folder


def read_manifest(folder: Path) -> dict[str, Any]:
    """What the maker of a stage wrote down, and its files."""
    path = folder / MANIFEST
    try:
        manifest = read_json(path)
        if manifest["sha256"] != _digest(manifest) or not isinstance(manifest["files"], dict):
            raise ValueError("its sha256 is another")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FullrankError(
            f"{path} is damaged or missing ({error}): remove {folder} and run the command again"
        ) from error
    return dict(manifest)


def check(folder: Path, *, every_byte: bool = True) -> None:
    """Raise unless every file is what its manifest says; all but small ones may go by their size."""
    for name, expected in read_manifest(folder)["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            raise FullrankError(f"{path} is missing or has another size: remove {folder} and run again")
        if (every_byte or path.suffix == ".json") and sha256(path) != expected["sha256"]:
            raise FullrankError(f"{path} is damaged, its sha256 is another: remove {folder} and run again")


def discard(cache: Path, stage: str, key: str) -> None:
    """Forget a stage that nobody needs any more, whole or not."""
    folder, partial = cache / f"{stage}-{key}", cache / f".{stage}-{key}.partial"
    with _locked(cache / f".{stage}-{key}.lock"):
        _remove(folder, partial)
        shutil.rmtree(partial, ignore_errors=True)


def free_bytes(folder: Path) -> int:
    """Room on the disk that a folder, which may not exist yet, is on."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


@contextlib.contextmanager
def written(cache: Path) -> Iterator[None]:
    """System errors of a stage that is being written, as a sentence with a remedy."""
    try:
        yield
    except OSError as error:
        raise FullrankError(
            f"files cannot be kept in {cache} ({error.strerror or error}): free some space there or choose "
            "another directory with --cache or $FULLRANK_CACHE; what is finished will be used again"
        ) from error


def _seal(partial: Path, manifest: dict[str, Any]) -> None:
    files: dict[str, dict[str, Any]] = dict(manifest.pop("files", {}))
    for path in sorted(partial.rglob("*")):
        name = path.relative_to(partial).as_posix()
        if path.is_file() and name != MANIFEST and name not in files:
            files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    manifest = {**manifest, "files": files}
    manifest["sha256"] = _digest(manifest)
    write_whole(partial / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    # The rename must not reach the disk before the names in the folder do.
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(manifest: dict[str, Any]) -> str:
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _remove(folder: Path, partial: Path) -> None:
    """Out of the way first: a reader never sees half a folder under the final name."""
    shutil.rmtree(partial, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(partial)
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the system lets go of the lock when its process dies."""
    try:
        with path.open("a") as file:
            filelock.lock(file, wait=True)
            yield
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EACCES, errno.EROFS, errno.ENOSPC):
            raise FullrankError(
                f"{path} cannot be written or locked ({error.strerror}): choose another directory with "
                "--cache or $FULLRANK_CACHE"
            ) from error
        raise
