"""Rank needed: matrices of known rank, the truncation against Eckart and Young, curves made by hand."""

import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import settings as options
from hypothesis import strategies as some

from fullrank.diagnose.questions.rank_needed import crossing, knee, narrowed, rank_needed, truncation
from fullrank.errors import FullrankError
from fullrank.fit import frozen
from fullrank.models.output_layer import OutputLayer
from fullrank.ops import Softcap


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(weight, **more):
    return OutputLayer(weight=weight, tokens=len(weight), **more)


def setting(output, states=lambda hidden: hidden, counts=(1200, 300, 900), rows=100):
    """Gaussian states, changed by `states`, with targets from the layer itself."""
    parts = []
    for place, count in enumerate(counts):
        hidden = states(gaussian(count, output.width, seed=20 + place))
        chosen = torch.Generator().manual_seed(30 + place)
        shares = torch.softmax(output.logits(hidden), dim=1)
        targets = torch.multinomial(shares, 1, generator=chosen)[:, 0]
        parts.append(frozen.Tokens(hidden=hidden, targets=targets, blocks=torch.arange(count) // 20))
    return frozen.setting(output, frozen.Split(fit=parts[0], choose=parts[1], held_out=parts[2]), rows=rows)


def ask(chosen, **more):
    options = {"rates": (0.02,), "epochs": 1} | more
    return rank_needed(chosen, **options)


def curve(found):
    return {point.rank: point.truncated.value for point in found.points}


@pytest.mark.parametrize("mean", [0.0, 5.0])
def test_a_matrix_of_low_rank_needs_no_more(mean):
    # The mean row is a dimension of W that softmax does not see.
    weight = 0.5 * gaussian(300, 6) @ gaussian(6, 24, seed=1) + mean * gaussian(24, seed=2)
    found = ask(setting(layer(weight)), ranks=(2, 4, 5, 6, 7, 8, 12, 18))
    losses = curve(found)
    for rank in (6, 7, 8, 12, 18, 24):
        assert losses[rank] == pytest.approx(found.original.value, abs=2e-4), rank
    for rank in (2, 4, 5):
        assert losses[rank] > found.original.value + found.tolerance
    assert 5 < found.truncated_knee.value <= 6
    assert found.truncated_knee.low <= found.truncated_knee.value <= found.truncated_knee.high <= 6
    assert found.knee.value <= 6
    assert not found.still_falling


def test_the_last_point_is_the_original():
    found = ask(setting(layer(gaussian(120, 12))))
    assert found.points[-1].rank == 12
    # To the rounding of a mean and of a mean of differences.
    assert found.points[-1].truncated.value == pytest.approx(found.original.value, abs=1e-6)
    assert [point.rank for point in found.points] == sorted(point.rank for point in found.points)


def test_states_confined_to_a_subspace_need_no_more_than_it_has():
    into = gaussian(5, 20, seed=3)
    found = ask(
        setting(layer(0.5 * gaussian(250, 20)), lambda hidden: hidden[:, :5] @ into), ranks=(2, 4, 5, 8, 14)
    )
    losses = curve(found)
    for rank in (5, 8, 14, 20):
        assert losses[rank] == pytest.approx(found.original.value, abs=1e-3), rank
    assert losses[4] > found.original.value + 0.02
    assert 4 < found.truncated_knee.value <= 5


def test_a_flat_spectrum_needs_the_width():
    weight = 30 * torch.linalg.qr(gaussian(400, 24)).Q
    found = ask(
        setting(layer(weight)), ranks=(6, 12, 18, 21, 23), refit=(12, 18, 23), rates=(0.02, 0.06), epochs=2
    )
    assert found.truncated_knee.value > 23
    assert found.knee.value > 18
    assert found.still_falling
    assert found.slope.low > 0
    # Refits repair something, never beat the truth, and start at the truncation, which they return where no
    # step helps: then the two losses differ by the rounding of fp32 means.
    repaired = []
    for point in found.points:
        if point.refitted is not None and point.rank < 24:
            assert point.refitted.value > found.original.value - 0.01
            assert point.refitted.value <= point.truncated.value * (1 + 1e-6)
            repaired.append(point.truncated.value - point.refitted.value)
        assert (point.refitted is None) == (point.learning_rate is None)
    assert max(repaired) > 0.01


def test_small_directions_of_the_states_are_cut_first():
    """W is round and the states are not: truncation in their metric keeps what they use."""
    sizes = torch.logspace(0, -2, 20)
    output = layer(1.5 * gaussian(300, 20))
    chosen = setting(output, lambda hidden: hidden * sizes)
    losses = curve(ask(chosen, ranks=(4, 10)))
    held_out = chosen.split.held_out
    weight = chosen.output.weight - chosen.output.weight.mean(dim=0)
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    for rank in (4, 10):
        plain = layer((left[:, :rank] * values[:rank]) @ right[:rank])
        assert losses[rank] < float(plain.losses(held_out.hidden, held_out.targets).mean()) - 0.02


@options(max_examples=25)
@given(
    V=some.integers(8, 60),
    D=some.integers(2, 10),
    seed=some.integers(0, 1000),
    mean=some.sampled_from([0.0, 30.0]),
)
def test_the_truncation_is_the_nearest_matrix_in_the_metric_of_the_states(V, D, seed, mean):
    output = layer(gaussian(V, D, seed=seed) + mean * gaussian(D, seed=seed + 1))
    mix = gaussian(D, D, seed=seed + 2)
    hidden = gaussian(200, D, seed=seed + 3) @ mix + gaussian(D, seed=seed + 4)
    moment = (hidden.double().T @ hidden.double()) / 200
    centred = output.weight.double() - output.weight.double().mean(dim=0)

    def distance(other):
        """E |(W' - W) h|² over the vocabulary, less the part that all tokens share."""
        gap = other.double() - other.double().mean(dim=0) - centred
        return float(((gap @ moment) * gap).sum())

    factors = truncation(output, hidden)
    values, vectors = torch.linalg.eigh(moment)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    singular = torch.linalg.svdvals(centred @ root)
    whole = distance(torch.zeros_like(centred))
    for rank in range(1, D + 1):
        cut = output.weight.double() @ (factors[0][:, :rank] @ factors[1][:rank])
        best = distance(cut)
        assert best == pytest.approx(float(singular[rank:].square().sum()), rel=1e-6, abs=1e-8 * whole)
        assert torch.linalg.matrix_rank(cut - cut.mean(dim=0), rtol=1e-9) <= rank
        for attempt in range(3):
            basis = torch.linalg.qr(gaussian(D, rank, seed=seed + 10 + attempt).double()).Q
            # The nearest matrix with rows in that random subspace, in the same metric.
            inner = torch.linalg.pinv(basis.T @ moment @ basis)
            assert distance(centred @ moment @ basis @ inner @ basis.T) >= best - 1e-8 * whole
            assert distance(centred @ basis @ basis.T) >= best - 1e-8 * whole


@pytest.mark.parametrize("bias", [False, True])
def test_the_narrow_layer_is_the_truncated_matrix(bias):
    output = layer(gaussian(90, 14) + 2, bias=gaussian(90, seed=1) if bias else None)
    hidden = gaussian(300, 14, seed=2) * torch.logspace(0, -2, 14)
    factors = truncation(output, hidden)
    for rank in (1, 5, 13, 14):
        narrow, down = narrowed(output, factors, rank)
        assert narrow.weight.shape == (90, rank)
        torch.testing.assert_close(down.T @ down, torch.eye(rank), rtol=1e-5, atol=1e-5)
        projection = (factors[0][:, :rank] @ factors[1][:rank]).float()
        torch.testing.assert_close(narrow.weight @ down.T, output.weight @ projection, rtol=1e-3, atol=2e-3)
        targets = torch.arange(90).repeat(4)[:300]
        full = layer(output.weight @ projection, bias=output.bias)
        torch.testing.assert_close(
            narrow.losses(hidden @ down, targets), full.losses(hidden, targets), rtol=1e-3, atol=1e-3
        )
    torch.testing.assert_close(projection, torch.eye(14), rtol=1e-5, atol=1e-5)


def test_a_projection_is_a_projection():
    factors = truncation(layer(gaussian(90, 14)), gaussian(300, 14, seed=2) * torch.logspace(0, -3, 14))
    for rank in (1, 7, 14):
        projection = factors[0][:, :rank] @ factors[1][:rank]
        torch.testing.assert_close(projection @ projection, projection, rtol=1e-8, atol=1e-8)
        assert float(projection.trace()) == pytest.approx(rank, abs=1e-8)


def test_under_a_soft_cap_the_mean_row_counts():
    # Rank four and a mean row: five dimensions, all of which a cap can see.
    weight = gaussian(200, 4) @ gaussian(4, 16, seed=1) + 3 * gaussian(16, seed=2)
    found = ask(setting(layer(weight, pointwise=Softcap(4.0))), ranks=(2, 4, 5, 8))
    losses = curve(found)
    assert losses[5] == pytest.approx(found.original.value, abs=1e-3)
    assert losses[8] == pytest.approx(found.original.value, abs=1e-3)
    assert losses[4] > found.original.value + 0.02


def test_fits_with_a_bias_and_few_rows():
    output = layer(gaussian(150, 10), bias=gaussian(150, seed=1))
    found = ask(setting(output, rows=30), ranks=(3, 6), refit=(3, 6))
    assert all(math.isfinite(point.truncated.value) for point in found.points)
    refits = {point.rank: point.refitted.value for point in found.points}
    assert refits[3] > refits[6] > refits[10] - 0.005


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        # Within the tolerance everywhere: the smallest rank looked at.
        ([1.01, 1.0, 1.0], 2.0),
        # Half of the way from 2 to 8 on a log scale: 4.
        ([1.3, 0.9, 1.0], 4.0),
        # Above up to the last step: excess 1.1 at 8, 0 at 32, 0.1 is ten elevenths of the way.
        ([3.0, 2.1, 1.0], 8 * 4 ** (10 / 11)),
        # A dip below the end that does not last is no answer.
        ([0.5, 1.5, 1.0], 8 * 4 ** (4 / 5)),
        # Exactly at the tolerance counts as within.
        ([1.1, 1.0, 1.0], 2.0),
        ([2.1, 1.1, 1.0], 8.0),
    ],
)
def test_crossing_of_curves_made_by_hand(losses, expected):
    tolerance = 0.1 + 1e-12
    assert crossing(numpy.array([2, 8, 32]), numpy.array(losses), tolerance) == pytest.approx(expected)


@given(some.lists(some.floats(0, 10), min_size=2, max_size=8))
def test_crossing_stays_within_the_ranks_and_the_curve_within_the_tolerance_after_it(losses):
    ranks = 2 ** numpy.arange(len(losses))
    found = crossing(ranks, numpy.array(losses), 0.5)
    assert ranks[0] <= found <= ranks[-1] * (1 + 1e-12)
    after = [loss - losses[-1] for rank, loss in zip(ranks, losses, strict=True) if rank > found * (1 + 1e-9)]
    assert all(excess <= 0.5 for excess in after)


def test_the_interval_of_a_knee_comes_from_blocks():
    blocks = torch.arange(400) // 20
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(400, generator=generator).abs()
    losses = {4: 1.0 + 0.3 * noise, 8: 1.0 + 0.1 * noise, 16: torch.ones(400)}
    found = knee(losses, blocks, 0.04)
    assert 8 < found.low < found.value < found.high < 16
    assert found == knee(losses, blocks, 0.04)
    # What all ranks share moves nothing.
    hard = 10 * torch.randn(20, generator=generator)[blocks]
    moved = knee({rank: one + hard for rank, one in losses.items()}, blocks, 0.04)
    assert (moved.low, moved.high) == (
        pytest.approx(found.low, rel=1e-4),
        pytest.approx(found.high, rel=1e-4),
    )
    # Without spread there is no interval, and one rank is its own knee.
    certain = knee({4: torch.full((400,), 2.0), 8: torch.ones(400)}, blocks, 0.5)
    assert certain.low == certain.value == certain.high == pytest.approx(4 * 2**0.5)
    assert knee({7: torch.ones(40)}, torch.arange(40), 0.1).value == 7


def test_the_slope_is_what_a_doubling_buys():
    found = ask(setting(layer(30 * torch.linalg.qr(gaussian(300, 16)).Q)), ranks=(8,), refit=(8,))
    points = {point.rank: point.refitted.value for point in found.points if point.refitted is not None}
    assert found.slope.value == pytest.approx(points[8] - points[16], abs=1e-6)
    found = ask(setting(layer(30 * torch.linalg.qr(gaussian(300, 16)).Q)), ranks=(4,), refit=(4,))
    points = {point.rank: point.refitted.value for point in found.points if point.refitted is not None}
    assert found.slope.value == pytest.approx((points[4] - points[16]) / 2, abs=1e-6)


def test_the_answer_is_the_same_twice_and_progress_rises():
    chosen, seen = setting(layer(gaussian(100, 8))), []
    one = ask(chosen, progress=lambda label, share: seen.append(share))
    assert one == ask(chosen)
    assert seen == sorted(seen)
    assert 0 <= seen[0] <= seen[-1] <= 1


@pytest.mark.parametrize("ranks", [(0,), (9,), (-1, 4)])
def test_ranks_beyond_the_width_are_refused(ranks):
    with pytest.raises(FullrankError, match="1 to the width 8"):
        ask(setting(layer(gaussian(100, 8)), counts=(60, 40, 40)), ranks=ranks)


def test_widths_that_leave_a_grid_little_room():
    for width in (1, 2, 3):
        found = ask(setting(layer(gaussian(30, width)), counts=(60, 40, 40)))
        assert found.points[-1].rank == width
        assert 1 <= found.knee.value <= width
