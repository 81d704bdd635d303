"""The tests for the critical size: their p-values, their order, and how many wrong rejections they make."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from fullrank.diagnose.attention.critical import FALSE_SHARE, first_kept, p_values, told_apart
from fullrank.errors import FullrankError


def test_p_values_are_those_of_students_t() -> None:
    torch.manual_seed(0)
    differences = torch.randn(9, 4, 3, dtype=torch.float64) + 0.3
    expected = stats.ttest_1samp(differences.numpy(), 0.0, axis=0).pvalue
    torch.testing.assert_close(p_values(differences), torch.from_numpy(expected))


def test_differences_without_spread() -> None:
    differences = torch.tensor([[0.0, 0.2, torch.nan]] * 5)
    p = p_values(differences)
    assert p[0] == 1
    assert p[1] == 0
    assert p[2].isnan()
    with pytest.raises(FullrankError, match="1 windows have no spread"):
        p_values(differences[:1])


def test_the_first_that_is_not_rejected() -> None:
    assert first_kept(torch.tensor([1e-9, 1e-4, 0.2, 1e-9]), 0.01) == 2
    assert first_kept(torch.tensor([1e-9, 1e-4]), 0.01) is None
    # What does not fit a length is not lost.
    assert first_kept(torch.tensor([1e-9, torch.nan]), 0.01) is None


def test_benjamini_and_hochberg() -> None:
    torch.manual_seed(1)
    p = torch.rand(40, 6, dtype=torch.float64).pow(3)
    p[3, 2] = torch.nan
    told = told_apart(p)
    for column in range(6):
        known = ~p[:, column].isnan()
        adjusted = torch.from_numpy(stats.false_discovery_control(p[known, column].numpy()))
        assert torch.equal(told[known, column], adjusted <= FALSE_SHARE)
        assert not told[~known, column].any()
    assert not told_apart(torch.full((5, 1), torch.nan)).any()


def test_heads_without_a_difference_are_rarely_told_apart() -> None:
    """Of 200 models with 30 heads that select at random, a head is named in about the false share."""
    torch.manual_seed(2)
    differences = torch.randn(12, 30, 200, dtype=torch.float64)
    wrong = told_apart(p_values(differences)).any(0).double().mean()
    # Binomial of 200: five standard deviations around 0.05.
    assert float(wrong) < FALSE_SHARE + 5 * (FALSE_SHARE * 0.95 / 200) ** 0.5
