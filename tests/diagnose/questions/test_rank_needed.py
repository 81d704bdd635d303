"""Rank needed: matrices of known rank, the truncation against Eckart and Young, curves made by hand."""

import dataclasses
import itertools
import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import settings as options
from hypothesis import strategies as some

from fullrank.diagnose.questions.rank_needed import (
    crossing,
    knee,
    narrow_head,
    rank_needed,
    ranks_to_refit,
    truncation,
)
from fullrank.errors import FullrankError
from fullrank.fit import comparison
from fullrank.fit.controls import plain_layer
from fullrank.fit.states import Part, Parts
from fullrank.models.output_layer import OutputLayer
from fullrank.ops import Softcap

SETTINGS = comparison.Settings(seeds=1, rates=(0.12,), epochs=1)
"""One epoch: most tests are about the truncation, where every refit starts."""


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(weight, **more):
    return OutputLayer(weight=weight, tokens=len(weight), **more)


def parts_of(output, states=lambda hidden: hidden, windows=(60, 15, 45)):
    """Windows of 20 Gaussian states, changed by `states`, each a block; targets from the layer itself."""
    made = []
    for place, count in enumerate(windows):
        hidden = states(gaussian(20 * count, output.width, seed=20 + place))
        chosen = torch.Generator().manual_seed(30 + place)
        shares = torch.softmax(output.logits(hidden), dim=1)
        targets = torch.multinomial(shares, 1, generator=chosen).view(count, 20)
        blocks = torch.arange(count)[:, None].expand(count, 20)
        made.append(Part(states=(hidden.view(count, 20, -1),), targets=targets, ids=targets, blocks=blocks))
    return Parts(fit=made[0], choose=made[1], held_out=made[2])


def ask(output, parts=None, *, settings=SETTINGS, **more):
    parts = parts_of(output) if parts is None else parts
    return rank_needed(plain_layer(output), parts, settings=settings, **more)


def curve(found):
    return {point.rank: point.truncated.value for point in found.points}


@pytest.mark.parametrize("mean", [pytest.param(0.0, marks=pytest.mark.slow), 5.0])
def test_a_matrix_of_low_rank_needs_no_more(mean):
    # The mean row is a dimension of W that softmax does not see.
    weight = 0.5 * gaussian(300, 6) @ gaussian(6, 24, seed=1) + mean * gaussian(24, seed=2)
    found = ask(layer(weight), ranks=(2, 4, 5, 6, 7, 8, 12, 18))
    losses = curve(found)
    for rank in (6, 7, 8, 12, 18, 24):
        assert losses[rank] == pytest.approx(found.original.value, abs=2e-4), rank
    for rank in (2, 4, 5):
        assert losses[rank] > found.original.value + found.tolerance
    assert 5 < found.truncated_knee.value <= 6
    assert found.truncated_knee.low <= found.truncated_knee.value <= found.truncated_knee.high <= 6
    assert found.knee.value <= 6
    assert not found.still_falling
    assert found.bound != "at least"


def test_states_confined_to_a_subspace_need_no_more_than_it_has():
    into = gaussian(5, 20, seed=3)
    output = layer(0.5 * gaussian(250, 20))
    found = ask(output, parts_of(output, lambda hidden: hidden[:, :5] @ into), ranks=(2, 4, 5, 8, 14))
    losses = curve(found)
    for rank in (5, 8, 14, 20):
        assert losses[rank] == pytest.approx(found.original.value, abs=1e-3), rank
    assert losses[4] > found.original.value + 0.02
    assert 4 < found.truncated_knee.value <= 5


def test_a_flat_spectrum_needs_the_width():
    weight = 30 * torch.linalg.qr(gaussian(400, 24)).Q
    settings = dataclasses.replace(SETTINGS, rates=(0.5,), epochs=6)
    found = ask(layer(weight), ranks=(6, 12, 18), settings=settings)
    assert found.truncated_knee.value >= 18
    assert found.truncated_knee.high > 18
    # Nothing was measured between 18 and 24, and 18 is not enough.
    assert (found.bound, found.knee.value, found.still_falling) == ("at least", 18, True)
    assert found.slope.low > 0
    # Refits repair something, never beat the truth, and start at the truncation.
    refits = {point.rank: point for point in found.points if point.refitted is not None}
    assert set(refits) >= {12, 18, 24}
    for rank, point in refits.items():
        assert point.refitted.value > found.original.value - 0.02
        if rank < 24:
            assert point.refitted.value < point.truncated.value
    assert max(point.truncated.value - point.refitted.value for point in refits.values()) > 0.01
    for point in found.points:
        assert (point.refitted is None) == (point.learning_rate is None)


def test_small_directions_of_the_states_are_cut_first():
    """W is round and the states are not: truncation in their metric keeps what they use."""
    sizes = torch.logspace(0, -2, 20)
    output = layer(1.5 * gaussian(300, 20))
    parts = parts_of(output, lambda hidden: hidden * sizes)
    losses = curve(ask(output, parts, ranks=(4, 10)))
    hidden, targets = parts.held_out.states[0].flatten(0, 1), parts.held_out.targets.flatten()
    weight = output.weight - output.weight.mean(dim=0)
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    for rank in (4, 10):
        plain = layer((left[:, :rank] * values[:rank]) @ right[:rank])
        assert losses[rank] < float(plain.losses(hidden, targets).mean()) - 0.02


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


def test_a_projection_is_a_projection():
    states = gaussian(300, 14, seed=2) * torch.logspace(0, -3, 14)
    plainly, drawn = (truncation(layer(gaussian(90, 14)), states, shrink) for shrink in (0.0, 0.3))
    assert not torch.allclose(plainly[0], drawn[0])
    for rank, factors in itertools.product((1, 7, 14), (plainly, drawn)):
        projection = factors[0][:, :rank] @ factors[1][:rank]
        torch.testing.assert_close(projection @ projection, projection, rtol=1e-8, atol=1e-8)
        assert float(projection.trace()) == pytest.approx(rank, abs=1e-8)


def test_under_a_soft_cap_the_mean_row_counts():
    # Rank four and a mean row: five dimensions, all of which a cap can see.
    weight = gaussian(200, 4) @ gaussian(4, 16, seed=1) + 3 * gaussian(16, seed=2)
    found = ask(layer(weight, pointwise=Softcap(4.0)), ranks=(2, 4, 5, 8))
    losses = curve(found)
    assert losses[5] == pytest.approx(found.original.value, abs=1e-3)
    assert losses[8] == pytest.approx(found.original.value, abs=1e-3)
    assert losses[4] > found.original.value + 0.02


@pytest.mark.parametrize("cap", [None, 5.0])
def test_a_narrow_head_is_the_truncated_matrix_and_fits_start_there(cap):
    pointwise = {} if cap is None else {"pointwise": Softcap(cap)}
    output = layer(gaussian(60, 10), bias=gaussian(60, seed=1), **pointwise)
    factors = truncation(output, gaussian(300, 10, seed=2))
    states = gaussian(7, 10, seed=3)
    for rank in (1, 4, 9):
        projection = (factors[0][:, :rank] @ factors[1][:rank]).float()
        cut = dataclasses.replace(output, weight=output.weight @ projection)
        found = narrow_head(plain_layer(output), factors, rank)
        assert found.width == rank
        torch.testing.assert_close(found(states), cut.logits(states).log_softmax(1), rtol=1e-4, atol=1e-4)


def test_fits_with_a_bias_and_few_rows():
    output = layer(gaussian(150, 10), bias=gaussian(150, seed=1))
    settings = dataclasses.replace(SETTINGS, epochs=3, rows=30, exact=False)
    found = ask(output, settings=settings, ranks=(3, 6))
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
    losses = {4: 1.0 + 0.3 * noise, 8: 1.0 + 0.1 * noise, 12: 1.0 + 0.01 * noise, 16: torch.ones(400)}
    found, bound = knee(losses, blocks, 0.04)
    assert bound == ""
    assert 8 < found.low < found.value < found.high < 12
    assert (found, bound) == knee(losses, blocks, 0.04)
    # What all ranks share moves nothing.
    hard = 10 * torch.randn(20, generator=generator)[blocks]
    moved, _ = knee({rank: loss + hard for rank, loss in losses.items()}, blocks, 0.04)
    assert (moved.low, moved.high) == pytest.approx((found.low, found.high), rel=1e-4)
    # Without spread there is no interval.
    flat = {4: torch.full((400,), 2.0), 8: torch.ones(400), 16: torch.ones(400)}
    certain, bound = knee(flat, blocks, 0.5)
    assert (certain.low, certain.value, certain.high, bound) == (*[pytest.approx(4 * 2**0.5)] * 3, "")


@pytest.mark.parametrize(
    ("levels", "bound", "value"),
    [
        # Every rank is within the tolerance: no smaller one was tried.
        ([1.01, 1.0, 1.0], "at most", 4),
        # Not even the last but the full width is: nothing was measured between them.
        ([3.0, 2.0, 1.0], "at least", 8),
        ([1.05, 1.06, 1.0], "at least", 8),
        ([2.0, 1.01, 1.0], "", 4 * 2 ** (0.95 / 0.99)),
    ],
)
def test_a_need_beyond_what_was_measured_is_a_bound(levels, bound, value):
    blocks = torch.arange(40) // 4
    curve = {rank: torch.full((40,), level) for rank, level in zip((4, 8, 16), levels, strict=True)}
    found, said = knee(curve, blocks, 0.05 - 1e-6)
    assert said == bound
    assert found.value == pytest.approx(value, rel=1e-3)
    assert found.low <= found.value <= found.high
    # One rank is its own knee.
    assert knee({7: torch.ones(40)}, blocks, 0.1)[0].value == 7


def test_ranks_about_the_truncated_knee_are_refitted():
    ranks = [2, 4, 8, 12, 16, 24, 32]
    assert ranks_to_refit(ranks, 10.0) == [4, 8, 12, 16, 32]
    assert ranks_to_refit(ranks, 2.0) == [2, 16, 32]
    assert ranks_to_refit(ranks, 31.0) == [16, 24, 32]


def test_the_slope_is_what_a_doubling_buys():
    found = ask(layer(30 * torch.linalg.qr(gaussian(100, 8)).Q), ranks=(4,))
    points = {point.rank: point.refitted.value for point in found.points if point.refitted is not None}
    assert found.slope.value == pytest.approx(points[4] - points[8], abs=1e-6)
    # Without half the width there is none.
    assert math.isnan(ask(layer(30 * torch.linalg.qr(gaussian(60, 8)).Q), ranks=(2,)).slope.value)


def test_the_tolerance_is_not_below_what_seeds_differ_by():
    # The text is another layer's, so that there is something to learn, and a seed makes a difference.
    output, parts = layer(gaussian(60, 8)), parts_of(layer(gaussian(60, 8, seed=1)))
    found = ask(output, parts, ranks=(4,), tolerance=1e-9)
    assert found.noise > 1e-6
    assert found.tolerance == 2 * found.noise
    assert ask(output, parts, ranks=(4,), tolerance=0.5).tolerance == 0.5


def test_the_answer_is_the_same_twice_and_its_last_point_is_the_original():
    output, seen = layer(gaussian(100, 8)), []
    found = ask(output, progress=lambda label, share: seen.append(share))
    assert found == ask(output)
    assert seen == sorted(seen)
    assert 0 <= seen[0] <= seen[-1] <= 1
    ranks = [point.rank for point in found.points]
    assert ranks == sorted(ranks)
    assert ranks[-1] == 8
    # To the rounding of a mean and of a mean of differences.
    assert found.points[-1].truncated.value == pytest.approx(found.original.value, abs=1e-6)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_widths_that_leave_a_grid_little_room(width):
    output = layer(gaussian(30, width))
    found = ask(output, parts_of(output, windows=(3, 2, 2)))
    assert found.points[-1].rank == width
    assert 1 <= found.knee.value <= width


@pytest.mark.parametrize(
    ("width", "ranks", "message"),
    [
        (8, (0,), "1 to the width 8"),
        (8, (9,), "1 to the width 8"),
        (8, (-1, 4), "1 to the width 8"),
        (24, (), r"80 tokens .* width 24: give text for 168 --tokens"),
    ],
)
def test_refusals(width, ranks, message):
    output = layer(gaussian(100, width))
    with pytest.raises(FullrankError, match=message):
        ask(output, parts_of(output, windows=(4, 2, 2)), ranks=ranks)
