"""Rows of an engine, in any order, become the same table, whether or not their hashes collide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.corpus import count
from fullrank.errors import FullrankError


def columns_of(rows: Sequence[Any], columns: int) -> Any:
    table = np.array(rows, dtype=np.int64).reshape(-1, columns + 3)
    contexts = [np.ascontiguousarray(table[:, index]) for index in range(columns)]
    return contexts, *(
        table[:, columns + at].astype(kind) for at, kind in enumerate((np.int32, np.int32, np.int64))
    )


def tables(rows: count.Rows) -> list[list[tuple[int, list[tuple[int, int]]]]]:
    """Contexts as lists of (next, [(block, count), ...])."""
    found, entry, row = [], 0, 0
    for end in rows.ends.tolist():
        context = []
        while entry < end:
            stop = int(rows.block_ends[entry])
            parts = list(zip(rows.block[row:stop].tolist(), rows.block_count[row:stop].tolist(), strict=True))
            assert sum(part for _, part in parts) == rows.count[entry]
            context.append((int(rows.next[entry]), parts))
            entry, row = entry + 1, stop
        found.append(context)
    assert (entry, row) == (len(rows.next), len(rows.block))
    return found


@settings(max_examples=30)
@given(
    rows=st.dictionaries(
        st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)),
        st.integers(1, 9),
        max_size=40,
    ),
    colliding=st.booleans(),
    wide=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_table_of_rows(rows: dict[Any, int], colliding: bool, wide: bool, seed: int) -> None:
    # Too wide to be packed into one number.
    large = (1 << 28) if wide else 1
    listed = [
        (one, two, following * large, block * large, times)
        for (one, two, following, block), times in rows.items()
    ]

    expected: dict[Any, dict[int, list[tuple[int, int]]]] = {}
    for one, two, following, block, times in sorted(listed):
        expected.setdefault((one, two), {}).setdefault(following, []).append((block, times))
    with pytest.MonkeyPatch.context() as patch:
        if colliding:
            # All contexts with the same hash: everything is set right afterwards.
            patch.setattr(count, "mixed", lambda contexts: np.zeros(len(contexts[0]), dtype=np.uint64))
        made = tables(count.rows_of(columns_of(listed, 2)))
        np.random.default_rng(seed).shuffle(listed)
        again = tables(count.rows_of(columns_of(listed, 2)))
    assert again == made
    plain = [list(context.items()) for context in expected.values()]
    assert sorted(made) == sorted(plain)


def test_counts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(FullrankError, match="--blocks"):
        count.rows_of(columns_of([(1, 2, 3, 1 << 31)], 1))
