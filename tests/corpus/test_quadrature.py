"""Sums over a spectrum: brackets hold every measure with the same moments, limits hold the true sums."""

import numpy as np
import pytest
import scipy.optimize
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fullrank.corpus.quadrature import Measure, Probes, Sums


def lanczos(values: np.ndarray, weights: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The matrix of a discrete measure, with full orthogonalisation."""
    basis = [np.sqrt(weights / weights.sum())]
    alpha, beta = [], []
    for _ in range(steps):
        row = values * basis[-1]
        alpha.append(float(row @ basis[-1]))
        for _ in range(2):
            for one in basis:
                row = row - (row @ one) * one
        beta.append(float(np.linalg.norm(row)))
        basis.append(row / beta[-1])
    return np.array(alpha), np.array(beta)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(2, 9), st.floats(0.0, 1.2))
@example(0, 2, 0.0078125)
def test_bracket_holds_the_integral(seed: int, steps: int, level: float) -> None:
    generator = np.random.default_rng(seed)
    values, weights = np.sort(generator.random(40)), generator.random(40) + 0.01
    level *= values[-1]
    truth = float(weights @ np.minimum(values, level)) / weights.sum()
    measure = Measure(*lanczos(values, weights, steps))
    low, high = (float(end[0]) for end in measure.ends(np.array([level])))
    assert low - 1e-9 <= truth <= high + 1e-9
    # And it is no trivial one: nine steps of forty points know the integral to a few percent.
    if steps == 9:
        assert high - low < 0.05 * values[-1]


@settings(max_examples=10)
@given(st.integers(0, 10_000), st.integers(1, 4), st.floats(0.1, 0.9))
def test_ends_hold_the_extremes_of_a_linear_program(seed: int, steps: int, level: float) -> None:
    generator = np.random.default_rng(seed)
    values, weights = np.sort(generator.random(40)), generator.random(40) + 0.01
    weights /= weights.sum()
    low, high = (float(end[0]) for end in Measure(*lanczos(values, weights, steps)).ends(np.array([level])))
    # Measures on a fine grid with the same first 2m moments, by polynomials that keep their digits.
    grid = np.linspace(0, 1, 1001)
    known, moments = (np.polynomial.chebyshev.chebvander(2 * x - 1, 2 * steps).T for x in (values, grid))
    wanted, height = known @ weights, np.minimum(grid, level)
    near = {"A_ub": np.vstack([moments, -moments]), "b_ub": np.concatenate([wanted, -wanted]) + 1e-7}
    least, most = (sign * scipy.optimize.linprog(sign * height, **near).fun for sign in (1, -1))
    assert low <= least + 1e-5
    assert high >= most - 1e-5


def test_bracket_is_attained() -> None:
    # Three points, of which one step knows mean 1 and variance 1/2.
    values = np.array([0.0, 1.0, 2.0])
    measure = Measure(*lanczos(values, np.array([1.0, 2.0, 1.0]), 1))
    low, high = (float(end[0]) for end in measure.ends(np.array([1.0])))
    # Largest where all but a little lies at 1 and the rest far above, least where two nodes stand around it.
    assert high == pytest.approx(1.0, abs=1e-9)
    assert low == pytest.approx(1 - np.sqrt(0.5) / 2, abs=0.02)
    assert low <= 0.75 <= high


def sums_of(values: np.ndarray, *, known: int, probes: int, steps: int, seed: int) -> Sums:
    generator = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(generator.standard_normal((len(values), len(values))))
    matrix = (basis * values) @ basis.T
    some = Probes(
        lambda block: matrix @ block,
        basis[:, :known],
        generator.choice([-1.0, 1.0], size=(len(values), probes)),
        most=steps,
    )
    some.extend(steps)
    return Sums(values[:known], len(values) - known, float(values[known:].sum()), [some])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_sums_dimensions_and_tails_are_near_and_inside(seed: int) -> None:
    values = 1 / np.arange(1, 301)
    beyond = np.append(np.cumsum(values[::-1])[::-1], 0.0)
    sums = sums_of(values, known=10, probes=8, steps=30, seed=seed)
    truth = np.minimum(values[:, None], sums.levels).sum(axis=0)
    sums.bracket()
    assert (sums.below - truth <= sums.chance + sums.under + 1e-9).all()
    assert (truth - sums.below <= sums.chance + sums.over + 1e-9).all()
    for d in (20, 100, 250):
        value, low, high = sums.beyond(d)
        assert low <= beyond[d] <= high
        assert value == pytest.approx(beyond[d], rel=0.15)
        real, least, most = sums.dimension(float(beyond[d]))
        assert least - 1e-6 <= d <= most + 1e-6
        assert real == pytest.approx(d, rel=0.1)


def test_an_exhausted_space_is_exact() -> None:
    # Three distinct eigenvalues: three steps know everything but the chance in the probes.
    values = np.repeat([4.0, 2.0, 1.0], [3, 5, 12])
    sums = sums_of(values, known=0, probes=6, steps=12, seed=0)
    assert all(measure.exhausted for measure in sums.measures)
    sums.bracket()
    assert (sums.under == 0).all()
    assert (sums.over == 0).all()
    truth = np.minimum(values[:, None], sums.levels).sum(axis=0)
    assert (np.abs(sums.below - truth) <= sums.chance + 1e-9).all()
    # All of one value: the line through it leaves nothing to chance.
    flat = sums_of(np.full(20, 3.0), known=0, probes=4, steps=5, seed=1)
    np.testing.assert_allclose(flat.below, 20 * np.minimum(3.0, flat.levels), rtol=1e-9)


def test_known_eigenvectors_are_summed_as_they_are() -> None:
    values = np.array([9.0, 7.0, 5.0, 3.0])
    sums = sums_of(values, known=3, probes=3, steps=4, seed=2)
    np.testing.assert_allclose(
        sums.below, np.minimum(values[:, None], sums.levels).sum(axis=0), rtol=1e-8, atol=1e-8
    )
