"""least_rank, shift_class_ranks, expressible: known ranks in every dtype, noise of every kind, bad input."""

from __future__ import annotations

import dataclasses

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.theory import expressible, least_rank, shift_class_ranks

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# Half-precision products by way of float32, as every BLAS does them: some processors have no other way.
SHAPES = [(6, 40, 2), (200, 100, 5), (100, 700, 16), (300, 200, 64)]


def factors(N: int, V: int, D: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    H = torch.randn(N, D, generator=generator, dtype=torch.float64)
    return H, 2 * torch.randn(V, D, generator=generator, dtype=torch.float64) / D**0.5


def product(H: Tensor, W: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits computed, not only stored, in a dtype."""
    H, W = H.to(dtype), W.to(dtype)
    if dtype in (torch.float16, torch.bfloat16):
        return (H.float() @ W.float().T).to(dtype)
    return H @ W.T


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "V", "D"), SHAPES)
@pytest.mark.parametrize("made", ["stored", "logits", "log_probs", "upcast"])
def test_a_known_rank_survives_the_dtype(dtype: torch.dtype, N: int, V: int, D: int, made: str) -> None:
    H, W = factors(N, V, D)
    source = None
    if made == "stored":
        A = torch.log_softmax(H @ W.T, dim=1).to(dtype)
    elif made == "logits":
        A = product(H, W, dtype)
    else:
        A = torch.log_softmax(product(H, W, dtype), dim=1)
    if made == "upcast":
        A, source = A.double(), dtype
    found = least_rank(A, source_dtype=source)
    assert (found.rank, found.gap_rank) == (D, D)
    assert found.ceiling == min(N, V - 1)
    assert found.source_dtype == dtype
    assert found.singular_values[D] < found.noise_floor < found.singular_values[D - 1]
    # Neither many times too high, so that it hides dimensions, nor near the noise, so that luck decides.
    assert found.noise_floor < (4 if dtype.itemsize == 2 else 400) * found.singular_values[D]
    assert found.gap > 10


def test_upcast_noise_fools_the_default_tolerance_but_not_the_source_dtype() -> None:
    H, W = factors(200, 150, 8)
    A = torch.log_softmax(product(H, W, torch.float32), dim=1).double()
    centred = A - A.mean(dim=1, keepdim=True)
    assert numpy.linalg.matrix_rank(centred.numpy()) > 100
    assert least_rank(A).rank > 100
    assert least_rank(A, source_dtype=torch.float32).rank == 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("uneven", ["all rows", "two rows", "one column", "a loud context"])
def test_offsets_that_centring_removes_leave_no_rank_behind(dtype: torch.dtype, uneven: str) -> None:
    N, V, D = 120, 80, 5
    H, W = factors(N, V, D)
    if uneven == "a loud context":
        H[0] *= 30
    A = H @ W.T
    if uneven == "all rows":
        A -= 30
    elif uneven == "two rows":
        A[:2] += 300
    elif uneven == "one column":
        A[:, 3] -= 100
    bias = uneven == "one column"
    assert least_rank(A.to(dtype), bias=bias).rank == D


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
    found = least_rank(torch.log_softmax(scale * H @ W.T, dim=1).to(dtype))
    assert found.rank <= min(D, found.ceiling)
    assert found.gap_rank <= found.rank


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_full_rank_is_the_ceiling(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 40, generator=generator, dtype=torch.float64).to(dtype)
    tall = torch.randn(40, 5, generator=generator, dtype=torch.float64).to(dtype)
    assert (least_rank(wide).rank, least_rank(wide).gap_rank, least_rank(wide).ceiling) == (5, 5, 5)
    assert (least_rank(tall).rank, least_rank(tall).gap_rank, least_rank(tall).ceiling) == (4, 4, 4)
    assert (least_rank(wide, bias=True).rank, least_rank(wide, bias=True).ceiling) == (4, 4)


def test_a_gap_tells_where_the_floor_cannot() -> None:
    # Log-probabilities whose noise was made by far larger logits: the floor is too low and the gap sees it.
    H, W = factors(100, 80, 6)
    noise = torch.randn(100, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # So small that the step down to it is far larger than the one from it to the floor.
    noisy = torch.log_softmax((H @ W.T).double() + 1e-8 * noise, dim=1)
    found = least_rank(noisy)
    assert found.rank == 79
    assert found.gap_rank == 6


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


def test_the_record_is_frozen() -> None:
    found = least_rank(torch.zeros(2, 3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.rank = 5  # type: ignore[misc]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_have_the_least_rank_and_log_probs_one_more(dtype: torch.dtype) -> None:
    H, W = factors(80, 60, 7)
    logits = product(H, W, dtype)
    # The rows of W do not sum to zero, but the row means H (mean of W) lie in col(H) all the same.
    assert shift_class_ranks(logits).own == 7
    ranks = shift_class_ranks(torch.log_softmax(logits, dim=1))
    assert (ranks.least, ranks.greatest, ranks.own) == (7, 8, 8)


def test_few_contexts_leave_one_rank_only() -> None:
    H, W = factors(4, 60, 7)
    ranks = shift_class_ranks(torch.log_softmax(H @ W.T, dim=1))
    assert (ranks.least, ranks.greatest, ranks.own) == (4, 4, 4)


def test_expressible_is_exact_and_counts_the_bias() -> None:
    H, W = factors(40, 30, 5)
    A = torch.log_softmax(H @ W.T, dim=1)
    assert expressible(A, 5)
    assert not expressible(A, 4)
    # Ones over contexts are not in col(B): the bias has nothing to save.
    assert not expressible(A, 4, bias=True)
    H[:, 0] = 1.0
    A = torch.log_softmax(H @ W.T, dim=1)
    assert not expressible(A, 4)
    assert expressible(A, 4, bias=True)
    assert not expressible(A, 3, bias=True)


def with_entry(value: float) -> Tensor:
    A = torch.zeros(3, 4)
    A[1, 2] = value
    return A


@pytest.mark.parametrize(
    ("bad", "said"),
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
def test_bad_input_is_named_with_a_remedy(bad: Tensor, said: str) -> None:
    for function in (least_rank, shift_class_ranks, lambda values: expressible(values, 2)):
        with pytest.raises(FullrankError, match=said) as caught:
            function(bad)
        assert ": " in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("width", [0, -1, 2.0, True, None])
def test_a_width_is_a_positive_whole_number(width: object) -> None:
    with pytest.raises(FullrankError, match="expected a whole number of at least 1"):
        expressible(torch.zeros(3, 4), width)  # type: ignore[arg-type]


def test_a_source_cannot_be_finer_than_what_came() -> None:
    with pytest.raises(FullrankError, match=r"float32 but log_probs came in torch\.bfloat16"):
        least_rank(torch.zeros(3, 4, dtype=torch.bfloat16), source_dtype=torch.float32)
    with pytest.raises(FullrankError, match=r"source_dtype is torch\.int8"):
        least_rank(torch.zeros(3, 4), source_dtype=torch.int8)
