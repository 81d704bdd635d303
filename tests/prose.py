"""A text of few words for tiny models."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

SENTENCE = "the shells that she sells are sea shells for sure when a model is small and language large"
WORDS = SENTENCE.split()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """prose.txt with 1,500 words, drawn at random."""
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    draw = random.Random(0)
    path.write_text(" ".join(draw.choice(WORDS) for _ in range(1500)), encoding="utf8")
    return path
