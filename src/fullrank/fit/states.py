"""What enters an upgraded model's head, collected once and kept in files for the next run.

Text becomes windows as in `fit.collect`; a window's tokens but the first are predicted. Kept are, for
every predicted token,

    states   one [windows, time, H] a state that the head reads, the last layer first
    ids      [windows, time] the input ids under the states

in one file a batch of windows, written under another name and renamed when whole. A killed run leaves whole
files only, and the next one with the same model, text and options goes on where it stopped. Heads that read
the same states share the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.fit import shards
from fullrank.fit.collect import Windows
from fullrank.fit.estimates import BLOCK
from fullrank.models.loading import quiet

FORMAT = 1
"""Of the files; raised when their meaning changes."""
KEY_LENGTH = 24
LEAST_TOKENS = 32
"""Tokens that each part of a text must have."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Some windows of a text, as a head sees them."""

    states: tuple[Tensor, ...]
    """[windows, time, H] each, fp32, the last layer first."""
    targets: Tensor
    """[windows, time] the tokens that followed."""
    ids: Tensor
    """[windows, time] the tokens under the states."""
    blocks: Tensor
    """[windows, time] block of text, for intervals."""

    def __len__(self) -> int:
        return self.targets.numel()

    def to(self, device: torch.device | str) -> Part:
        return Part(
            states=tuple(state.to(device) for state in self.states),
            targets=self.targets.to(device),
            ids=self.ids.to(device),
            blocks=self.blocks.to(device),
        )

    def windows(self, chosen: Tensor | slice) -> Part:
        return Part(
            states=tuple(state[chosen] for state in self.states),
            targets=self.targets[chosen],
            ids=self.ids[chosen],
            blocks=self.blocks[chosen],
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """A text in three: to fit on, to choose on, and to judge on, in the text's order."""

    fit: Part
    choose: Part
    held_out: Part


class _Reached(Exception):  # noqa: N818  (a signal, not an error)
    """The states are here: the head is not needed."""


@torch.no_grad()
def head_states(model: Any, ids: Tensor) -> tuple[Tensor, ...]:
    """What enters the head for ids [batch, time]: [batch, time, H] each, fp32, the last layer first."""
    found: list[tuple[Tensor, ...]] = []

    def catch(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        hidden = inputs[0] if inputs else keywords["hidden"]
        states = (hidden,) if isinstance(hidden, Tensor) else tuple(hidden)
        found.append(tuple(state.detach().float().reshape(*ids.shape, -1) for state in states))
        raise _Reached

    handle = model.lm_head.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        with contextlib.suppress(_Reached), quiet():
            model(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
    if not found:
        raise FullrankError(
            f"{type(model).__name__} never calls its head, so its states cannot be found: expected a model "
            "made by fullrank.upgrade.upgrade"
        )
    return found[-1]


def collect(
    model: Any,
    windows: Windows,
    directory: Path,
    *,
    fingerprint: str,
    memory: int,
    batch: int = 4,
    progress: Callable[[float], None] = lambda share: None,
) -> Part:
    """Run the body over the windows, or read what an earlier run has kept in `directory`."""
    ids, head = windows.ids, model.lm_head
    largest = int(ids.max())
    if largest >= head.vocab:
        raise FullrankError(
            f"the text has token {largest}, but the output matrix has {head.vocab} rows: the tokenizer "
            "belongs to another model"
        )
    count, length = ids.shape
    needed = 4 * count * (length - 1) * sum(head.state_widths)
    if needed > memory:
        raise FullrankError(
            f"states of {count * length} tokens take {needed / 2**30:.1f} GiB, more than --memory "
            f"{memory / 2**30:.1f} GiB: take fewer --tokens or allow more"
        )
    where = directory / _key(model, windows, fingerprint)
    device = next(model.parameters()).device
    kept = [torch.empty(count, length - 1, width) for width in head.state_widths]
    for start in range(0, count, batch):
        part = slice(start, start + batch)
        file = where / f"{start:06d}.safetensors"
        shapes = [(len(ids[part]), length - 1, width) for width in head.state_widths]
        found = _read(file, shapes)
        if found is None:
            found = [state[:, :-1].cpu().contiguous() for state in head_states(model, ids[part].to(device))]
            if not all(bool(state.isfinite().all()) for state in found):
                raise FullrankError(
                    f"the model's states hold NaN or infinity in {model.dtype}: run it with --dtype float32, "
                    "or check its weights"
                )
            _write(file, found)
        for whole, piece in zip(kept, found, strict=True):
            whole[part] = piece
        progress(min(1.0, (start + batch) / count))
    number = torch.arange(count)[:, None].expand(count, length - 1)
    position = torch.arange(length - 1).expand(count, length - 1)
    return Part(
        states=tuple(kept),
        targets=ids[:, 1:].contiguous(),
        ids=ids[:, :-1].contiguous(),
        blocks=number * -(-(length - 1) // BLOCK) + position // BLOCK,
    )


SHARES = (4, 1, 2)
"""Of a text, in sevenths: to fit on, to choose on and to judge on."""


def thirds(count: int) -> tuple[slice, slice, slice]:
    """Of so many windows: those to fit on, to choose on and to judge on, in their order."""
    first = max(1, count * SHARES[0] // sum(SHARES))
    second = max(first + 1, count * sum(SHARES[:2]) // sum(SHARES))
    return slice(0, first), slice(first, second), slice(second, count)


def split(whole: Part) -> Parts:
    """A text in three parts."""
    parts = [whole.windows(one) for one in thirds(len(whole.targets))]
    if min(map(len, parts)) < LEAST_TOKENS:
        raise FullrankError(
            f"{len(whole)} tokens are too few to fit on one part and judge on another: give more text"
        )
    return Parts(fit=parts[0], choose=parts[1], held_out=parts[2])


def _key(model: Any, windows: Windows, fingerprint: str) -> str:
    """A name for what the states depend on, and nothing else."""
    head, config = model.lm_head, model.config
    facts = [FORMAT, fingerprint, str(model.dtype), list(head.state_widths), config.logit_scale]
    digest = hashlib.sha256(json.dumps(facts).encode("utf8"))
    digest.update(windows.ids.numpy().tobytes())
    return digest.hexdigest()[:KEY_LENGTH]


def _names(number: int) -> list[str]:
    return [f"state{place}" for place in range(number)]


def _read(file: Path, shapes: Sequence[tuple[int, ...]]) -> list[Tensor] | None:
    """The states of a file, if it is whole and what it should be."""
    names = _names(len(shapes))
    found = shards.read(file, dict(zip(names, shapes, strict=True)))
    return None if found is None else [found[name] for name in names]


def _write(file: Path, states: list[Tensor]) -> None:
    shards.write(file, dict(zip(_names(len(states)), states, strict=True)), "--cache")
