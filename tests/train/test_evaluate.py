"""Evaluation: a table model has a loss in closed form, every token counts once, text order is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads.softmax import Softmax
from fullrank.models import FullrankForCausalLM
from fullrank.train.evaluate import by_frequency, evaluate, summarise, token_counts, token_losses
from tests import small_models

V = 7


class Windowed(small_models.Body):
    """Hidden state: the last token, one-hot. With a linear head, any bigram model."""

    def __init__(self, context: int | None = None) -> None:
        super().__init__(V, V, V, context)
        nn.init.eye_(self.embedding.weight)
        self.calls: list[bool] = []

    def states(self, ids: Tensor) -> list[Tensor]:
        self.calls.append(self.training or torch.is_grad_enabled())
        return [self.embedding(ids)]


class Recurrent(Windowed, small_models.RecurrentBody):
    """The same as a body that reads a text part by part."""


@dataclass
class Text:
    tokens: np.ndarray
    bytes: int


def table_model(context: int | None = None) -> tuple[FullrankForCausalLM, np.ndarray]:
    """The model and log p [before, next]."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(V, V, generator=generator)
    body = Recurrent() if context is None else Windowed(context)
    model = small_models.under(body, Softmax(hidden=V, vocab=V))
    with torch.no_grad():
        model.lm_head.decoder.weight.copy_(logits.T)
    return model, logits.double().log_softmax(1).numpy()


def text(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, length).astype(np.uint16)


def truth(log_p: np.ndarray, tokens: np.ndarray, eos: int) -> np.ndarray:
    before = np.concatenate([[eos], tokens[:-1]])
    return -log_p[before, tokens]


@settings(max_examples=40)
@given(
    length=st.integers(1, 60), batch=st.integers(1, 9), time=st.integers(1, 13),
    context=st.booleans(), stride=st.integers(1, 13),
)  # fmt: skip
def test_every_token_once_in_text_order(
    length: int, batch: int, time: int, context: bool, stride: int
) -> None:
    """A bigram model needs one token of context, which every batch shape gives: the truth is one for all."""
    model, log_p = table_model(20 if context else None)
    tokens = text(length)
    stride_ = min(stride, time) if context else None
    losses = token_losses(model, tokens, eos=2, batch=batch, length=time, stride=stride_)
    np.testing.assert_allclose(losses, truth(log_p, tokens, 2), rtol=2e-6)


@settings(max_examples=20)
@given(
    length=st.integers(1, 60), batch=st.integers(1, 5), time=st.integers(1, 13),
    context=st.booleans(), processes=st.integers(2, 4),
)  # fmt: skip
def test_the_shares_of_several_processes_are_the_whole(
    length: int, batch: int, time: int, context: bool, processes: int
) -> None:
    model, log_p = table_model(20 if context else None)
    tokens = text(length)
    shares = [
        token_losses(model, tokens, eos=2, batch=batch, length=time, rank=rank, processes=processes)
        for rank in range(processes)
    ]
    np.testing.assert_allclose(sum(shares), truth(log_p, tokens, 2), rtol=2e-6)
    # No token twice, not even one whose loss would be small.
    assert (np.count_nonzero(shares, axis=0) == 1).all()


def test_closed_form() -> None:
    model, log_p = table_model()
    tokens = text(500)
    expected = truth(log_p, tokens, 0)
    found = evaluate(model, Text(tokens, 1300), eos=0, batch=3, length=11)
    assert found.loss == pytest.approx(expected.mean(), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(expected.mean()), rel=1e-6)
    assert found.bits_per_byte == pytest.approx(expected.sum() / math.log(2) / 1300, rel=1e-6)
    assert (found.counted, found.tokens) == (500, 500)
    part = evaluate(model, Text(tokens, 1300), eos=0, batch=3, length=11, limit=125)
    assert part.loss == pytest.approx(expected[:125].mean(), rel=1e-6)
    assert part.bits_per_byte == pytest.approx(expected[:125].sum() / math.log(2) / (1300 / 4), rel=1e-6)
    assert (part.counted, part.tokens) == (125, 500)
    assert math.isnan(evaluate(model, Text(tokens, 0), eos=0, batch=3, length=11).bits_per_byte)


def test_a_part_of_a_text_is_from_all_over_it() -> None:
    """Three pieces of 40: its beginning, its middle and its end, each without what stands before it."""
    model, log_p = table_model()
    tokens = text(500)
    part = evaluate(model, Text(tokens, 1300), eos=0, batch=3, length=11, limit=122, pieces=3)
    pieces = np.concatenate([tokens[:40], tokens[230:270], tokens[460:]])
    assert part.loss == pytest.approx(truth(log_p, pieces, 0).mean(), rel=1e-6)
    assert part.counted == 120


def test_modes_are_kept_and_nothing_is_differentiated() -> None:
    model, _ = table_model()
    model.train()
    model.lm_head.eval()
    evaluate(model, Text(text(9), 9), eos=0, batch=1, length=4)
    assert not any(model.model.calls)
    assert model.training
    assert model.model.training
    assert not model.lm_head.training


def lstm(**dropouts: float) -> FullrankForCausalLM:
    torch.manual_seed(0)
    return small_models.lstm(vocab=V, **dropouts)


def test_carried_state_makes_the_cut_invisible() -> None:
    model, tokens = lstm(), text(97)
    whole = token_losses(model, tokens, eos=0, batch=1, length=97)
    cut = token_losses(model, tokens, eos=0, batch=1, length=7)
    np.testing.assert_allclose(cut, whole, rtol=1e-5)
    # A larger batch starts cold at its pieces' starts only, and forgets that.
    beside = token_losses(model, tokens, eos=0, batch=3, length=7)
    np.testing.assert_allclose(beside[:32], whole[:32], rtol=1e-5)
    assert not np.allclose(beside[32:34], whole[32:34], rtol=1e-5)


def test_no_dropout_in_evaluation() -> None:
    plain = token_losses(lstm(), text(50), eos=0, batch=1, length=10)
    model = lstm(dropout=0.5, dropout_embedding=0.5, dropout_input=0.5, dropout_hidden=0.5, weight_drop=0.5)
    np.testing.assert_array_equal(token_losses(model.train(), text(50), eos=0, batch=1, length=10), plain)


def test_a_smaller_stride_shows_more_context() -> None:
    """With stride 1 every token beyond the first window sees length tokens: the same as asking one by one."""
    torch.manual_seed(0)
    model = small_models.transformer(vocab=V, context=6).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    tokens = text(25)
    losses = token_losses(model, tokens, eos=1, batch=4, length=6, stride=1)
    full = [1, *tokens.tolist()]
    for place in range(len(tokens)):
        ids = torch.tensor([full[max(0, place - 5) : place + 1]])
        with torch.no_grad():
            expected = -model(ids).logits[0, -1, int(tokens[place])]
        assert losses[place] == pytest.approx(float(expected), rel=1e-4)
    assert not np.allclose(losses, token_losses(model, tokens, eos=1, batch=4, length=6), rtol=1e-4)


def test_standard_error_covers_correlated_losses() -> None:
    """Losses in runs of 50: the block error matches the spread of the mean, the naive one is far off."""
    generator = np.random.default_rng(0)
    means, errors, naive = [], [], []
    for _ in range(200):
        losses = np.repeat(generator.exponential(size=256), 50).astype(np.float32)
        found = summarise(losses, Text(np.zeros(len(losses)), 1), seconds=0.0)
        means.append(found.loss)
        errors.append(found.standard_error)
        naive.append(losses.std() / math.sqrt(len(losses)))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.2)
    assert np.mean(naive) < np.std(means) / 4


def test_too_few_tokens_for_an_error() -> None:
    assert summarise(np.ones(1, np.float32), Text(np.zeros(1), 1), seconds=0.0).standard_error == math.inf
    assert summarise(np.full(3, 2e3, np.float32), Text(np.zeros(3), 1), seconds=0.0).perplexity == math.inf
    assert math.isnan(summarise(np.full(3, np.nan, np.float32), Text(np.zeros(3), 1), seconds=0.0).perplexity)


def test_by_frequency() -> None:
    counts = np.array([5, 50, 500, 5_000, 50_000, 10, 0])
    targets = np.array([0, 1, 2, 3, 4, 5, 6, 0], dtype=np.uint16)
    losses = np.array([9, 5, 4, 3, 1, 7, 12, 6], dtype=np.float32)
    bins = by_frequency(losses, targets, counts)
    assert [(one.low, one.high, one.counted) for one in bins] == [
        (0, 10, 3), (10, 100, 2), (100, 1_000, 1), (1_000, 10_000, 1), (10_000, None, 1),
    ]  # fmt: skip
    assert [one.loss for one in bins] == [9, 6, 4, 3, 1]
    assert bins[0].standard_error == pytest.approx(math.sqrt(3))
    assert bins[2].standard_error == math.inf
    empty = by_frequency(losses[:1], targets[:1], counts)[1]
    assert empty.counted == 0
    assert math.isnan(empty.loss)


def test_token_counts() -> None:
    tokens = text(1000)
    assert token_counts(tokens, V + 2).tolist() == [int((tokens == word).sum()) for word in range(V + 2)]


def test_progress_ends_at_one() -> None:
    shares: list[float] = []
    model, _ = table_model()
    evaluate(model, Text(text(40), 40), eos=0, batch=2, length=7, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_autocast_of_the_caller() -> None:
    model, log_p = table_model()
    tokens = text(100)
    with torch.autocast("cpu", torch.bfloat16):
        found = evaluate(model, Text(tokens, 100), eos=0, batch=2, length=10)
    assert found.loss == pytest.approx(truth(log_p, tokens, 0).mean(), rel=1e-2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"length": 30}, "context of 20"),
        ({"stride": 9}, "stride=9"),
        ({"stride": 0}, "stride=0"),
        ({"batch": 0}, "batch=0"),
        ({"limit": -1}, "limit=-1"),
        ({"blocks": 1}, "blocks=1"),
    ],
)
def test_impossible_settings(given: dict[str, int], words: str) -> None:
    model, _ = table_model(20)
    shape = {"eos": 0, "batch": 2, "length": 5} | given
    with pytest.raises(FullrankError, match=words):
        evaluate(model, Text(text(40), 40), **shape)


def test_a_stride_is_not_for_a_carried_state() -> None:
    with pytest.raises(FullrankError, match="leave it out"):
        token_losses(lstm(), text(9), eos=0, batch=1, length=4, stride=2)
    with pytest.raises(FullrankError, match="no token"):
        token_losses(lstm(), text(0), eos=0, batch=1, length=4)
    with pytest.raises(FullrankError, match="one loss a token"):
        by_frequency(np.zeros(2, np.float32), np.zeros(3, np.int64), np.ones(1))
