"""The neural cache: equal to the definition by brute force, sums to one, looks back only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.errors import FullrankError
from fullrank.models import FullrankForCausalLM
from fullrank.models.loading import Loaded
from fullrank.train import cache as module
from fullrank.train.cache import Cache, Trace, evaluate_cache, trace, trace_transformers, tune, with_cache
from fullrank.train.evaluate import evaluate, token_losses
from fullrank.upgrade.original import EveryRow
from tests import small_models

V = 6
EOS = 0


@dataclass
class Text:
    tokens: np.ndarray
    bytes: int = 100


def made(length: int, seed: int = 0, scale: float = 1.0) -> tuple[Trace, np.ndarray]:
    """A way through a text, and the model's log-probabilities [L, V] on it."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, V, length).astype(np.uint16)
    logits = generator.normal(size=(length, V))
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    states = (scale * generator.normal(size=(length, 4))).astype(np.float32)
    losses = -log_p[np.arange(length), tokens].astype(np.float32)
    return Trace(tokens=tokens, losses=losses, states=states), log_p


def brute(way: Trace, log_p: np.ndarray, chosen: Cache) -> np.ndarray:
    """p [L, V] by the definition, fp64."""
    out = np.exp(log_p)
    for now in range(1, len(out)):
        held = range(max(0, now - chosen.window), now)
        scores = np.array([chosen.theta * way.states[now].astype(float) @ way.states[then] for then in held])
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        votes = np.zeros(V)
        for share, then in zip(shares, held, strict=True):
            votes[way.tokens[then]] += share
        out[now] = (1 - chosen.weight) * out[now] + chosen.weight * votes
    return out


@settings(max_examples=40)
@given(
    length=st.integers(1, 40), seed=st.integers(0, 99), window=st.integers(1, 50),
    weight=st.floats(0, 0.99), theta=st.floats(-3, 3),
)  # fmt: skip
def test_equals_the_definition_and_sums_to_one(
    length: int, seed: int, window: int, weight: float, theta: float
) -> None:
    way, log_p = made(length, seed)
    chosen = Cache(weight=weight, theta=theta, window=window)
    expected = brute(way, log_p, chosen)
    found = with_cache(way, chosen)
    np.testing.assert_allclose(found, -np.log(expected[np.arange(length), way.tokens]), rtol=1e-4, atol=1e-5)
    # As a distribution: the same past with each token of the vocabulary as the last one.
    total = 0.0
    for token in range(V):
        tokens, losses = way.tokens.copy(), way.losses.copy()
        tokens[-1], losses[-1] = token, -log_p[-1, token]
        total += math.exp(-with_cache(Trace(tokens=tokens, losses=losses, states=way.states), chosen)[-1])
    assert total == pytest.approx(1.0, abs=1e-5)


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    way, _ = made(60)
    chosen = Cache(weight=0.3, theta=0.7, window=13)
    whole = with_cache(way, chosen)
    monkeypatch.setattr(module, "_BYTES", 4 * (13 + 512) * 7)
    np.testing.assert_allclose(with_cache(way, chosen), whole, rtol=1e-6)


def test_long_states_neither_overflow_nor_vanish() -> None:
    """theta h·h of thousands: the loss stays finite and at most the model's plus -log(1 - weight)."""
    way, _ = made(50, scale=100.0)
    found = with_cache(way, Cache(weight=0.2, theta=5.0, window=20))
    assert np.isfinite(found).all()
    assert (found <= way.losses - math.log1p(-0.2) + 1e-4).all()


def test_the_first_token_and_no_weight_are_the_model() -> None:
    way, _ = made(30)
    assert with_cache(way, Cache())[0] == way.losses[0]
    np.testing.assert_array_equal(with_cache(way, Cache(weight=0.0)), way.losses)


def test_looks_back_only() -> None:
    way, _ = made(40)
    chosen = Cache(weight=0.3, theta=1.0, window=9)
    before = with_cache(way, chosen)
    tokens, states = way.tokens.copy(), way.states.copy()
    tokens[25] = (tokens[25] + 1) % V
    states[25] += 1
    after = with_cache(Trace(tokens=tokens, losses=way.losses, states=states), chosen)
    np.testing.assert_array_equal(after[:25], before[:25])
    assert (after[26:35] != before[26:35]).any()
    # The window has gone by.
    np.testing.assert_allclose(after[35:], before[35:], rtol=1e-6)


def model() -> FullrankForCausalLM:
    torch.manual_seed(0)
    return small_models.lstm(
        "mos", vocab=V, embedding=5, inner=7, last=5, options={"components": 2}, dropout=0.5, weight_drop=0.5
    )


@pytest.mark.parametrize("batch", [1, 3])
def test_a_trace_is_the_states_that_predicted(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net, tokens = model().train(), made(50)[0].tokens
    way = trace(net, tokens, eos=EOS, batch=batch, length=7)
    np.testing.assert_array_equal(way.losses, token_losses(net, tokens, eos=EOS, batch=batch, length=7))
    # What the head reads: its loss on these states is the loss.
    net.eval()
    with torch.no_grad():
        losses = net.lm_head(
            torch.from_numpy(way.states), torch.from_numpy(tokens.astype(np.int64)), reduction="none"
        )
    np.testing.assert_allclose(losses.numpy(), way.losses, rtol=1e-5)
    monkeypatch.setattr(module, "_IN_MEMORY", 0)
    on_disk = trace(net, tokens, eos=EOS, batch=batch, length=7)
    assert isinstance(on_disk.states, np.memmap)
    np.testing.assert_array_equal(on_disk.states, way.states)


def test_end_to_end() -> None:
    net, tokens = model(), np.tile(made(23)[0].tokens, 4)
    shares: list[float] = []
    found = evaluate_cache(
        net,
        Text(tokens),
        eos=EOS,
        batch=2,
        length=9,
        settings=Cache(weight=0.0),
        limit=80,
        progress=shares.append,
    )
    plain = evaluate(net, Text(tokens), eos=EOS, batch=2, length=9, limit=80)
    assert found.evaluation.loss == pytest.approx(plain.loss, rel=1e-6)
    assert (found.evaluation.counted, found.evaluation.tokens) == (80, 92)
    assert shares[-1] == 1.0
    assert shares == sorted(shares)


def test_tuning_finds_the_planted_settings() -> None:
    """States that tell a token if the model knows nothing: a heavy, sharp cache wins; of noise the least."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, V, 400).astype(np.uint16)
    states = (3.0 * np.eye(V, dtype=np.float32))[tokens]
    flat = np.full(400, math.log(V), dtype=np.float32)
    best = tune(Trace(tokens=tokens, losses=flat, states=states), windows=(5, 300))
    assert (best.weight, best.window) == (0.4, 300)
    assert best.theta * 9 > 4
    found = with_cache(Trace(tokens=tokens, losses=flat, states=states), best)
    assert found[100:].mean() < 0.6 * math.log(V)
    noise = generator.normal(size=(400, V)).astype(np.float32)
    assert tune(Trace(tokens=tokens, losses=flat / 8, states=noise)).weight == 0.02


def test_the_best_of_the_grid_is_the_best() -> None:
    way, _ = made(60)
    grid = {"thetas": (0.1, 1.0), "weights": (0.1, 0.3), "windows": (4, 20)}
    losses = {
        (weight, theta, window): with_cache(way, Cache(weight=weight, theta=theta, window=window)).mean()
        for theta in grid["thetas"] for weight in grid["weights"] for window in grid["windows"]
    }  # fmt: skip
    best = tune(way, **grid)  # type: ignore[arg-type]
    assert (best.weight, best.theta, best.window) == min(losses, key=losses.__getitem__)


@pytest.mark.parametrize("given_", [{"weight": 1.0}, {"weight": -0.1}, {"theta": math.inf}, {"window": 0}])
def test_impossible_settings(given_: dict[str, float]) -> None:
    with pytest.raises(FullrankError, match=next(iter(given_))):
        Cache(**given_)  # type: ignore[arg-type]


def tiny_transformer() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=40, max_position_embeddings=64, pad_token_id=None)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)
    return model


@pytest.mark.parametrize("head", [None, "mos", "cache"])
def test_a_model_of_transformers(head: str | None) -> None:
    """Its way through windows is that of its own logits, and the cache looks back across them."""
    from fullrank.upgrade import upgrade

    model = tiny_transformer()
    if head is not None:
        model = upgrade(model, head)
    ids = torch.randint(40, (5, 9), generator=torch.Generator().manual_seed(1))
    loaded: Any = Loaded(
        model=model, tokenizer=EveryRow(40), name="tiny", source="object", storage="float32", fingerprint="",
        notes=(),
    )  # fmt: skip
    way = trace_transformers(loaded, ids, batch=2)
    with torch.no_grad():
        log_p = model(ids).logits.log_softmax(-1)[:, :-1]
        states = model.model(ids).last_hidden_state[:, :-1]
    expected = -log_p.gather(-1, ids[:, 1:, None])[..., 0]
    np.testing.assert_allclose(way.losses, expected.flatten().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(way.states, states.flatten(0, 1).numpy(), rtol=1e-4, atol=1e-5)
    assert way.tokens.tolist() == ids[:, 1:].flatten().tolist()
    chosen = Cache(weight=0.3, theta=0.2, window=11)
    whole = np.full((len(way.tokens), 40), -np.inf)
    whole[:] = log_p.flatten(0, 1).numpy()
    assert not np.allclose(with_cache(way, chosen), way.losses, atol=1e-3)
    for now in (1, 9, 30):
        held = range(max(0, now - 11), now)
        shares = np.exp([0.2 * float(way.states[now] @ way.states[then]) for then in held])
        votes = sum(
            share for share, then in zip(shares, held, strict=True) if way.tokens[then] == way.tokens[now]
        )
        p = 0.7 * math.exp(whole[now, way.tokens[now]]) + 0.3 * votes / shares.sum()
        assert with_cache(way, chosen)[now] == pytest.approx(-math.log(p), abs=1e-4)


def test_windows_of_one_token_predict_nothing() -> None:
    loaded: Any = None
    with pytest.raises(FullrankError, match=r"\[3, 1\].*2 tokens or more"):
        trace_transformers(loaded, torch.zeros(3, 1, dtype=torch.long))
