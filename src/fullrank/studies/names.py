"""Text with rare names that come back: what a memory of the text should help with, and what it cannot help.

A document tells of two people, a town and a firm whose names are made of syllables and are therefore in
nobody's training text. Each is named several times. At its first occurrence a name cannot be known; at every
later one it stands in the text already. The loss on the tokens of either kind, beside that on all other
tokens, says whether a memory is used, and what it costs where there is nothing to remember.
"""

from __future__ import annotations

import dataclasses
import random

ONSETS = tuple("b br d dr f fl g gr k kr l m n p pr r s sh sk t th tr v vr w y z zh".split())  # noqa: SIM905
VOWELS = ("a", "e", "i", "o", "u", "ae", "ei", "ou", "ia", "oa")
ENDS = ("l", "m", "n", "r", "s", "th", "x", "k", "nd", "rn", "sk", "lt")

SENTENCES = (
    "{person} had lived in {town} since the war.",
    "{person} worked for {firm} until the spring.",
    "Nobody in {town} had ever met {other}.",
    "When {other} arrived in {town}, the shops were already closed.",
    "{person} wrote to {other} every week.",
    "The road to {town} was under water again.",
    "{firm} had promised new machines and better pay.",
    "At the station {other} asked for a ticket to {town}.",
    "{person} said that {firm} would be sold before winter.",
    "The letter was signed by {other} and by two witnesses.",
    "In the evening {person} and {other} walked along the river.",
    "A lawyer of {firm} came to see {person} on Monday.",
    "Most people in {town} worked for {firm}.",
    "{other} did not believe a word of it.",
    "The doctor told {person} to rest for a month.",
    "By then {firm} owed the bank a great deal of money.",
    "It rained, and the market of {town} stayed empty.",
    "{person} kept the key in a drawer of the desk.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mention:
    """A name in a text."""

    start: int
    end: int
    """Characters, without the space before."""
    repeated: bool
    """Whether the name stands in the text before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Story:
    text: str
    mentions: tuple[Mention, ...]


def stories(count: int, *, sentences: int = 14, seed: int = 0) -> list[Story]:
    """Documents of so many sentences; no name is in two of them."""
    draw = random.Random(f"names {seed}")
    used: set[str] = set()
    return [_story(sentences, draw, used) for _ in range(count)]


def _story(sentences: int, draw: random.Random, used: set[str]) -> Story:
    names = {
        "person": f"{_name(draw, used)} {_name(draw, used)}",
        "other": f"{_name(draw, used)} {_name(draw, used)}",
        "town": _name(draw, used),
        "firm": f"{_name(draw, used)} Brothers",
    }
    text, mentions = "", []
    seen: set[str] = set()
    order: list[str] = []
    while len(order) < sentences:
        # Every sentence once before any comes back.
        order += draw.sample(SENTENCES, len(SENTENCES))
    for sentence in order[:sentences]:
        text += " " if text else ""
        for part in sentence.replace("}", "{").split("{"):
            name = names.get(part)
            if name is not None:
                mentions.append(Mention(start=len(text), end=len(text) + len(name), repeated=part in seen))
                seen.add(part)
            text += part if name is None else name
    return Story(text=text, mentions=tuple(mentions))


def _name(draw: random.Random, used: set[str]) -> str:
    while True:
        syllables = [draw.choice(ONSETS) + draw.choice(VOWELS) for _ in range(draw.choice((2, 2, 3)))]
        name = ("".join(syllables) + draw.choice(ENDS)).capitalize()
        if name not in used:
            used.add(name)
            return name
