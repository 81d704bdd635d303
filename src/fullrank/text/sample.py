"""The text that a model is run on: files that a user gives, or English prose that every Python carries.

Files are UTF-8. A byte order mark is dropped and nothing else is changed: newlines and spaces are what the
model would see. Bytes that are not UTF-8 become U+FFFD as long as they are rare; where more than 1% of the
characters would, or where there are NUL bytes, the file is not text and is refused.

The default text needs no network: the language reference that `help()` prints (pydoc_data.topics) and the
longer docstrings of the standard library, read with `ast`, so that no module is run. It is about 1.5 million
characters, the same for one Python version, and mixed by a fixed shuffle, so that any beginning of it is a
sample of the whole. A paragraph that was there before is left out: the reference repeats itself, and the same
one could stand in the tokens that a head is fitted on and again in those that it is judged on.
"""

from __future__ import annotations

import ast
import codecs
import dataclasses
import hashlib
import inspect
import os
import random
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from fullrank.errors import FullrankError

SUFFIXES = (".txt", ".md", ".rst")
"""Files of a directory that are read as text."""

LARGEST_BAD_SHARE = 0.01
"""Of characters that could not be decoded."""

PIECE = 6000
"""Characters after which a long document of the default text is cut, so that none rules a short sample."""

SHORTEST_DOCSTRING = 200
"""Characters; shorter ones are labels."""

SHORTEST_REPEAT = 60
"""Characters from which on a repeated paragraph is left out; shorter ones are headings and lists."""

SKIPPED_FOLDERS = {
    "__phello__",
    "__pycache__",
    "dist-packages",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "lib-dynload",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
"""Tests, generated data, and what a distribution adds to the standard library."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A text whose tokens may stand in one window."""

    name: str
    text: str


def read(files: Sequence[Path], *, limit: int | None = None) -> list[Document]:
    """The files' texts in order, cut after `limit` characters in all; a directory means its text files."""
    if not files:
        raise FullrankError("no text was given: name at least one file of text")
    paths = [(path, given) for given in files for path in _expand(Path(given))]
    documents: list[Document] = []
    left = limit
    for path, given in paths:
        if left is not None and left <= 0:
            break
        text = _decode(path, left)
        if text.strip():
            documents.append(Document(name=str(path), text=text))
            left = None if left is None else left - len(text)
        elif path == Path(given):
            raise FullrankError(f"{path} holds no text ({len(text)} blank characters): give a file with text")
    if not documents:
        raise FullrankError(f"{', '.join(map(str, files))} held no text: give files with text")
    return documents


def standard_library(*, limit: int | None = None) -> list[Document]:
    """English prose about Python from the Python that runs this, cut after `limit` characters in all."""
    documents: list[Document] = []
    left = limit
    for document in _mixed():
        if left is not None:
            if left <= 0:
                break
            document = dataclasses.replace(document, text=document.text[:left])
            left -= len(document.text)
        documents.append(document)
    if not documents:
        raise FullrankError(
            "this Python carries neither pydoc_data nor the sources of its standard library, which are the "
            "default text: give a file of text with --text"
        )
    return documents


def sha256(documents: Sequence[Document]) -> str:
    """Hash of the texts in order: of one document that of its UTF-8 bytes, several are parted by a NUL."""
    digest = hashlib.sha256()
    for index, document in enumerate(documents):
        digest.update(b"\0" if index else b"")
        digest.update(document.text.encode("utf8", "surrogatepass"))
    return digest.hexdigest()


def _expand(path: Path) -> list[Path]:
    path = Path(os.path.expanduser(path))
    try:
        if not path.is_dir():
            if not path.exists():
                raise FullrankError(f"no such text file: {path}; give the path of a UTF-8 text file")
            return [path]
        found = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    except OSError as error:
        raise FullrankError(
            f"{path} cannot be read ({error.strerror}): give a text file that you may read"
        ) from error
    if not found:
        raise FullrankError(f"{path} is a directory without {', '.join(SUFFIXES)} files: give a file of text")
    return found


def _decode(path: Path, limit: int | None) -> str:
    try:
        with path.open("rb") as file:
            # A character takes at most 4 bytes, and the byte order mark 3: no more of a huge file is read.
            data = file.read() if limit is None else file.read(4 * limit + 3)
            at_end = limit is None or not file.read(1)
    except OSError as error:
        raise FullrankError(
            f"{path} cannot be read ({error.strerror}): give a text file that you may read"
        ) from error
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise FullrankError(f"{path} is UTF-16, expected UTF-8: save it as UTF-8")
    # Incremental, because the cut may go through a character, which is no fault of the file.
    text = codecs.getincrementaldecoder("utf8")("replace").decode(
        data.removeprefix(codecs.BOM_UTF8), final=at_end
    )
    text = text if limit is None else text[:limit]
    bad = text.count("\ufffd")
    if "\0" in text or bad > LARGEST_BAD_SHARE * len(text):
        found = "it has NUL bytes" if "\0" in text else f"{bad} of {len(text)} characters are not UTF-8"
        raise FullrankError(f"{path} looks binary ({found}): give a UTF-8 text file")
    return text


def _mixed() -> Iterator[Document]:
    """Pieces of the reference and docstrings of modules, in an order that is the same every time."""
    seen: set[str] = set()
    topics = _topics()
    root, sources = _sources()
    # One shuffle over names of both kinds. A file is parsed when its turn comes: the whole takes seconds.
    order: list[tuple[str, str | Path]] = [
        (f"pydoc_data.topics {name}, part {index + 1}", piece)
        for name, text in topics
        for index, piece in enumerate(_pieces(text))
    ]
    order += [(path.relative_to(root).as_posix(), path) for path in sources]
    random.Random(0).shuffle(order)
    for name, content in order:
        texts = [content] if isinstance(content, str) else _pieces("\n\n".join(_docstrings(content)))
        for text in texts:
            fresh = _fresh(text, seen)
            if len(fresh) >= SHORTEST_DOCSTRING:
                yield Document(name=name, text=fresh + "\n")


def _topics() -> list[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    return sorted((name, text) for name, text in topics.items() if isinstance(text, str))


def _sources() -> tuple[Path, list[Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        return root, []
    found: list[Path] = []
    folders = [root]
    while folders:
        # By hand, because rglob would walk through site-packages and the tests first and drop them then.
        try:
            entries = sorted(folders.pop().iterdir())
        except OSError:
            continue
        for entry in entries:
            if entry.suffix == ".py":
                found.append(entry)
            elif entry.name not in SKIPPED_FOLDERS and "." not in entry.name and entry.is_dir():
                folders.append(entry)
    return root, sorted(found)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            # Old sources may hold escapes that the parser warns about: no concern of our user.
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None and len(text) >= SHORTEST_DOCSTRING:
                yield inspect.cleandoc(text)


def _paragraphs(text: str) -> Iterator[str]:
    """Blocks between blank lines, without tables and interpreter sessions, which are no prose."""
    for block in text.replace("\r\n", "\n").split("\n\n"):
        block = block.strip("\n").rstrip()
        first = block.lstrip()
        if first and not first.startswith((">>>", "...", "+-", "|", "===")):
            yield block


def _pieces(text: str) -> list[str]:
    """The text cut between paragraphs into parts of about PIECE characters."""
    pieces: list[list[str]] = [[]]
    size = 0
    for paragraph in _paragraphs(text):
        if size + len(paragraph) > PIECE and pieces[-1]:
            pieces.append([])
            size = 0
        pieces[-1].append(paragraph)
        size += len(paragraph)
    return ["\n\n".join(piece) for piece in pieces if piece]


def _fresh(text: str, seen: set[str]) -> str:
    """The text without the paragraphs that were seen before."""
    kept = []
    for paragraph in text.split("\n\n"):
        key = " ".join(paragraph.split())
        if len(key) < SHORTEST_REPEAT or key not in seen:
            seen.add(key)
            kept.append(paragraph)
    return "\n\n".join(kept)
