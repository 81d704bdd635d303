"""Dynamic evaluation: the published rule by hand, losses before updates, weights restored bit by bit."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit import captured
from fullrank.models import FullrankForCausalLM
from fullrank.train.dynamic import (
    Dynamic,
    dynamic_losses,
    evaluate_dynamic,
    from_published,
    gradient_rms,
    tune_dynamic,
)
from fullrank.train.evaluate import evaluate, token_losses
from tests import small_models

V = 11
EOS = 0


@dataclasses.dataclass
class Text:
    tokens: np.ndarray
    bytes: int = 100


def text(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, length).astype(np.uint16)


def lstm(head: str = "softmax", **dropouts: float) -> FullrankForCausalLM:
    torch.manual_seed(0)
    options = {} if head == "softmax" else {"components": 3}
    return small_models.lstm(head, vocab=V, options=options, **dropouts)


def transformer() -> FullrankForCausalLM:
    torch.manual_seed(0)
    return small_models.transformer(vocab=V, context=12)


def snapshot(model: FullrankForCausalLM) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def run(model: FullrankForCausalLM, tokens: np.ndarray, **settings: float) -> np.ndarray:
    chosen = Dynamic(**{"batch": 4, "length": 5, **settings})
    statistics = gradient_rms(model, text(200, 9), eos=EOS, settings=chosen)
    return dynamic_losses(model, tokens, statistics, eos=EOS, settings=chosen)


@pytest.mark.parametrize("head", ["softmax", "mos"])
def test_without_a_rate_it_is_plain_evaluation(head: str) -> None:
    tokens = text(83)
    plain = token_losses(lstm(head), tokens, eos=EOS, batch=1, length=5)
    found = run(lstm(head), tokens, lr=0.0, decay=0.3)
    np.testing.assert_allclose(found, plain, rtol=1e-6, atol=1e-6)


def test_a_transformer_sees_its_whole_context() -> None:
    """Without a rate: each token from the context that ends with its segment."""
    model, tokens = transformer(), text(40)
    found = run(model, tokens, lr=0.0)
    full = [EOS, *tokens.tolist()]
    model.eval()
    for place in range(len(tokens)):
        end = min(len(tokens), place - place % 5 + 5)
        ids = torch.tensor([full[max(0, end - 12) : place + 1]])
        with torch.no_grad():
            expected = -model(ids).logits[0, -1, int(tokens[place])]
        assert found[place] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(("make", "rate"), [(lstm, 2e-2), (transformer, 4e-3)])
def test_a_text_that_repeats_is_learnt(make: object, rate: float) -> None:
    model = make()  # type: ignore[operator]
    tokens = np.tile(np.array([3, 5, 8, 2], dtype=np.uint16), 40)
    plain = run(model, tokens, lr=0.0)
    found = run(model, tokens, lr=rate, epsilon=1e-3, decay=1e-3)
    assert found.mean() < 0.9 * plain.mean()
    assert found[-40:].mean() < 0.75 * plain[-40:].mean()


def reference(
    model: FullrankForCausalLM,
    train: np.ndarray,
    tokens: np.ndarray,
    settings: Dynamic,
    *,
    summed: bool = False,
) -> np.ndarray:
    """The rule by hand, in the published units if summed; one parameter after the other, plain autograd."""
    model = copy.deepcopy(model).eval()
    parameters = list(model.parameters())

    def segments(text: np.ndarray, batch: int) -> list[tuple[Tensor, Tensor]]:
        bounds = len(text) * np.arange(batch + 1) // batch
        before = np.concatenate([[EOS], text[:-1]]).astype(np.int64)
        rows = [(before[a:b], text[a:b].astype(np.int64)) for a, b in itertools.pairwise(bounds)]
        ids, targets = (torch.from_numpy(np.stack([row[side] for row in rows])) for side in (0, 1))
        size = settings.length
        return [(ids[:, at : at + size], targets[:, at : at + size]) for at in range(0, ids.shape[1], size)]

    squares = [torch.zeros_like(parameter) for parameter in parameters]
    carried: tuple[Tensor, ...] = ()
    pieces = segments(train, settings.batch)
    for ids, targets in pieces:
        model.zero_grad()
        out = model(ids, state=carried or None)
        log_probs, carried = out.logits, out.state
        torch.nn.functional.nll_loss(log_probs.flatten(0, 1), targets.flatten()).backward()
        for square, parameter in zip(squares, parameters, strict=True):
            square += parameter.grad**2
    rms = [(square / (1 if summed else len(pieces))).sqrt() for square in squares]
    normaliser = sum(one.mean() for one in rms) / (1 if summed else len(rms))
    trained = snapshot(model)
    losses, carried = [], ()
    for ids, targets in segments(tokens, 1):
        model.zero_grad()
        out = model(ids, state=carried or None)
        log_probs, carried = out.logits, out.state
        nll = torch.nn.functional.nll_loss(log_probs[0], targets[0], reduction="none")
        losses += nll.tolist()
        nll.mean().backward()
        for parameter, start, one in zip(parameters, trained, rms, strict=True):
            rate = (settings.decay * one / normaliser).clamp(max=1.0)
            parameter.data += rate * (start - parameter.data) - settings.lr * parameter.grad / (
                one + settings.epsilon
            )
    return np.array(losses)


def test_equals_the_rule_by_hand() -> None:
    model, train, tokens = lstm("mos"), text(400, 4), np.tile(text(13), 5)
    # A decay of 0.5 clips some weights' rates at 1 and not others'.
    settings = Dynamic(lr=1e-3, epsilon=1e-3, decay=0.5, length=5, batch=4)
    statistics = gradient_rms(model, train, eos=EOS, settings=settings)
    found = dynamic_losses(model, tokens, statistics, eos=EOS, settings=settings)
    np.testing.assert_allclose(found, reference(model, train, tokens, settings), rtol=2e-4)


def test_published_values_are_converted() -> None:
    model, train, tokens = lstm(), text(400, 4), np.tile(text(13), 5)
    number = len(list(model.parameters()))
    settings = from_published(0.01, 0.02, 0.4, batches=20, tensors=number, batch=4)
    assert settings.lr == pytest.approx(0.01 / math.sqrt(20))
    statistics = gradient_rms(model, train, eos=EOS, settings=settings)
    found = dynamic_losses(model, tokens, statistics, eos=EOS, settings=settings)
    summed = Dynamic(lr=0.01, epsilon=0.02, decay=0.4, batch=4)
    expected = reference(model, train, tokens, summed, summed=True)
    np.testing.assert_allclose(found, expected, rtol=2e-4)
    assert not np.allclose(found, reference(model, train, tokens, settings, summed=True), rtol=2e-4)


# A transformer carries nothing from one segment to the next: the LSTM has more to get wrong.
@pytest.mark.parametrize("make", [lstm, pytest.param(transformer, marks=pytest.mark.slow)])
def test_no_token_helps_to_predict_itself_or_an_earlier_one(make: object) -> None:
    model, tokens = make(), text(60)  # type: ignore[operator]
    before = run(model, tokens, lr=1e-3)
    for place in (0, 7, 34, 59):
        changed = tokens.copy()
        changed[place] = (changed[place] + 1) % V
        after = run(model, changed, lr=1e-3)
        np.testing.assert_array_equal(after[:place], before[:place])
        assert after[place] != before[place]
        if place < 59:
            assert not np.array_equal(after[place + 1 :], before[place + 1 :])


def test_weights_and_modes_come_back() -> None:
    model = lstm("mos").train()
    model.lm_head.eval()
    before = snapshot(model)
    run(model, text(40), lr=1e-2)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.grad is None
    assert model.training
    assert not model.lm_head.training


def test_weights_come_back_after_an_exception() -> None:
    model = lstm()
    before = snapshot(model)

    def stop(share: float) -> None:
        moved = any(
            not torch.equal(parameter, old) for parameter, old in zip(model.parameters(), before, strict=True)
        )
        if moved:
            raise KeyboardInterrupt

    settings = Dynamic(lr=1e-2, length=5, batch=4)
    statistics = gradient_rms(model, text(100), eos=EOS, settings=settings)
    with pytest.raises(KeyboardInterrupt):
        dynamic_losses(model, text(60), statistics, eos=EOS, settings=settings, progress=stop)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def test_no_dropout_of_any_kind() -> None:
    plain = run(lstm(), text(40), lr=1e-3)
    model = lstm(dropout=0.5, dropout_embedding=0.5, dropout_input=0.5, dropout_hidden=0.5, weight_drop=0.5)
    np.testing.assert_array_equal(run(model.train(), text(40), lr=1e-3), plain)


def test_inside_no_grad_and_end_to_end() -> None:
    model, tokens = lstm(), text(64)
    settings = Dynamic(lr=0.0, batch=4)
    with torch.no_grad():
        found = evaluate_dynamic(
            model, Text(tokens), Text(text(200, 9)), eos=EOS, settings=settings, limit=50
        )
    plain = evaluate(model, Text(tokens), eos=EOS, batch=1, length=5, limit=50)
    assert found.evaluation.loss == pytest.approx(plain.loss, rel=1e-6)
    assert found.evaluation.standard_error == pytest.approx(plain.standard_error, rel=1e-4)
    assert (found.evaluation.counted, found.evaluation.tokens) == (50, 64)
    assert found.settings is settings


@pytest.mark.parametrize(("lr", "way"), [(1e-5, 1), (0.05, -1), (0.0, 0)])
def test_a_rate_is_chosen_from_either_side_and_none_stays_none(lr: float, way: int) -> None:
    """On text that repeats itself, which wants a rate between."""
    model, tokens = lstm(), np.tile(text(30), 8)
    given = Dynamic(batch=4, length=5, lr=lr)
    statistics = gradient_rms(model, text(400, 9), eos=EOS, settings=given)
    before = snapshot(model)

    def loss(of: Dynamic) -> float:
        return float(dynamic_losses(model, tokens, statistics, eos=EOS, settings=of).mean())

    chosen = tune_dynamic(given, loss)
    assert np.sign(chosen.lr - given.lr) == way
    assert loss(chosen) < loss(given) or (chosen == given and way == 0)
    assert all(torch.equal(one, other) for one, other in zip(before, snapshot(model), strict=True))


def test_a_rate_that_diverges_is_walked_away_from() -> None:
    best, given = 0.1, Dynamic(lr=0.8)
    chosen = tune_dynamic(given, lambda of: math.nan if of.lr > 0.3 else abs(math.log(of.lr / best)))
    assert chosen == dataclasses.replace(given, lr=0.1)


def test_fewer_batches_of_statistics() -> None:
    model, train = lstm(), text(400, 4)
    two = gradient_rms(model, train, eos=EOS, settings=Dynamic(batch=4, batches=2))
    every = gradient_rms(model, train, eos=EOS, settings=Dynamic(batch=4))
    assert not torch.allclose(two[0], every[0], rtol=1e-3)


def test_frozen_weights_stay() -> None:
    model = lstm()
    model.model.embedding.weight.requires_grad_(False)
    statistics = gradient_rms(model, text(100), eos=EOS, settings=Dynamic(batch=4))
    assert len(statistics) == len(list(model.parameters())) - 1
    model.requires_grad_(False)
    with pytest.raises(FullrankError, match="requires_grad_"):
        run(model, text(20))


@pytest.mark.parametrize(
    "given",
    [{"lr": -1.0}, {"decay": math.nan}, {"epsilon": 0.0}, {"length": 0}, {"batch": 0}, {"batches": -1}],
)
def test_impossible_settings(given: dict[str, float]) -> None:
    with pytest.raises(FullrankError, match=next(iter(given))):
        Dynamic(**given)  # type: ignore[arg-type]


def test_impossible_published_units() -> None:
    with pytest.raises(FullrankError, match="batches=0"):
        from_published(0.1, 0.1, 0.1, 0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("head", ["softmax", "mos"])
def test_segments_as_one_graph_are_what_they_are_one_by_one(
    head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = []
    made = captured.CapturedStep

    def capture(*given: Any) -> Any:
        graphs.append(made(*given))
        return graphs[-1]

    def found() -> tuple[list[Tensor], np.ndarray]:
        model, settings = lstm(head).cuda(), Dynamic(batch=4, length=5, lr=0.001, decay=0.1)
        statistics = gradient_rms(model, text(400, 9), eos=EOS, settings=settings, device="cuda")
        losses = dynamic_losses(model, text(103), statistics, eos=EOS, settings=settings, device="cuda")
        return statistics, losses

    monkeypatch.setattr(captured, "CapturedStep", capture)
    statistics, losses = found()
    assert len(graphs) == 2
    monkeypatch.setattr(captured, "WARM", 1000)
    others, plain = found()
    assert len(graphs) == 2
    for mine, other in zip(statistics, others, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(losses, plain, rtol=1e-3, atol=1e-4)
