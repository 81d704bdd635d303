"""Packing is one to one at any order, and windows are those that a plain loop finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.corpus import windows
from fullrank.corpus.windows import Packing
from fullrank.errors import FullrankError

pytest.importorskip("pyarrow")


@settings(max_examples=30)
@given(
    order=st.integers(2, 24),
    vocabulary=st.sampled_from([1, 2, 3, 255, 256, 257, 32_000, 32_768, 32_769, 151_936, 2**21, 2**30]),
    seed=st.integers(0, 2**32 - 1),
)
def test_contexts_come_back_as_they_went_in(order: int, vocabulary: int, seed: int) -> None:
    packing = Packing(order=order, vocabulary=vocabulary)
    tokens = np.random.default_rng(seed).integers(0, vocabulary, 40)
    tokens[::3] = vocabulary - 1
    columns = packing.pack(tokens)
    assert all(column.dtype == np.int64 and (column >= 0).all() for column in columns)
    expected = np.lib.stride_tricks.sliding_window_view(tokens, order - 1)[: 40 - order + 1]
    np.testing.assert_array_equal(packing.unpack(columns), expected)


def test_how_many_columns() -> None:
    assert Packing(order=5, vocabulary=32_768).lengths == (4,)
    assert Packing(order=5, vocabulary=32_769).lengths == (3, 1)
    assert Packing(order=9, vocabulary=256).lengths == (7, 1)
    for order in (1, 0, 65):
        with pytest.raises(FullrankError, match="--order"):
            Packing(order=order, vocabulary=10)


@settings(max_examples=30)
@given(
    runs=st.lists(st.lists(st.integers(0, 6), max_size=9), max_size=8),
    order=st.integers(2, 6),
)
def test_windows_are_those_of_a_plain_loop(runs: list[list[int]], order: int) -> None:
    packing = Packing(order=order, vocabulary=7)
    tokens = np.array([token for run in runs for token in run], dtype=np.int64)
    found = windows.windows(
        packing,
        tokens,
        np.array([len(run) for run in runs], dtype=np.int64),
        np.arange(len(runs), dtype=np.int32),
    )
    expected = [
        (tuple(run[at - order + 1 : at]), run[at], block)
        for block, run in enumerate(runs)
        for at in range(order - 1, len(run))
    ]
    contexts = packing.unpack(found.contexts).tolist()
    assert [
        (tuple(context), following, block)
        for context, following, block in zip(contexts, found.next.tolist(), found.block.tolist(), strict=True)
    ] == expected


def test_a_context_is_in_one_part_and_parts_are_even() -> None:
    random = np.random.default_rng(0)
    contexts = [random.integers(0, 2**62, 100_000), random.integers(0, 2**10, 100_000)]
    part = windows.part_of(contexts, 16)
    np.testing.assert_array_equal(part, windows.part_of([column.copy() for column in contexts], 16))
    assert np.bincount(part, minlength=16).min() > 5800
    # Consecutive numbers, as a small vocabulary has them, spread too.
    assert np.bincount(windows.part_of([np.arange(100_000)], 16), minlength=16).min() > 5800


def test_a_file_has_one_row_group_a_part(tmp_path: Path) -> None:
    from pyarrow import parquet

    random = np.random.default_rng(0)
    found = windows.Windows(
        contexts=[random.integers(0, 50, 1000)],
        next=random.integers(0, 50, 1000).astype(np.int32),
        block=np.repeat(np.arange(10, dtype=np.int32), 100),
    )
    windows.write(tmp_path / "a.parquet", found, 8)
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]
    file = parquet.ParquetFile(tmp_path / "a.parquet")
    seen = []
    for group in range(file.num_row_groups):
        parts = set(file.read_row_group(group).column("part").to_pylist())
        assert len(parts) == 1
        seen += parts
    assert seen == sorted(set(windows.part_of(found.contexts, 8).tolist()))
    table = file.read()
    rows = sorted(
        zip(*(table.column(name).to_pylist() for name in ("context_0", "next", "block")), strict=True)
    )
    assert rows == sorted(
        zip(found.contexts[0].tolist(), found.next.tolist(), found.block.tolist(), strict=True)
    )
