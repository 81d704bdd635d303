"""`reference.py` in tiles: the T x L scores exist a tile at a time, forward and once more backward, where

ds_ti = g_every exp(s_ti - every_t) + g_agreeing 1[x_i = y_t] exp(s_ti - agreeing_t).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fullrank.ops.arguments import compute_dtype
from fullrank.ops.memory.reference import View, check_memory
from fullrank.ops.workspace import workspace_of

COPIES = 6  # Buffers as large as a tile of scores that live at once.
MOST_QUERIES = 128  # Of a tile: with more, more of the future is scored for nothing.


def memory_logsumexp(
    queries: Tensor, keys: Tensor, tokens: Tensor, targets: Tensor, *, first: int | None = 0,
    window: int | None = None, asking: Tensor | None = None, workspace: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(agreeing, every) [B, T] each, differentiable in queries and keys; a target < 0 agrees with nothing."""
    check_memory(queries, keys, tokens, targets, window)
    budget = workspace_of(workspace, queries.device)
    agreeing, every = _Memory.apply(queries, keys, tokens, targets, asking, View(first, window), budget)
    return agreeing, every


class _Memory(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, tokens: Tensor, targets: Tensor, asking: Tensor | None,
        view: View, budget: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
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
    queries: Tensor, keys: Tensor, tokens: Tensor, targets: Tensor, asking: Tensor | None, view: View,
    budget: int,
) -> Iterator[tuple[tuple[slice, slice, slice], Tensor, Tensor, Tensor]]:  # fmt: skip
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
