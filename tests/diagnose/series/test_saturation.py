"""Saturation: published curves, planted turns and planted noise, and curves that are odd."""

import dataclasses
import math
from collections.abc import Iterator

import numpy
import pytest
from hypothesis import given
from hypothesis import settings as options
from hypothesis import strategies as some

from fullrank.diagnose.series import saturation as module
from fullrank.diagnose.series.correlated_noise import autoregressive
from fullrank.diagnose.series.saturation import difference, holm, saturation, saturations
from fullrank.results.series import NOT_TURNED, TURNED, UNDECIDED, Curve
from tests.level_curves import simulations


@pytest.fixture(
    scope="module", autouse=True, params=[4000, pytest.param(20_000, marks=pytest.mark.slow, id="all")]
)
def _simulations(request: pytest.FixtureRequest) -> Iterator[None]:
    """As many level curves as a user's curve is compared with take minutes."""
    with simulations(request.param):
        yield


# LAMBADA perplexity, EleutherAI/pythia evals, steps in thousands; every 10,000 steps from 13,000 on.
STEPS = tuple(range(13, 144, 10))
PYTHIA_70M = (
    136.2, 121.3, 118.1, 112.4, 94.32, 101.7, 117.1, 124.3, 140.5, 125.6, 120.5, 133.1, 148.5, 142.4,
)  # fmt: skip
PYTHIA_410M = (
    20.94, 16.99, 15.79, 14.96, 14.92, 12.54, 13.01, 11.45, 11.75, 12.04, 11.47, 11.31, 10.54, 10.83,
)  # fmt: skip
PYTHIA_1B = (15.20, 12.42, 11.14, 10.53, 9.875, 9.157, 8.778, 8.709, 8.507, 8.310, 8.067, 7.663, 7.576, 7.916)
PYTHIA_2800M = (
    10.21, 7.897, 7.170, 6.793, 6.360, 5.989, 5.586, 5.545, 5.428, 5.201, 5.060, 5.007, 5.023, 5.036,
)  # fmt: skip


def curve(
    steps: object, values: object, error: float | None = None, lower_is_better: bool | None = True
) -> Curve:
    """A curve with standard errors of a share `error` of its values."""
    numbers = tuple(float(value) for value in values)  # type: ignore[attr-defined]
    return Curve(
        model="m", shots=None, metric="ppl", unit="perplexity", lower_is_better=lower_is_better, dropped=0,
        steps=tuple(int(step) for step in steps), values=numbers,  # type: ignore[attr-defined]
        standard_errors=None if error is None else tuple(error * value for value in numbers),
    )  # fmt: skip


def thousands(steps: tuple[int, ...]) -> list[int]:
    return [1000 * step for step in steps]


STEADY = 1000 * numpy.arange(1, 21)
"""Level curves are simulated once for the same steps, so that most tests share these."""


def vee(fall: float, rise: float, count: int = 20) -> numpy.ndarray:
    """Down to the middle, and up."""
    half = count // 2
    return numpy.concatenate([numpy.linspace(fall, 0, half), numpy.linspace(0, rise, count - half)])


def scattered(heights: numpy.ndarray, noise: float, seed: int = 0) -> numpy.ndarray:
    return numpy.exp(3 + heights + noise * numpy.random.default_rng(seed).standard_normal(len(heights)))


def test_pythia_70m_is_undecided_unless_its_noise_is_known_to_be_independent() -> None:
    """It lost half, and noise of 14 checkpoints that wanders could have made that."""
    found = saturation(curve(thousands(STEPS), PYTHIA_70M, 0.042))
    assert found.outcome == UNDECIDED
    assert found.best_step == 53_000
    assert found.lost_percent == pytest.approx(100 * (142.4 / 94.32 - 1))
    assert found.turned_up_to >= 0.2
    assert found.noise_correlation == 0.8
    assert found.interval[0] < found.lost_percent < found.interval[1]


@pytest.mark.parametrize("values", [PYTHIA_410M, PYTHIA_1B, PYTHIA_2800M], ids=["410m", "1b", "2.8b"])
def test_larger_pythias_did_not_turn(values: tuple[float, ...]) -> None:
    found = saturation(curve(thousands(STEPS), values))
    assert found.outcome == NOT_TURNED
    assert found.reason == ""
    assert found.interval[1] < found.smallest_rise_percent


def test_early_phase_changes_nothing() -> None:
    """Steps 0, 1, 2, 4, ... of a model that has learnt nothing yet are neither noise nor a turn."""
    early = [0, *(2**power for power in range(10)), 1000, 3000]
    values = [3.5e6] * 9 + [2.9e6, 117_000, 4465, 411.7]
    short = saturation(curve(thousands(STEPS), PYTHIA_1B))
    long = saturation(curve(early + thousands(STEPS), (*values, *PYTHIA_1B)))
    assert long.outcome == short.outcome == NOT_TURNED
    assert long.first_step == 13_000
    assert long == dataclasses.replace(short, first_step=13_000)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_too_few_points_are_undecided(count: int) -> None:
    found = saturation(
        curve(thousands((63, 93, 123, 133, 143))[:count], (30, 24.1, 55.9, 60, 32)[:count], 0.04)
    )
    assert found.outcome == UNDECIDED
    assert (f"{count} usable" if count else "no usable value") in found.reason
    assert found.p_value == 1.0
    assert math.isnan(found.interval[0])


@pytest.mark.parametrize("error", [None, 0.1])
def test_errors_that_checkpoints_share_hide_no_rise(error: float | None) -> None:
    found = saturation(curve(STEADY, scattered(vee(0.2, 0.04), 0.002), error))
    assert found.outcome == TURNED
    assert 8_000 <= found.best_step <= 12_000


def test_paired_errors_count_as_noise() -> None:
    """What differs between checkpoints, block by block, is noise of the difference."""
    plain = curve(STEADY, scattered(vee(0.2, 0.04), 0.002))
    sure, unsure = (
        saturation(dataclasses.replace(plain, paired_errors=tuple(share * value for value in plain.values)))
        for share in (0.001, 0.03)
    )
    assert sure.outcome == TURNED
    assert unsure.outcome != TURNED
    assert unsure.noise_percent > 3 * sure.noise_percent
    assert "block" in sure.noise_origin


def test_scatter_counts_as_noise() -> None:
    """The same rise is a turn on a smooth curve, and none where checkpoints scatter by as much."""
    smooth, rough = (saturation(curve(STEADY, scattered(vee(0.3, 0.15), noise))) for noise in (0.003, 0.15))
    assert smooth.outcome == TURNED
    assert rough.outcome != TURNED
    assert rough.noise_percent > 5 * smooth.noise_percent


def test_a_swing_after_the_turn_is_no_noise() -> None:
    """A curve that went up and came half way back has turned as well as one that went half way up."""
    swing = numpy.array([0, 0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.6, 0.3, 0.3])
    before = numpy.linspace(0.5, 0, 10)
    found = saturation(curve(STEADY, scattered(numpy.concatenate([before, swing]), 0.01)))
    assert found.outcome == TURNED
    assert found.noise_percent < 15


@pytest.mark.parametrize("place", [3, 8, 11, 12, 13])
def test_one_spike_is_no_turn(place: int) -> None:
    heights = -0.2 * numpy.log(numpy.arange(1, 15))
    heights[place] += 0.5
    assert saturation(curve(thousands(STEPS), scattered(heights, 0.01, place))).outcome != TURNED


def test_recovered_curve_lost_nothing() -> None:
    heights = [*numpy.linspace(5, 3.2, 10), 3, 2, 1, 1.2, 1.4, 1.4, 1.2, 1.0, 0.99, 0.98]
    found = saturation(curve(STEADY, numpy.exp(heights)))
    assert found.outcome != TURNED
    assert (found.lost_percent, found.best_step) == (0, 20_000)


def test_a_sure_rise_that_is_too_small_is_not_material() -> None:
    found = saturation(curve(STEADY, scattered(vee(0.1, 0.01), 0.0002)))
    assert found.p_value < module.LEVEL
    assert found.outcome == NOT_TURNED


def test_accuracy_turns_downwards() -> None:
    values = 0.4 - vee(0.2, 0.1) + 0.002 * numpy.random.default_rng(0).standard_normal(20)
    found = saturation(curve(STEADY, values, None, lower_is_better=False))
    assert found.outcome == TURNED
    assert found.lost_percent == pytest.approx(25, abs=2)
    assert found.best_value == values.max()
    assert saturation(curve(STEADY, numpy.linspace(0.2, 0.4, 20), None, False)).outcome == NOT_TURNED
    assert saturation(curve(STEADY, numpy.zeros(20), None, False)).outcome != TURNED


def test_constant_and_smooth_curves() -> None:
    for values in (numpy.full(20, 7.0), numpy.geomspace(9, 3, 20)):
        found = saturation(curve(STEADY, values))
        assert found.outcome == NOT_TURNED
        assert found.p_value > 0.2
        assert found.lost_percent == 0
    rising = saturation(curve(STEADY, numpy.geomspace(3, 9, 20)))
    assert (rising.outcome, rising.best_step) == (TURNED, 1000)


# Four seconds, of one curve of 5,000 points.
@pytest.mark.slow
def test_very_long_curves_are_pooled() -> None:
    heights = numpy.concatenate([numpy.linspace(1, 0, 3000), numpy.linspace(0, 0.2, 2000)])
    found = saturation(curve(range(5000), scattered(heights, 0.1)))
    assert found.outcome == TURNED
    assert found.points <= module.MOST_POINTS
    assert 2500 < found.best_step < 3500
    assert found.interval[0] < 100 * math.expm1(0.2) < found.interval[1]
    assert "pooled" in found.noise_origin


def test_same_seed_same_answer() -> None:
    short = curve(range(6), scattered(vee(0.2, 0.04, 6), 0.002))
    first, again, other = (saturation(short, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first.interval != other.interval


def test_holm() -> None:
    assert holm([]) == []
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_many_curves_must_be_clearer() -> None:
    """An alarm among all curves of a call is as rare as one for a single curve."""
    turned = curve(STEADY, scattered(vee(0.2, 0.04), 0.002))
    others = [curve(STEADY, scattered(numpy.linspace(0.3, 0, 20), 0.01, seed)) for seed in range(1, 5)]
    alone, among = saturation(turned), saturations([turned, *others])[0].record
    assert among.p_value == alone.p_value
    assert among.adjusted_p == pytest.approx(5 * alone.p_value)
    assert among.smallest_rise_percent > alone.smallest_rise_percent


def test_few_points_among_many_curves_show_no_rise_at_all() -> None:
    """Eight points of one curve, at the level that thirty curves leave it: not 1e17 percent."""
    curves = [curve(range(8), scattered(numpy.linspace(0.1, 0, 8), 0.002, seed)) for seed in range(30)]
    alone, among = saturation(curves[0]), saturations(curves)[0].record
    assert alone.smallest_rise_percent < 10
    assert "would have been seen" in alone.power
    assert math.isinf(among.smallest_rise_percent)
    assert "too few" in among.power


def test_a_difference_is_tested_as_one() -> None:
    heights = [vee(0.3, rise) for rise in (0.25, 0.25, 0.0)]
    first, same, level = saturations(
        [curve(STEADY, scattered(one, 0.005, seed)) for seed, one in enumerate(heights)]
    )
    low, high, p_value = difference(first, level)
    assert 0 < low < 100 * math.expm1(0.25) < high
    assert p_value < 0.01
    low, high, p_value = difference(first, same)
    assert low < 0 < high
    assert p_value > 0.05


@options(max_examples=30)
@given(heights=some.lists(some.floats(-3, 3), min_size=1, max_size=8), lower=some.booleans())
def test_any_curve_has_a_sane_answer(heights: list[float], lower: bool) -> None:
    values = numpy.exp(heights)
    found = saturation(curve(range(len(values)), values, None, lower))
    best = values.min() if lower else values.max()
    assert found.best_value == pytest.approx(best)
    assert found.lost_percent == pytest.approx(100 * abs(values[-1] / best - 1), abs=1e-6)
    assert 0 < found.p_value <= found.adjusted_p <= 1
    if not math.isnan(found.interval[0]):
        assert 0 <= found.interval[0] <= found.lost_percent + 1e-9 <= found.interval[1] + 2e-9
    assert not (found.turned and found.lost_percent < module.MATERIAL_PERCENT)


@pytest.mark.parametrize(
    ("correlation", "count", "most"),
    [
        (0.8, 30, 1),
        pytest.param(0.5, 80, 2, marks=pytest.mark.slow),
        pytest.param(0.8, 80, 3, marks=pytest.mark.slow),
    ],
)
def test_false_alarms_are_rare_where_noise_is_correlated(correlation: float, count: int, most: int) -> None:
    """Of level curves, on which alarms are most frequent: 2% and a little for the luck of the draw.

    With independent noise assumed there are 8 to 30 of 80. `benchmarks/series_calibration.py` has thousands.
    """
    drawn = 0.02 * autoregressive(numpy.random.default_rng(7), count, 14, correlation)
    assert sum(saturation(curve(thousands(STEPS), numpy.exp(row))).p_value < 0.01 for row in drawn) <= most


@pytest.mark.parametrize("count", [15, pytest.param(40, marks=pytest.mark.slow)])
def test_planted_turns_are_found(count: int) -> None:
    """Of 4% with 0.2% scatter: down to the middle of 14 checkpoints, and back up."""
    found = [
        saturation(curve(thousands(STEPS), scattered(vee(0.2, 0.04, 14), 0.002, seed), 0.014))
        for seed in range(count)
    ]
    assert sum(record.turned for record in found) >= 0.9 * count
    truth = 100 * math.expm1(0.04)
    assert sum(record.interval[0] <= truth <= record.interval[1] for record in found) >= 0.9 * count


def test_record_is_plain() -> None:
    found = saturation(curve(thousands(STEPS), PYTHIA_70M, 0.042))
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        assert value is None or type(value) in (str, int, float, bool, tuple)
