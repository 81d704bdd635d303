"""Counts are those of a plain loop, however the text is cut; stages are used again only if they are whole."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.corpus import count, engines, plan, prepare, tokenise
from fullrank.corpus.counts import BlockCounts, Counts, load_blocks, load_counts
from fullrank.corpus.engines import Resources
from fullrank.corpus.prepare import Prepared, Settings
from fullrank.errors import FullrankError
from fullrank.text import documents, formats, sources, stages, tokenisers, workers

pytest.importorskip("duckdb")
pytest.importorskip("ibis")

Rows = Counter[tuple[tuple[int, ...], ...]]


def text_of(seed: int, words: int, types: int = 12) -> str:
    chance = random.Random(seed)
    return "".join(
        f"w{chance.randrange(types)}" + chance.choice(["  ", " ", " ", "\n"]) for _ in range(words)
    )


def ids_of(text: str) -> list[str]:
    words = text.replace("\n", " <eos> ").split()
    return words if text.endswith("\n") or not text else [*words, "<eos>"]


def oracle(documents: Sequence[Sequence[Any]], order: int) -> Rows:
    """The rows of the table without their contexts' names: what followed, and how often."""
    table: dict[tuple[Any, ...], Counter[Any]] = defaultdict(Counter)
    for document in documents:
        for at in range(order - 1, len(document)):
            table[tuple(document[at - order + 1 : at])][document[at]] += 1
    return Counter(tuple(sorted(row.items())) for row in table.values())


def rows_of(counts: Counts, names: Sequence[Any] | None = None) -> Rows:
    found: Rows = Counter()
    for context in range(counts.contexts):
        part = slice(counts.indptr[context], counts.indptr[context + 1])
        following = counts.next[part].tolist()
        assert following == sorted(set(following))
        tokens = following if names is None else [names[index] for index in following]
        found[tuple(sorted(zip(tokens, counts.count[part].tolist(), strict=True)))] += 1
    return found


def words_of(cache: Path) -> list[str]:
    (folder,) = cache.glob("tokeniser-*")
    return list(json.loads((folder / "vocabulary.json").read_text())["words"])


def made(texts: Sequence[Path], cache: Path, **options: Any) -> tuple[Prepared, Counts, BlockCounts]:
    options = {"tokenizer": "words", "workers": 1, "blocks": 4, **options}
    found = prepare.prepare(list(texts), Settings(cache=cache, **options))
    return found, load_counts(found.folder), load_blocks(found.folder)


def same(first: Counts, second: Counts) -> bool:
    names = ("indptr", "next", "count")
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in names)


def written(folder: Path, content: str, name: str = "a.txt") -> Path:
    path = folder / name
    path.write_text(content, encoding="utf8")
    return path


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of a few kilobytes is cut as a large one is."""
    monkeypatch.setattr(documents, "FRAGMENT", 1000)
    monkeypatch.setattr(plan, "BATCH", (3000, 3000))
    monkeypatch.setattr(plan, "PART", 1000)


@pytest.mark.parametrize(("order", "rule"), [(2, "file"), (3, "line"), (5, "line"), (17, "file")])
def test_counts_are_those_of_a_plain_loop(tmp_path: Path, order: int, rule: Any) -> None:
    texts = [written(tmp_path, text_of(index, 900, types=6), f"{index}.txt") for index in range(3)]
    found, counts, blocks = made(texts, tmp_path / "cache", order=order, documents=rule)
    contents = [path.read_text() for path in texts]
    if rule == "line":
        contents = [line for content in contents for line in content.split("\n") if line.strip()]
    expected = [ids_of(content) for content in contents]
    assert rows_of(counts, words_of(tmp_path / "cache")) == oracle(expected, order)
    assert counts.tokens == sum(map(len, expected))
    assert found.facts["documents"] == len(expected)
    assert (
        counts.vocabulary == found.vocabulary == len({word for ids in expected for word in ids} | {"<eos>"})
    )
    np.testing.assert_array_equal(np.add.reduceat(blocks.count, blocks.start[:-1]), counts.count)
    assert found.facts["windows"] == counts.count.sum()


@settings(max_examples=10)
@given(data=st.data(), order=st.integers(2, 6))
def test_bytes_of_any_text(data: st.DataObject, order: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    documents = data.draw(st.lists(st.text(alphabet="abä ", min_size=1, max_size=30), min_size=1, max_size=6))
    folder = tmp_path_factory.mktemp("bytes")
    text = "\n".join(documents)
    path = written(folder, text)
    expected = oracle([list(line.encode()) for line in documents if line.strip()], order)
    options: dict[str, Any] = {"tokenizer": "bytes", "order": order, "documents": "line"}
    if not text.strip() or not expected:
        with pytest.raises(FullrankError, match=r"give (more )?text"):
            made([path], folder / "cache", **options)
        return
    _, counts, _ = made([path], folder / "cache", **options)
    assert rows_of(counts) == expected
    assert counts.vocabulary == 256


@pytest.mark.parametrize("tokenizer", ["words", "bytes", "bpe:300"])
def test_how_a_text_is_cut_does_not_show(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, text_of(1, 4000, types=200))
    _, plain, _ = made([path], tmp_path / "one", tokenizer=tokenizer, blocks=1)
    monkeypatch.setattr(documents, "FRAGMENT", 700)
    monkeypatch.setattr(formats, "READ", 100)
    monkeypatch.setattr(plan, "BATCH", (1500, 1500))
    monkeypatch.setattr(plan, "PART", 3000)
    _, cut, blocks = made([path], tmp_path / "two", tokenizer=tokenizer, blocks=7)
    assert rows_of(plain) == rows_of(cut)
    assert plain.tokens == cut.tokens
    sizes = np.bincount(blocks.block, weights=blocks.count, minlength=7)
    assert len(sizes) == 7
    assert sizes.min() > 0.8 * sizes.max()


def test_a_context_may_reach_over_several_blocks(tmp_path: Path) -> None:
    path = written(tmp_path, "a few words, and some more of them\n")
    _, counts, blocks = made([path], tmp_path / "cache", blocks=20)
    assert rows_of(counts, words_of(tmp_path / "cache")) == oracle([ids_of(path.read_text())], 5)
    assert len(set(blocks.block.tolist())) > 2
    _, counts, _ = made([written(tmp_path, "a" * 5000)], tmp_path / "cache", tokenizer="bytes")
    assert (counts.contexts, counts.next.tolist(), counts.count.tolist()) == (1, [ord("a")], [4996])


def test_blocks_are_stretches_of_whole_documents(tmp_path: Path) -> None:
    # Each file has its own language.
    texts = [
        written(tmp_path, " ".join(f"{index}{letter}" for letter in "abcd" * 5) + "\n", f"{index}.txt")
        for index in range(6)
    ]
    _, counts, blocks = made(texts, tmp_path / "cache", order=2, blocks=3)
    words = words_of(tmp_path / "cache")
    for entry, token in enumerate(counts.next.tolist()):
        if words[token] != "<eos>":
            part = blocks.block[blocks.start[entry] : blocks.start[entry + 1]].tolist()
            assert part == [int(words[token][0]) // 2]


def test_a_limit_takes_so_many_tokens(tmp_path: Path, small_batches: None) -> None:
    path = written(tmp_path, text_of(2, 3000))
    expected = ids_of(path.read_text())
    for limit in (100, 1234, 10**9):
        found, counts, _ = made([path], tmp_path / "cache", tokens=limit)
        assert found.facts["tokens"] == min(limit, len(expected))
        assert rows_of(counts, words_of(tmp_path / "cache")) == oracle([expected[:limit]], 5)


def test_several_processes_count_the_same(
    tmp_path: Path, small_batches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SMALL", 0)
    path = written(tmp_path, text_of(3, 6000))
    _, one, _ = made([path], tmp_path / "one", workers=1)
    _, two, _ = made([path], tmp_path / "two", workers=2)
    assert same(one, two)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", {}, "holds no text"),
        (" \n\n \n", {}, "no words|holds no text"),
        (" \n\n \n", {"tokenizer": "bytes"}, "holds no text"),
        ("a b c", {}, "4 tokens in 1 documents.*lower --order"),
        ("a b c", {"order": 1}, "--order is 1"),
        ("a b c", {"tokenizer": "bpe:10"}, "bpe:257"),
        ("a b c", {"tokenizer": "bpe:x"}, "bpe:257"),
        ("a b c", {"tokens": 0}, "--tokens is 0"),
        ("a b c", {"blocks": 40_000}, "--blocks"),
        ("a b c", {"resources": Resources(memory=1 << 20)}, "--memory is 1 MiB"),
    ],
)
def test_refusals(tmp_path: Path, content: str, options: dict[str, Any], message: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(FullrankError, match=message):
        made([path], tmp_path / "cache", **options)
    assert not list((tmp_path / "cache").glob("counts-*"))


def test_little_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    with path.open("w") as file:
        file.write("some words\n")
        # A hole: ten gigabytes that take no room, and that nobody may read through to find out.
        file.truncate(10 << 30)
    monkeypatch.setattr(formats, "LOOK", 0)
    monkeypatch.setattr(sources, "_hash", lambda path: pytest.fail("read ten gigabytes first"))
    monkeypatch.setattr(stages, "free_bytes", lambda folder: 5 << 30)
    with pytest.raises(FullrankError, match=r"5.4 GB free: .*--cache.*--tokens"):
        made([path], tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_full_disk_leaves_nothing_that_would_be_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, text_of(4, 3000))
    _, expected, _ = made([path], tmp_path / "other")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    for module, name in ((tokenise.windows_of, "write"), (count._Arrays, "_write"), (stages, "write_whole")):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, full)
            with pytest.raises(FullrankError, match=r"No space left.*--cache"):
                made([path], tmp_path / "cache")
        assert not list((tmp_path / "cache").glob("counts-*"))
    _, counts, _ = made([path], tmp_path / "cache")
    assert same(counts, expected)


class Killed(BaseException):
    """What SIGKILL is, for a test that must see every place."""


def test_a_run_that_dies_anywhere_is_continued(
    tmp_path: Path, small_batches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run dies after a few writes, again and again: no step may rest on a write that was lost."""
    monkeypatch.setattr(count, "SYNC_SECONDS", 0)
    path = written(tmp_path, text_of(5, 4000, types=40))
    _, expected, _ = made([path], tmp_path / "whole")
    left = {"writes": 0}
    whole, arrays, batch = stages.write_whole, count._Arrays._write, tokenise.windows_of.write
    replaced = {"tokenised": 0}

    def dying(function: Any) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            left["writes"] -= 1
            if left["writes"] < 0:
                raise Killed
            return result

        return wrapped

    def counted(*arguments: Any) -> None:
        replaced["tokenised"] += 1
        batch(*arguments)

    monkeypatch.setattr(tokenise.windows_of, "write", dying(counted))
    for module in (stages, tokenise, count, tokenisers):
        monkeypatch.setattr(module, "write_whole", dying(whole))
    monkeypatch.setattr(count._Arrays, "_write", dying(arrays))
    deaths = 0
    for _ in range(200):
        # Three writes are the longest step that is done again if it was not finished.
        left["writes"] = 3 + deaths % 3
        try:
            _, counts, _ = made([path], tmp_path / "cache")
            break
        except Killed:
            deaths += 1
            assert not list((tmp_path / "cache").glob("counts-*"))
    assert deaths > 5
    assert same(counts, expected)
    # Batches are not made over and over: a death costs the one that it hit.
    assert replaced["tokenised"] <= 2 * -(-len(path.read_text()) // 3000) + 2


def test_damaged_stages_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, text_of(6, 3000))
    cache = tmp_path / "cache"
    found, expected, _ = made([path], cache)
    # In memory: the files are about to change.
    arrays = {name: np.array(getattr(expected, name)) for name in ("indptr", "next", "count")}
    expected = dataclasses.replace(expected, **arrays)
    for damage in ("flip", "short", "missing", "manifest"):
        file = found.folder / ("manifest.json" if damage == "manifest" else "next.npy")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(data[:-4] if damage == "short" else data)
        said: list[str] = []
        again = prepare.prepare(
            [path], Settings(cache=cache, tokenizer="words", workers=1, blocks=4), warn=said.append
        )
        assert len(said) == 1
        assert "made again" in said[0]
        assert same(load_counts(again.folder), expected)
    # And nothing is made that is there.
    monkeypatch.setattr(tokenise, "tokenise", lambda *_, **__: pytest.fail("tokenised again"))
    monkeypatch.setattr(count, "count", lambda *_, **__: pytest.fail("counted again"))
    made([path], cache)
    # Other text under the same name is other text.
    path.write_text(text_of(7, 3000))
    with pytest.raises(pytest.fail.Exception, match="tokenised again"):
        made([path], cache)


def test_windows_are_removed_when_they_are_counted(tmp_path: Path) -> None:
    path = written(tmp_path, text_of(8, 500))
    made([path], tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*windows*/*"))
    shutil.rmtree(tmp_path / "cache")
    made([path], tmp_path / "cache", keep_windows=True)
    assert list((tmp_path / "cache").glob("windows-*/*.parquet"))


def test_a_tokenizer_that_fails_and_an_engine_that_is_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, text_of(9, 500))
    finds = engines.importlib.util.find_spec
    with monkeypatch.context() as patched:
        patched.setattr(
            engines.importlib.util, "find_spec", lambda name: None if name == "pyspark" else finds(name)
        )
        with pytest.raises(FullrankError, match=r"pyspark: pip install 'fullrank\[corpus,spark\]'"):
            made([path], tmp_path / "cache", resources=Resources(engine="spark"))
    assert not (tmp_path / "cache").exists()

    def stream(*_: Any, **__: Any) -> Any:
        raise Exception("a panic in the library")

    monkeypatch.setattr(tokenisers.Bytes, "stream", stream)
    with pytest.raises(FullrankError, match=r"tokenizer bytes failed .*'w\d.*a panic.*--tokenizer"):
        made([path], tmp_path / "cache", tokenizer="bytes")


def test_progress_goes_forward(tmp_path: Path) -> None:
    path = written(tmp_path, text_of(11, 5000))
    settings = Settings(cache=tmp_path / "cache", tokenizer="words", workers=1)
    events: dict[str, list[float]] = defaultdict(list)
    prepare.prepare([path], settings, progress=lambda label, share: events[label.split(":")[0]].append(share))
    assert len(events) == 4
    for shares in events.values():
        assert shares == sorted(shares)
        assert shares[-1] == pytest.approx(1.0, abs=0.01)
