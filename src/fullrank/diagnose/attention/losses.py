"""What the next-token loss becomes when attention is changed and nothing is retrained.

Two changes, each in every layer and head at once: another normaliser in place of softmax, and only the N
largest weights of every query, as they are, without sharing out the rest. Both say how far this model leans
on what is changed. Neither says what a model trained that way would do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fullrank.diagnose.attention.capture import watched
from fullrank.errors import FullrankError
from fullrank.fit import estimates
from fullrank.fit.estimates import BLOCK
from fullrank.models.anatomy import states
from fullrank.models.attention import replace_normaliser
from fullrank.models.output_layer import OutputLayer
from fullrank.results.attention import AttentionKept
from fullrank.results.estimate import Estimate

TOLERANCE = 0.01
KEPT = (16, 64, 256)
"""Numbers of weights that are tried."""

Progress = Callable[[float], None]


class Losses:
    """Losses of the same tokens under several changes of a model."""

    def __init__(self, model: Any, output: OutputLayer, ids: Tensor, *, limit: int) -> None:
        self.model, self.output, self.ids, self.limit = model, output, ids, limit
        count, length = ids.shape[0], ids.shape[1] - 1
        pieces = -(-length // BLOCK)
        window = torch.arange(count)[:, None].expand(count, length)
        self.blocks = (window * pieces + torch.arange(length) // BLOCK).flatten()
        self.plain = self._run(contextlib.nullcontext())

    @torch.no_grad()
    def _run(self, changed: contextlib.AbstractContextManager[Any]) -> Tensor:
        found = []
        with changed:
            for text in self.ids:
                hidden = states(self.model, text[None].to(self.model.device))[0, :-1].float()
                found.append(self.output.losses(hidden, text[1:].to(hidden.device), self.limit).cpu())
        return torch.cat(found)

    def as_it_is(self) -> Estimate:
        return estimates.mean(self.plain, self.blocks)

    def with_normaliser(self, name: str) -> tuple[Estimate, Estimate]:
        """Loss and its change, with another normaliser in every layer."""
        losses = self._run(replace_normaliser(self.model, name))
        if not losses.isfinite().all():
            raise FullrankError(f"with {name} in place of softmax the loss is no number")
        return estimates.mean(losses, self.blocks), estimates.mean(losses - self.plain, self.blocks)

    def with_largest(self, size: int, memory: int) -> AttentionKept:
        """The change with only the `size` largest weights of every query."""
        rows = torch.zeros(0, dtype=torch.long)
        losses = self._run(watched(self.model, rows, None, memory=memory, keep=size))
        change = estimates.mean(losses - self.plain, self.blocks)
        return AttentionKept(size=size, change=change, relative=change.value / float(self.plain.mean()))


def effective_size(kept: Sequence[AttentionKept]) -> int | None:
    """The least size within the tolerance, if any is."""
    return min((one.size for one in kept if one.relative <= TOLERANCE), default=None)
