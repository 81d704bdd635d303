"""The null of a table: the same contexts, the same tokens, no dependence of one on the other.

Contexts are sorted into classes by how often they were seen: once, 2 to 3 times, 4 to 7 times, and so on.
Within a class all tokens that followed are pooled, shuffled, and dealt out again, so that every context keeps
its count and every class its tokens. What the table's spectrum owes to word frequencies and to how often
contexts come stays; what it owes to contexts predicting tokens goes.

Contexts that were seen once have one token each before and after, so the shuffle only renames them: where
they make most of the table, the null's spectrum is near the table's, and the difference is what there is to
see.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fullrank.corpus.counts import Counts
from fullrank.corpus.curve import Effort
from fullrank.corpus.table import Folded, spans

EFFORT = Effort(leading=64, batches=1, brackets=False, most_exact=4000)
"""Of the null's spectrum: a line to hold the curve against."""


def shuffled(counts: Counts, seed: int = 0) -> Folded:
    """The counts with next tokens shuffled within classes of contexts, contexts in another order."""
    generator = np.random.default_rng(seed)
    V = counts.vocabulary
    totals, once = _totals(counts)
    widths, nexts, parts = [], [], []
    low = 2
    while low <= totals.max(initial=0):
        rows = np.flatnonzero((totals >= low) & (totals < 2 * low))
        low *= 2
        if not len(rows):
            continue
        tokens = _tokens(counts, rows)
        generator.shuffle(tokens)
        key = np.repeat(np.arange(len(rows), dtype=np.int64), totals[rows])
        key *= V
        key += tokens
        del tokens
        key.sort()
        first = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
        parts.append(np.diff(np.append(first, len(key))).astype(np.int32))
        key = key[first]
        widths.append(np.bincount(key // V, minlength=len(rows)))
        nexts.append((key % V).astype(np.int32))
    empty = np.zeros(0, dtype=np.int64)
    return Folded(
        counts=Counts(
            indptr=np.concatenate([[0], np.cumsum(np.concatenate([empty, *widths]))]).astype(np.int64),
            next=np.concatenate([empty.astype(np.int32), *nexts]),
            count=np.concatenate([empty.astype(np.int32), *parts]),
            vocabulary=V,
            tokens=counts.tokens,
        ),
        once=once,
    )


def _totals(counts: Counts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How often each context was seen, and how many were seen once by the token that followed."""
    totals = np.zeros(counts.contexts, dtype=np.int64)
    once = np.zeros(counts.vocabulary, dtype=np.int64)
    for first, last in spans(counts):
        begin, end = int(counts.indptr[first]), int(counts.indptr[last])
        if end > begin:
            starts = counts.indptr[first : last + 1] - begin
            sums = np.concatenate([[0], np.cumsum(counts.count[begin:end])])
            totals[first:last] = np.diff(sums[starts])
            seen_once = starts[:-1][totals[first:last] == 1]
            once += np.bincount(counts.next[begin:end][seen_once], minlength=counts.vocabulary)
    return totals, once


def _tokens(counts: Counts, rows: NDArray[np.int64]) -> NDArray[np.int32]:
    """All tokens that followed some contexts, as often as they did."""
    starts = counts.indptr[rows]
    width = counts.indptr[rows + 1] - starts
    ends = np.cumsum(width)
    places = np.repeat(starts - (ends - width), width) + np.arange(ends[-1])
    return np.repeat(counts.next[places], counts.count[places])
