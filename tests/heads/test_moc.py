"""Mixture of contexts, Yang et al. 2018: one softmax of the mean context, so that its rank stays D."""

from __future__ import annotations

from typing import Any

import pytest
import torch

NAMES = ["moc", "moc-as-published"]


@pytest.mark.parametrize("name", NAMES)
def test_the_equation(cases: dict[str, Any], component: Any, name: str) -> None:
    head = cases[name].build().double()
    inputs = cases[name].inputs(head, (1,), dtype=torch.float64)
    contexts, log_prior = head.contexts(inputs.each)
    expected = component(head, (log_prior[0].exp()[:, None] * contexts[0]).sum(0))
    torch.testing.assert_close(head(inputs.states)[0].exp(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_its_rank_is_the_width(cases: dict[str, Any], rank_of: Any, name: str, biased: bool) -> None:
    assert rank_of(cases[name], bias=biased) == 4 + biased
