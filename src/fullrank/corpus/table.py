"""Four tables of next-token distributions from one table of counts, each as what its Gram matrix needs.

With counts k[c, v] of token v after context c, n[c] = Σ_v k[c, v] and C contexts, the row of context c is

    probability   k / n               the construction of Godey et al. 2024 (2404.07647): every context equal
    weighted      k / sqrt(n)         sqrt(n) times the distribution: every token of the text counts the same
    frequent      k / n where n >= m  only contexts that were seen at least m times
    log           log p less its mean over all V tokens, with p = (k + a u) / (n + a)

u is the smoothed unigram distribution (N_v + 1) / (N + V), and a the weight of this Dirichlet prior, in
tokens. Interpolation with the unigram and not a constant added to all counts: after a context that was seen
twice, "the" is still likelier than a word that occurs once in the corpus, and a table that denies that
measures the smoothing. a is the one that predicts best when each token is left out of its own context's
counts,

    a = argmax Σ k log((k - 1 + a u_v) / (n - 1 + a)),

so it is no knob. And it leaves the table sparse plus rank one: log p = log u_v + log1p(k / (a u_v)) + (a
number a row), the last of which centring removes, so that

    log table = (S + 1 l') P,   S = log1p(k / (a u)) sparse,   l = log u,   P = 1 - 11'/V.

A context that was followed by one token only is a row with one entry and adds to nothing but the diagonal of
the Gram matrix; most contexts of a long order are such rows. So a `Table` keeps a diagonal [V] and the
branching rows B, and the Gram matrix of the sparse part is diag + B'B. Nothing of size C x V or V x V is ever
made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
import scipy.sparse as sparse
from numpy.typing import NDArray

from fullrank.corpus.counts import BlockCounts, Counts
from fullrank.errors import FullrankError

CONSTRUCTIONS = ("probability", "weighted", "frequent", "log")
"""Never mixed in one curve."""
PIECE = 1 << 21
"""Entries read at a time: the temporary arrays of a piece take about 100 MB."""
ROWS = 1 << 14
"""Branching rows of one sparse matrix: a product with eight vectors then stays in the cache."""
STRENGTHS = (1e-2, 1e4)
"""Between these the weight of the prior is sought."""

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offset:
    """The dense part of the log table: (S + 1 l') P."""

    log_unigram: Floats
    """l, [V], less its mean: the projection would take it away."""
    column_sums: Floats
    """1'S, [V]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A C x V table as the parts of its Gram matrix."""

    construction: str
    contexts: int
    """Rows, C."""
    vocabulary: int
    diagonal: Floats
    """Squared entries of the rows with one entry, summed by column: [V]."""
    branching: tuple[sparse.csr_matrix, ...]
    """All other rows, some at a time, each with V columns."""
    offset: Offset | None = None
    strength: float | None = None
    """Weight of the prior of the log table, in tokens."""

    @property
    def entries(self) -> int:
        """In branching rows."""
        return sum(part.nnz for part in self.branching)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folded:
    """Counts whose contexts that were seen once are kept as numbers: all such rows of a token are alike."""

    counts: Counts
    """Of the other contexts."""
    once: NDArray[np.int64]
    """Contexts that were seen once, by the token that followed: [V]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Left:
    """Which part of the text is left out."""

    blocks: BlockCounts
    out: int
    """The block that is left out."""


def table(
    counts: Counts | Folded,
    construction: str,
    *,
    least: int = 2,
    strength: float | None = None,
    left: Left | None = None,
) -> Table:
    """The table of a construction; `least` is m of frequent, `strength` fixes the prior of log.

    It can have no rows: where no context was seen `least` times.
    """
    if isinstance(counts, Folded):
        once, counts = counts.once.astype(np.float64), counts.counts
    else:
        once = np.zeros(counts.vocabulary)
    if construction not in CONSTRUCTIONS:
        raise FullrankError(
            f"construction {construction!r} is unknown, expected one of {', '.join(CONSTRUCTIONS)}"
        )
    if least < 1:
        raise FullrankError(f"contexts seen at least {least} times were asked for: pass 1 or more")
    if construction == "log":
        return _log_table(counts, once, strength, left)
    if construction == "weighted":
        return _scaled(counts, once, construction, lambda total: 1.0 / np.sqrt(total), 1, left)
    if construction == "frequent":
        return _scaled(counts, once, construction, lambda total: 1.0 / total, least, left)
    return _scaled(counts, once, construction, lambda total: 1.0 / total, 1, left)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Piece:
    """Some whole rows of the counts, rows without entries left out."""

    next: NDArray[np.int32]
    count: Floats
    width: NDArray[np.int64]
    """Entries a row."""
    total: Floats
    """n[c] of each row."""


def _scaled(
    counts: Counts,
    once: Floats,
    construction: str,
    scale: Callable[[Floats], Floats],
    least: int,
    left: Left | None,
) -> Table:
    collected = _Collected(counts.vocabulary)
    for piece in _pieces(counts, left):
        collected.add(
            piece, piece.count * np.repeat(scale(piece.total), piece.width), keep=piece.total >= least
        )
    if least <= 1:
        collected.add_once(once, np.ones(counts.vocabulary))
    return collected.table(construction)


def _log_table(counts: Counts, once: Floats, strength: float | None, left: Left | None) -> Table:
    V = counts.vocabulary
    seen = once.copy()
    for piece in _pieces(counts, left):
        seen += np.bincount(piece.next, weights=piece.count, minlength=V)
    unigram = (seen + 1.0) / (seen.sum() + V)
    if strength is None:
        strength = prior_strength(counts, unigram, left)
    elif not strength > 0:
        raise FullrankError(f"the prior has weight {strength}, expected a positive number of tokens")
    collected, sums = _Collected(V), np.zeros(V)
    for piece in _pieces(counts, left):
        value = np.log1p(piece.count / (strength * unigram[piece.next]))
        sums += np.bincount(piece.next, weights=value, minlength=V)
        collected.add(piece, value)
    single = np.log1p(1.0 / (strength * unigram))
    collected.add_once(once, single)
    sums += once * single
    log_unigram = np.log(unigram)
    offset = Offset(log_unigram=log_unigram - log_unigram.mean(), column_sums=sums)
    return collected.table("log", offset=offset, strength=strength)


def prior_strength(counts: Counts, unigram: Floats, left: Left | None = None) -> float:
    """The weight of the prior that predicts best when each token is left out, in tokens."""
    grid = np.geomspace(*STRENGTHS, 61)
    gains = np.zeros(len(grid))
    for piece in _pieces(counts, left):
        # A context that was seen once predicts u whatever the prior: only the others tell.
        rows = piece.total > 1
        keep = np.repeat(rows, piece.width)
        if not keep.any():
            continue
        count, prior = piece.count[keep], unigram[piece.next[keep]]
        repeated, single = count > 1, count == 1
        # An entry seen once, left out, has the probability a u / (n - 1 + a): its u is no matter, so only how
        # many such entries there are counts.
        singles, more, weight = int(single.sum()), count[repeated] - 1, count[repeated]
        rest, total = prior[repeated], piece.total[rows]
        for place, value in enumerate(grid):
            gains[place] += singles * math.log(value) + weight @ np.log(more + value * rest)
            gains[place] -= total @ np.log(total - 1 + value)
    return float(grid[int(np.argmax(gains))]) if gains.any() else 1.0


class _Collected:
    """Rows on their way to a table: single entries to the diagonal, the others to sparse matrices."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.contexts = 0
        self.diagonal = np.zeros(vocabulary)
        self.branching: list[sparse.csr_matrix] = []

    def add(self, piece: _Piece, value: Floats, keep: NDArray[np.bool_] | None = None) -> None:
        single = piece.width == 1
        branches = ~single
        if keep is not None:
            single, branches = single & keep, branches & keep
        self.contexts += int(single.sum()) + int(branches.sum())
        entries = np.repeat(single, piece.width)
        squares = np.square(value[entries])
        self.diagonal += np.bincount(piece.next[entries], weights=squares, minlength=self.vocabulary)
        entries = np.repeat(branches, piece.width)
        column, value = piece.next[entries].astype(np.int32), value[entries]
        ends = np.concatenate([[0], np.cumsum(piece.width[branches])])
        for first in range(0, len(ends) - 1, ROWS):
            last = min(first + ROWS, len(ends) - 1)
            begin, end = ends[first], ends[last]
            self.branching.append(
                sparse.csr_matrix(
                    (value[begin:end], column[begin:end], (ends[first : last + 1] - begin).astype(np.int32)),
                    shape=(last - first, self.vocabulary),
                )
            )

    def add_once(self, once: Floats, value: Floats) -> None:
        """Rows of one entry, `once` of each token, with the token's value."""
        self.contexts += int(once.sum())
        self.diagonal += once * np.square(value)

    def table(self, construction: str, offset: Offset | None = None, strength: float | None = None) -> Table:
        return Table(
            construction=construction,
            contexts=self.contexts,
            vocabulary=self.vocabulary,
            diagonal=self.diagonal,
            branching=tuple(self.branching),
            offset=offset,
            strength=strength,
        )


def _pieces(counts: Counts, left: Left | None) -> Iterator[_Piece]:
    """The counts a piece of whole rows at a time: they may be larger than memory."""
    for first, last in spans(counts):
        begin, end = int(counts.indptr[first]), int(counts.indptr[last])
        column = np.asarray(counts.next[begin:end])
        count = np.asarray(counts.count[begin:end], dtype=np.float64)
        width = np.diff(counts.indptr[first : last + 1])
        if left is not None:
            count = count - _of_block(left, begin, end)
            there = count > 0
            row = np.repeat(np.arange(len(width)), width)
            width = np.bincount(row[there], minlength=len(width))
            column, count = column[there], count[there]
        width = width[width > 0]
        if not len(width):
            continue
        starts = np.cumsum(width) - width
        yield _Piece(next=column, count=count, width=width, total=np.add.reduceat(count, starts))


def spans(counts: Counts) -> Iterator[tuple[int, int]]:
    """First and one past the last row of pieces of about `PIECE` entries; one long row is a piece."""
    first = 0
    while first < counts.contexts:
        last = int(np.searchsorted(counts.indptr, counts.indptr[first] + PIECE, side="right")) - 1
        last = min(max(last, first + 1), counts.contexts)
        yield first, last
        first = last


def _of_block(left: Left, begin: int, end: int) -> Floats:
    """How often the entries begin:end came in the block that is left out."""
    blocks = left.blocks
    start = np.asarray(blocks.start[begin : end + 1])
    if end == begin:
        return np.zeros(0)
    inside = slice(int(start[0]), int(start[-1]))
    taken = np.where(np.asarray(blocks.block[inside]) == left.out, blocks.count[inside], 0)
    result: Floats = np.add.reduceat(taken.astype(np.float64), start[:-1] - start[0])
    return result
