"""Which targets count, found with one look at their values.

Reading values makes the host wait for a CUDA device, so the targets are copied to it once, and it does the
looking. Where the last calls ignored no token, all the work is launched as if this one did not either, with
the copy behind the first product: the device never waits for the host, and what was seen decides whether the
work is done again.

While a CUDA graph is captured nothing can be read. Then every token goes through the products, an ignored one
with weight 0 (its rows must be finite), and a target outside the vocabulary makes the loss NaN instead of an
error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.ops.later import Later


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


# Calls since one ignored a token: after so many the next one is expected to ignore none.
FEW_CALLS = 4
_calls_since = FEW_CALLS


class Asked:
    """Targets that will be looked at: `answer` waits for them, and for what was launched before `fetch`."""

    def __init__(self, targets: Tensor, V: int, ignore_index: int | None) -> None:
        self.targets, self.V, self.ignore_index = targets, V, ignore_index
        self.captured = capturing(targets)
        self._answer: Counted | None = None
        if targets.numel() == 0:
            self._answer = Counted(targets=targets, count=0)
        self._coming: Later | None = None

    @property
    def all_expected(self) -> bool:
        """Whether work on all tokens may begin before the answer is known: it is likely to be used."""
        return not self.captured and _calls_since >= FEW_CALLS

    def expected(self) -> Counted:
        """The answer that is likely; targets outside the vocabulary are still among them."""
        return Counted(targets=self.targets, count=self.targets.shape[0])

    def answer(self) -> Counted:
        """Raises for a target that no row of W belongs to, naming it."""
        if self._answer is None:
            self._answer = self._captured_answer() if self.captured else self._read_answer()
        return self._answer

    def fetch(self) -> None:
        """Let the targets come to the host."""
        if self._answer is None and self._coming is None and not self.captured:
            self._coming = Later(self.targets)

    def _captured_answer(self) -> Counted:
        targets = self.targets
        outside = (targets < 0) | (targets >= self.V)
        ignored = torch.zeros_like(outside) if self.ignore_index is None else targets == self.ignore_index
        safe = targets.masked_fill(outside | ignored, 0)
        return Counted(targets=safe, ignored=ignored, wrong=(outside & ~ignored).any())

    def _read_answer(self) -> Counted:
        global _calls_since
        targets, V, ignore_index = self.targets, self.V, self.ignore_index
        self.fetch()
        assert self._coming is not None
        here, left_out = self._coming.read(), 0
        least, most = (int(end) for end in here.aminmax())
        if ignore_index is not None and least <= ignore_index <= most:
            left_out = int((here == ignore_index).sum())
        if least < 0 or most >= V:
            bad = (here < 0) | (here >= V)
            if ignore_index is not None:
                bad &= here != ignore_index
            if bool(bad.any()):
                also = "" if ignore_index is None else f" or ignore_index={ignore_index}"
                raise FullrankError(
                    f"target {int(here[bad][0])} is outside the vocabulary: "
                    f"expected 0 <= target < V={V}{also}; check the tokenizer against the head"
                )
        _calls_since = 0 if left_out else _calls_since + 1
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
