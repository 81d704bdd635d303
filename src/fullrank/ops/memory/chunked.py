"""Scores of queries against a memory, as two numbers a query: all of it, and the part that holds the target.

    s_ti = q_t . k_i                                           over the entries i that query t may see
    every_t = logsumexp_i s_ti,    agreeing_t = logsumexp_{i: x_i = y_t} s_ti          -inf over no entry

queries [B, T, D], keys [B, L, D], tokens [B, L] (x_i; negative: nobody sees the entry), targets [B, T]. Query
t sees entry i where i < first + t, and where i >= first + t - window if there is a window; with first=None it
sees all; a query whose `asking` [B, T] is False sees none. The T x L scores exist a tile at a time, forward
and once more backward, where

    ds_ti = g_every exp(s_ti - every_t) + g_agreeing 1[x_i = y_t] exp(s_ti - agreeing_t).

Products are in fp32 (fp64 for fp64 inputs), under autocast too: eight bits of a score of 50 are 0.2 nats.
`reference` is the definition, which the tests hold this against.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fullrank.errors import FullrankError
from fullrank.ops.mixture.reference import compute_dtype
from fullrank.ops.workspace import default_workspace

# Buffers as large as a tile of scores that live at once.
COPIES = 6
MOST_QUERIES = 128
"""Queries of a tile: with more, more of the future is scored for nothing."""


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
    queries: Tensor,
    keys: Tensor,
    tokens: Tensor,
    targets: Tensor,
    *,
    first: int | None = 0,
    window: int | None = None,
    asking: Tensor | None = None,
    workspace: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(agreeing, every) [B, T] each, differentiable in queries and keys; a target < 0 agrees with nothing."""
    _check(queries, keys, tokens, targets, window)
    budget = default_workspace(queries.device) if workspace is None else workspace
    agreeing, every = _Memory.apply(queries, keys, tokens, targets, asking, View(first, window), budget)
    return agreeing, every


def reference(
    queries: Tensor,
    keys: Tensor,
    tokens: Tensor,
    targets: Tensor,
    *,
    first: int | None = 0,
    window: int | None = None,
    asking: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, with all scores at once."""
    _check(queries, keys, tokens, targets, window)
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


class _Memory(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        tokens: Tensor,
        targets: Tensor,
        asking: Tensor | None,
        view: View,
        budget: int,
    ) -> tuple[Tensor, Tensor]:
        wide = compute_dtype(queries.dtype)
        every = queries.new_full(queries.shape[:2], -torch.inf, dtype=wide)
        agreeing = every.clone()
        for at, scores, seen, agreed in _tiles(queries, keys, tokens, targets, asking, view, budget):
            rows = at[:2]
            scores = scores.masked_fill_(~seen, -torch.inf)
            every[rows] = torch.logaddexp(every[rows], scores.logsumexp(-1))
            agreeing[rows] = torch.logaddexp(
                agreeing[rows], scores.masked_fill_(~agreed, -torch.inf).logsumexp(-1)
            )
        ctx.save_for_backward(queries, keys, tokens, targets, asking, agreeing, every)
        ctx.view, ctx.budget = view, budget
        return agreeing, every

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_agreeing: Tensor, g_every: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, tokens, targets, asking, agreeing, every = ctx.saved_tensors
        plan = (ctx.view, ctx.budget)
        wide = compute_dtype(queries.dtype)
        d_queries = torch.zeros_like(queries, dtype=wide) if ctx.needs_input_grad[0] else None
        d_keys = torch.zeros_like(keys, dtype=wide) if ctx.needs_input_grad[1] else None
        # Where nothing was summed no score is seen, and any finite number will do.
        agreeing, every = (torch.where(torch.isneginf(one), 0.0, one) for one in (agreeing, every))
        for at, scores, seen, agreed in _tiles(queries, keys, tokens, targets, asking, *plan):
            batch, rows, entries = at
            here = (batch, rows)
            scores = scores.masked_fill_(~seen, -torch.inf)
            share = (scores - every[here][..., None]).exp_().mul_(g_every[here][..., None])
            scores = scores.masked_fill_(~agreed, -torch.inf).sub_(agreeing[here][..., None]).exp_()
            share = share.addcmul_(scores, g_agreeing[here][..., None])
            if d_queries is not None:
                d_queries[here] += _product(share, keys[batch, entries].to(wide))
            if d_keys is not None:
                d_keys[batch, entries] += _product(share.transpose(1, 2), queries[here].to(wide))
        return (
            None if d_queries is None else d_queries.to(queries.dtype),
            None if d_keys is None else d_keys.to(keys.dtype),
            *[None] * 5,
        )


def _tiles(
    queries: Tensor,
    keys: Tensor,
    tokens: Tensor,
    targets: Tensor,
    asking: Tensor | None,
    view: View,
    budget: int,
) -> Iterator[tuple[tuple[slice, slice, slice], Tensor, Tensor, Tensor]]:
    """(batch, queries, entries), scores [b, t, m], which are seen, and which of these hold the target."""
    B, T, _ = queries.shape
    L = keys.shape[1]
    wide = compute_dtype(queries.dtype)
    most = max(1, budget // (COPIES * wide.itemsize))
    time = max(1, min(T, MOST_QUERIES))
    columns = max(1, min(L, most // time))
    time = max(1, min(time, most // columns))
    batch = max(1, most // (time * columns))
    for b in range(0, B, batch):
        group = slice(b, min(b + batch, B))
        for t in range(0, T, time):
            rows = slice(t, min(t + time, T))
            low, high = view.bounds(rows.start, rows.stop, L)
            asked = queries[group, rows].to(wide)
            for m in range(low, high, columns):
                entries = slice(m, min(m + columns, high))
                held = tokens[group, entries]
                seen = view.mask(rows, entries, held)
                seen = seen if asking is None else seen & asking[group, rows, None]
                agreed = seen & (held[:, None, :] == targets[group, rows, None])
                scores = _product(asked, keys[group, entries].to(wide).transpose(1, 2))
                yield (group, rows, entries), scores, seen, agreed


def _product(left: Tensor, right: Tensor) -> Tensor:
    with torch.autocast(left.device.type, enabled=False):
        return torch.matmul(left, right)


def _check(queries: Tensor, keys: Tensor, tokens: Tensor, targets: Tensor, window: int | None) -> None:
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
