"""factorise: exact where it can be, and a floor that training does not undercut where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.theory import Factorisation, factorise


def language(N: int, V: int, rank: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    H = torch.randn(N, rank, generator=generator, dtype=torch.float64)
    W = torch.randn(V, rank, generator=generator, dtype=torch.float64)
    return torch.log_softmax(scale * H @ W.T / rank**0.5, dim=1)


def divergence(log_probs: Tensor, logits: Tensor, weight: Tensor | None = None) -> float:
    """The definition, term by term."""
    model = torch.log_softmax(logits, dim=1)
    rows = torch.nn.functional.kl_div(model, log_probs.exp(), reduction="none").sum(dim=1)
    return float(rows.mean() if weight is None else (weight / weight.sum()) @ rows)


def adamw(log_probs: Tensor, width: int, *, seed: int, steps: int, rate: float) -> float:
    """The loss that plain training of free context and token vectors arrives at."""
    generator = torch.Generator().manual_seed(seed)
    N, V = log_probs.shape
    H = (0.3 * torch.randn(N, width, generator=generator, dtype=torch.float64)).requires_grad_()
    W = (0.3 * torch.randn(V, width, generator=generator, dtype=torch.float64)).requires_grad_()
    optimiser = torch.optim.AdamW([H, W], lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = -(log_probs.exp() * torch.log_softmax(H @ W.T, dim=1)).sum(dim=1).mean()
        loss.backward()
        optimiser.step()
        schedule.step()
    return divergence(log_probs, H.detach() @ W.detach().T)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.integers(1, 20), st.integers(2, 20), st.integers(1, 5), st.integers(0, 20))
def test_a_sufficient_width_gives_the_distributions_back(
    seed: int, N: int, V: int, rank: int, extra: int
) -> None:
    log_probs = language(N, V, rank, seed=seed)
    factors = factorise(log_probs + 5.0, rank + extra)
    assert factors.exact
    assert factors.H.shape == (N, rank + extra)
    assert factors.W.shape == (V, rank + extra)
    model = torch.log_softmax(factors.H @ factors.W.T, dim=1)
    torch.testing.assert_close(model, log_probs, rtol=0, atol=1e-11)
    assert 0 <= factors.loss < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_to_the_precision_of_the_dtype(dtype: torch.dtype) -> None:
    log_probs = language(60, 40, 4)
    factors = factorise(log_probs.to(dtype), 4)
    assert factors.exact
    error = (torch.log_softmax(factors.H @ factors.W.T, dim=1) - log_probs).abs().max()
    assert error < torch.finfo(dtype).eps * log_probs.abs().max()


@pytest.fixture(scope="module")
def low_width() -> tuple[Tensor, Factorisation]:
    """Distributions of rank 5, and their factors of width 2."""
    log_probs = language(20, 14, 5)
    return log_probs, factorise(log_probs, 2, hops=1)


def test_the_factors_give_the_loss_at_a_stationary_point(low_width: tuple[Tensor, Factorisation]) -> None:
    log_probs, factors = low_width
    assert not factors.exact
    assert factors.loss == pytest.approx(divergence(log_probs, factors.H @ factors.W.T), abs=1e-12)
    assert factors.loss <= min(factors.descents) + 1e-12
    # Two truncations, three random starts, one hop.
    assert len(factors.descents) == 6
    H, W = factors.H.clone().requires_grad_(), factors.W.clone().requires_grad_()
    loss = -(log_probs.exp() * torch.log_softmax(H @ W.T, dim=1)).sum(dim=1).mean()
    for gradient in torch.autograd.grad(loss, [H, W]):
        assert gradient.norm() < 1e-5


def test_the_same_seed_gives_the_same_factors(low_width: tuple[Tensor, Factorisation]) -> None:
    log_probs, factors = low_width
    again = factorise(log_probs, 2, hops=1)
    assert torch.equal(again.H, factors.H)
    assert again.descents == factors.descents


def test_context_weights_count_as_repeated_contexts() -> None:
    log_probs = language(12, 10, 5)
    weight = torch.ones(12)
    weight[:3] = 5
    even, weighted = factorise(log_probs, 2, hops=0), factorise(log_probs, 2, hops=0, context_weight=weight)
    logits = weighted.H @ weighted.W.T
    assert weighted.loss == pytest.approx(divergence(log_probs, logits, weight.double()), abs=1e-12)
    assert weighted.loss < divergence(log_probs, even.H @ even.W.T, weight.double()) - 1e-3
    assert even.loss < divergence(log_probs, logits) - 1e-3
    repeated = factorise(torch.cat([log_probs, *[log_probs[:3]] * 4]), 2, hops=0)
    assert repeated.loss == pytest.approx(weighted.loss, abs=1e-4)


@pytest.mark.slow(reason="a training against the floor, four seconds; the floor itself is tested exactly")
def test_training_does_not_undercut_the_floor() -> None:
    log_probs = language(32, 16, 8)
    floor = factorise(log_probs, 3).loss
    trained = [adamw(log_probs, 3, seed=seed, steps=600, rate=0.1) for seed in range(2)]
    assert floor <= min(trained) + 1e-4
    # And it is near: training does arrive, so that the floor is a prediction and not only a bound.
    assert min(trained) < floor + 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("N", "V", "rank", "width", "scale"),
    [(256, 64, 16, 4, 3.0), (512, 256, 32, 8, 3.0), (256, 128, 24, 6, 6.0)],
)
def test_long_training_does_not_undercut_the_floor(
    N: int, V: int, rank: int, width: int, scale: float
) -> None:
    log_probs = language(N, V, rank, scale)
    floor = factorise(log_probs, width).loss
    for seed, rate in ((10, 0.2), (11, 0.1), (12, 0.2)):
        assert floor <= adamw(log_probs, width, seed=seed, steps=3000, rate=rate) + 1e-4


def test_zero_probabilities_count_in_the_loss_and_are_never_exact() -> None:
    log_probs = language(8, 6, 3)
    log_probs[:, 5] = -torch.inf
    log_probs[3, 1] = -torch.inf
    log_probs = torch.log_softmax(log_probs, dim=1)
    factors = factorise(log_probs, 5, hops=0)
    assert not factors.exact
    assert factors.H.isfinite().all()
    assert factors.W.isfinite().all()
    assert 0 <= factors.loss < 1e-4
    assert torch.softmax(factors.H @ factors.W.T, dim=1)[:, 5].max() < 1e-2


@pytest.mark.parametrize(
    ("log_probs", "options", "words"),
    [
        ([[0.0, 1.0], [-torch.inf, -torch.inf]], {}, "without any possible token"),
        ([[torch.nan, 0.0]], {}, "NaN"),
        ([[0.0, 0.0]], {"width": 0}, "width is 0"),
        *(([[0.0, 0.0]] * 3, {"context_weight": torch.tensor(weight)}, r"context_weight .*expected \[3\]")
          for weight in ([1.0] * 4, [1.0, 0.0, 1.0], [1.0, torch.nan, 1.0])),
    ],
)  # fmt: skip
def test_refusals(log_probs: list[list[float]], options: dict[str, Any], words: str) -> None:
    with pytest.raises(FullrankError, match=words):
        factorise(torch.tensor(log_probs), **{"width": 1, **options})
