"""least_rank, shift_class_ranks, expressible: known ranks in every dtype, noise of every kind, bad input."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.theory import expressible, least_rank, shift_class_ranks

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def factors(N: int, V: int, D: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    H = torch.randn(N, D, generator=generator, dtype=torch.float64)
    return H, 2 * torch.randn(V, D, generator=generator, dtype=torch.float64) / D**0.5


def product(H: Tensor, W: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits computed, not only stored, in a dtype; half-precision products go through float32."""
    H, W = H.to(dtype), W.to(dtype)
    if dtype in (torch.float16, torch.bfloat16):
        return (H.float() @ W.float().T).to(dtype)
    return H @ W.T


# Every dtype twice, every shape and every way of storing the matrix, with and without `source_dtype`.
@pytest.mark.parametrize(
    ("dtype", "N", "V", "D", "stored_as"),
    [
        (torch.float64, 6, 40, 2, "logits"),
        (torch.float64, 300, 200, 64, "log_probs"),
        (torch.float32, 200, 100, 5, "upcast"),
        (torch.float32, 100, 700, 16, "log_probs"),
        (torch.float16, 6, 40, 2, "upcast"),
        (torch.float16, 100, 700, 16, "rounded"),
        (torch.bfloat16, 200, 100, 5, "logits"),
        (torch.bfloat16, 300, 200, 64, "upcast"),
    ],
)
def test_a_planted_rank_survives_the_dtype(
    dtype: torch.dtype, N: int, V: int, D: int, stored_as: str
) -> None:
    H, W = factors(N, V, D)
    source = None
    if stored_as == "rounded":
        A = torch.log_softmax(H @ W.T, dim=1).to(dtype)
    elif stored_as == "logits":
        A = product(H, W, dtype)
    else:
        A = torch.log_softmax(product(H, W, dtype), dim=1)
    if stored_as == "upcast":
        A, source = A.double(), dtype
        # Without the source the rounding counts as rank.
        assert least_rank(A).rank > D
    result = least_rank(A, source_dtype=source)
    assert (result.rank, result.gap_rank) == (D, D)
    assert result.ceiling == min(N, V - 1)
    assert result.source_dtype == dtype
    assert result.singular_values[D] < result.noise_floor < result.singular_values[D - 1]
    # A floor far above the noise hides dimensions; a floor near the noise lets luck decide.
    assert result.noise_floor < (4 if dtype.itemsize == 2 else 400) * result.singular_values[D]
    assert result.gap > 10


@pytest.mark.parametrize(
    ("dtype", "offset"),
    [
        (torch.float64, "all rows"),
        (torch.float32, "two rows"),
        (torch.float32, "one large context"),
        (torch.float16, "two rows"),
        (torch.float16, "one column"),
        (torch.bfloat16, "all rows"),
        (torch.bfloat16, "one column"),
        (torch.bfloat16, "one large context"),
    ],
)
def test_offsets_that_centring_removes_add_no_rank(dtype: torch.dtype, offset: str) -> None:
    H, W = factors(120, 80, 5)
    if offset == "one large context":
        H[0] *= 30
    A = H @ W.T
    if offset == "all rows":
        A -= 30
    elif offset == "two rows":
        A[:2] += 300
    elif offset == "one column":
        A[:, 3] -= 100
    assert least_rank(A.to(dtype), bias=offset == "one column").rank == 5


def test_a_large_offset_in_float64() -> None:
    H, W = factors(60, 50, 4)
    assert least_rank(H @ W.T + 1e6).rank == 4
    assert least_rank(H @ W.T + 1e6 * torch.randn(60, 1, dtype=torch.float64)).rank == 4


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**31),
    st.integers(1, 60),
    st.integers(2, 60),
    st.integers(1, 6),
    st.sampled_from(DTYPES),
    st.floats(0.01, 30),
)
def test_rounding_never_adds_rank(
    seed: int, N: int, V: int, D: int, dtype: torch.dtype, scale: float
) -> None:
    H, W = factors(N, V, D, seed)
    result = least_rank(torch.log_softmax(scale * H @ W.T, dim=1).to(dtype))
    assert result.rank <= min(D, result.ceiling)
    assert result.gap_rank <= result.rank


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_full_rank_is_the_ceiling(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 40, generator=generator, dtype=torch.float64).to(dtype)
    tall = torch.randn(40, 5, generator=generator, dtype=torch.float64).to(dtype)
    assert (least_rank(wide).rank, least_rank(wide).gap_rank, least_rank(wide).ceiling) == (5, 5, 5)
    assert (least_rank(tall).rank, least_rank(tall).gap_rank, least_rank(tall).ceiling) == (4, 4, 4)
    assert (least_rank(wide, bias=True).rank, least_rank(wide, bias=True).ceiling) == (4, 4)


def test_the_gap_rank_is_right_where_the_noise_floor_is_too_low() -> None:
    H, W = factors(100, 80, 6)
    noise = torch.randn(100, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # The step from the signal to the noise is far larger than the step from the noise to the floor.
    noisy = torch.log_softmax((H @ W.T).double() + 1e-8 * noise, dim=1)
    result = least_rank(noisy)
    assert (result.rank, result.gap_rank) == (79, 6)


@pytest.mark.parametrize("value", [0.0, -1.3, 700.0])
def test_one_distribution_for_all_and_uniform_at_that(value: float) -> None:
    A = torch.full((7, 9), value)
    assert (least_rank(A).rank, least_rank(A).gap_rank) == (0, 0)
    assert expressible(A, 1)
    ranks = shift_class_ranks(A)
    assert (ranks.least, ranks.greatest, ranks.own) == (0, 1, int(value != 0))


def test_numpy_and_torch_agree_and_gradients_do_not_matter() -> None:
    H, W = factors(30, 20, 3)
    A = torch.log_softmax(H @ W.T, dim=1)
    frozen = A.numpy().copy()
    frozen.flags.writeable = False
    assert torch.equal(least_rank(frozen).singular_values, least_rank(A).singular_values)
    assert least_rank(A.float().numpy()).source_dtype == torch.float32
    assert least_rank(A.clone().requires_grad_()).rank == 3


def test_singular_values_are_those_of_the_centred_matrix() -> None:
    H, W = factors(50, 40, 20)
    A = torch.log_softmax(H @ W.T, dim=1)
    expected = torch.linalg.svdvals(A - A.mean(dim=1, keepdim=True))
    torch.testing.assert_close(least_rank(A).singular_values, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_have_the_least_rank_and_log_probs_one_more(dtype: torch.dtype) -> None:
    H, W = factors(80, 60, 7)
    logits = product(H, W, dtype)
    # The rows of W do not sum to zero, but the row means H (mean of W) lie in col(H) all the same.
    assert shift_class_ranks(logits).own == 7
    ranks = shift_class_ranks(torch.log_softmax(logits, dim=1))
    assert (ranks.least, ranks.greatest, ranks.own) == (7, 8, 8)
    # Fewer contexts than dimensions leave a single rank.
    ranks = shift_class_ranks(torch.log_softmax((H[:4] @ W.T).to(dtype), dim=1))
    assert (ranks.least, ranks.greatest, ranks.own) == (4, 4, 4)


def with_entry(value: float) -> Tensor:
    A = torch.zeros(3, 4)
    A[1, 2] = value
    return A


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (with_entry(-torch.inf), "zero probabilities.*drop those tokens or smooth"),
        (with_entry(torch.finfo(torch.float32).min), "zero probabilities.*mask"),
        (with_entry(torch.inf), "NaN or \\+inf"),
        (with_entry(torch.nan), "NaN or \\+inf"),
        (torch.zeros(3), r"shape \[3\], expected \[N, V\]"),
        (torch.zeros(2, 3, 4), r"shape \[2, 3, 4\], expected \[N, V\]"),
        (torch.zeros(0, 4), r"shape \[0, 4\]"),
        (torch.zeros(4, 0), r"shape \[4, 0\]"),
        (torch.zeros(4, 1), r"shape \[4, 1\].*two tokens"),
        (torch.zeros(3, 4, dtype=torch.int64), "int64"),
        (torch.zeros(3, 4, dtype=torch.bool), "bool"),
        (torch.zeros(3, 4, dtype=torch.complex64), "complex64"),
        (numpy.zeros((3, 4), dtype=numpy.int32), "int32"),
        (numpy.array([["a"]]), "dtype"),
        ([[0.0, 1.0]], "list"),
    ],
)
def test_matrices_that_are_refused(matrix: Tensor, words: str) -> None:
    for function in (least_rank, shift_class_ranks, lambda values: expressible(values, 2)):
        with pytest.raises(FullrankError, match=words):
            function(matrix)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *((lambda width=width: expressible(torch.zeros(3, 4), width), "whole number of at least 1")
          for width in (0, -1, 2.0, True, None)),
        (lambda: least_rank(torch.zeros(3, 4, dtype=torch.bfloat16), source_dtype=torch.float32),
         r"float32 but log_probs came in torch\.bfloat16"),
        (lambda: least_rank(torch.zeros(3, 4), source_dtype=torch.int8), r"source_dtype is torch\.int8"),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[], object], words: str) -> None:
    with pytest.raises(FullrankError, match=words):
        call()
