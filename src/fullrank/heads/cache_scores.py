"""The V-wide log-probabilities of a cache head, a piece of tokens at a time.

    log P(w) = logaddexp(log p_base(w), m_w - l) - log(1 + exp(m - l))

with l the base's normaliser, m_w the logsumexp of the memories that hold w and m of them all, memory weight
included. A piece lies in one sequence or is several whole ones: one batched product scores its memory.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from fullrank.heads.base import Head
from fullrank.heads.memory import Remembered, add_by_token, by_token, either, rectangles
from fullrank.heads.pieces import piece_tokens
from fullrank.heads.rows import RowHead
from fullrank.heads.store import Store, nearest
from fullrank.ops.arguments import compute_dtype
from fullrank.ops.memory.reference import masked_logsumexp
from fullrank.ops.mixture.reference import bent_scores


class CacheScores:
    """Log-probabilities of all tokens of a batch, or of those at flat positions `index`, which rise."""

    def __init__(
        self,
        *,
        base: Head,
        decoder: nn.Linear,
        normalised: bool,
        memory_weight: Tensor,
        remembered: Remembered,
        store: Store | None,
        neighbours: int,
        states: list[Tensor],
        context: Tensor,
        index: Tensor | None,
    ) -> None:
        self.base, self.decoder, self.normalised = base, decoder, normalised
        self.memory_weight, self.remembered = memory_weight, remembered
        self.store, self.neighbours = store, neighbours
        (B, self.time, D), V = remembered.queries.shape, base.vocab
        # A token holds the base's scores about four times, those by token six times, and the memory's.
        columns = (4 * getattr(base, "components", 1) + 6) * V + 6 * remembered.keys.shape[1]
        columns += neighbours * (6 + 3 * D)
        grid = rectangles(B, self.time, piece_tokens(context.device, columns))
        self.index = torch.arange(B * self.time, device=context.device) if index is None else index
        stops = torch.tensor([batch.start * self.time + self._stop(batch, rows) for batch, rows in grid])
        ends = torch.searchsorted(self.index, stops.to(self.index.device)).tolist()
        self.pieces: list[slice] = []
        self.places: dict[int, tuple[slice, slice]] = {}
        """The rectangle [batch, time] that a piece lies in, by the piece's first token."""
        for start, stop, place in zip([0, *ends[:-1]], ends, grid, strict=True):
            if stop > start:
                self.pieces.append(slice(start, stop))
                self.places[start] = place
        if not self.pieces:
            self.pieces, self.places = [slice(0, 0)], {0: (slice(0, 0), slice(0, 0))}
        self.states = [state.flatten(0, -2) for state in states]
        # A base that reads time is asked once, for all of it.
        self.whole = cast(Tensor, base(states, context=context)).flatten(0, -2) if base.reads_time else None

    def _stop(self, batch: slice, rows: slice) -> int:
        return (batch.stop - batch.start - 1) * self.time + rows.stop

    def log_probs(self, piece: slice) -> Tensor:
        """[piece, V], of base and memory."""
        base, normaliser = self._base(piece)
        scores, seen, tokens = self._entries(piece)
        every = masked_logsumexp(scores, seen)
        weight = self.memory_weight.to(every.dtype) - normaliser
        if torch.is_grad_enabled():
            joint = either(base, by_token(scores, seen, tokens, self.base.vocab) + weight[:, None])
        else:
            joint = add_by_token(base, scores + weight[:, None], seen, tokens)
        return joint - torch.logaddexp(torch.zeros_like(every), every + weight)[:, None]

    def memory_log_probs(self, piece: slice) -> Tensor:
        """[piece, V], of the memory alone; -inf where nothing is remembered."""
        scores, seen, tokens = self._entries(piece)
        every = masked_logsumexp(scores, seen)
        found = by_token(scores, seen, tokens, self.base.vocab)
        return found - torch.where(torch.isneginf(every), 0.0, every)[:, None]

    def _entries(self, piece: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Of all that a token of the piece may remember: scores, which are seen, and tokens, [piece, m]."""
        batch, rows = self.places[piece.start]
        scores, seen, tokens = self.remembered.scores(batch, rows)
        chosen = self.index[piece] - (batch.start * self.time + rows.start)
        held = tokens[:, None, :].expand_as(scores)
        scores, seen, held = (one.flatten(0, 1)[chosen] for one in (scores, seen.expand_as(scores), held))
        if self.store is not None:
            queries = self.remembered.queries.flatten(0, 1)[self.index[piece]]
            more, tokens = nearest(self.store, queries, self.neighbours)
            tokens = tokens.masked_fill(~self.remembered.asking.flatten()[self.index[piece], None], -1)
            scores, held = torch.cat([scores, more], 1), torch.cat([held, tokens], 1)
            seen = torch.cat([seen, tokens >= 0], 1)
        return scores, seen, held

    def _base(self, piece: slice) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the base [piece, V], a tensor of its own, and its normaliser [piece]."""
        index, base = self.index[piece], self.base
        if self.whole is not None:
            return self.whole[index], self.whole.new_zeros(len(index))
        states = [state[index] for state in self.states]
        if not isinstance(base, RowHead) or self.normalised:
            found = cast(Tensor, base(states))
            return found, found.new_zeros(len(index))
        rows, log_prior = base._flat_rows(states)
        scores = bent_scores(rows, self.decoder.weight, self.decoder.bias, base.pointwise)
        prior, lse = log_prior.to(compute_dtype(rows.dtype)), torch.logsumexp(scores, 2)
        joint = scores + (prior - lse)[:, :, None]
        if joint.shape[1] == 1:
            return joint[:, 0], lse[:, 0]
        joint = joint.transpose(1, 2)
        return masked_logsumexp(joint, ~torch.isneginf(joint)), torch.logsumexp(prior + lse, 1)
