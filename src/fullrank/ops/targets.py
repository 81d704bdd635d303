"""Which targets count, found with one look at their values.

Reading a value makes the host wait for a CUDA device, so a call reads two numbers at once: how many targets
no row of W belongs to, and how many are ignored. It asks early and waits late: the first product starts in
between, for all tokens, as if none were ignored. While a CUDA graph is captured nothing can be read. Then
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


def look(targets: Tensor, V: int, ignore_index: int | None) -> Tensor:
    """[2]: how many targets lie outside the vocabulary, and how many are ignored."""
    if targets.is_cuda:
        from fullrank.ops import triton

        if triton.obstacle(targets.device, torch.float32) is None:
            # One launch in place of seven, before the first product can start.
            return triton.look_at_targets(targets, V, ignore_index)
    outside = (targets < 0) | (targets >= V)
    ignored = torch.zeros_like(outside) if ignore_index is None else targets == ignore_index
    return torch.stack([outside, ignored]).sum(1)


# Whether the last call on a CUDA device ignored any token: the next one is likely to do as well.
_ignored_last = False


class Asked:
    """Targets that were looked at; `answer` waits for what was seen.

    On a CUDA device the host can go on launching between the two.
    """

    def __init__(self, targets: Tensor, V: int, ignore_index: int | None) -> None:
        self.targets, self.V, self.ignore_index = targets, V, ignore_index
        self.captured = capturing(targets)
        self._answer: Counted | None = None
        if targets.numel() == 0:
            self._answer = Counted(targets=targets, count=0)
        if self._answer is not None or self.captured:
            return
        self._seen = look(targets, V, ignore_index)
        self._ready: torch.cuda.Event | None = None
        if targets.is_cuda:
            here = torch.empty(2, dtype=torch.int64, pin_memory=True)
            self._seen = here.copy_(self._seen, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(targets.device))

    @property
    def all_expected(self) -> bool:
        """Whether work on all tokens may begin before the answer is known: it is likely to be used."""
        return self.targets.is_cuda and (self.captured or not _ignored_last)

    def answer(self) -> Counted:
        """Raises for a target that no row of W belongs to, naming it."""
        if self._answer is None:
            self._answer = self._captured_answer() if self.captured else self._read_answer()
        return self._answer

    def _captured_answer(self) -> Counted:
        targets = self.targets
        outside = (targets < 0) | (targets >= self.V)
        ignored = torch.zeros_like(outside) if self.ignore_index is None else targets == self.ignore_index
        safe = targets.masked_fill(outside | ignored, 0)
        return Counted(targets=safe, ignored=ignored, wrong=(outside & ~ignored).any())

    def _read_answer(self) -> Counted:
        global _ignored_last
        if self._ready is not None:
            self._ready.synchronize()
        outside, left_out = self._seen.tolist()
        targets, V, ignore_index = self.targets, self.V, self.ignore_index
        # An ignored target is outside as well, unless it is a token's own number.
        if outside - (left_out if ignore_index is not None and not 0 <= ignore_index < V else 0):
            bad = (targets < 0) | (targets >= V)
            if ignore_index is not None:
                bad &= targets != ignore_index
            also = "" if ignore_index is None else f" or ignore_index={ignore_index}"
            raise FullrankError(
                f"target {int(targets[bad][0])} is outside the vocabulary: "
                f"expected 0 <= target < V={V}{also}; check the tokenizer against the head"
            )
        if targets.is_cuda:
            _ignored_last = left_out > 0
        positions, count = None, targets.shape[0] - left_out
        if left_out:
            # Counted tokens first, in their order: `nonzero` would have to be waited for once more.
            ignored = torch.eq(targets, ignore_index if ignore_index is not None else -1)
            positions = torch.argsort(ignored.to(torch.uint8), stable=True)[:count]
        return Counted(targets=targets, positions=positions, count=count)


def count_targets(targets: Tensor, V: int, ignore_index: int | None) -> Counted:
    """Find the targets that count; raise for one that no row of W belongs to, naming it."""
    return Asked(targets, V, ignore_index).answer()


def check_targets(targets: Tensor, V: int, ignore_index: int | None) -> None:
    """Raise for a target that no row of W belongs to, naming it."""
    count_targets(targets, V, ignore_index)
