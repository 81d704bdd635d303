"""Which targets count, found with one look at their values.

Reading a value makes the host wait for a CUDA device, so a call reads two numbers at once: how many targets
no row of W belongs to, and how many are ignored. While a CUDA graph is captured nothing can be read. Then
every token goes through the products, an ignored one with weight 0 (its rows must be finite), and a target
outside the vocabulary makes the loss NaN instead of an error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullrank.errors import FullrankError


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The targets of one call."""

    targets: Tensor
    """[N], safe to index with wherever `positions` points."""
    positions: Tensor | None = None
    """Of the tokens that count; None: all of them go through the products."""
    count: int | None = None
    """How many count; None while a graph is captured."""
    ignored: Tensor | None = None
    """[N], only while a graph is captured."""
    wrong: Tensor | None = None
    """Whether any target is outside the vocabulary, only while a graph is captured."""

    def blank(self, values: Tensor, filling: float) -> Tensor:
        """values [N, ...] with the filling where a token is ignored and yet went through the products."""
        if self.ignored is None or values.shape[0] != self.ignored.shape[0]:
            return values
        return values.masked_fill(self.ignored.view(-1, *[1] * (values.ndim - 1)), filling)

    def spoil(self, loss: Tensor) -> Tensor:
        """NaN where a target is outside the vocabulary and nobody could be told."""
        return loss if self.wrong is None else torch.where(self.wrong, torch.nan, loss)


def capturing(tensor: Tensor) -> bool:
    """Whether the work on the tensor's device is being recorded into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def count_targets(targets: Tensor, V: int, ignore_index: int | None) -> Counted:
    """Find the targets that count; raise for one that no row of W belongs to, naming it."""
    if targets.numel() == 0:
        return Counted(targets=targets, count=0)
    outside = (targets < 0) | (targets >= V)
    ignored = torch.zeros_like(outside) if ignore_index is None else targets == ignore_index
    bad = outside & ~ignored
    if capturing(targets):
        safe = targets.masked_fill(outside | ignored, 0)
        return Counted(targets=safe, ignored=ignored, wrong=bad.any())
    wrong, left_out = torch.stack([bad.sum(), ignored.sum()]).tolist()
    if wrong:
        first = int(targets[bad][0])
        also = "" if ignore_index is None else f" or ignore_index={ignore_index}"
        raise FullrankError(
            f"target {first} is outside the vocabulary: "
            f"expected 0 <= target < V={V}{also}; check the tokenizer against the head"
        )
    count = targets.shape[0] - left_out
    positions = None
    if left_out:
        # Counted tokens first, in their order: `nonzero` would have to be waited for once more.
        positions = torch.argsort(ignored.to(torch.uint8), stable=True)[:count]
    return Counted(targets=targets, positions=positions, count=count)


def check_targets(targets: Tensor, V: int, ignore_index: int | None) -> None:
    """Raise for a target that no row of W belongs to, naming it."""
    count_targets(targets, V, ignore_index)
