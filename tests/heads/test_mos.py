"""Mixture of softmaxes, Yang et al. 2018: a weighted sum of softmaxes, of no bounded rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fullrank.heads import build

NAMES = ["mos", "mos-as-published", "mos-square-with-bias"]


@pytest.mark.parametrize("name", NAMES)
def test_the_equation(cases: dict[str, Any], component: Any, name: str) -> None:
    """p = sum_k prior_k softmax of the contexts' scores."""
    head = cases[name].build().double()
    inputs = cases[name].inputs(head, (1,), dtype=torch.float64)
    contexts, log_prior = head.contexts(inputs.each)
    prior = log_prior[0].exp()
    parts = [component(head, contexts[0, k]) for k in range(3)]
    expected = sum(prior[k] * part for k, part in enumerate(parts))
    torch.testing.assert_close(head(inputs.states)[0].exp(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_its_rank_is_not_bounded_by_the_width(
    cases: dict[str, Any], rank_of: Any, name: str, biased: bool
) -> None:
    """Above even K (D + 1), which a sum of logits of K components could reach."""
    assert rank_of(cases[name], bias=biased) > 3 * (4 + 1)


def test_published_contexts_are_tanh_of_a_linear_map(cases: dict[str, Any]) -> None:
    head = cases["mos-as-published"].build().double()
    state = torch.randn(6, dtype=torch.float64)
    contexts, log_prior = head.contexts([state[None]])
    weight, bias = head.contexts.differences[0].weight, head.contexts.differences[0].bias
    for k in range(3):
        rows = slice(4 * k, 4 * (k + 1))
        torch.testing.assert_close(contexts[0, k], torch.tanh(weight[rows] @ state + bias[rows]))
    logits = head.contexts.gate.weight @ state
    torch.testing.assert_close(log_prior[0].exp(), logits.exp() / logits.exp().sum())


@pytest.mark.parametrize("width", [4, 6])
def test_our_contexts_are_a_shared_map_plus_centred_differences(cases: dict[str, Any], width: int) -> None:
    """As large as the map's row where there is a map, and as one entry of the state where it is the row."""
    head = cases["mos"].build(width=width).double()
    state = torch.randn(6, dtype=torch.float64)
    contexts, log_prior = head.contexts([state[None]])
    plain, x = (state, state / 6**0.5) if width == 6 else (head.contexts.shared.weight @ state, state)
    part = head.contexts.differences[0]
    prior = torch.softmax(head.contexts.gate.weight @ state / state.norm(), 0)
    torch.testing.assert_close(log_prior[0].exp(), prior, rtol=1e-5, atol=1e-6)
    deltas = (part.weight @ x + part.bias).view(3, width)
    for k in range(3):
        torch.testing.assert_close(contexts[0, k], plain + deltas[k] - deltas.mean(0))


def test_the_prior_is_of_the_direction_of_a_state_whatever_its_size(cases: dict[str, Any]) -> None:
    head = cases["mos"].build().double()
    states = torch.randn(5, 6, dtype=torch.float64)
    _, log_prior = head.contexts([states])
    _, of_small_ones = head.contexts([0.05 * states])
    torch.testing.assert_close(of_small_ones, log_prior, rtol=1e-3, atol=1e-3)
    _, of_others = head.contexts([-states])
    assert (of_others - log_prior).abs().max() > 0.1
    nothing = torch.zeros(1, 6, dtype=torch.float64, requires_grad=True)
    _, even = head.contexts([nothing])
    (slope,) = torch.autograd.grad(even[0, 0], nothing)
    assert bool(slope.isfinite().all())


def test_contexts_that_are_not_centred_are_a_shared_map_plus_differences(cases: dict[str, Any]) -> None:
    head = cases["mos"].build(centred=False).double()
    state = torch.randn(6, dtype=torch.float64)
    contexts, _ = head.contexts([state[None]])
    part = head.contexts.differences[0]
    for k in range(3):
        rows = slice(4 * k, 4 * (k + 1))
        expected = head.contexts.shared.weight @ state + part.weight[rows] @ state + part.bias[rows]
        torch.testing.assert_close(contexts[0, k], expected)


def test_published_parameter_count_on_penn_treebank() -> None:
    """2.62M beyond the matrix."""
    with torch.device("meta"):
        head = build("mos", vocab=10_000, width=280, hidden=620, components=15, as_published=True)
    own = sum(parameter.numel() for _, parameter in head.own_parameters())
    assert own == 15 * 620 * 280 + 15 * 280 + 15 * 620 == 2_617_500


def test_very_unlikely_targets_keep_their_loss(cases: dict[str, Any]) -> None:
    """No floor under the probability: log(p + 1e-8), as released with the paper, would stop at 18.4 nats."""
    head = cases["mos"].build(bias=True)
    with torch.no_grad():
        head.decoder.bias[5] = -300.0
    inputs = cases["mos"].inputs(head)
    loss = head(inputs.states, torch.full_like(inputs.targets, 5))
    assert loss.item() > 250.0
    assert math.isfinite(loss.item())
