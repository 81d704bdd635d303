"""The prose that every Python carries: of a size, mixed, and the same every time."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from fullrank.errors import FullrankError
from fullrank.text import standard_library as text


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.slow(reason="reads the whole standard library, seven seconds")
def test_standard_library_is_prose_of_a_size() -> None:
    documents = text.standard_library()
    size = sum(len(document.text) for document in documents)
    assert size > 800_000
    assert all(len(document.text) >= text.SHORTEST_DOCSTRING for document in documents)
    # One paragraph may be longer than a piece.
    assert sorted(len(document.text) for document in documents)[-20] <= text.PIECE + 200
    topics = sum(len(document.text) for document in documents if document.name.startswith("pydoc_data"))
    assert 0.1 < topics / size < 0.6
    letters = sum(
        character.isalpha() or character == " " for document in documents for character in document.text
    )
    assert letters / size > 0.75
    paragraphs = [
        " ".join(paragraph.split()) for document in documents for paragraph in document.text.split("\n\n")
    ]
    long = [paragraph for paragraph in paragraphs if len(paragraph) >= text.SHORTEST_REPEAT]
    assert len(long) == len(set(long))
    assert not any(paragraph.startswith(">>>") for paragraph in paragraphs)


def test_any_beginning_of_the_standard_library_is_a_mix() -> None:
    start = time.perf_counter()
    documents = text.standard_library(limit=100_000)
    # 0.3 s on one core of the machine that this was written on.
    assert time.perf_counter() - start < 10
    assert sum(len(document.text) for document in documents) == 100_000
    topics = sum(len(document.text) for document in documents if document.name.startswith("pydoc_data"))
    assert 10_000 < topics < 60_000
    shorter = text.standard_library(limit=30_000)
    assert shorter[:-1] == documents[: len(shorter) - 1]
    assert documents[len(shorter) - 1].text.startswith(shorter[-1].text)


def test_the_standard_library_is_the_same_in_another_process() -> None:
    code = (
        "import hashlib, sys; from fullrank.text.standard_library import standard_library\n"
        "print(hashlib.sha256(repr(standard_library(limit=50000)).encode()).hexdigest())\n"
        "assert not {'torch', 'transformers', 'turtle'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = hashlib.sha256(repr(text.standard_library(limit=50_000)).encode()).hexdigest()
    assert done.stdout.strip() == here


def test_a_python_without_topics_or_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    only_sources = text.standard_library(limit=20_000)
    assert not any(document.name.startswith("pydoc_data") for document in only_sources)
    paths = {"stdlib": str(tmp_path / "nowhere")}
    monkeypatch.setattr(sysconfig, "get_path", paths.__getitem__)
    with pytest.raises(FullrankError, match="--text"):
        text.standard_library()
    monkeypatch.delitem(sys.modules, "pydoc_data.topics")
    only_topics = text.standard_library(limit=20_000)
    assert all(document.name.startswith("pydoc_data") for document in only_topics)


def test_broken_sources_are_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    paths = {"stdlib": str(tmp_path)}
    monkeypatch.setattr(sysconfig, "get_path", paths.__getitem__)
    words = "A docstring that is long enough to be taken, with words. " * 5
    write(tmp_path / "good.py", f'"""{words}"""\nraise SystemExit("this was run")\n')
    write(tmp_path / "escape.py", f'"""{words} of another kind \\d"""\n')
    write(tmp_path / "wrong.py", "def (:\n")
    write(tmp_path / "nul.py", b"x = 1\0")
    write(tmp_path / "test" / "test_it.py", f'"""{words} in a test"""\n')
    write(tmp_path / "site-packages" / "other.py", f'"""{words} of others"""\n')
    assert sorted(document.name for document in text.standard_library()) == ["escape.py", "good.py"]
