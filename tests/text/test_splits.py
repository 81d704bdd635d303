"""Splits: whose text is what, all of it once, and of every source."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullrank.errors import FullrankError
from fullrank.text import formats, splits
from fullrank.text import sources as reading
from fullrank.text.documents import Read
from fullrank.text.settings import DataConfig
from fullrank.text.splits import SPLITS, _cut, _Lines, assigned, chosen, plan, role


def split_of(names: list[Any], config: DataConfig = DataConfig()) -> dict[str, list[str]]:  # noqa: B008
    """The documents of every split."""
    texts = reading.look(chosen(reading.listed(names), names), names, config.documents)
    found: dict[str, list[str]] = {name: [] for name in SPLITS}
    for split, _, _, fragment in assigned(texts, plan(texts, config), config, Read()):
        if fragment.begins:
            found[split].append("")
        found[split][-1] += fragment.text
    return found


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30),
    st.floats(0.01, 0.4),
    st.floats(0.01, 0.4),
)
def test_cuts_have_their_shares_and_lie_in_their_sources(
    counts: list[int], valid: float, test: float
) -> None:
    config = DataConfig(valid_share=valid, test_share=test)
    total = sum(counts)
    try:
        cuts = [cut for cut in _cut(list(counts), config) if cut is not None]
    except FullrankError:
        assert total - max(1, round(total * valid)) - max(1, round(total * test)) < 1
        return
    assert all(0 <= first <= second <= count for (first, second), count in zip(cuts, counts, strict=True))
    tested = sum(count - second for (_, second), count in zip(cuts, counts, strict=True))
    validated = sum(second - first for first, second in cuts)
    assert tested == max(1, round(total * test))
    # A source that is all test cannot give a line for validation; the next one does.
    assert abs(validated - max(1, round(total * valid))) <= max(counts)
    # Every source gives its share, to a line or two of rounding.
    for (_, second), count in zip(cuts, counts, strict=True):
        assert abs((count - second) - tested * count / total) <= 1 + 1e-9


@given(st.text(alphabet="ab\n", max_size=60), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_lines_are_given_out_up_to_a_line(text: str, step: int, first: int, more: int) -> None:
    blocks = (text[start : start + step] for start in range(0, len(text), step))
    lines = _Lines(blocks)
    parts = ["".join(lines.until(end)) for end in (first, first + more, None)]
    assert "".join(parts) == text
    whole = text.splitlines(keepends=True)
    assert parts[0] == "".join(whole[:first])
    assert parts[1] == "".join(whole[first : first + more])


def test_rows_of_every_source_are_cut_at_its_end(tmp_path: Path) -> None:
    for label, count in (("a", 60), ("b", 20)):
        rows = [json.dumps({"text": f"{label}{number}"}) for number in range(count)]
        (tmp_path / f"{label}.jsonl").write_text("\n".join(rows))
    found = split_of([tmp_path], DataConfig(valid_share=0.1, test_share=0.1))
    assert found["test"] == [*(f"a{n}" for n in range(54, 60)), "b18", "b19"]
    assert found["valid"] == [*(f"a{n}" for n in range(48, 54)), "b16", "b17"]
    assert found["train"] == [*(f"a{n}" for n in range(48)), *(f"b{n}" for n in range(16))]


def test_lines_as_documents_are_cut_like_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {number}\n\n" for number in range(40)))
    found = split_of([path], DataConfig(documents="line"))
    assert [len(found[name]) for name in SPLITS] == [36, 2, 2]
    assert found["test"] == ["line 38", "line 39"]


def test_many_files_are_dealt_out_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"first of {number:03d}\nsecond of {number:03d}\n" for number in range(40)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:03d}.txt").write_text(text)
    monkeypatch.setattr(splits, "MANY", 40)
    found = split_of([tmp_path])
    assert sorted(text for name in SPLITS for text in found[name]) == texts
    assert [len(found[name]) for name in SPLITS] == [36, 2, 2]
    monkeypatch.setattr(splits, "MANY", 41)
    # The same files as lines: none is in one piece for certain.
    assert sum(len(found) for found in split_of([tmp_path]).values()) > 40


def test_an_archive_may_name_its_splits(tmp_path: Path) -> None:
    import zipfile

    path = tmp_path / "corpus.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("test", "train", "valid"):
            archive.writestr(f"data/wiki.{name}.tokens", f"{name} text\n")
    assert split_of([path]) == {name: [f"{name} text\n"] for name in SPLITS}


def test_an_archive_without_a_split_gives_the_end_of_train(tmp_path: Path) -> None:
    import zipfile

    path = tmp_path / "corpus.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, count in (("test", 2), ("train", 20)):
            archive.writestr(f"data/{name}.txt", "".join(f"{name} {n}\n" for n in range(count)))
    found = split_of([path])
    assert found["valid"] == ["train 19\n"]
    assert found["test"] == ["test 0\ntest 1\n"]
    assert found["train"] == ["".join(f"train {n}\n" for n in range(19))]
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("test", "valid"):
            archive.writestr(f"data/{name}.txt", f"{name}\n")
    with pytest.raises(FullrankError, match=r"a split for valid .* and test .*, none for train: add a file"):
        split_of([path])


def test_many_training_files_are_dealt_out_whole_beside_a_named_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "MANY", 20)
    for number in range(20):
        (tmp_path / f"train-{number:02d}.txt").write_text(f"a {number}\nb {number}\n")
    (tmp_path / "valid.txt").write_text("one\ntwo\n")
    found = split_of([tmp_path], DataConfig(test_share=0.1))
    assert found["valid"] == ["one\ntwo\n"]
    assert [len(found[name]) for name in SPLITS] == [18, 1, 2]
    assert all(text.startswith("a ") and text.count("\n") == 2 for text in found["train"] + found["test"])


def test_datasets_name_their_splits_or_are_cut_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = lambda name, config, *, split, streaming: iter(  # type: ignore[attr-defined]
        {"text": f"{split} {number}"} for number in range(2500 if split == "train" else 3)
    )
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: object())
    named = split_of([f"some/test-text:small:{name}" for name in ("train", "validation", "test")])
    assert [len(named[name]) for name in SPLITS] == [2500, 3, 3]
    assert named["valid"][0] == "validation 0"
    cut = split_of(["some/test-text:small:train", "some/test-text:small:test"], DataConfig(valid_share=0.01))
    assert cut["valid"] == [f"train {n}" for n in (*range(990, 1000), *range(1990, 2000))]
    assert [len(cut[name]) for name in SPLITS] == [2480, 20, 3]
    one = split_of(["some/test-text:small:train"], DataConfig(test_share=0.01))
    assert one["test"] == [f"train {n}" for n in (*range(990, 1000), *range(1990, 2000))]
    assert [len(one[name]) for name in SPLITS] == [2380, 100, 20]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train.txt", "train"),
        ("wiki.valid.tokens", "valid"),
        ("a/b/dev.jsonl.gz", "valid"),
        ("TEST-2.parquet", "test"),
        ("test/book.txt", None),
        ("latest.txt", None),
        ("some/test-text:small:train", "train"),
        ("some/text:small:all", None),
    ],
)
def test_names_that_say_a_split(name: str, expected: str | None) -> None:
    assert role(name) == expected
