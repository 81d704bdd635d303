"""Low rank: softmax of W B A x, so that no log-probabilities have a rank above the inner width."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def test_the_equation(cases: dict[str, Any], component: Any) -> None:
    head = cases["low-rank"].build().double()
    state = torch.randn(1, 6, dtype=torch.float64)
    expected = component(head, head.up.weight @ head.down.weight @ state[0])
    torch.testing.assert_close(head(state)[0].exp(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("biased", [False, True])
def test_its_rank_is_the_inner_width(cases: dict[str, Any], rank_of: Any, biased: bool) -> None:
    assert rank_of(cases["low-rank"], bias=biased) == 2 + biased
