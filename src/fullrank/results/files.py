"""Result records as files: frozen dataclasses to versioned JSON and back, without torch.

Every command writes one `results.json`: "kind" names the record's class, "version" the version of its fields,
"made" how the figures came to be (command, commit, seed, device, library versions), and beside them stand the
record's own fields. A reader of an older or newer file gets an error with a remedy, never a wrong number.
Non-finite floats are written as the strings "nan", "inf" and "-inf", because JSON has no word for them.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from fullrank import filelock
from fullrank.errors import FullrankError
from fullrank.results.reading import NotRegularError, read_json, require_regular
from fullrank.version import __version__

Record = TypeVar("Record")

KINDS: dict[str, type] = {}
"""Every kind of record that a file can hold; `fullrank.results` fills it."""

LIBRARIES = ("torch", "numpy", "scipy", "highspy", "triton", "transformers", "tokenizers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """How a set of figures came to be."""

    command: str
    commit: str
    time: str
    device: str
    seed: int | None
    versions: dict[str, str]


def provenance(*, seed: int | None, device: str) -> Provenance:
    """Describe this process: its command line, the commit of this source tree, device and versions."""
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return Provenance(
        command=command, commit=_commit(), time=now(), device=device, seed=seed, versions=dict(_versions())
    )


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "fullrank": __version__}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def now() -> str:
    """The time of an answer, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _commit() -> str:
    """The commit of the source tree around this module, "+changes" if edited; "" outside a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return ""
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()


def save(record: Any, path: Path, made: Provenance) -> None:
    """Write a record whole or not at all."""
    document = {"kind": record.kind, "version": record.version, "made": _plain(made), **_plain(record)}
    write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def load(path: Path) -> tuple[Any, Provenance]:
    """Read a record of any kind with its provenance; raises FullrankError for what it cannot read."""
    try:
        document = read_json(path)
    except FileNotFoundError as error:
        raise FullrankError(f"no results at {path}: run the command that writes them first") from error
    except OSError as error:
        raise FullrankError(f"{path} cannot be read ({error.strerror}): pass a results file") from error
    except NotRegularError:
        raise
    except ValueError as error:
        raise FullrankError(f"{path} is not JSON ({error}): run the command that wrote it again") from error
    if not isinstance(document, dict) or not {"kind", "version", "made"} <= document.keys():
        raise FullrankError(f"{path} is not a fullrank result: it lacks kind, version or made")
    cls = KINDS.get(str(document["kind"]))
    if cls is None:
        raise FullrankError(f"{path} holds a {document['kind']!r}, this version reads {', '.join(KINDS)}")
    if document["version"] != cls.version:  # type: ignore[attr-defined]
        raise FullrankError(
            f"{path} has version {document['version']} of {document['kind']!r}, this fullrank reads version "
            f"{cls.version}: run the command that wrote it again"  # type: ignore[attr-defined]
        )
    try:
        fields = {key: value for key, value in document.items() if key not in ("kind", "version", "made")}
        return _build(cls, fields), _build(Provenance, document["made"])
    except (KeyError, TypeError, ValueError) as error:
        raise FullrankError(
            f"{path} does not hold the fields of a {document['kind']!r} ({error}): run its command again"
        ) from error


def to_plain(record: Any) -> Any:
    """A record, or a part of one, as what JSON can hold."""
    return _plain(record)


def from_plain(cls: type[Record], data: Any) -> Record:
    """The inverse of `to_plain`."""
    return _build(cls, data)


def cache_directory() -> Path:
    """$FULLRANK_CACHE, else $XDG_CACHE_HOME/fullrank, else ~/.cache/fullrank."""
    own, shared = os.environ.get("FULLRANK_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(shared) if shared else Path.home() / ".cache") / "fullrank"


def check_writable(directory: Path) -> None:
    """Raise before long work, not after it, where its results could not be written."""
    there = directory.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise FullrankError(
            f"cannot write to {directory}: {there} is no writable directory; choose another --out"
        )


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old content or the new, never a part."""
    # Renaming onto a device or a pipe would replace it.
    require_regular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}."
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=prefix)
    try:
        with os.fdopen(handle, "w", encoding="utf8") as file:
            # The lock stops another writer's `_remove_left`.
            locked = _locked(file)
            file.write(text)
            # Else a power cut may leave the new name on an empty file.
            file.flush()
            os.fsync(file.fileno())
            # mkstemp makes the file private; a result is as readable as any other file the user writes.
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            if locked:
                os.replace(temporary, path)
        if not locked:
            # Windows has no such locks, and renames no open file.
            os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    for left in path.parent.iterdir():
        alike = left.name.startswith(prefix) and len(left.name) == len(Path(temporary).name)
        if alike and left.is_file() and not left.is_symlink():
            _remove_left(left)


def _remove_left(path: Path) -> None:
    """Remove what a writer that was killed has left behind; not what another one is writing."""
    try:
        with path.open("rb") as file:
            if _locked(file):
                path.unlink(missing_ok=True)
    except OSError:
        return


def _locked(file: IO[Any]) -> bool:
    """Lock an open file until it is closed; False where another process holds it, or where files have no
    locks."""
    if not filelock.SUPPORTED:
        return False
    try:
        filelock.lock(file, wait=False)
    except OSError:
        return False
    return True


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        # float first: a numpy scalar's repr names its type.
        return repr(float(value))
    return value


def _build(cls: type[Record], data: Any) -> Record:
    """The inverse of `_plain` for dataclasses of plain fields, tuples, dicts and options of them."""
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = {field.name for field in fields}
    unknown = set(data) - names
    if unknown:
        raise ValueError(f"unknown fields {sorted(unknown)}")
    # A field with a default is one that older files of the same version do not have.
    optional = {
        field.name
        for field in fields
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }
    return cls(
        **{name: _value(hints[name], data[name]) for name in names if name in data or name not in optional}
    )


def _value(hint: Any, data: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        return _value(next(item for item in arguments if item is not type(None)), data)
    if origin is tuple:
        return tuple(_value(arguments[0], item) for item in data)
    if origin is dict:
        return {key: _value(arguments[1], item) for key, item in data.items()}
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), data)
    if hint is float:
        return float(data)
    if hint in (int, str, bool) and type(data) is not hint:
        raise ValueError(f"expected {hint.__name__}, got {data!r}")
    return data


def sha256(path: Path) -> str:
    """Of a whole file."""
    require_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
