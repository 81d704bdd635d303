"""A sample is of all that was named, in proportion, without a word twice, and the same every time."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullrank.errors import FullrankError
from fullrank.text import formats, sample
from fullrank.text.sample import beginning, draw


def numbered(path: Path, label: str, count: int) -> Path:
    """Text in which every word is another, so that its place can be told."""
    path.write_text(" ".join(f"{label}{number:06d}" for number in range(count)), encoding="utf8")
    return path


def words(found: sample.Sample) -> list[str]:
    return [word for stretch in found.stretches for word in re.findall(r"\b[a-z]\d{6}\b", stretch)]


@pytest.mark.parametrize("large", [1 << 30, 1000], ids=["streamed", "by places"])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_every_source_counts_by_its_size(
    large: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "LARGE", large)
    files = [numbered(tmp_path / f"{label}.txt", label, count) for label, count in (("a", 6000), ("b", 2000))]
    if kind == "jsonl":
        for number, path in enumerate(files):
            rows = re.findall(r"(?:\S+ ?){1,20}", path.read_text())
            files[number] = path.with_suffix(".jsonl")
            files[number].write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    found = draw(files, count=24, characters=400)
    assert not found.whole
    assert found.sources == (files[0].name, files[1].name)
    taken = words(found)
    # No word twice: no two stretches overlap.
    assert len(set(taken)) == len(taken)
    share = sum(word[0] == "b" for word in taken) / len(taken)
    assert share == pytest.approx(0.25, abs=0.1)
    # From everywhere in each: a quarter of a file that was left out would show.
    for label, count in (("a", 6000), ("b", 2000)):
        quarters = {4 * int(word[1:]) // count for word in taken if word[0] == label}
        assert quarters == {0, 1, 2, 3}
    for count in range(1, 24):
        fewer = words(draw(files, count=count, characters=400, seed=count))
        assert len(set(fewer)) == len(fewer) > 20 * count
    assert draw(files, count=24, characters=400) == found
    assert draw(files, count=24, characters=400, seed=1) != found


@given(st.integers(4, 60), st.integers(10, 200), st.integers(0, 800))
def test_a_stream_keeps_stretches_from_all_over(most: int, characters: int, length: int) -> None:
    text = " ".join(f"{number:05d}" for number in range(length))
    kept, stride, total = sample._streamed(iter(re.findall(r".{1,37}", text)), most, characters)
    assert total == len(text)
    assert len(kept) <= most
    if stride == 1:
        assert "".join(kept) == text
    else:
        # Many enough, in order, and none twice.
        assert len(kept) >= most // 2
        places = [text.index(one) for one in kept]
        assert places == sorted(set(places))
        assert places[-1] > total / 3


def test_a_short_text_comes_whole(tmp_path: Path) -> None:
    content = "  one\r\ntwo\n\n\tthree: Ünï, 日本, 🙂\n"
    files = [tmp_path / "a.txt", tmp_path / "b.txt.gz"]
    files[0].write_bytes(b"\xef\xbb\xbf" + content.encode())
    files[1].write_bytes(gzip.compress(content.encode()))
    found = draw(files, count=3, characters=100)
    assert found.whole
    assert found.stretches == (content + sample.BETWEEN + content,)
    assert beginning(files, 10**6).stretches == found.stretches
    first = beginning(files, 12)
    assert (first.stretches, first.whole) == ((content[:12],), False)


def test_a_dataset_without_end_is_read_in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows:
        def __init__(self, seed: int | None = None) -> None:
            self.seed = seed

        def shuffle(self, *, seed: int, buffer_size: int) -> Rows:
            return Rows(seed)

        def __iter__(self) -> Any:
            return ({"text": f"{self.seed} {number} of a row"} for number in itertools.count())

    module = types.ModuleType("datasets")
    module.load_dataset = lambda *_, **__: Rows()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: object())
    found = draw(["some/text"], count=4, characters=100, seed=3)
    assert len(found.stretches) == 4
    assert all("3 " in stretch for stretch in found.stretches)
    assert beginning(["some/text"], 20).stretches == ("None 0 of a row\n\nNon",)


def test_a_huge_file_is_read_only_where_a_stretch_lies(tmp_path: Path) -> None:
    path = tmp_path / "huge.txt"
    with path.open("wb") as file:
        file.write(b"plain words " * 30_000)
        # Words again at the end, and a hole of a terabyte between.
        file.seek(1 << 40)
        file.write(b"plain words " * 10_000)
    with pytest.raises(FullrankError, match=r"huge\.txt has NUL bytes"):
        draw([path], count=4, characters=100)
    assert beginning([path], 1000).stretches == ("plain words " * 83 + "plai",)


def test_what_is_not_unicode_is_replaced_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    lines[0].write_text('{"text": "' + "ü " * 1000 + 'a\\ud800b"}\n' + '{"text": "c d"}\n')
    lines[1].write_bytes(b"plain words " * 400 + b"and \xff then " + b"plain words " * 400)
    for path in lines:
        streamed = draw([path], count=100, characters=1000)
        assert streamed.whole
        assert (streamed.stretches[0].count("\ufffd"), streamed.replaced) == (1, 1)
        assert beginning([path], 10_000).replaced == 1
    # By places: nothing is dropped, and the half of a character before a place is no error.
    monkeypatch.setattr(sample, "LARGE", 1000)
    for path in lines:
        found = draw([path], count=4, characters=path.stat().st_size // 4)
        assert sum(stretch.count("\ufffd") for stretch in found.stretches) <= found.replaced <= 4
        assert found.replaced > 0
    path = tmp_path / "c.txt"
    path.write_text("ü日🙂 " * 3000, encoding="utf8")
    for seed in range(8):
        assert draw([path], count=2, characters=1000, seed=seed).replaced == 0


def test_conversations_become_text_by_a_template(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"number {number}"}]} for number in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def chat(messages: list[Any]) -> str:
        return "".join(f"<{one['role']}>{one['content']}" for one in messages)

    found = draw([f"{path}#messages"], count=1, characters=1000, chat=chat)
    assert found.stretches == ("<user>number 0\n\n<user>number 1\n\n<user>number 2",)
    with pytest.raises(FullrankError, match=r"holds list, expected text.*chat template"):
        draw([f"{path}#messages"], count=1, characters=1000)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n\t\n")
    for take in (lambda: draw([blank], count=1, characters=9), lambda: beginning([blank], 9)):
        with pytest.raises(FullrankError, match=r"blank.txt holds no text, only blank"):
            take()
    with pytest.raises(FullrankError, match="no text was given"):
        draw([], count=1, characters=9)
