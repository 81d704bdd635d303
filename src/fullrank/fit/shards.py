"""Files of states: written whole or not at all, and believed only if they are what they should be."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from torch import Tensor

from fullrank.errors import FullrankError


def read(file: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor] | None:
    """The states of a file, if it is whole and what it should be."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not file.is_file():
        return None
    try:
        found = load_file(file)
    except (SafetensorError, OSError, ValueError):
        return None
    if any(name not in found or tuple(found[name].shape) != shape for name, shape in shapes.items()):
        return None
    return found if all(bool(value.isfinite().all()) for value in found.values()) else None


def write(file: Path, found: dict[str, Tensor], flag: str) -> None:
    """Whole or not at all; `flag` is what chooses the directory, for the remedy."""
    from safetensors import SafetensorError
    from safetensors.torch import save

    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as target:
            target.write(save(found))
            target.flush()
            os.fsync(target.fileno())
        os.replace(partial, file)
    except (OSError, SafetensorError) as error:
        raise FullrankError(
            f"states cannot be kept in {file.parent} ({error}): free some space or choose another {flag}"
        ) from error
    finally:
        # Where the directory could not be made there is nothing to remove, and that is another OSError.
        with contextlib.suppress(OSError):
            partial.unlink()
