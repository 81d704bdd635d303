"""Saturation: published curves, planted turns and planted noise, and curves that are odd."""

import dataclasses
import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as some

from fullrank.diagnose.series import saturation as module
from fullrank.diagnose.series.saturation import saturation
from fullrank.results.series import Curve

# LAMBADA perplexity, EleutherAI/pythia evals, steps in thousands; every 10,000 steps from 13,000 on.
STEPS = tuple(range(13, 144, 10))
PYTHIA_70M = (
    136.2,
    121.3,
    118.1,
    112.4,
    94.32,
    101.7,
    117.1,
    124.3,
    140.5,
    125.6,
    120.5,
    133.1,
    148.5,
    142.4,
)
PYTHIA_410M = (
    20.94,
    16.99,
    15.79,
    14.96,
    14.92,
    12.54,
    13.01,
    11.45,
    11.75,
    12.04,
    11.47,
    11.31,
    10.54,
    10.83,
)
PYTHIA_1B = (15.20, 12.42, 11.14, 10.53, 9.875, 9.157, 8.778, 8.709, 8.507, 8.310, 8.067, 7.663, 7.576, 7.916)
PYTHIA_2800M = (
    10.21,
    7.897,
    7.170,
    6.793,
    6.360,
    5.989,
    5.586,
    5.545,
    5.428,
    5.201,
    5.060,
    5.007,
    5.023,
    5.036,
)


def curve(
    steps: object, values: object, error: float | None = None, lower_is_better: bool | None = True
) -> Curve:
    """A curve with standard errors of a share `error` of its values."""
    numbers = tuple(float(value) for value in values)  # type: ignore[attr-defined]
    return Curve(
        model="m",
        shots=None,
        metric="ppl",
        unit="perplexity",
        lower_is_better=lower_is_better,
        steps=tuple(int(step) for step in steps),  # type: ignore[attr-defined]
        values=numbers,
        standard_errors=None if error is None else tuple(error * value for value in numbers),
        dropped=0,
    )


def thousands(steps: tuple[int, ...]) -> list[int]:
    return [1000 * step for step in steps]


@pytest.mark.parametrize("error", [0.042, None])
def test_pythia_70m_turned_near_53000(error: float | None) -> None:
    found = saturation(curve(thousands(STEPS), PYTHIA_70M, error))
    assert found.saturated
    assert found.best_step == 53_000
    assert found.lost_percent == pytest.approx(100 * (142.4 / 94.32 - 1))
    assert 20 < found.interval[0] < found.lost_percent < found.interval[1] < 90


@pytest.mark.parametrize("values", [PYTHIA_410M, PYTHIA_1B, PYTHIA_2800M], ids=["410m", "1b", "2.8b"])
@pytest.mark.parametrize("error", [0.03, None])
def test_larger_pythias_did_not_turn(values: tuple[float, ...], error: float | None) -> None:
    found = saturation(curve(thousands(STEPS), values, error))
    assert not found.saturated
    assert found.reason == ""


def test_early_phase_changes_nothing() -> None:
    """Steps 0, 1, 2, 4, ... of a model that has learnt nothing yet are neither noise nor a turn."""
    early = [0, *(2**power for power in range(10)), 1000, 3000]
    values = [3.5e6] * 9 + [2.9e6, 117_000, 4465, 411.7]
    short = saturation(curve(thousands(STEPS), PYTHIA_70M, 0.042))
    long = saturation(curve(early + thousands(STEPS), (*values, *PYTHIA_70M), 0.042))
    assert long.saturated
    assert (long.best_step, long.lost_percent) == (short.best_step, short.lost_percent)
    assert long.first_step == 13_000
    assert long.noise_percent == pytest.approx(short.noise_percent, rel=0.3)


def test_few_points_with_standard_errors() -> None:
    """Pythia 160m, five of its points, and 70m, four."""
    found = saturation(curve(thousands((23, 63, 103, 133, 143)), (36.3, 24.8, 29.0, 44.9, 38.1), 0.04))
    assert found.saturated
    assert found.best_step == 63_000
    assert "scatter" in found.noise_origin
    assert saturation(curve(thousands((13, 53, 93, 143)), (136.3, 94.3, 140.5, 142.4), 0.042)).saturated


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("error", [0.04, None])
def test_too_few_points_are_said(count: int, error: float | None) -> None:
    found = saturation(curve(thousands((93, 123, 143))[:count], (24.1, 55.9, 32.2)[:count], error))
    assert not found.saturated
    assert f"{count} usable" in found.reason
    assert found.p_value == 1.0
    assert found.best_step == 93_000
    assert math.isnan(found.interval[0]) == (error is None)


def test_no_points() -> None:
    found = saturation(curve((), ()))
    assert not found.saturated
    assert found.reason


def test_scatter_counts_as_noise() -> None:
    """The same rise is a turn on a smooth curve, and none where checkpoints scatter by as much."""
    steps = numpy.arange(1, 21) * 1000
    trend = numpy.concatenate([numpy.linspace(0.3, 0, 10), numpy.linspace(0, 0.15, 10)])
    zigzag = 0.15 * (-1.0) ** numpy.arange(20)
    smooth, rough = (saturation(curve(steps, numpy.exp(3 + part), 0.01)) for part in (trend, trend + zigzag))
    assert smooth.saturated
    assert not rough.saturated
    assert rough.noise_percent > 5 * smooth.noise_percent


def test_standard_errors_count_as_noise() -> None:
    """A smooth rise is no turn where each value is that uncertain."""
    steps = numpy.arange(1, 21) * 1000
    values = numpy.exp(numpy.concatenate([numpy.linspace(0.3, 0, 10), numpy.linspace(0, 0.05, 10)]))
    assert saturation(curve(steps, values, 0.005)).saturated
    assert not saturation(curve(steps, values, 0.1)).saturated


@pytest.mark.parametrize("place", [3, 8, 12, 13])
@pytest.mark.parametrize("error", [0.01, None])
def test_one_spike_is_no_turn(place: int, error: float | None) -> None:
    random = numpy.random.default_rng(place)
    heights = -0.2 * numpy.log(numpy.arange(1, 16)) + 0.01 * random.standard_normal(15)
    heights[place] += 0.5
    assert not saturation(curve(range(1000, 16000, 1000), numpy.exp(heights), error)).saturated


def test_recovered_curve_lost_nothing() -> None:
    heights = [3, 2, 1, 1.2, 1.4, 1.4, 1.2, 1.0, 0.99, 0.98]
    found = saturation(curve(range(1, 11), numpy.exp(heights), 0.01))
    assert not found.saturated
    assert found.lost_percent == 0
    assert found.best_step == 10


def test_a_sure_rise_that_is_too_small_is_not_material() -> None:
    heights = numpy.concatenate([numpy.linspace(0.1, 0, 15), numpy.linspace(0, 0.01, 15)])
    found = saturation(curve(range(1, 31), numpy.exp(heights), 0.0005))
    assert found.p_value < module.LEVEL
    assert not found.saturated


def test_accuracy_turns_downwards() -> None:
    values = numpy.concatenate([numpy.linspace(0.2, 0.4, 10), numpy.linspace(0.4, 0.3, 10)])
    found = saturation(curve(range(1, 21), values, 0.01, lower_is_better=False))
    assert found.saturated
    assert found.lost_percent == pytest.approx(25)
    assert found.best_value == pytest.approx(0.4)
    assert not saturation(curve(range(1, 11), numpy.linspace(0.2, 0.4, 10), 0.01, False)).saturated
    assert not saturation(curve(range(1, 11), numpy.zeros(10), None, False)).saturated


def test_constant_and_smooth_curves() -> None:
    for values in (numpy.full(12, 7.0), numpy.geomspace(9, 3, 12)):
        for error in (None, 0.01):
            found = saturation(curve(range(1, 13), values, error))
            assert not found.saturated
            assert found.p_value > 0.5
            assert found.lost_percent == 0
    rising = saturation(curve(range(1, 13), numpy.geomspace(3, 9, 12), 0.02))
    assert rising.saturated
    assert rising.best_step == 1


def test_very_long_curves_are_pooled() -> None:
    random = numpy.random.default_rng(0)
    heights = numpy.concatenate([numpy.linspace(1, 0, 3000), numpy.linspace(0, 0.2, 2000)])
    values = numpy.exp(heights + 0.1 * random.standard_normal(5000))
    found = saturation(curve(range(5000), values))
    assert found.saturated
    assert found.points <= module.MOST_POINTS
    assert 2500 < found.best_step < 3500
    assert found.interval[0] < 100 * math.expm1(0.2) < found.interval[1]
    assert "pooled" in found.noise_origin


def test_same_seed_same_answer() -> None:
    one = curve(thousands(STEPS), PYTHIA_70M, 0.04)
    assert saturation(one, seed=3) == saturation(one, seed=3)
    assert saturation(one, seed=3).interval != saturation(one, seed=4).interval


@given(
    heights=some.lists(some.floats(-3, 3), min_size=1, max_size=12),
    error=some.one_of(some.none(), some.floats(1e-6, 1.0)),
    lower=some.booleans(),
)
def test_any_curve_has_a_sane_answer(heights: list[float], error: float | None, lower: bool) -> None:
    values = numpy.exp(heights)
    found = saturation(curve(range(len(values)), values, error, lower))
    best = values.min() if lower else values.max()
    assert found.best_value == best
    assert found.lost_percent == pytest.approx(100 * abs(values[-1] / best - 1), abs=1e-6)
    assert 0 < found.p_value <= 1
    if not math.isnan(found.interval[0]):
        assert 0 <= found.interval[0] <= found.lost_percent + 1e-9 <= found.interval[1] + 2e-9
    assert not (found.saturated and found.lost_percent < module.MATERIAL_PERCENT)


def _rate(trend: numpy.ndarray, noise: float, error: float | None, count: int) -> float:
    steps = numpy.linspace(3000, 143_000, len(trend))
    random = numpy.random.default_rng(11)
    draws = numpy.exp(3 + trend + noise * random.standard_normal((count, len(trend))))
    return float(
        numpy.mean(
            [saturation(curve(steps, row, error), seed=seed).saturated for seed, row in enumerate(draws)]
        )
    )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    # The least number whose smallest p-values still straddle the level.
    monkeypatch.setattr(module, "SIMULATIONS", 150)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("shape", "noise", "error", "most"),
    [
        # 300 tests of a curve take two seconds: the easier cases are slow ones.
        pytest.param("level", 0.02, 0.02, 0.03, marks=pytest.mark.slow),
        pytest.param("level", 0.02, None, 0.03, marks=pytest.mark.slow),
        ("plateau", 0.02, None, 0.03),
        # The hardest case: level, and scatter that the standard errors know nothing of.
        ("level", 0.03, 0.02, 0.06),
        pytest.param("falling", 0.03, 0.02, 0.01, marks=pytest.mark.slow),
    ],
)
def test_false_alarms_are_rare(shape: str, noise: float, error: float | None, most: float) -> None:
    """Of 300 curves that never turned, at level 0.01."""
    way = numpy.log(numpy.linspace(3000, 143_000, 14) / 3000)
    trend = {"level": 0 * way, "plateau": numpy.maximum(-0.8 * way, -1.5), "falling": -0.3 * way}[shape]
    assert _rate(trend, noise, error, 300) <= most


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("error", "least"), [(0.02, 0.9), (None, 0.7)])
def test_planted_turns_are_found(error: float | None, least: float) -> None:
    """Of 10% with 2% noise: down to the middle of 20 checkpoints, and back up."""
    trend = numpy.concatenate([numpy.linspace(0.4, 0, 10), numpy.linspace(0, math.log(1.1), 10)])
    assert _rate(trend, 0.02, error, 60) >= least


@pytest.mark.usefixtures("quick")
def test_interval_covers_the_planted_loss() -> None:
    trend = numpy.concatenate([numpy.linspace(0.4, 0, 10), numpy.linspace(0, 0.2, 10)])
    random = numpy.random.default_rng(5)
    truth = 100 * math.expm1(0.2)
    inside = 0
    for seed in range(60):
        values = numpy.exp(3 + trend + 0.03 * random.standard_normal(20))
        low, high = saturation(curve(range(1000, 21000, 1000), values, 0.03), seed=seed).interval
        inside += low <= truth <= high
    assert inside >= 52


def test_record_is_plain() -> None:
    found = saturation(curve(thousands(STEPS), PYTHIA_70M, 0.042))
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        assert value is None or type(value) in (str, int, float, bool, tuple)
