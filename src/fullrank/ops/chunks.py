"""A pass goes over its tokens in chunks: which tokens they are, and what a chunk knows of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fullrank.ops.statistics import Statistics, posterior

Index = slice | Tensor


def chunks(targets: Tensor, ignore_index: int | None, size: int) -> Iterator[Index]:
    """Index every counted token, in pieces."""
    positions = None
    if ignore_index is not None:
        counted = targets != ignore_index
        if not bool(counted.all()):
            positions = counted.nonzero()[:, 0]
    return pieces(targets.shape[0], positions, size)


def at(tensor: Tensor, index: Index) -> Tensor:
    """tensor[index], and the tensor itself where that is all of it."""
    if isinstance(index, slice) and index.start == 0 and index.stop == tensor.shape[0]:
        return tensor
    return tensor[index]


def pieces(N: int, positions: Tensor | None, size: int) -> Iterator[Index]:
    """Pieces of the positions, or slices of all N tokens where none are given."""
    if positions is not None:
        # An empty tensor splits into one empty piece, not into none.
        yield from positions.split(size) if positions.numel() else ()
        return
    for start in range(0, N, size):
        yield slice(start, min(start + size, N))


@dataclass
class Chunk:
    """Some whole tokens with all their rows."""

    index: Index
    """Which of all tokens."""
    rows: Tensor
    """[tokens * K, D]"""
    targets: Tensor
    """[tokens * K]"""
    log_prior: Tensor
    """[tokens, K]"""
    weight: Tensor | None
    """[tokens]; None is 1 for every token."""
    late: bool
    """The tokens' factors come with the backward pass: until then every row counts 1."""

    @property
    def in_place(self) -> bool:
        """Whether the tokens lie side by side, so that results can be written where they belong."""
        return isinstance(self.index, slice)

    def upstream(self, tokens: slice, row_nll: Tensor) -> Tensor:
        """g of each row of some tokens: the token's weight times the row's posterior share."""
        if self.late:
            return torch.ones_like(row_nll)
        prior = self.log_prior[tokens]
        _, share = posterior(prior, row_nll.view(prior.shape))
        return self.weigh(tokens, share)

    def weigh(self, tokens: slice, share: Tensor) -> Tensor:
        """The same from posterior shares [tokens, K]."""
        if self.late:
            return torch.ones_like(share).flatten()
        return (share if self.weight is None else share * self.weight[tokens, None]).flatten()

    def entry(self, statistics: Statistics) -> Tensor:
        """What stands at the target: with late factors nothing, `add_own` brings it."""
        return torch.zeros_like(statistics.others) if self.late else statistics.deficit


def rows_at(chunk: Chunk, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Where some rows of a chunk stand among all: the token, and which of its K."""
    K = chunk.log_prior.shape[1]
    token = rows // K
    return token + chunk.index.start if isinstance(chunk.index, slice) else chunk.index[token], rows % K
