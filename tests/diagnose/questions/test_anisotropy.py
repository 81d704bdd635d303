"""Anisotropy: the closed form against the double loop, and states whose geometry was planted."""

import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import settings as options
from hypothesis import strategies as some

from fullrank.diagnose.questions import anisotropy as module
from fullrank.diagnose.questions.anisotropy import anisotropy, layer_geometry, mean_cosine
from fullrank.errors import FullrankError


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def geometry(states, positions=None, blocks=None):
    """Of states that are all past the first position, in blocks of sixteen."""
    count = len(states)
    positions = torch.ones(count, dtype=torch.int64) if positions is None else positions
    blocks = torch.arange(count) // 16 if blocks is None else blocks
    return layer_geometry(states, positions, blocks, layer=0, name="layer")


def cosine_by_loops(states, weights=None):
    """Mean cosine over pairs of different states, state i counted weights[i] times, never beside a copy."""
    unit = (states / states.norm(dim=1, keepdim=True)).numpy()
    weights = numpy.ones(len(states)) if weights is None else weights
    total, pairs = 0.0, 0.0
    for i in range(len(states)):
        for j in range(len(states)):
            if i != j:
                total += weights[i] * weights[j] * float(unit[i] @ unit[j])
                pairs += weights[i] * weights[j]
    return total / pairs


@options(max_examples=30)
@given(count=some.integers(3, 12), width=some.integers(1, 6), seed=some.integers(0, 1000))
def test_the_closed_form_is_the_double_loop(count, width, seed):
    states = gaussian(count, width, seed=seed) + gaussian(width, seed=seed + 1)
    found = mean_cosine(states, torch.arange(count) // 3)
    assert found.value == pytest.approx(cosine_by_loops(states), abs=1e-9)
    # Length, rotation and order do not matter.
    turn = torch.linalg.qr(gaussian(width, width, seed=seed + 2)).Q
    lengths = gaussian(count, 1, seed=seed + 3).exp()
    assert mean_cosine(lengths * states @ turn, torch.arange(count) // 3).value == pytest.approx(
        found.value, abs=1e-9
    )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    moved = mean_cosine(states[order], (torch.arange(count) // 3)[order])
    assert moved.value == pytest.approx(found.value, abs=1e-9)
    assert (moved.low, moved.high) == (pytest.approx(found.low), pytest.approx(found.high))


def test_a_resampled_state_is_never_paired_with_its_own_copy():
    states = gaussian(10, 4) + 0.5
    blocks = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2, 3])
    counts = numpy.array([2, 0, 3, 1])
    sums = torch.zeros(4, 4, dtype=torch.float64)
    sums.index_add_(0, blocks, states / states.norm(dim=1, keepdim=True))
    sizes = torch.tensor([2.0, 3.0, 4.0, 1.0], dtype=torch.float64)
    found = float(module._cosine(torch.from_numpy(counts).double()[None], sums, sizes)[0])
    assert found == pytest.approx(cosine_by_loops(states, counts[blocks.numpy()]))
    # Copies side by side would count as cosines of one.
    naive = torch.from_numpy(numpy.repeat(states.numpy(), counts[blocks.numpy()], axis=0))
    assert cosine_by_loops(naive) > found + 0.05


def test_the_interval_is_that_of_resampled_loops():
    states = gaussian(24, 5) + 0.4
    blocks = torch.arange(24) // 4
    counts = numpy.random.default_rng(7).multinomial(6, numpy.full(6, 1 / 6), size=module.REPLICATES)
    drawn = [cosine_by_loops(states, count[blocks.numpy()]) for count in counts[:60]]
    found = mean_cosine(states, blocks, seed=7)
    assert found.low < numpy.median(drawn) < found.high
    assert found == mean_cosine(states, blocks, seed=7)
    assert numpy.mean([found.low <= cosine <= found.high for cosine in drawn]) >= 0.85


def test_collapsed_states_point_one_way():
    found = geometry(5 * gaussian(32) + 0.3 * gaussian(800, 32, seed=1))
    assert found.cosine.low > 0.95
    assert abs(found.cosine_centred.value) < 0.01


def test_isotropic_states_point_everywhere():
    found = geometry(gaussian(1600, 64))
    assert abs(found.cosine.value) < 0.002
    assert found.cosine.low <= 0 <= found.cosine.high
    assert found.cosine.high - found.cosine.low < 0.01
    assert found.outliers == ()
    assert found.sinks == 0
    assert found.top_variance_share < 2 / 64
    assert found.effective_rank > 60
    assert 3 <= found.largest_kurtosis < 4.5


def test_a_common_offset_is_what_centring_takes_away():
    # Cosine of two states: |offset|² / (|offset|² + D) in the limit.
    offset = gaussian(48, seed=3)
    offset *= math.sqrt(3 * 48) / offset.norm()
    found = geometry(offset + gaussian(2000, 48))
    assert found.cosine.value == pytest.approx(0.75, abs=0.01)
    assert found.cosine.low <= 0.75 + 0.01
    assert abs(found.cosine_centred.value) < 0.002
    assert found.cosine_centred.low <= 0.0005


def test_a_planted_outlier_dimension_is_found_with_its_share():
    states = gaussian(3000, 64)
    states[:, 17] *= 10
    found = geometry(states)
    # 100 of 163 parts of the variance.
    assert [one.dimension for one in found.outliers] == [17]
    assert found.outliers[0].variance_share == pytest.approx(100 / 163, abs=0.02)
    assert found.outliers[0].kurtosis == pytest.approx(3, abs=0.4)
    assert found.top_variance_share == pytest.approx(100 / 163, abs=0.02)


def test_outliers_come_largest_first_with_the_kurtosis_of_heavy_tails():
    states = gaussian(4000, 100)
    states[:, 5] *= 8
    # A dimension that is off nearly always: kurtosis 3 / 0.05.
    states[:, 40] *= 30 * (torch.rand(4000, generator=torch.Generator().manual_seed(1)) < 0.05)
    found = geometry(states)
    assert [one.dimension for one in found.outliers] == [5, 40]
    assert found.outliers[1].kurtosis == pytest.approx(60, rel=0.35)
    assert found.largest_kurtosis == found.outliers[1].kurtosis


def test_an_offset_alone_is_no_outlier_dimension():
    states = gaussian(1000, 64)
    states[:, 9] += 50
    assert geometry(states).outliers == ()


def test_sinks_are_left_out_and_counted():
    states = gaussian(1000, 32)
    clean = geometry(states)
    planted = states.clone()
    direction = gaussian(32, seed=5)
    for place in (3, 400, 777):
        planted[place] = 100 * direction
    found = geometry(planted)
    assert found.sinks == 3
    assert found.cosine.value == pytest.approx(clean.cosine.value, abs=1e-3)
    assert found.top_variance_share == pytest.approx(clean.top_variance_share, abs=2e-3)
    # Without that rule three states of a thousand hold the variance.
    assert float(torch.linalg.svdvals(planted - planted.mean(dim=0))[0] ** 2 / planted.square().sum()) > 0.9


def test_the_first_position_of_a_window_is_left_out():
    states = gaussian(640, 16)
    positions = torch.arange(640) % 64
    states[positions == 0] = 3 * gaussian(16, seed=9)
    found = geometry(states, positions=positions)
    assert found.sinks == 10
    again = geometry(states[positions > 0], blocks=(torch.arange(640) // 16)[positions > 0])
    assert found.cosine == again.cosine


def test_states_of_zero_are_left_out():
    states = gaussian(60, 8)
    states[50:] = 0
    found = geometry(states)
    assert found.sinks == 10
    assert found.cosine.value == pytest.approx(cosine_by_loops(states[:50]))


def test_identical_states_and_states_fewer_than_the_width():
    found = geometry(torch.ones(100, 8, dtype=torch.float64))
    assert (found.cosine.value, found.cosine.low) == pytest.approx((1, 1))
    assert found.outliers == ()
    assert math.isnan(found.largest_kurtosis)
    assert 1 < geometry(gaussian(20, 64)).effective_rank <= 19 + 1e-6


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_the_interval_covers_the_truth_roughly(strength):
    """Blocks with noise of their own around a common direction; the truth is the mean of many draws."""
    generator = torch.Generator().manual_seed(0)
    offset = strength * torch.randn(16, generator=generator, dtype=torch.float64)

    def draw(blocks):
        own = 0.5 * torch.randn(blocks, 1, 16, generator=generator, dtype=torch.float64)
        noise = torch.randn(blocks, 10, 16, generator=generator, dtype=torch.float64)
        return (offset + own + noise).reshape(-1, 16)

    truth = float(torch.nn.functional.normalize(draw(40000), dim=1).mean(dim=0).square().sum())
    hits = 0
    for _ in range(100):
        found = mean_cosine(draw(30), torch.arange(300) // 10)
        # States of one block are nearer to each other: the sample's own mean pair has 1 / 30 of such pairs.
        hits += found.low - 0.007 <= truth <= found.high
    assert hits >= 85


def test_intervals_of_few_blocks():
    found = mean_cosine(gaussian(10, 4), torch.zeros(10, dtype=torch.int64))
    assert (found.low, found.high) == (-1.0, 1.0)
    # Blocks of one state are no pair when they are drawn twice.
    for seed in range(20):
        found = mean_cosine(gaussian(4, 2, seed=seed) + 1, torch.tensor([0, 0, 0, 1]), seed=seed)
        assert -1 <= found.low <= found.high <= 1
        found = mean_cosine(gaussian(2, 3, seed=seed), torch.tensor([0, 1]), seed=seed)
        assert found.low == pytest.approx(found.value) == pytest.approx(found.high)


def test_a_record_of_all_layers():
    layers = torch.stack([gaussian(100, 8), gaussian(100, 8, seed=1) + 5]).float()
    positions, blocks = torch.arange(100) % 50, torch.arange(100) // 10
    found = anisotropy(layers, positions, blocks, ["embedding", "layer 1"])
    assert found.tokens == 100
    assert [(one.layer, one.name) for one in found.layers] == [(0, "embedding"), (1, "layer 1")]
    assert found.layers[1].cosine.value > 0.8 > found.layers[0].cosine.value


@pytest.mark.parametrize(
    ("states", "positions", "blocks", "message"),
    [
        (gaussian(2, 10, 4), torch.arange(10), torch.arange(9), r"\[2, 10, 4\]"),
        (gaussian(2, 10, 4), torch.zeros(10), torch.arange(10), "expected 3 or more"),
        (torch.zeros(2, 10, 4), torch.arange(10), torch.arange(10), "expected 3 or more"),
    ],
)
def test_refusals(states, positions, blocks, message):
    with pytest.raises(FullrankError, match=message):
        anisotropy(states, positions, blocks, ["a", "b"])
