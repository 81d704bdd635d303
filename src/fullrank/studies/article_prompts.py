"""Beginnings of WikiText-2 articles, for a model to go on from.

An article begins at a line ` = Title = `. Its prompt is the title and the first words of its text, its
reference the words that follow. The marks of the word-level files are taken back (` @-@ `, spaces before
punctuation), for models of ordinary text; `<unk>` stays.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path

from fullrank.errors import FullrankError
from fullrank.studies.text_metrics import words

FILES = {"train": "train.txt", "test": "test.txt"}
_TITLE = re.compile(r"^ = (?!=)(.+?) = ?$")
_PUNCTUATION = re.compile(r" ([,.;:!?)\]%]|'s\b|n't\b)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Article:
    prompt: str
    continuation: str
    """What the article goes on with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Articles:
    train: tuple[str, ...]
    """Beginnings of articles to train on, of as many words as a prompt and its continuation."""
    test: tuple[Article, ...]
    counts: Counter[str]
    """Of words in the file to train on."""


def read(directory: Path, *, prompt: int = 64, continuation: int = 64) -> Articles:
    """Articles of test.txt with so many words in all, and how often words are in train.txt."""
    texts = {}
    for split, name in FILES.items():
        try:
            texts[split] = (directory / name).read_text(encoding="utf8")
        except (OSError, UnicodeDecodeError) as error:
            raise FullrankError(
                f"{directory / name} cannot be read ({error}): give the folder of WikiText-2, with "
                f"{' and '.join(FILES.values())}"
            ) from error
    found = []
    for title, body in _articles(texts["test"]):
        every = body.split()
        if len(every) >= prompt + continuation:
            head = f"{title}\n{plain(' '.join(every[:prompt]))}"
            found.append(
                Article(prompt=head, continuation=plain(" ".join(every[prompt : prompt + continuation])))
            )
    if not found:
        raise FullrankError(
            f"{directory / FILES['test']} has no article of {prompt + continuation} words, expected lines "
            "' = Title = ' with text below them"
        )
    begun = [
        f"{title}\n{plain(' '.join(body.split()[: prompt + continuation]))}"
        for title, body in _articles(texts["train"])
        if body
    ]
    if len(begun) < 2:
        raise FullrankError(f"{directory / FILES['train']} has {len(begun)} articles, expected 2 or more")
    return Articles(train=tuple(begun), test=tuple(found), counts=Counter(words(plain(texts["train"]))))


def plain(text: str) -> str:
    """Word-level text as people write it."""
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = _PUNCTUATION.sub(r"\1", text)
    return re.sub(r"([(\[]) ", r"\1", text).strip()


def _articles(text: str) -> list[tuple[str, str]]:
    """Titles and texts, without the headings inside."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        title = _TITLE.match(line.rstrip())
        if title:
            found.append((title[1], []))
        elif found and line.strip() and not line.startswith(" = ="):
            found[-1][1].append(line.strip())
    return [(plain(title), " ".join(lines)) for title, lines in found]
