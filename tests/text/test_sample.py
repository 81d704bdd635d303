"""Text: files as they are, refusals of what is no text, and the prose that every Python carries."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from fullrank.errors import FullrankError
from fullrank.text import sample as text


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_text_is_kept_as_it_is(tmp_path: Path) -> None:
    content = "  one\r\ntwo\n\n\tthree: Ünï, 日本, 🙂\n"
    files = [write(tmp_path / "a.txt", content), write(tmp_path / "b", b"\xef\xbb\xbf" + content.encode())]
    first, second = text.read(files)
    assert first.text == second.text == content
    assert first.name == str(files[0])
    assert text.sha256([first]) == hashlib.sha256(content.encode()).hexdigest()


def test_hash_knows_where_a_document_ends() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("c", "ab"), ("abc", "")]
    hashes = {text.sha256([text.Document(name="", text=part) for part in pair]) for pair in pairs}
    assert len(hashes) == 4


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 5, 9])
def test_limit_counts_characters_and_cuts_none(limit: int, tmp_path: Path) -> None:
    files = [write(tmp_path / "a", "ä🙂b日"), write(tmp_path / "b", "second")]
    if limit == 0:
        with pytest.raises(FullrankError, match="held no text"):
            text.read(files, limit=limit)
        return
    found = text.read(files, limit=limit)
    assert "".join(document.text for document in found) == "ä🙂b日second"[:limit]
    assert len(found) == (1 if limit <= 4 else 2)


def test_no_more_of_a_huge_file_is_read_than_needed(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.write("🙂".encode() * 100)
        file.truncate(1 << 40)
    assert text.read([path], limit=100)[0].text == "🙂" * 100


def test_a_directory_means_its_text_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "sub/c.RST", "code.py", "sub/d.html"):
        write(tmp_path / name, name)
    write(tmp_path / "empty.txt", "")
    assert [document.text for document in text.read([tmp_path])] == ["a.md", "b.txt", "sub/c.RST"]


def test_rare_bad_bytes_are_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"caf\xe9 " + b"plain text " * 100)
    assert text.read([path])[0].text.startswith("caf\ufffd plain")
    refused(write(tmp_path / "b", b"caf\xe9 and cr\xe8me"), "looks binary .2 of 14 characters are not UTF-8")


def refused(path: Path, match: str) -> None:
    with pytest.raises(FullrankError, match=match) as caught:
        text.read([path])
    assert "\n" not in str(caught.value)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere.txt", "no such text file")
    refused(write(tmp_path / "empty", ""), "holds no text")
    refused(write(tmp_path / "blank", " \n\t\n"), "holds no text .4 blank")
    refused(write(tmp_path / "nul", b"some text\0" * 100), "looks binary .it has NUL bytes")
    refused(write(tmp_path / "picture.png", bytes(range(1, 256)) * 20), "looks binary")
    refused(write(tmp_path / "windows.txt", "text".encode("utf-16")), "UTF-16, expected UTF-8")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "directory without .txt, .md, .rst")
    write(tmp_path / "folder" / "a.txt", "  ")
    refused(tmp_path / "folder", "held no text")
    with pytest.raises(FullrankError, match="no text was given"):
        text.read([])


def test_unreadable_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "secret.txt", "secret")

    def denied(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Not by its mode: whoever runs the tests may be root.
    monkeypatch.setattr(Path, "open", denied)
    refused(path, "cannot be read .Permission denied")


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
        "import sys; from fullrank.text import sample as text\n"
        "print(text.sha256(text.standard_library(limit=50000)))\n"
        "assert not {'torch', 'transformers', 'turtle'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == text.sha256(text.standard_library(limit=50_000))


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
