"""Checkpoints that a crash cannot spoil: written beside, synced, then renamed; checksummed; no pickle.

    checkpoints/step-00001200/   model.safetensors, optimiser.safetensors, ...   named groups of tensors
                                 config.json, tokenizer.json, ...   what else a transformers directory has
                                 manifest.json   the plain state, and sha256 and size of every file

model.safetensors are the weights that are evaluated: of a run that averages, the average, with the live
weights beside it (live.safetensors). So `from_pretrained` of the directory is the model as it was judged.

A directory with its final name is complete, because the rename comes last. Its checksums still tell a disk
that lied. What a killed writer leaves has a name that starts with a dot, and the next run removes it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.results.files import sha256
from fullrank.results.reading import read_json

VERSION = 2
MANIFEST = "manifest.json"
_UNFINISHED = ".writing-"
_NAME = re.compile(r"^(step|best)-(\d{8,})$")

Groups = Mapping[str, Mapping[str, Tensor]]


class Damaged(FullrankError):  # noqa: N818 (what is wrong with a checkpoint, as a word)
    """A checkpoint whose files are not what was written."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint that was read back."""

    path: Path
    step: int
    state: dict[str, Any]
    groups: dict[str, dict[str, Tensor]]


def write(
    folder: Path,
    kind: str,
    step: int,
    groups: Groups,
    state: Mapping[str, Any],
    files: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write a checkpoint whole or not at all; an existing one of the same name is replaced.

    kind is "step", which a run continues from, or "best", the weights alone. `files` are texts by name: JSON,
    and the import of the model's code.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    final = path_of(folder, kind, step)
    temporary = folder / f"{_UNFINISHED}{final.name}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name, tensors in groups.items():
            whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
            # transformers asks for this word.
            save_file(whole, temporary / f"{name}.safetensors", metadata={"format": "pt"})
        for name, text in files.items():
            (temporary / name).write_text(text, encoding="utf8")
        written = {}
        for path in sorted(temporary.iterdir()):
            # A rename may reach the disk before the bytes do.
            sync(path)
            written[path.name] = {"sha256": sha256(path), "bytes": path.stat().st_size}
        manifest = {"version": VERSION, "kind": kind, "step": step, "files": written, "state": dict(state)}
        manifest["sha256"] = _manifest_digest(manifest)
        path = temporary / MANIFEST
        path.write_text(json.dumps(manifest, indent=1), encoding="utf8")
        sync(path)
        sync(temporary)
        _set_aside(final)
        os.rename(temporary, final)
        sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        kept = [path.name for path in found(folder, "step") if path.exists()]
        intact = f"{kept[-1]} is intact" if kept else "there is no earlier one"
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        reason = "the disk is full" if full else str(error)
        raise FullrankError(
            f"checkpoint {final.name} could not be written ({reason}); {intact}: make room in {folder} and "
            "run the same command again"
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def path_of(folder: Path, kind: str, step: int) -> Path:
    return folder / f"{kind}-{step:08d}"


def _set_aside(path: Path) -> None:
    """Take a checkpoint's name away, then remove it: half a removal must not leave half a checkpoint."""
    if path.exists():
        gone = path.with_name(f"{_UNFINISHED}old-{path.name}")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def read(path: Path) -> Stored:
    """Read a checkpoint; raises Damaged where a file is missing or its checksum is another."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        manifest = read_json(path / MANIFEST)
        if manifest["version"] != VERSION:
            raise FullrankError(
                f"{path} has checkpoint version {manifest['version']}, this fullrank reads {VERSION}: "
                "continue with the fullrank that wrote it"
            )
        if manifest["sha256"] != _manifest_digest(manifest):
            raise Damaged(f"{path / MANIFEST} is not what was written: its checksum is another")
        if path.name != path_of(path.parent, manifest["kind"], manifest["step"]).name:
            raise Damaged(f"{path} says that it is {manifest['kind']} {manifest['step']}")
        groups = {}
        for name, expected in manifest["files"].items():
            file = path / name
            if Path(name).name != name or file.suffix not in (".safetensors", ".json", ".py"):
                raise Damaged(f"{path} names a file {name!r} that no checkpoint has")
            if file.stat().st_size != expected["bytes"] or sha256(file) != expected["sha256"]:
                raise Damaged(f"{file} is not what was written: its checksum is another")
            if file.suffix == ".safetensors":
                groups[file.stem] = load_file(file)
        return Stored(path=path, step=int(manifest["step"]), state=manifest["state"], groups=groups)
    except FullrankError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise Damaged(f"{path} cannot be read ({error})") from error


def found(folder: Path, kind: str) -> list[Path]:
    """The complete checkpoints of a kind, by rising step."""
    if not folder.is_dir():
        return []
    matches = [(path, _NAME.match(path.name)) for path in folder.iterdir()]
    return sorted((path for path, match in matches if match and match[1] == kind), key=step_of)


def newest(folder: Path, warn: Any) -> Stored | None:
    """The newest checkpoint to continue from that is whole; damaged ones are passed over with a warning.

    A damaged one is set aside under another name: its step will be written again. Where none is whole all
    stay as they are: were they set aside, the next run would take the directory for a new one.
    """
    damaged: list[tuple[Path, Damaged]] = []
    for path in reversed(found(folder, "step")):
        try:
            whole = read(path)
        except Damaged as error:
            damaged.append((path, error))
            continue
        for other, reason in damaged:
            warn(f"{reason}; the checkpoint before it is used")
            aside = other.with_name(f"damaged-{other.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(other, aside)
        return whole
    if damaged:
        raise FullrankError(
            f"every checkpoint in {folder} is damaged ({damaged[0][1]}): remove the run directory to begin "
            "again, or restore one"
        )
    return None


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` to continue from, and the best weights that none of these names."""
    paths = found(folder, "step")
    for path in paths[: max(0, len(paths) - keep)]:
        _set_aside(path)
    # Every checkpoint's own best stays: the newest may turn out damaged, and the one before it needs its own.
    named = {best_of(path) for path in found(folder, "step")}
    for path in found(folder, "best"):
        if step_of(path) not in named:
            _set_aside(path)


def drop(folder: Path, kind: str, *, after: int) -> None:
    """Remove those of later steps: a run that continues from before may not come by them again."""
    for path in found(folder, kind):
        if step_of(path) > after:
            _set_aside(path)


def step_of(path: Path) -> int:
    match = _NAME.match(path.name)
    assert match is not None
    return int(match[2])


def best_of(path: Path) -> int | None:
    """The step of the best weights when a checkpoint was written; None where it cannot be read."""
    try:
        return read_json(path / MANIFEST)["state"]["best_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def clean(folder: Path) -> None:
    """Remove what a killed writer left behind."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith(_UNFINISHED):
                shutil.rmtree(path, ignore_errors=True)


def _manifest_digest(manifest: dict[str, Any]) -> str:
    text = json.dumps({key: value for key, value in manifest.items() if key != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sync(path: Path) -> None:
    """Make a file or a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
