"""Mixture of sigsoftmaxes, Kanai et al. 2018: mos with sigsoftmax components."""

from __future__ import annotations

from typing import Any

import pytest
import torch

NAMES = ["moss", "moss-as-published"]


@pytest.mark.parametrize("name", NAMES)
def test_the_equation(cases: dict[str, Any], component: Any, name: str) -> None:
    """p = sum_k prior_k sigsoftmax of the contexts' scores."""
    head = cases[name].build().double()
    inputs = cases[name].inputs(head, (1,), dtype=torch.float64)
    contexts, log_prior = head.contexts(inputs.each)
    prior = log_prior[0].exp()
    parts = [component(head, contexts[0, k], sigmoid=True) for k in range(3)]
    expected = sum(prior[k] * part for k, part in enumerate(parts))
    torch.testing.assert_close(head(inputs.states)[0].exp(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_its_rank_is_not_bounded_by_the_width(
    cases: dict[str, Any], rank_of: Any, name: str, biased: bool
) -> None:
    """Above even K (D + 1), which a sum of logits of K components could reach."""
    assert rank_of(cases[name], bias=biased) > 3 * (4 + 1)
