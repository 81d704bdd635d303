"""Tasks in which a text should follow its prompt: what is trained on, prompted with, and measured.

    restaurants    E2E NLG (`data_to_text`): slots said and made up, BLEU, chrF, table precision
    articles       WikiText-2 (`article_prompts`): telling words of the prompt that come back, repetition, and
                   the loss of another model

Of a text to train on the part behind its prompt counts, of an article everything. Learning rates are chosen
by the development texts, which are no test's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fullrank.errors import FullrankError
from fullrank.models import loading
from fullrank.results.generation import Piece
from fullrank.studies import article_prompts, data_to_text, slot_forms, text_metrics

TASKS = ("restaurants", "articles")
_WORD = re.compile(r"[^\W\d_]{3,}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    prompt: str
    text: str
    """What a person wrote behind it."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    name: str
    train: tuple[Example, ...]
    development: tuple[Example, ...]
    test: tuple[Example, ...]
    sha256: str
    cut: Callable[[str], str]
    """What counts of a text that was generated."""
    scores: Callable[[Sequence[str]], dict[str, float]]
    """Measures of texts behind the first test prompts, in their order."""
    people: Callable[[int], dict[str, float]]
    """The same of people's own texts behind so many prompts."""
    marked: Callable[[int, str], tuple[Piece, ...]]
    """A text behind a test prompt, with what it has copied and what it has made up."""
    notes: tuple[str, ...] = ()
    """For whoever reads the figures."""


def check(name: str, directory: Path) -> None:
    """Raise before long work where a task's texts cannot be read, or its measures not be taken."""
    read(name, directory).scores(["-"])


def read(name: str, directory: Path, judge: loading.Loaded | None = None) -> Task:
    """The task of that name from the folder of its data."""
    if name not in TASKS:
        raise FullrankError(f"the task is {name!r}: expected one of {', '.join(TASKS)}")
    return _restaurants(directory, judge) if name == "restaurants" else _articles(directory, judge)


def _restaurants(directory: Path, judge: loading.Loaded | None) -> Task:
    found = data_to_text.read(directory)
    places = found.places

    def examples(some: Sequence[data_to_text.Description]) -> tuple[Example, ...]:
        return tuple(Example(prompt=one.prompt, text=f" {text}\n") for one in some for text in one.references)

    # The file is in order of names; some prompts should be of all kinds.
    test = list(found.test)
    random.Random(0).shuffle(test)

    def measured(
        texts: Sequence[str], chosen: Sequence[data_to_text.Description], references: Sequence[Sequence[str]]
    ) -> dict[str, float]:
        looked = [slot_forms.look(text, one.slots, places) for text, one in zip(texts, chosen, strict=True)]
        bleu, chrf = text_metrics.overlap(texts, references)
        return {
            "slots said": statistics.fmean(
                len(one.realised) / (len(one.realised) + len(one.missing)) for one in looked
            ),
            "slots made up": statistics.fmean(len(one.invented) for one in looked),
            "BLEU": bleu,
            "chrF": chrf,
            "table precision": statistics.fmean(
                text_metrics.table_precision(text, one.slots.values(), theirs)
                for text, one, theirs in zip(texts, chosen, references, strict=True)
            ),
            **_judged(judge, [one.prompt for one in chosen], texts),
        }

    def scores(texts: Sequence[str]) -> dict[str, float]:
        chosen = test[: len(texts)]
        return measured(texts, chosen, [one.references for one in chosen])

    def people(count: int) -> dict[str, float]:
        chosen = [one for one in test[:count] if len(one.references) > 1]
        if not chosen:
            return {}
        first = [one.references[0] for one in chosen]
        return measured(first, chosen, [one.references[1:] for one in chosen])

    return Task(
        name="restaurants",
        train=examples(found.train),
        development=examples(found.development),
        test=tuple(Example(prompt=one.prompt, text=f" {one.references[0]}\n") for one in test),
        sha256=_sha256(directory, data_to_text.FILES.values()),
        cut=data_to_text.continuation,
        scores=scores,
        people=people,
        notes=("People’s figures are of the first reference a prompt, against the others.",),
        marked=lambda place, text: pieces(text, slot_forms.look(text, test[place].slots, places).spans),
    )


def _articles(directory: Path, judge: loading.Loaded | None) -> Task:
    found = article_prompts.read(directory)

    def scores(texts: Sequence[str]) -> dict[str, float]:
        prompts = [one.prompt for one in found.test[: len(texts)]]
        back = [
            text_metrics.returned(prompt, text, found.counts)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        return {
            "telling words back": statistics.fmean([one for one in back if one is not None] or [0.0]),
            "rep-2": statistics.fmean(text_metrics.repetition(text, 2) for text in texts),
            "rep-4": statistics.fmean(text_metrics.repetition(text, 4) for text in texts),
            "distinct-2": text_metrics.distinct(texts, 2),
            **_judged(judge, prompts, texts),
        }

    def marked(place: int, text: str) -> tuple[Piece, ...]:
        prompt = found.test[place].prompt
        known, telling = set(text_metrics.words(prompt)), text_metrics.telling(prompt, found.counts)
        named = text_metrics.telling(text, found.counts)
        spans = []
        for match in _WORD.finditer(text):
            word = match[0].lower()
            if word in telling:
                spans.append((*match.span(), "copied"))
            elif match[0][0].isupper() and word in named and word not in known:
                spans.append((*match.span(), "invented"))
        return pieces(text, spans)

    every = [Example(prompt=one.prompt, text=f" {one.continuation}") for one in found.test]
    train = [Example(prompt="", text=text) for text in found.train]
    held = max(1, len(train) // 10)
    return Task(
        name="articles",
        train=tuple(train[held:]),
        development=tuple(train[:held]),
        test=tuple(every),
        sha256=_sha256(directory, article_prompts.FILES.values()),
        cut=str.strip,
        scores=scores,
        people=lambda count: scores([one.continuation for one in found.test[:count]]),
        marked=marked,
    )


def pieces(text: str, spans: Sequence[tuple[int, int, str]]) -> tuple[Piece, ...]:
    """The whole text in stretches; spans are in order and do not overlap."""
    found, place = [], 0
    for start, stop, kind in spans:
        found += [Piece(text=text[place:start], kind="plain"), Piece(text=text[start:stop], kind=kind)]
        place = stop
    found.append(Piece(text=text[place:], kind="plain"))
    return tuple(one for one in found if one.text)


def _judged(judge: loading.Loaded | None, prompts: Sequence[str], texts: Sequence[str]) -> dict[str, float]:
    if judge is None:
        return {}
    losses = text_metrics.judged_losses(judge, prompts, [f" {text}" if text else "" for text in texts])
    counted = [loss for loss in losses if loss is not None]
    return {"judge's loss": statistics.fmean(counted)} if counted else {}


def _sha256(directory: Path, files: Iterable[str]) -> str:
    found = hashlib.sha256()
    for name in files:
        found.update((directory / name).read_bytes())
    return found.hexdigest()
