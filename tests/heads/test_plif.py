"""PLIF: p = softmax(f(z)), f learned, monotone and piecewise linear, Ganea et al. 2019."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fullrank.errors import FullrankError


def test_the_function_rises_by_its_slopes(cases: dict[str, Any]) -> None:
    head = cases["plif"].build().double()
    with torch.no_grad():
        head.decoder.weight.mul_(2.0)  # scores on both sides of the knots' range as well
    state = torch.randn(20, 6, dtype=torch.float64)
    with torch.no_grad():
        scores = (head.project(state) @ head.decoder.weight.t()).numpy()
        slopes = np.log1p(np.exp(head.steepness.numpy()))
    assert scores.min() < -3.0
    assert scores.max() > 3.0
    knots = np.linspace(-3.0, 3.0, 41)
    heights = np.concatenate([[0.0], np.cumsum(slopes) * 6.0 / 40])
    bent = np.interp(scores, knots, heights)
    bent = np.where(scores < -3.0, (scores + 3.0) * slopes[0], bent)
    bent = np.where(scores > 3.0, heights[-1] + (scores - 3.0) * slopes[-1], bent)
    expected = torch.log_softmax(torch.from_numpy(bent), -1)
    torch.testing.assert_close(head(state), expected, rtol=1e-9, atol=1e-9)


def test_without_spread_starts_as_softmax(cases: dict[str, Any]) -> None:
    plif = cases["plif"].build(spread=0.0, warm=False)
    softmax = cases["softmax"].build(warm=False)
    state = 5.0 * torch.randn(8, 6)
    torch.testing.assert_close(plif(state), softmax(state), atol=1e-4, rtol=0)


def test_a_function_of_its_own_takes_no_cap(cases: dict[str, Any]) -> None:
    with pytest.raises(FullrankError, match="bends its scores already"):
        cases["plif"].build().cap_scores(1.5)


@pytest.mark.parametrize("biased", [False, True])
def test_its_rank_is_not_bounded_by_the_width(cases: dict[str, Any], rank_of: Any, biased: bool) -> None:
    assert rank_of(cases["plif"], bias=biased) > 3 * (4 + 1)
