"""Sampling: exact shares, greedy, filters, a carried state that equals reading all again, unknown words."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.models import FullrankForCausalLM
from fullrank.text.vocabulary import Bytes, Words
from fullrank.train.generate import choose, generate
from tests import small_models

WORDS = Words(["<eos>", "<unk>", "a", "b", "c", "d"])
V = WORDS.size
SHARES = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])


def drawn(number: int = 1000, **settings: float) -> dict[int, float]:
    generator = torch.Generator().manual_seed(0)
    chosen = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "banned": None} | settings
    counts = Counter(choose(SHARES.log(), generator=generator, **chosen) for _ in range(number))  # type: ignore[arg-type]
    return {token: count / number for token, count in counts.items()}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"temperature": 0.5}, [0.16, 0.09, 0.0225, 0.01, 0.0025]),
        ({"top_k": 2}, [0.4, 0.3]),
        ({"top_p": 0.71}, [0.4, 0.3, 0.15]),
        ({"top_p": 0.69}, [0.4, 0.3]),
        ({"top_p": 1e-9}, [0.4]),
        ({"banned": 0}, [0, 0.3, 0.15, 0.1, 0.05]),
        ({"banned": 0, "top_k": 2}, [0, 0.3, 0.15]),
        ({"top_k": 99}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"temperature": 0}, [1.0]),
        ({"temperature": 0, "banned": 0}, [0, 1.0]),
    ],
    ids=str,
)
def test_shares(settings: dict[str, float], expected: list[float]) -> None:
    found = drawn(**settings)
    total = sum(expected)
    for token in range(5):
        share = expected[token] / total if token < len(expected) else 0.0
        # Five standard deviations; nothing at all where the share is 0 or 1.
        bound = 5 * math.sqrt(share * (1 - share) / 1000)
        assert abs(found.get(token, 0.0) - share) <= bound


def lstm(head: str = "mos", dropout: float = 0.0) -> FullrankForCausalLM:
    torch.manual_seed(0)
    options = {"components": 2} if head == "mos" else {}
    model = small_models.lstm(head, vocab=V, weight_drop=dropout, dropout=dropout, options=options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def transformer(vocab: int = V) -> FullrankForCausalLM:
    torch.manual_seed(0)
    model = small_models.transformer(vocab=vocab, context=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def by_hand(model: FullrankForCausalLM, ids: list[int], tokens: int, context: int | None) -> list[int]:
    """Greedy, all read again for every token, the unknown word left out."""
    model.eval()
    for _ in range(tokens):
        with torch.no_grad():
            log_probs = model(torch.tensor([ids if context is None else ids[-context:]])).logits[0, -1]
        log_probs[WORDS.unknown] = -math.inf
        ids = [*ids, int(log_probs.argmax())]
    return ids


@pytest.mark.parametrize("make", [lstm, transformer])
def test_greedy_equals_reading_all_again(make: object) -> None:
    model = make()  # type: ignore[operator]
    found = generate(model, WORDS, "a b\nc", tokens=12, temperature=0)
    expected = by_hand(model, [0, 2, 3, 0, 4], 12, None if make is lstm else 5)
    assert found == WORDS.decode(expected[1:])
    assert found.startswith("a b\nc")


def test_a_head_that_points_reads_its_context() -> None:
    model = lstm("pointer")
    assert model.lm_head.needs_context
    expected = by_hand(model, [0, 2, 3], 6, None)
    assert generate(model, WORDS, "a b", tokens=6, temperature=0) == WORDS.decode(expected[1:])


def test_seeds() -> None:
    model = lstm()
    first = generate(model, WORDS, "a", tokens=30, seed=1)
    assert generate(model, WORDS, "a", tokens=30, seed=1) == first
    assert generate(model, WORDS, "a", tokens=30, seed=2) != first


def test_no_dropout_and_modes_come_back() -> None:
    expected = generate(lstm(), WORDS, "", tokens=20)
    model = lstm(dropout=0.5).train()
    assert generate(model, WORDS, "", tokens=20) == expected
    assert model.training


def test_unknown_words() -> None:
    model = lstm()
    assert generate(model, WORDS, "zebra a", tokens=1, temperature=0).startswith("<unk> a")
    texts = [generate(model, WORDS, "", tokens=60, seed=seed) for seed in range(5)]
    assert not any("<unk>" in text for text in texts)
    allowed = [generate(model, WORDS, "", tokens=60, seed=seed, allow_unknown=True) for seed in range(5)]
    assert any("<unk>" in text for text in allowed)
    closed = Words(["<eos>", "a", "b", "c", "d", "e"])
    with pytest.raises(FullrankError, match="'zebra' in line 1 of the prompt"):
        generate(model, closed, "a zebra", tokens=1)


def test_bytes_come_back_as_text() -> None:
    found = generate(transformer(257), Bytes(), "é", tokens=8)
    assert found.startswith("é")


@pytest.mark.parametrize(
    "given",
    [
        {"tokens": 0},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ],
)
def test_impossible_settings(given: dict[str, float]) -> None:
    with pytest.raises(FullrankError, match=next(iter(given))):
        generate(lstm(), WORDS, "", **{"tokens": 1, **given})  # type: ignore[arg-type]


def test_a_broken_model_is_named() -> None:
    model = lstm()
    with torch.no_grad():
        model.model.embedding.weight.fill_(math.nan)
    with pytest.raises(FullrankError, match="no token a probability"):
        generate(model, WORDS, "", tokens=1)
