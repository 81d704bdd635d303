"""Means with their intervals over blocks of text.

Losses of neighbouring tokens are alike, so tokens are not independent draws; blocks of text nearly are. With
B blocks of mean m_b and size n_b the estimate is the token mean Σ n_b m_b / Σ n_b, and its standard error

    s = sqrt( B / (B - 1)  Σ (n_b (m_b - mean))² ) / Σ n_b

with Student's t on B - 1 degrees for the interval. Seeds add their own variance of the mean, and the degrees
are then those of Welch and Satterthwaite. Differences of two heads are taken token by token first: the same
blocks are hard for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.results import Estimate

LEVEL = 0.95
BLOCK = 128
"""Tokens a block."""


def mean(values: Tensor, blocks: Tensor, level: float = LEVEL) -> Estimate:
    """The mean of values [N] with its interval over blocks [N] of block numbers."""
    centre, error, count = mean_and_error(values, blocks)
    return around(centre, error, count - 1, level)


def mean_over_seeds(values: Sequence[Tensor], blocks: Tensor) -> Estimate:
    """The mean of values [N] of several seeds, with both the blocks' and the seeds' variance."""
    centre, error, count = mean_and_error(torch.stack(list(values)).mean(dim=0), blocks)
    degrees = float(count - 1)
    if len(values) > 1 and 0 < error < math.inf:
        seeds = torch.stack([one.double().mean() for one in values]).var().item() / len(values)
        total = error**2 + seeds
        # Welch and Satterthwaite: where two seeds make most of the variance, there is little to judge it by.
        degrees = total**2 / (error**4 / (count - 1) + seeds**2 / (len(values) - 1))
        error = math.sqrt(total)
    return around(centre, error, degrees)


def mean_and_error(values: Tensor, blocks: Tensor) -> tuple[float, float, int]:
    """Token mean, its standard error over blocks, and the number of blocks."""
    if values.shape != blocks.shape or values.numel() == 0:
        raise FullrankError(
            f"values {list(values.shape)} and blocks {list(blocks.shape)} differ, or are empty: one block "
            "number a value is expected"
        )
    centre = values.double().mean()
    excess, _ = block_sums(values.double() - centre, blocks)
    count = len(excess)
    if count < 2:
        return float(centre), math.inf, count
    error = (excess.square().sum() * count / (count - 1)).sqrt() / values.numel()
    return float(centre), float(error), count


def block_sums(values: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the values and number of them in every block, [blocks] each."""
    # Whatever device they were made on: a few thousand numbers.
    values, blocks = values.double().cpu(), blocks.cpu()
    numbers, place, counts = torch.unique(blocks, return_inverse=True, return_counts=True)
    return torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, place, values), counts


def around(centre: float, error: float, degrees: float, level: float = LEVEL) -> Estimate:
    """The interval of Student's t; endless where there was one block only."""
    # Not scipy.stats: its import takes a second.
    from scipy.special import stdtrit

    if degrees < 1 or not math.isfinite(error):
        return Estimate(value=centre, low=-math.inf, high=math.inf)
    reach = float(stdtrit(degrees, 0.5 + level / 2)) * error
    return Estimate(value=centre, low=centre - reach, high=centre + reach)


def transformed(estimate: Estimate, function: Callable[[float], float]) -> Estimate:
    """A rising function of an estimate: of its value and of both ends."""
    return Estimate(value=function(estimate.value), low=function(estimate.low), high=function(estimate.high))
