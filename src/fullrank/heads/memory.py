"""What a cache head remembers of a sequence, and its scores by token.

    entry i = (key of the state h_i, x_{i+1})        h_i is the state that predicted x_{i+1}
    position t sees the entries i < t, and with a window the last of these alone

The token of an entry is the next input id, so what is remembered comes from `context` and never from labels,
and the last state of a segment waits for the next segment's first id. A `Memory` is the keys and the ids of
the positions before a segment; a negative id is padding: it remembers nothing, and an entry with padding on
either side is a hole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads.pieces import cut
from fullrank.ops.arguments import compute_dtype
from fullrank.ops.memory.reference import View


@dataclass(frozen=True, kw_only=True, eq=False)
class Memory:
    """Positions before a segment."""

    keys: Tensor
    """[batch, M, D], detached."""
    ids: Tensor
    """[batch, M] the input ids under them; negative: padding."""

    def __post_init__(self) -> None:
        if self.keys.ndim != 3 or self.ids.shape != self.keys.shape[:2]:
            raise FullrankError(
                f"a memory has keys of shape {list(self.keys.shape)} and ids of {list(self.ids.shape)}, "
                "expected [batch, M, D] and [batch, M]"
            )

    def __len__(self) -> int:
        return self.ids.shape[1]

    def last(self, positions: int | None) -> Memory:
        """The last so many positions, or all."""
        if positions is None or positions >= len(self):
            return self
        start = len(self) - positions
        return Memory(keys=self.keys[:, start:], ids=self.ids[:, start:])

    def select(self, rows: Tensor) -> Memory:
        """These rows of the batch, as a beam search picks its beams."""
        return Memory(keys=self.keys[rows], ids=self.ids[rows])


@dataclass(frozen=True, kw_only=True, eq=False)
class Remembered:
    """The queries of a segment and all entries that they may see."""

    queries: Tensor
    """[batch, T, D], over the temperature."""
    asking: Tensor
    """[batch, T] False under padding."""
    keys: Tensor
    """[batch, M + T, D]"""
    tokens: Tensor
    """[batch, M + T] the token of each entry; -1 where there is none."""
    view: View

    def scores(self, batch: slice, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Of some queries: scores [b, t, m], which are seen, and the tokens [b, m] of the m entries."""
        wide = compute_dtype(self.queries.dtype)
        low, high = self.view.bounds(rows.start, rows.stop, self.keys.shape[1])
        entries = slice(low, high)
        held = self.tokens[batch, entries]
        with torch.autocast(self.keys.device.type, enabled=False):
            found = torch.matmul(
                self.queries[batch, rows].to(wide), self.keys[batch, entries].to(wide).transpose(1, 2)
            )
        seen = self.view.mask(rows, entries, held) & self.asking[batch, rows, None]
        return found, seen, held


def rectangles(batch: int, time: int, tokens: int) -> list[tuple[slice, slice]]:
    """A grid [batch, time] in pieces of at most so many tokens: parts of one row, or several whole rows."""
    if tokens < time:
        return [(slice(row, row + 1), part) for row in range(batch) for part in cut(time, tokens)]
    return [(rows, slice(0, time)) for rows in cut(batch, max(1, tokens // max(time, 1)))]


def entry_tokens(ids: Tensor) -> Tensor:
    """[batch, L] of input ids [batch, L]: what followed each position, -1 where that is nothing."""
    following = torch.nn.functional.pad(ids, (0, 1), value=-1)[:, 1:]
    return following.masked_fill((following < 0) | (ids < 0), -1)


def by_token(scores: Tensor, seen: Tensor, tokens: Tensor, vocab: int) -> Tensor:
    """logsumexp of scores [n, m] over the entries with each token [n, m]: [n, V], -inf where none is."""
    column = tokens.clamp_min(0)
    hidden = scores.detach().masked_fill(~seen, -torch.inf)
    peak = scores.new_full((scores.shape[0], vocab), -torch.inf).scatter_reduce_(1, column, hidden, "amax")
    # A peak of its own for each token: under one for all, what lies 100 nats below it would be lost.
    above = torch.where(seen, scores - peak.gather(1, column), -torch.inf)
    total = torch.zeros_like(peak).scatter_add(1, column, above.exp())
    there = total > 0
    return torch.where(there, torch.where(there, total, 1.0).log() + peak, -torch.inf)


def add_by_token(base: Tensor, scores: Tensor, seen: Tensor, tokens: Tensor) -> Tensor:
    """`either(base, by_token(scores, ...))`, written into base [n, V]; without gradients.

    A memory holds far fewer tokens than there are: only their columns are worked on, so that a step of
    decoding pays little for the width of the vocabulary.
    """
    column = tokens.clamp_min(0)
    hidden = scores.masked_fill(~seen, -torch.inf)
    peak = torch.full_like(base, -torch.inf).scatter_reduce_(1, column, hidden.to(base.dtype), "amax")
    peak = peak.gather(1, column)
    above = torch.where(seen, scores - peak, -torch.inf).exp().to(base.dtype)
    total = torch.zeros_like(base).scatter_add_(1, column, above).gather(1, column)
    # Entries of one token have one number, those of it that are not seen too: whichever is written last.
    found = torch.where(total > 0, total.log() + peak, -torch.inf)
    return base.scatter_(1, column, either(base.gather(1, column), found))


def either(first: Tensor, second: Tensor) -> Tensor:
    """logaddexp, without NaN in the gradient where both are -inf."""
    neither = torch.isneginf(first) & torch.isneginf(second)
    found = torch.logaddexp(torch.where(neither, 0.0, first), second)
    return torch.where(neither, -torch.inf, found)
