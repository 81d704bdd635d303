"""What trainings keep for the case that their process dies, one file a training.

While a training runs, its file holds everything that the rest depends on: weights, optimiser, best weights,
and where it is. Once it is done, a file holds its losses, and the best weights where they may be wanted.

Files are written under another name and renamed when whole. Each says which training it is of, as a digest of
all that decides its numbers, and carries checksums. One that is damaged or of another training counts as
none, with a line in the log.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullrank.errors import FullrankError

FORMAT = 2
"""Of the files; raised when their meaning changes."""

Kept = tuple[dict[str, Tensor], dict[str, Any]]

_log = logging.getLogger(__name__)


def digest(*facts: Any) -> str:
    """A name for tensors and plain values that no others have."""
    found = hashlib.sha256(str(FORMAT).encode("utf8"))
    for fact in facts:
        if isinstance(fact, Tensor):
            found.update(_label(fact))
            found.update(_bytes(fact))
        else:
            found.update(json.dumps(fact, sort_keys=True, default=str).encode("utf8") + b"\n")
    return found.hexdigest()


def weights(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def keep(
    file: Path,
    of: str,
    parameters: Mapping[str, Tensor],
    optimiser: Any,
    state: dict[str, Any],
    best: Mapping[str, Tensor],
) -> None:
    """Everything that the rest of a training depends on; `of` is the digest that names it."""
    tensors = {f"now.{name}": parameter.detach() for name, parameter in parameters.items()}
    tensors |= {f"best.{name}": value for name, value in best.items()}
    for number, moments in optimiser.state_dict()["state"].items():
        for name, value in moments.items():
            tensors[f"optimiser.{number}.{name}"] = torch.as_tensor(value).clone()
    _write(file, of, tensors, state)


def resume(
    kept: Kept, parameters: Mapping[str, Tensor], optimiser: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Put parameters and optimiser where a checkpoint has them: its state, and the best weights."""
    tensors, state = kept
    whole = optimiser.state_dict()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"now.{name}"])
    for name, value in tensors.items():
        kind, number, *rest = name.split(".")
        if kind == "optimiser":
            whole["state"].setdefault(int(number), {})[".".join(rest)] = value.clone()
    optimiser.load_state_dict(whole)
    best = {name: tensors[f"best.{name}"].to(parameter.device) for name, parameter in parameters.items()}
    return state, best


def finish(
    file: Path,
    of: str,
    facts: dict[str, Any],
    *,
    losses: Tensor | None = None,
    divergences: Tensor | None = None,
    best: Mapping[str, Tensor] | None = None,
) -> None:
    """The end of a training: what is known of it, losses [tokens] and divergences [tokens] from a teacher
    where it was judged, and the best weights if wanted."""
    judged = {"losses": losses, "divergences": divergences}
    tensors = {name: value for name, value in judged.items() if value is not None}
    tensors |= {f"best.{name}": value for name, value in (best or {}).items()}
    _write(file, of, tensors, {"finished": facts})


def finished(kept: Kept | None) -> dict[str, Any] | None:
    """What is known of a training's end; None where it has not come."""
    return None if kept is None else kept[1].get("finished")


def best_of(kept: Kept) -> dict[str, Tensor]:
    return {name.removeprefix("best."): value for name, value in kept[0].items() if name.startswith("best.")}


def read(file: Path, of: str, *, weights: bool = True) -> Kept | None:
    """What an earlier process kept of the training `of`; None, and a line in the log, where it is no use.

    Without `weights`, those of a training that is done are checked but not held.
    """
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        return None
    try:
        with safe_open(file, "pt") as opened:
            words, check = opened.metadata()["kept"], opened.metadata()["check"]
            if zlib.crc32(words.encode("utf8")) != int(check):
                raise ValueError("checksum")
            facts = json.loads(words)
            if facts["of"] != of:
                _log.warning("%s is of another training and is not used: this one begins anew", file)
                return None
            losses_alone = "finished" in facts["state"] and not weights
            tensors = {}
            for name, expected in facts["checks"].items():
                tensor = opened.get_tensor(name)
                if _check(tensor) != expected:
                    raise ValueError("checksum")
                if not (losses_alone and name.startswith("best.")):
                    tensors[name] = tensor
            return tensors, facts["state"]
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        _log.warning("%s is damaged and is not used: its training begins anew", file)
        return None


def _write(file: Path, of: str, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    checks = {name: _check(tensor) for name, tensor in tensors.items()}
    words = json.dumps({"of": of, "state": state, "checks": checks})
    metadata = {"kept": words, "check": str(zlib.crc32(words.encode("utf8")))}
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial, metadata=metadata)
        with open(partial, "rb") as opened:
            # A rename may reach the disk before the bytes do.
            os.fsync(opened.fileno())
        os.replace(partial, file)
    except (OSError, SafetensorError) as error:
        raise FullrankError(
            f"a checkpoint cannot be kept in {file.parent} ({error}): free space or choose another --cache"
        ) from error
    finally:
        # Where the directory could not be made there is nothing to remove, and that is another OSError.
        with contextlib.suppress(OSError):
            partial.unlink()


def _check(tensor: Tensor) -> int:
    return zlib.crc32(_bytes(tensor), zlib.crc32(_label(tensor)))


def _label(tensor: Tensor) -> bytes:
    return f"{tensor.dtype} {tuple(tensor.shape)}".encode()


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
