"""Estimates: against numpy, and coverage of the interval where blocks share their noise."""

import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy import stats

from fullrank.errors import FullrankError
from fullrank.fit import estimates


def oracle(values, blocks):
    """Mean and standard error of a ratio of block sums, in plain numpy."""
    numbers = numpy.unique(blocks)
    mean = values.mean()
    excess = numpy.array([(values[blocks == number] - mean).sum() for number in numbers])
    count = len(numbers)
    return mean, math.sqrt(count / (count - 1) * (excess**2).sum()) / len(values), count


@settings(max_examples=25)
@given(
    sizes=some.lists(some.integers(1, 9), min_size=2, max_size=12),
    seed=some.integers(0, 1000),
    dtype=some.sampled_from([torch.float32, torch.float64]),
)
def test_mean_and_error_are_the_oracles_in_any_order_of_tokens(sizes, seed, dtype):
    generator = numpy.random.default_rng(seed)
    # Block numbers of real text have holes and are no order.
    names = generator.choice(1000, size=len(sizes), replace=False)
    blocks = numpy.repeat(names, sizes)
    values = generator.normal(size=len(blocks)) + generator.normal(size=1000)[blocks]
    order = generator.permutation(len(blocks))
    values, blocks = values[order], blocks[order]
    kept = torch.tensor(values, dtype=dtype)
    mean, error, count = oracle(kept.double().numpy(), blocks)
    found = estimates.mean_and_error(kept, torch.from_numpy(blocks))
    assert found == (pytest.approx(mean, abs=1e-13), pytest.approx(error, rel=1e-12), count)
    interval = estimates.mean(kept, torch.from_numpy(blocks))
    reach = stats.t.ppf(0.975, count - 1) * error
    assert interval.value == pytest.approx(mean, abs=1e-13)
    assert interval.high - interval.value == pytest.approx(reach, rel=1e-10)
    assert interval.value - interval.low == pytest.approx(reach, rel=1e-10)


def coverage(sizes, common, seed):
    generator = numpy.random.default_rng(seed)
    blocks = torch.from_numpy(numpy.repeat(numpy.arange(len(sizes)), sizes))
    hits = 0
    for _ in range(400):
        noise = common * generator.normal(size=len(sizes))[blocks] + generator.normal(size=len(blocks))
        found = estimates.mean(torch.from_numpy(3.0 + noise), blocks)
        hits += found.low <= 3.0 <= found.high
    return hits / 400


def test_the_interval_covers_the_truth():
    # 400 draws of a coin of 0.95 leave 0.92 to 0.98 less than once in a hundred times.
    assert 0.92 <= coverage([50] * 20, 1.0, seed=0) <= 0.98
    assert coverage([1] * 1000, 0.0, seed=1) >= 0.92
    # Blocks of unequal size.
    assert 0.90 <= coverage([10, 30, 50, 70, 90] * 8, 1.0, seed=2) <= 0.98


def test_differences_of_the_same_tokens_have_a_narrow_interval():
    generator = torch.Generator().manual_seed(0)
    blocks = torch.arange(400) // 20
    hard = torch.randn(20, generator=generator)[blocks] * 3
    first = hard + 0.01 * torch.randn(400, generator=generator) + 0.05
    second = hard + 0.01 * torch.randn(400, generator=generator)
    apart = estimates.mean(first, blocks)
    paired = estimates.mean(first - second, blocks)
    assert apart.high - apart.low > 1.0
    assert paired.low > 0.045
    assert paired.high < 0.055


def test_a_single_block_has_an_endless_interval():
    found = estimates.mean(torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3, dtype=torch.int64))
    assert (found.value, found.low, found.high) == (3.0, -math.inf, math.inf)
    seeds = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    found = estimates.mean_over_seeds(seeds, torch.zeros(2, dtype=torch.int64))
    assert (found.value, found.low, found.high) == (2.5, -math.inf, math.inf)


def test_values_without_any_spread_have_an_interval_of_no_width():
    found = estimates.mean(torch.full((6,), 0.5), torch.arange(6))
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)


def test_seeds_add_the_variance_of_their_mean():
    blocks = torch.arange(40) // 4
    base = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seeds = [base, base + 0.3, base + 0.9]
    _, error, count = estimates.mean_and_error(base + 0.4, blocks)
    spread = numpy.var([0.0, 0.3, 0.9], ddof=1) / 3
    found = estimates.mean_over_seeds(seeds, blocks)
    total = error**2 + spread
    degrees = total**2 / (error**4 / (count - 1) + spread**2 / 2)
    reach = stats.t.ppf(0.975, degrees) * math.sqrt(total)
    assert found.value == pytest.approx(float(base.mean()) + 0.4)
    assert found.high - found.value == pytest.approx(reach, rel=1e-9)
    assert estimates.mean_over_seeds(seeds[:1], blocks) == estimates.mean(base, blocks)


@settings(max_examples=25)
@given(shift=some.floats(-100, 100), scale=some.floats(0.01, 100), seed=some.integers(0, 100))
def test_an_estimate_moves_and_stretches_with_its_values(shift, scale, seed):
    values = torch.randn(30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    blocks = torch.arange(30) // 7
    plain, moved = estimates.mean(values, blocks), estimates.mean(shift + scale * values, blocks)
    for field in ("value", "low", "high"):
        expected = shift + scale * getattr(plain, field)
        assert getattr(moved, field) == pytest.approx(expected, abs=1e-9 * (abs(shift) + scale))


def test_refusals():
    with pytest.raises(FullrankError, match=r"\[3\].*\[2\]"):
        estimates.mean(torch.zeros(3), torch.zeros(2))
    with pytest.raises(FullrankError, match="empty"):
        estimates.mean(torch.zeros(0), torch.zeros(0))


def test_a_rising_function_keeps_the_interval_in_order():
    found = estimates.transformed(estimates.around(1.0, 0.1, 9), math.exp)
    assert found.low < found.value == math.e < found.high
