"""Scores of queries against a memory, as two numbers a query: all of it, and the part that holds the target.

    s_ti = q_t . k_i                                           over the entries i that query t may see
    every_t = logsumexp_i s_ti,    agreeing_t = logsumexp_{i: x_i = y_t} s_ti          -inf over no entry

queries [B, T, D], keys [B, L, D], tokens [B, L] (x_i; negative: nobody sees the entry), targets [B, T]. Query
t sees entry i where i < first + t, and where i >= first + t - window if there is a window; with first=None it
sees all; a query whose `asking` [B, T] is False sees none.

Products are in fp32 (fp64 for fp64 inputs), under autocast too: eight bits of a score of 50 are 0.2 nats.
This is the definition, with all scores at once; `chunked.py` makes the same a tile at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.ops.arguments import compute_dtype


class View(NamedTuple):
    """Which entries a query sees."""

    first: int | None
    """The place of the first query among the entries; None: every query sees every entry."""
    window: int | None
    """How many entries back a query sees; None: all."""

    def bounds(self, start: int, stop: int, entries: int) -> tuple[int, int]:
        """Entries that any of the queries start .. stop sees."""
        if self.first is None:
            return 0, entries
        low = 0 if self.window is None else max(0, self.first + start - self.window)
        high = min(entries, self.first + stop - 1)
        return min(low, high), max(high, 0)

    def mask(self, queries: slice, entries: slice, tokens: Tensor) -> Tensor:
        """[B, t, m] whether each query of a tile sees each entry; tokens [B, m]."""
        there = (tokens >= 0)[:, None, :]
        if self.first is None:
            return there.expand(-1, queries.stop - queries.start, -1)
        now = torch.arange(queries.start, queries.stop, device=tokens.device)[:, None] + self.first
        then = torch.arange(entries.start, entries.stop, device=tokens.device)
        seen = then < now
        if self.window is not None:
            seen &= then >= now - self.window
        return there & seen


def memory_logsumexp(
    queries: Tensor, keys: Tensor, tokens: Tensor, targets: Tensor, *, first: int | None = 0,
    window: int | None = None, asking: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition, with all scores at once."""
    check_memory(queries, keys, tokens, targets, window)
    wide = compute_dtype(queries.dtype)
    scores = torch.einsum("btd,bld->btl", queries.to(wide), keys.to(wide))
    seen = View(first, window).mask(slice(0, queries.shape[1]), slice(0, keys.shape[1]), tokens)
    seen = seen if asking is None else seen & asking[:, :, None]
    agreed = seen & (tokens[:, None, :] == targets[:, :, None])
    return masked_logsumexp(scores, agreed), masked_logsumexp(scores, seen)


def masked_logsumexp(scores: Tensor, mask: Tensor) -> Tensor:
    """logsumexp over the last axis where the mask is True; -inf, and no gradient, where it never is."""
    some = mask.any(-1)
    kept = torch.where(mask, scores, -torch.inf)
    # Over no entry the derivative of logsumexp is inf - inf.
    found = torch.logsumexp(torch.where(some[..., None], kept, 0.0), dim=-1)
    return torch.where(some, found, -torch.inf)


def check_memory(queries: Tensor, keys: Tensor, tokens: Tensor, targets: Tensor, window: int | None) -> None:
    if queries.ndim != 3 or keys.ndim != 3 or keys.shape[::2] != queries.shape[::2]:
        raise FullrankError(
            f"queries have shape {list(queries.shape)} and keys {list(keys.shape)}, expected [B, T, D] and "
            "[B, L, D] with one B and one D"
        )
    if tokens.shape != keys.shape[:2] or targets.shape != queries.shape[:2]:
        raise FullrankError(
            f"tokens have shape {list(tokens.shape)} and targets {list(targets.shape)}, expected "
            f"{list(keys.shape[:2])}, one a key, and {list(queries.shape[:2])}, one a query"
        )
    if tokens.is_floating_point() or targets.is_floating_point():
        raise FullrankError(
            f"tokens are {tokens.dtype} and targets {targets.dtype}, expected whole numbers: token ids"
        )
    if window is not None and window < 1:
        raise FullrankError(f"window={window} is impossible: expected at least 1 entry, or None for all")
