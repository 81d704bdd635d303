"""Counts from rows written as dictionaries."""

import numpy as np

from fullrank.corpus.counts import Counts


def counts_of(rows: list[dict[int, int]], vocabulary: int) -> Counts:
    pairs = [sorted(row.items()) for row in rows]
    return Counts(
        indptr=np.cumsum([0, *map(len, pairs)]).astype(np.int64),
        next=np.array([token for row in pairs for token, _ in row], dtype=np.int32),
        count=np.array([count for row in pairs for _, count in row], dtype=np.int64),
        vocabulary=vocabulary,
        tokens=sum(count for row in pairs for _, count in row),
    )
