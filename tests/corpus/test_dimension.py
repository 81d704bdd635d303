"""From text to record: the dimensions of a dense SVD, kept curves, and a run that is killed and continued."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullrank.corpus import dimension as module
from fullrank.corpus.dimension import Measure, dimension
from fullrank.corpus.prepare import Settings
from fullrank.errors import FullrankError

pytest.importorskip("duckdb")
pytest.importorskip("ibis")

PLAIN = Measure(constructions=("probability",), interval=False, null=False)


def text_of(seed: int, words: int, types: int) -> str:
    chance = random.Random(seed)
    state, found = 0, []
    for _ in range(words):
        state = (state * 5 + chance.choice([1, 1, 1, 2, 3, chance.randrange(types)])) % types
        found.append(f"w{state}")
    return " ".join(found)


def written(folder: Path, content: str) -> Path:
    path = folder / "a.txt"
    path.write_text(content)
    return path


def settings_of(cache: Path, **options: Any) -> Settings:
    return Settings(**{"tokenizer": "words", "order": 3, "workers": 1, "cache": cache, **options})


def dense(text: str, order: int) -> tuple[np.ndarray, int]:
    words = [*text.split(), "<eos>"]
    numbers = {word: index for index, word in enumerate(dict.fromkeys(words))}
    table: dict[Any, Counter[int]] = defaultdict(Counter)
    for at in range(order - 1, len(words)):
        table[tuple(words[at - order + 1 : at])][numbers[words[at]]] += 1
    rows = np.zeros((len(table), len(numbers)))
    for row, counts in zip(rows, table.values(), strict=True):
        for token, count in counts.items():
            row[token] = count
    return rows, len(numbers)


def smallest(values: np.ndarray, bound: float) -> int:
    left = np.sqrt(np.append(np.cumsum((values**2)[::-1])[::-1], 0.0) / (values**2).sum())
    return int(np.flatnonzero(left <= bound + 1e-9)[0])


def test_dimensions_are_those_of_a_dense_svd(tmp_path: Path) -> None:
    path = written(tmp_path, text_of(0, 3000, 60))
    record = dimension([path], settings_of(tmp_path / "cache"), Measure(interval=False, null=False, least=4))
    counts, vocabulary = dense(path.read_text(), 3)
    totals = counts.sum(axis=1, keepdims=True)
    tables = {
        "probability": counts / totals,
        "weighted": counts / np.sqrt(totals),
        "frequent": (counts / totals)[totals[:, 0] >= 4],
    }
    curves = {curve.construction: curve for curve in record.curves}
    assert set(curves) == {*tables, "log"}
    for name, table in tables.items():
        values = np.linalg.svd(table, compute_uv=False)
        curve = curves[name]
        assert curve.contexts == len(table)
        assert curve.vocabulary == vocabulary
        np.testing.assert_allclose(curve.singular_values, values[: len(curve.singular_values)], atol=1e-7)
        assert curve.dimensions == {
            "50": smallest(values, 0.5), "90": smallest(values, 0.1), "99": smallest(values, 0.01)
        }  # fmt: skip
    assert record.tokens == 3001
    assert record.pairs == 2999
    assert record.single == int((np.count_nonzero(counts, axis=1) == 1).sum())
    assert record.used == int(np.count_nonzero(counts.sum(axis=0)))


def test_intervals_and_null_are_in_the_record(tmp_path: Path) -> None:
    path = written(tmp_path, text_of(1, 2000, 30))
    measure = Measure(constructions=("probability",))
    record = dimension([path], settings_of(tmp_path / "cache", blocks=8), measure)
    (curve,) = record.curves
    assert curve.blocks == 8
    assert curve.dimension_intervals is not None
    assert curve.null is not None
    for name, one in curve.dimension_intervals.items():
        assert one.low <= curve.dimensions[name] <= one.high
    assert len(curve.null.relative_error) == len(curve.grid)
    few = dimension([path], settings_of(tmp_path / "cache", blocks=4), measure)
    assert few.curves[0].dimension_intervals is None
    assert any("too few" in note for note in few.notes)


def test_a_finished_curve_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, text_of(2, 800, 20))
    first = dimension([path], settings_of(tmp_path / "cache"), PLAIN)
    monkeypatch.setattr(module, "spectrum", lambda *_, **__: pytest.fail("measured again"))
    assert dimension([path], settings_of(tmp_path / "cache"), PLAIN).curves == first.curves
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        dimension([path], settings_of(tmp_path / "cache", order=4), PLAIN)


def test_one_repeated_token_needs_one_dimension(tmp_path: Path) -> None:
    path = written(tmp_path, "a" * 3000)
    record = dimension([path], settings_of(tmp_path / "cache", tokenizer="bytes"), Measure(interval=False))
    curves = {curve.construction: curve for curve in record.curves}
    for name in ("probability", "weighted", "frequent"):
        assert curves[name].dimensions == {"50": 1, "90": 1, "99": 1}


def test_a_corpus_without_frequent_contexts_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, " ".join(f"w{number}" for number in range(200)))
    both = Measure(constructions=("probability", "frequent"), interval=False, null=False)
    record = dimension([path], settings_of(tmp_path / "cache"), both)
    assert [curve.construction for curve in record.curves] == ["probability"]
    assert any("No context was seen 5 times" in note for note in record.notes)
    for construction, words in (
        ("frequent", "No context was seen 5 times"),
        ("magic", "--constructions has"),
    ):
        measure = Measure(constructions=(construction,), interval=False)
        with pytest.raises(FullrankError, match=words):
            dimension([path], settings_of(tmp_path / "cache"), measure)


SCRIPT = """
import sys
from pathlib import Path
from fullrank.corpus import count, plan
from fullrank.corpus.dimension import Measure, dimension
from fullrank.corpus.prepare import Settings
from fullrank.text import documents, workers

documents.FRAGMENT, plan.BATCH, plan.PART = 20_000, (50_000, 50_000), 4000
workers.SMALL, count.SYNC_SECONDS = 0, 0.0

if __name__ == "__main__":
    record = dimension(
        [sys.argv[1]],
        Settings(tokenizer="words", order=3, workers=2, cache=Path(sys.argv[2])),
        Measure(constructions=("probability", "weighted"), interval=False, null=False),
    )
    print([(curve.construction, curve.contexts, curve.singular_values) for curve in record.curves])
"""


@pytest.mark.slow
def test_a_run_that_is_killed_is_continued_to_the_same_end(tmp_path: Path) -> None:
    """SIGKILL, at moments from the first import to the last curve; orphans must not live on either."""
    path, script = tmp_path / "a.txt", tmp_path / "script.py"
    path.write_text(text_of(3, 120_000, 200))
    script.write_text(SCRIPT)

    def start(cache: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(script), str(path), str(tmp_path / cache)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    begun = time.monotonic()
    expected, _ = start("whole").communicate(timeout=300)
    whole = time.monotonic() - begun
    assert expected
    kills = 0
    for attempt in range(60):
        process = start("cache")
        try:
            # Every attempt lives a little longer, so that each gets further than the last.
            process.wait(timeout=whole * (0.15 + 0.04 * attempt))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        found, _ = process.communicate(timeout=60)
        if process.returncode == 0:
            break
    assert kills >= 3
    assert found == expected
