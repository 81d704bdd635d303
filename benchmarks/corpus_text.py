"""Synthetic text of any length, sampled from a word-level trigram model of a real text.

It is no language, but as much work. Every word is drawn from those that followed the last two words somewhere
in the model's text, or, with the chances below, from those that followed the last one, or from all. So the
counts of words and of short n-grams are those of the text, longer ones are new, and no stretch of text is
repeated: counting it costs what counting real text costs. Types beyond `vocabulary` become <unk>. The same
seed gives the same text.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np

BIGRAM, UNIGRAM = 0.15, 0.05
"""Chances to look back one word only, and none."""
CHAINS = 2048
"""Texts that are drawn side by side."""
LENGTH = 4096
"""Words of a document."""


def make(path: Path, model: Path, *, tokens: int, vocabulary: int = 32_000, seed: int = 0) -> None:
    """Write about `tokens` words, ends of lines counted, whole or not at all."""
    words = [word for word in model.read_text(encoding="utf8").replace("\n", " \n ").split(" ") if word]
    common = [word for word, _ in Counter(words).most_common(vocabulary)]
    numbers = {word: index for index, word in enumerate(common)}
    unknown = numbers.get("<unk>", 0)
    ids = np.array([numbers.get(word, unknown) for word in words], dtype=np.int64)
    names = np.array(common, dtype=object)
    # Place p stands for the two words at p and p + 1; what follows is at p + 2.
    first, second, third = ids[:-2], ids[1:-1], ids[2:]
    two, one = _Alike(first * vocabulary + second), _Alike(second)
    places, random = len(third), np.random.default_rng(seed)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    left = tokens
    with partial.open("w", encoding="utf8") as file:
        while left > 0:
            place = random.integers(0, places, CHAINS)
            steps = min(LENGTH, -(-left // CHAINS))
            drawn = np.empty((steps, CHAINS), dtype=np.int64)
            for step in range(steps):
                chance, at = random.random((2, CHAINS))
                chosen = np.where(chance < BIGRAM + UNIGRAM, one.draw(place, at), two.draw(place, at))
                chosen = np.where(chance < UNIGRAM, (at * places).astype(np.int64), chosen)
                drawn[step] = third[chosen]
                place = (chosen + 1) % places
            for chain in drawn.T:
                text = " ".join(names[chain].tolist())
                file.write(text.replace(" \n ", "\n").replace("\n ", "\n") + "\n")
            left -= steps * CHAINS
    os.replace(partial, path)


class _Alike:
    """Places that share a key, found by place."""

    def __init__(self, keys: np.ndarray) -> None:
        self._sorted = np.argsort(keys, kind="stable")
        ordered = keys[self._sorted]
        starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        sizes = np.diff(np.append(starts, len(keys)))
        self._low, self._size = np.empty_like(keys), np.empty_like(keys)
        self._low[self._sorted] = np.repeat(starts, sizes)
        self._size[self._sorted] = np.repeat(sizes, sizes)

    def draw(self, place: np.ndarray, at: np.ndarray) -> np.ndarray:
        """One of the places like `place`, by a number between 0 and 1."""
        return self._sorted[self._low[place] + (at * self._size[place]).astype(np.int64)]
