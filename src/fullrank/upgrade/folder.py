"""A directory that appears whole or not at all: written beside, and renamed at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullrank.errors import FullrankError
from fullrank.models.loading import quiet


def check_empty(out: Path) -> None:
    """Raise where something is in the way of a new directory."""
    if out.is_symlink() or out.is_file() or (out.is_dir() and any(out.iterdir())):
        found = "a directory that is not empty" if out.is_dir() else "a file"
        raise FullrankError(
            f"{out} is {found}, and nothing is overwritten: choose another --out, or remove it"
        )


@contextlib.contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A place to write to, which becomes `out` at the end; whatever goes wrong leaves nothing behind."""
    check_empty(out)
    out = out.absolute()
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        beside.mkdir(parents=True)
        yield beside
        _flush(beside)
        # Over an empty directory of that name as well.
        os.replace(beside, out)
    except OSError as error:
        raise FullrankError(
            f"{out} cannot be written ({error.strerror or error}): free some space or choose another --out"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_model(model: Any, tokenizer: Any, directory: Path) -> None:
    """Both in the layout of `save_pretrained`."""
    from safetensors import SafetensorError

    try:
        with quiet():
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
    except SafetensorError as error:
        # Its way of saying that the disk is full.
        raise FullrankError(f"the model cannot be written ({error}): free some space") from error


def _flush(directory: Path) -> None:
    """On the disk, before the name says that it is there."""
    for file in directory.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
