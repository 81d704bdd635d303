"""Sampling: greedy equals reading all again, a full context goes on, and what is never drawn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.models.loading import Loaded, from_objects, load
from fullrank.models.sampling import continue_each, prompt_ids, sample, sample_each
from fullrank.models.tokenizer import as_tokenizer
from fullrank.text.vocabulary import Bytes, Vocabulary, Words
from fullrank.upgrade import upgrade
from tests import small_models

WORDS = Words(["<eos>", "<unk>", "a", "b", "c", "d"])
CONTEXT = 8


def loaded(
    kind: str = "lstm", head: str = "mos", *, vocabulary: Vocabulary = WORDS, extra: int = 0
) -> Loaded:
    """`extra` rows of the matrix have no token."""
    torch.manual_seed(0)
    options = {"components": 2} if head == "mos" else {}
    vocab = vocabulary.size + extra
    if kind == "lstm":
        model = small_models.lstm(head, vocab=vocab, options=options)
    else:
        model = small_models.transformer(head, vocab=vocab, context=CONTEXT, options=options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return from_objects(model, as_tokenizer(vocabulary))


def greedy(one: Loaded, ids: list[int], tokens: int, context: int | None) -> list[int]:
    """All read again for every token, from the later half of a full context; the unknown word left out."""
    first = 0
    for _ in range(tokens):
        if context is not None and len(ids) - first >= context:
            first = len(ids) - context // 2
        with torch.no_grad():
            log_probs = one.model(torch.tensor([ids[first:]])).logits[0, -1]
        log_probs[WORDS.unknown] = -math.inf
        ids = [*ids, int(log_probs[: WORDS.size].argmax())]
    return ids


@pytest.mark.parametrize(
    ("kind", "head"),
    [("lstm", "mos"), ("lstm", "pointer"), ("transformer", "softmax"), ("transformer", "cache")],
)
def test_greedy_equals_reading_all_again(kind: str, head: str) -> None:
    one = loaded(kind, head)
    found = sample(one, "a b\nc", tokens=12, temperature=0)
    expected = greedy(one, [0, 2, 3, 0, 4], 12, None if kind == "lstm" else CONTEXT)
    assert found == WORDS.decode(expected[1:])
    assert found.startswith("a b\nc")


def test_narrow_choices_are_the_most_probable() -> None:
    one = loaded()
    expected = sample(one, "a", tokens=12, temperature=0)
    assert sample(one, "a", tokens=12, top_k=1) == expected
    assert sample(one, "a", tokens=12, top_p=1e-6) == expected
    assert sample(one, "a", tokens=12, temperature=1e-4) == expected


# Three seconds of draws; how a head draws is in tests/heads/test_decoding.py.
@pytest.mark.slow
def test_shares_are_the_models() -> None:
    """First tokens of 400 texts against the model's probabilities, five standard deviations."""
    one = loaded()
    with torch.no_grad():
        shares = one.model(torch.tensor([[0]])).logits[0, -1].exp()
    shares[WORDS.unknown] = 0.0
    shares = (shares / shares.sum()).tolist()
    drawn = [sample(one, "", tokens=1, seed=seed) for seed in range(400)]
    for word, share in zip(WORDS.words, shares, strict=True):
        count = sum(text == ("\n" if word == "<eos>" else word) for text in drawn)
        assert abs(count / 400 - share) <= 5 * math.sqrt(share * (1 - share) / 400)


def test_seeds_and_the_callers_random_state() -> None:
    one = loaded()
    before = torch.get_rng_state()
    first = sample(one, "a", tokens=30, seed=1)
    assert sample(one, "a", tokens=30, seed=1) == first
    assert sample(one, "a", tokens=30, seed=2) != first
    assert torch.equal(torch.get_rng_state(), before)


def test_the_unknown_word_and_rows_without_a_token_are_not_drawn() -> None:
    one = loaded(extra=5)
    assert sample(one, "zebra a", tokens=1, temperature=0).startswith("<unk> a")
    texts = [sample(one, "", tokens=60, seed=seed) for seed in range(3)]
    assert not any("<unk>" in text for text in texts)
    assert any("<unk>" in sample(one, "", tokens=60, seed=seed, allow_unknown=True) for seed in range(3))
    closed = loaded(vocabulary=Words(["<eos>", "a", "b"]))
    with pytest.raises(FullrankError, match="use words that it has"):
        sample(closed, "a zebra", tokens=1)


def test_bytes_of_a_command_line_that_are_not_utf8_are_replaced() -> None:
    model = loaded("transformer", "softmax", vocabulary=Bytes())
    # As Python reads the byte 255 of an argument.
    assert prompt_ids(model, "a\udcffb") == prompt_ids(model, "a\ufffdb")


def test_bytes_come_back_as_text_and_end_where_the_model_ends_it() -> None:
    one = loaded("transformer", "softmax", vocabulary=Bytes())
    one.model.generation_config.eos_token_id = Bytes.eos
    assert sample(one, "é", tokens=8).startswith("é")
    with torch.no_grad():
        # Whatever was read, the end of a text scores 8 and any other token next to nothing.
        one.model.model.embed_in.weight.mul_(0.01)
        one.model.model.embed_in.weight[Bytes.eos] = 1.0
        one.model.model.final_layer_norm.weight.zero_()
        one.model.model.final_layer_norm.bias.fill_(1.0)
    assert sample(one, "A", tokens=30, temperature=0) == "A"


def test_an_upgraded_model_has_its_originals_text(tiny_checkpoint: Any) -> None:
    plain = load(tiny_checkpoint("llama"))
    expected = sample(plain, "the", tokens=12, temperature=0)
    upgraded = from_objects(upgrade(plain, "mos"), plain.tokenizer)
    assert sample(upgraded, "the", tokens=12, temperature=0) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"tokens": 0},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"beams": 0},
        {"beams": 2, "temperature": 0.5},
    ],
)
def test_impossible_settings(given: dict[str, float]) -> None:
    with pytest.raises(FullrankError, match=next(iter(given))):
        sample_each(loaded(), [""], **{"tokens": 1, **given})  # type: ignore[arg-type]


def test_a_broken_model_is_named() -> None:
    one = loaded()
    with torch.no_grad():
        one.model.model.embedding.weight.fill_(math.nan)
    with pytest.raises(FullrankError, match="no token a probability"):
        sample(one, "", tokens=1)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(("kind", "head"), [("lstm", "cache"), ("transformer", "cache")])
def test_prompts_of_different_lengths_together(kind: str, head: str, beams: int) -> None:
    """Each as alone, a full context and an empty prompt among them."""
    one = loaded(kind, head)
    prompts = ["a b\nc", "", "d", "a b c d a b c d a b", "c d"]
    found = sample_each(one, prompts, tokens=12, temperature=0, beams=beams)
    assert found == [
        sample_each(one, [prompt], tokens=12, temperature=0, beams=beams)[0] for prompt in prompts
    ]
    assert all(text.startswith(prompt) for text, prompt in zip(found, prompts, strict=True))


def test_a_text_that_ends_beside_one_that_goes_on() -> None:
    one = loaded("transformer", "cache", vocabulary=Bytes())
    ids = continue_each(one, [prompt_ids(one, "A"), prompt_ids(one, "Bc")], tokens=6, temperature=0)
    end = next(token for token in ids[0][2:] if token not in ids[1])
    one.model.generation_config.eos_token_id = end
    again = continue_each(one, [prompt_ids(one, "A"), prompt_ids(one, "Bc")], tokens=6, temperature=0)
    assert again[0] == ids[0][: ids[0].index(end) + 1]
    assert again[1] == ids[1]


def test_draws_of_a_batch_are_repeatable() -> None:
    one = loaded("transformer", "cache")
    first = sample_each(one, ["a", "b c"], tokens=20, seed=1)
    assert sample_each(one, ["a", "b c"], tokens=20, seed=1) == first
    assert sample_each(one, ["a", "b c"], tokens=20, seed=2) != first
