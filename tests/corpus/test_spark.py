"""Spark counts what DuckDB counts, by the same expression; one that is not there is said in a sentence."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from fullrank.corpus import plan, prepare
from fullrank.corpus.counts import load_blocks, load_counts
from fullrank.corpus.engines import Resources
from fullrank.corpus.prepare import Settings
from fullrank.errors import FullrankError
from fullrank.text import documents

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("pyspark") is None, reason="pyspark is an extra"),
    # pyspark and py4j leave sockets and warn about themselves.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("order", [3, 9])
def test_both_engines_count_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    monkeypatch.setattr(documents, "FRAGMENT", 2000)
    monkeypatch.setattr(plan, "BATCH", (5000, 5000))
    monkeypatch.setattr(plan, "PART", 2000)
    random = np.random.default_rng(0)
    path = tmp_path / "a.txt"
    path.write_text(" ".join(f"w{number}" for number in random.zipf(1.4, 8000) % 3000))
    found = []
    for engine in ("duckdb", "spark"):
        settings = Settings(
            tokenizer="words",
            order=order,
            workers=1,
            blocks=5,
            cache=tmp_path / engine,
            resources=Resources(engine=engine, memory=1 << 30),  # type: ignore[arg-type]
        )
        found.append(prepare.prepare([path], settings).folder)
    one, two = map(load_counts, found)
    for name in ("indptr", "next", "count"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    first, second = map(load_blocks, found)
    for name in ("start", "block", "count"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_a_spark_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some words to count, and some more of them\n")
    settings = Settings(
        tokenizer="words",
        cache=tmp_path / "cache",
        workers=1,
        resources=Resources(engine="spark", address="spark://no.such.host.invalid:7077"),
    )
    with pytest.raises(FullrankError, match=r"Spark at spark://no\.such\.host.*--engine duckdb"):
        prepare.prepare([path], settings)
    assert not list((tmp_path / "cache").glob("counts-*"))
