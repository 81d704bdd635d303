"""Leading eigenvalues against LAPACK, with planted spectra: repeated, rank-deficient, restarted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.corpus.lanczos import leading


def planted(values: np.ndarray, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(generator.standard_normal((len(values), len(values))))
    return (basis * values) @ basis.T


@pytest.mark.parametrize(
    "values",
    [
        1 / np.arange(1, 401) ** 1.0,
        np.concatenate([np.full(20, 5.0), np.linspace(1, 0, 380)]),
        np.concatenate([np.arange(1, 13, dtype=float), np.zeros(388)]),
        np.exp(-np.arange(400) / 20),
    ],
    ids=["zipf", "repeated", "low rank", "steep"],
)
@pytest.mark.parametrize("most", [None, 104], ids=["whole", "restarted"])
def test_values_lie_within_their_residuals(values: np.ndarray, most: int | None) -> None:
    matrix = planted(values, 3)
    found = leading(
        lambda block: matrix @ block, 400, 24, generator=np.random.default_rng(0), most=most, tolerance=1e-7
    )
    expected = np.sort(values)[::-1][:24]
    rounding = 1e-12 * expected[0]
    assert (np.abs(found.values - expected) <= found.residuals + rounding).all()
    assert (found.residuals <= 1e-7 * np.maximum(expected, 1e-7 * expected[0]) + rounding).all()
    # Residuals are what they claim to be, of vectors that are orthonormal.
    true = np.linalg.norm(matrix @ found.vectors - found.vectors * found.values, axis=0)
    assert (true <= found.residuals + 1e-10 * expected[0]).all()
    np.testing.assert_allclose(found.vectors.T @ found.vectors, np.eye(24), atol=1e-10)


@settings(max_examples=25)
@given(st.integers(1, 60), st.integers(1, 80), st.integers(0, 5))
def test_small_operators_are_solved_whole(size: int, count: int, seed: int) -> None:
    root = np.random.default_rng(seed).standard_normal((size, max(size // 2, 1)))
    matrix = root @ root.T
    found = leading(lambda block: matrix @ block, size, count, generator=np.random.default_rng(0))
    expected = np.linalg.eigvalsh(matrix)[::-1][:count]
    assert len(found.values) == min(size, count)
    np.testing.assert_allclose(found.values, np.maximum(expected, 0), atol=1e-10 * expected[0])
