"""Softmax-CPR: one softmax whose logits of seen and of likely tokens are made by vectors of their own.

Chang et al. 2023 (2305.12289): C the context part, P the pointer part, R the rerankers. Position t of a
sequence with input ids x_0 .. x_t and states h_0 .. h_t:

    z_v = f_V . w_v + b_v                                            the base
    R:  for each size k in `rerank`, in turn: the k tokens with the highest z get
            z_v <- f_R . w_v + b_v                                   R's of their own, on the z so far
    then for every id v among x_0 .. x_t, over what the rerankers gave:
    C:      z_v <- f_C . w_v + b_v
    P:      z_v <- z_v + mean over i <= t with x_i = v of f_P(t) . f_E(i)
    p = softmax(z)

Every f is a linear map of the state, H -> D, without bias; f_V is the state itself where H = D. This is the
order of the authors' released code: the context part overrides the rerankers, with C the pointer adds to
the context logit and without C to the logit as it stands. f_C and f_R start equal to f_V and f_P at 0, so
that the head starts as plain softmax; f_E starts at f_V / sqrt(D), not near 0 as published, so that f_P has a
gradient. The multi-layer input of the paper ("Mi") is not part of this head.

forward needs context=input_ids [batch, time] with states [batch, time, H]. A negative id is padding: nobody
points at it. Sizes in `rerank` beyond V rerank all V tokens; () switches R off.

Parameters: V D + H D ([H != D] + [C] + 2 [P] + number of rerankers), + V with a bias.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads.base import Head, States, require_positive
from fullrank.heads.confident import score_nll
from fullrank.heads.labels import Labels, Loss
from fullrank.heads.pieces import MOST_TOKENS, CountedTokens, checkpointed, cut, joined, piece_tokens, widened
from fullrank.ops.arguments import compute_dtype


class Pointer(Head):
    name = "pointer"
    needs_context: bool = True

    def __init__(
        self,
        *,
        hidden: int,
        vocab: int,
        width: int | None = None,
        bias: bool = False,
        context: bool = True,
        pointer: bool = True,
        rerank: Sequence[int] = (100, 20),
    ) -> None:
        super().__init__(hidden=hidden, vocab=vocab, width=width, bias=bias)
        sizes = tuple(rerank)
        for size in sizes:
            require_positive(rerank=size)
        if not (context or pointer or sizes):
            raise FullrankError(
                "pointer got every part switched off: leave one of them on, or build 'softmax'"
            )
        self.reads_time = context or pointer
        self.needs_context = context or pointer  # rerankers alone read no ids
        self.asked = sizes

        def linear() -> nn.Linear:
            return nn.Linear(hidden, self.width, bias=False)

        self.base: nn.Module = nn.Identity() if self.width == hidden else linear()
        start = self.base.weight if isinstance(self.base, nn.Linear) else torch.eye(hidden)
        self.rerankers = nn.ModuleList(linear() for _ in sizes)
        self.seen = linear() if context else None
        self.query = linear() if pointer else None
        self.key = linear() if pointer else None
        with torch.no_grad():
            for part in (*self.rerankers, self.seen, self.key):
                if isinstance(part, nn.Linear):
                    part.weight.copy_(start)
            if self.query is not None and self.key is not None:
                self.query.weight.zero_()
                self.key.weight.div_(math.sqrt(self.width))

    def scored(self) -> int:
        """Of all tokens, and of those that each reranker scores again."""
        return self.width * (self.vocab + sum(self.sizes))

    def attended(self, length: int) -> int:
        """Parts C and P, each one product with every position; later ones are masked."""
        parts = (self.seen is not None) + (self.query is not None)
        return parts * self.width * length

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many tokens each reranker scores again."""
        return tuple(min(size, self.vocab) for size in self.asked)

    def _checked(self, hidden: States, targets: Tensor | None, context: Tensor | None) -> list[Tensor]:
        states = super()._checked(hidden, targets, context)
        if not self.needs_context or context is None:
            return states
        if states[0].ndim < 3:
            raise FullrankError(
                f"pointer got states of shape {list(states[0].shape)}, expected [batch, time, H] with "
                "context=input_ids [batch, time]: a token sees the ids of its own sequence alone"
            )
        if context.is_floating_point() or (not context.is_meta and bool((context >= self.vocab).any())):
            raise FullrankError(
                f"pointer got context of {context.dtype} with ids up to {context.max()}, expected whole "
                f"numbers below V={self.vocab} (negative: padding); check the tokenizer against the head"
            )
        return states

    def _log_probs(self, states: list[Tensor], context: Tensor | None) -> Tensor:
        scores = PointerScores(self, states[0], None, context)
        return joined(scores.log_probs, scores.pieces).view(*states[0].shape[:-1], self.vocab)

    def _loss(self, states: list[Tensor], labels: Labels, context: Tensor | None) -> Loss:
        tokens = CountedTokens(labels, self.vocab)
        scores = PointerScores(self, states[0], tokens.index, context)

        def nll(piece: slice) -> Tensor:
            return score_nll(scores(piece), tokens.targets[piece])

        loss = tokens.reduce(checkpointed(nll, scores.pieces))
        return Loss(loss, tokens.statistics(scores.log_probs, scores.pieces) if labels.stats else None)


class PointerScores:
    """Scores of some tokens of a batch, all or those at flat positions `index`, with V-wide work in pieces.

    A piece lies within a stretch of whole sequences, its memory: one product [n, memory] scores all that its
    tokens may point at, and a mask keeps each token to the past of its own sequence.
    """

    def __init__(self, head: Pointer, states: Tensor, index: Tensor | None, context: Tensor | None) -> None:
        flat, time = states.flatten(0, -2), states.shape[-2]
        # A token holds its V scores and those of the memory about eight times, and the rows of W to rerank.
        columns = 8 * (head.vocab + max(time, MOST_TOKENS)) + 3 * sum(head.sizes) * head.width
        size = piece_tokens(states.device, columns)
        span = max(1, size // max(time, 1)) * max(time, 1)
        if index is None:
            counts = [part.stop - part.start for part in cut(flat.shape[0], span)]
            index = torch.arange(flat.shape[0], device=states.device)
        else:
            counts = torch.bincount(index // span).tolist()
        self.pieces: list[slice] = []
        self.memory = {0: slice(0, 0)}
        """The memory of a piece, by the piece's first token."""
        start = 0
        for number, count in enumerate(counts):
            for part in cut(count, size) if count else ():
                self.pieces.append(slice(start + part.start, start + part.stop))
                self.memory[start + part.start] = slice(
                    number * span, min((number + 1) * span, flat.shape[0])
                )
            start += count
        self.pieces = self.pieces or [slice(0, 0)]

        picked = flat[index]
        self.index, self.time = index, time
        self.wide = compute_dtype(states.dtype)
        self.pointwise = head.pointwise
        self.weight = widened(head.decoder.weight)
        self.bias = None if head.decoder.bias is None else widened(head.decoder.bias)
        self.base = head.base(picked)
        self.reranked = [(size, part(picked)) for size, part in zip(head.sizes, head.rerankers, strict=True)]
        self.seen = None if head.seen is None else head.seen(picked)
        self.query = self.key = self.ids = None
        if context is not None and head.needs_context:
            self.ids = context.flatten().long()
            if head.query is not None and head.key is not None:
                # Padding is cut off before the map: what its states hold must not reach a gradient.
                self.query, self.key = head.query(picked), head.key(flat.where(self.ids[:, None] >= 0, 0.0))

    def __call__(self, piece: slice) -> Tensor:
        """z [piece, V]."""
        scores = self._against(self.base[piece], self.weight)
        if self.bias is not None:
            scores = scores + self.bias
        for size, rows in self.reranked:
            chosen = torch.topk(scores.detach(), size, dim=1).indices
            own = nn.functional.embedding(chosen, self.weight).to(rows.dtype)
            again = torch.matmul(own, rows[piece, :, None])[..., 0].to(self.wide)
            scores = scores.scatter(1, chosen, again if self.bias is None else again + self.bias[chosen])
        return self.pointwise(scores if self.ids is None else self._with_context(scores, piece, self.ids))

    def log_probs(self, piece: slice) -> Tensor:
        return torch.log_softmax(self(piece), dim=1)

    def _against(self, rows: Tensor, others: Tensor) -> Tensor:
        return torch.matmul(rows, others.to(rows.dtype).t()).to(self.wide)

    def _with_context(self, scores: Tensor, piece: slice, ids: Tensor) -> Tensor:
        """Give the ids that each token has seen their own logits: parts C and P."""
        memory = self.memory[piece.start]
        now, then = self.index[piece, None], torch.arange(memory.start, memory.stop, device=ids.device)
        there = ids[memory]
        past = (then <= now) & (then >= now // self.time * self.time) & (there >= 0)
        # What is not in the past adds 0 to some column, so that no id serves as a sink.
        column = there.clamp_min(0)
        empty = torch.zeros_like(scores)
        count = empty.index_add(1, column, past.to(scores.dtype))
        found = scores.new_zeros(past.shape)
        if self.seen is not None:
            found = found + self._against(self.seen[piece], self.weight[column])
        if self.query is not None and self.key is not None:
            found = found + self._against(self.query[piece], self.key[memory])
        mean = empty.index_add(1, column, found.masked_fill(~past, 0.0)) / count.clamp_min(1.0)
        if self.seen is None:
            return scores + mean
        return torch.where(count > 0, mean if self.bias is None else mean + self.bias, scores)
