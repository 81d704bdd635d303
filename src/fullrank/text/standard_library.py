"""English prose that every Python carries: the text for a model where a user gives none.

It needs no network: the language reference that `help()` prints (pydoc_data.topics) and the longer docstrings
of the standard library, read with `ast`, so that no module is run. It is about 1.5 million characters, the
same for one Python version, and mixed by a fixed shuffle, so that any beginning of it is a sample of the
whole. A paragraph that was there before is left out: the reference repeats itself, and the same one could
stand in the tokens that a head is fitted on and again in those that it is judged on.
"""

from __future__ import annotations

import ast
import inspect
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fullrank.errors import FullrankError
from fullrank.text.documents import valid_unicode

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


class Document(NamedTuple):
    """A piece of the reference, or the docstrings of a module."""

    name: str
    text: str


def standard_library(limit: int | None = None) -> list[Document]:
    """English prose about Python from the Python that runs this, cut after `limit` characters in all."""
    documents: list[Document] = []
    left = limit
    for name, text in _mixed():
        if left is not None:
            if left <= 0:
                break
            text = text[:left]
            left -= len(text)
        documents.append(Document(name, text))
    if not documents:
        raise FullrankError(
            "this Python carries neither pydoc_data nor the sources of its standard library, which are the "
            "default text: give a file of text with --text"
        )
    return documents


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
                yield Document(name, fresh + "\n")


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
                yield valid_unicode(inspect.cleandoc(text))[0]


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
