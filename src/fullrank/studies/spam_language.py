"""A language of one repeated symbol (SpamLang of Godey and Artzi 2026, 2603.10145), as tokens.

A sequence is one symbol of V, `LENGTH` times. Training has every symbol equally often, in random order;
validation and test draw theirs. Sequences follow each other, and windows are cut anywhere: of the tokens in a
window one, where the next sequence begins, cannot be known. So the least loss is near log V / LENGTH.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fullrank.studies.grid_plan import Text

LENGTH, HELD_OUT = 16, 2048
"""Tokens of a sequence, and sequences of validation and test."""


def language(folder: Path, vocabulary: int, copies: int) -> Text:
    """So many sequences of every symbol as a directory of tokens, the same whenever it is made."""
    place = folder / f"v{vocabulary}x{copies}"
    facts = {"vocabulary": str(vocabulary), "copies": str(copies)}
    text = Text(name=place.name, tokens=place, facts=facts)
    if (place / "tokens.json").exists():
        return text
    place.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng([vocabulary, copies])
    # Token 0 ends a text, and there is one text.
    every = [random.permutation(np.arange(1, vocabulary)) for _ in range(copies)]
    splits = {"train": np.concatenate(every)}
    splits |= {name: random.integers(1, vocabulary, HELD_OUT) for name in ("valid", "test")}
    for name, symbols in splits.items():
        np.repeat(symbols, LENGTH).astype("<u4").tofile(place / f"{name}.bin")
    said = {"vocabulary_size": vocabulary, "dtype": "uint32", "end": 0}
    # Last: a directory with it is whole.
    (place / "tokens.json").write_text(json.dumps(said) + "\n", encoding="utf8")
    return text
