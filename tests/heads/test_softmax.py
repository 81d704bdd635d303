"""Softmax: p = softmax(W x + b), with x the state or its projection; a soft cap on the scores; rank D."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.mark.parametrize("name", ["softmax", "softmax-square-with-bias"])
def test_the_equation(cases: dict[str, Any], component: Any, name: str) -> None:
    head = cases[name].build().double()
    state = torch.randn(1, head.hidden, dtype=torch.float64)
    expected = component(head, head.project(state)[0])
    torch.testing.assert_close(head(state)[0].exp(), expected, rtol=1e-9, atol=1e-12)


def test_a_soft_cap_bends_every_score(cases: dict[str, Any]) -> None:
    head = cases["softmax"].build(bias=True).double()
    head.cap_scores(1.5)
    state = 3.0 * torch.randn(5, 6, dtype=torch.float64)
    scores = head.decoder(head.project(state))
    assert scores.abs().max() > 1.5
    torch.testing.assert_close(head(state), torch.log_softmax(1.5 * torch.tanh(scores / 1.5), dim=-1))


@pytest.mark.parametrize("biased", [False, True])
def test_its_rank_is_the_width_and_one_more_with_a_bias(
    cases: dict[str, Any], rank_of: Any, biased: bool
) -> None:
    assert rank_of(cases["softmax"], bias=biased) == 4 + biased
