"""Spectrum: against the SVD in fp64, matrices of known effective and numerical rank, real rounding."""

import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import settings as options
from hypothesis import strategies as some

from fullrank.diagnose.questions import spectrum as module
from fullrank.diagnose.questions.spectrum import (
    random_effective_rank,
    singular_values,
    spectrum,
    storage_noise,
)
from fullrank.errors import FullrankError


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def orthonormal(rows, columns, seed=0):
    return torch.linalg.qr(gaussian(rows, columns, seed=seed)).Q


def with_spectrum(V, values, seed=0):
    D = len(values)
    return (orthonormal(V, D, seed) * values) @ orthonormal(D, D, seed + 1).T


@pytest.mark.parametrize("shape", [(300, 20), (20, 300), (40, 40), (9000, 8)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_singular_values_are_those_of_the_svd(shape, dtype):
    weight = gaussian(*shape, dtype=dtype)
    expected = torch.linalg.svdvals(weight.double())
    torch.testing.assert_close(singular_values(weight), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("condition", [1e3, 3e6, 1e12])
def test_singular_values_of_ill_conditioned_matrices(condition, transposed):
    truth = torch.logspace(0, -math.log10(condition), 30, dtype=torch.float64)
    weight = with_spectrum(200, truth)
    found = singular_values(weight.T if transposed else weight)
    # fp64 cannot hold the smallest value of condition 1e12 better than to 1e-16 / 1e-12.
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=0)
    assert spectrum(weight).condition == pytest.approx(condition, rel=1e-3)


@pytest.mark.parametrize("rank", [1, 7, 29])
def test_singular_values_of_matrices_without_full_rank(rank):
    weight = gaussian(400, rank) @ gaussian(rank, 30, seed=1)
    found = singular_values(weight)
    torch.testing.assert_close(found[:rank], torch.linalg.svdvals(weight)[:rank], rtol=1e-10, atol=0)
    assert float(found[rank:].max()) < 1e-13 * float(found[0])


def test_zero_rows_and_columns_are_a_condition_without_end():
    weight = gaussian(50, 8)
    weight[:, 3] = 0
    weight[10:20] = 0
    found = spectrum(weight)
    assert found.condition > 1e15
    assert found.numerical_rank == 7


def by_entropy(*squares):
    """exp of the entropy of shares."""
    return math.exp(-sum(share * math.log(share) for share in squares))


@pytest.mark.parametrize(
    ("weight", "effective", "stable", "participation", "entropy", "rank", "condition"),
    [
        (3.0 * orthonormal(100, 12), 12, 12, 12, 0, 12, 1),
        (torch.outer(gaussian(100), gaussian(12, seed=1)), 1, 1, 1, math.log(12), 1, None),
        # Singular values 4, 2 and 2: the shares of their squares are 2/3, 1/6 and 1/6.
        (
            with_spectrum(60, torch.tensor([4.0, 2.0, 2.0], dtype=torch.float64)),
            by_entropy(0.5, 0.25, 0.25), 24 / 16, 24**2 / 288, math.log(3) - 1.5 * math.log(2), 3, 2,
        ),
    ],
    ids=["orthogonal", "rank one", "three values"],
)  # fmt: skip
def test_measures_by_hand(weight, effective, stable, participation, entropy, rank, condition):
    found = spectrum(weight)
    assert found.effective_rank == pytest.approx(effective, abs=1e-10)
    assert found.stable_rank == pytest.approx(stable)
    assert found.participation_ratio == pytest.approx(participation)
    assert found.singular_entropy == pytest.approx(entropy, abs=1e-10)
    assert found.numerical_rank == rank
    assert condition is None or found.condition == pytest.approx(condition)


@options(max_examples=40)
@given(
    V=some.integers(2, 60), D=some.integers(2, 60), seed=some.integers(0, 100), scale=some.floats(1e-3, 1e3)
)
def test_measures_are_invariant_and_agree_with_each_other(V, D, seed, scale):
    weight = gaussian(V, D, seed=seed)
    found = spectrum(weight)
    least = min(V, D)
    assert found.effective_rank == pytest.approx(least * math.exp(-found.singular_entropy))
    assert 1 <= found.stable_rank <= found.participation_ratio * (1 + 1e-9)
    assert found.participation_ratio <= found.effective_rank * (1 + 1e-9) <= least * (1 + 1e-8)
    turned = scale * weight.flip(0) @ orthonormal(D, D, seed + 1)
    other = spectrum(turned)
    for field in ("effective_rank", "stable_rank", "participation_ratio"):
        assert getattr(other, field) == pytest.approx(getattr(found, field), rel=1e-6)
    assert other.noise == pytest.approx(scale * found.noise, rel=1e-6)
    assert other.numerical_rank == found.numerical_rank == least


@pytest.mark.parametrize("shape", [(1000, 50), (150, 150), (50, 350)])
def test_effective_rank_of_gaussian_matrices(shape):
    sampled = [spectrum(gaussian(*shape, seed=seed)).effective_rank for seed in range(3)]
    assert random_effective_rank(*shape) == pytest.approx(numpy.mean(sampled), rel=0.005)
    assert random_effective_rank(*shape) == random_effective_rank(*shape[::-1])
    assert spectrum(gaussian(*shape)).random_effective_rank == random_effective_rank(*shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("V", "D", "rank"), [(500, 64, 20), (128, 128, 100), (64, 200, 30)])
def test_numerical_rank_of_a_product_as_it_is_stored(dtype, V, D, rank):
    weight = (0.02 * gaussian(V, rank) @ gaussian(rank, D, seed=1)).to(dtype)
    found = spectrum(weight.float(), str(dtype).split(".")[-1])
    assert found.numerical_rank == rank
    # Taken for exact numbers, rounding passes for rank: the storage must be named.
    assert spectrum(weight.double(), "float64").numerical_rank == min(V, D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_full_rank_stays_full_rank_in_half_precision(dtype):
    values = torch.logspace(0, -1.5, 64, dtype=torch.float64)
    weight = with_spectrum(4000, values).to(dtype).float()
    assert spectrum(weight, str(dtype).split(".")[-1]).numerical_rank == 64


@pytest.mark.parametrize(("V", "D", "rank"), [(300, 32, 11), (200, 210, 60)])
def test_numerical_rank_of_a_product_in_single_precision(V, D, rank):
    weight = (0.02 * gaussian(V, rank)).float() @ gaussian(rank, D, seed=1).float()
    assert spectrum(weight, "float32").numerical_rank == rank


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_noise_is_the_norm_of_the_real_rounding(dtype):
    weight = gaussian(1500, 80)
    stored = weight.to(dtype)
    real = float(torch.linalg.matrix_norm(stored.double() - weight, ord=2))
    noise, origin = storage_noise(stored.float(), str(dtype).split(".")[-1])
    assert real < noise < 2.5 * real
    assert str(dtype).split(".")[-1] in origin


@pytest.mark.parametrize("uneven", ["columns", "few columns", "rows", "few rows", "mean row"])
def test_numerical_rank_of_a_product_whose_entries_are_uneven(uneven):
    weight = gaussian(4000, 20) @ gaussian(20, 64, seed=1)
    rank = 20
    if uneven == "columns":
        weight *= gaussian(64, seed=2).exp()
    elif uneven == "few columns":
        weight[:, :3] *= 10
    elif uneven == "rows":
        weight *= gaussian(4000, 1, seed=2).exp()
    elif uneven == "few rows":
        weight[:40] *= 10
    else:
        weight += 20 * gaussian(64, seed=2)
        rank = 21
    assert spectrum(weight.bfloat16().float(), "bfloat16").numerical_rank == rank


@pytest.mark.parametrize(("name", "same"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_unquantised_gguf_types_are_known(name, same):
    weight = gaussian(100, 10)
    assert storage_noise(weight, name) == storage_noise(weight, same)
    assert storage_noise(weight, name)[0] > 0


def q8_0(weight):
    """llama.cpp's: blocks of 32, scale = largest / 127, kept in half precision."""
    blocks = weight.reshape(-1, 32)
    scale = (blocks.abs().amax(dim=1, keepdim=True) / 127).half().float()
    return ((blocks / scale).round().clamp(-127, 127) * scale).reshape(weight.shape)


def q4_0(weight):
    """llama.cpp's: blocks of 32, the entry of largest size becomes -8."""
    blocks = weight.reshape(-1, 32)
    largest = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    scale = (largest / -8).half().float()
    return ((blocks / scale + 8.5).floor().clamp(0, 15).sub(8) * scale).reshape(weight.shape)


@pytest.mark.parametrize(("name", "quantise"), [("Q8_0", q8_0), ("Q4_0", q4_0)])
def test_noise_of_block_quantisation_is_that_of_the_real_one(name, quantise):
    weight = 0.05 * gaussian(300, 256, dtype=torch.float32)
    stored = quantise(weight)
    real = float(torch.linalg.matrix_norm((stored - weight).double(), ord=2))
    noise, origin = storage_noise(stored, name)
    assert real / 1.5 < noise < 1.5 * real
    assert name in origin


def test_numerical_rank_of_a_quantised_product():
    weight = (gaussian(3000, 20) @ gaussian(20, 128, seed=1)).float()
    assert spectrum(q8_0(weight), "Q8_0").numerical_rank == 20
    assert spectrum(q8_0(weight), "float32").numerical_rank == 128


def test_storage_of_unknown_noise_says_so():
    weight = gaussian(100, 10)
    found = spectrum(weight, "fp8_e4m3_scaled")
    assert (found.noise, found.numerical_rank) == (0.0, 10)
    assert "fp8_e4m3_scaled" in found.noise_origin
    assert "unknown" in found.noise_origin
    assert "shorter" in spectrum(weight, "Q8_0").noise_origin
    for name in module.BITS:
        assert storage_noise(gaussian(20, 64), f"{name}_K")[0] > 0
    assert storage_noise(gaussian(20, 64), "q4_k")[0] == storage_noise(gaussian(20, 64), "Q4_K")[0]


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(5), "at least 2 x 2"),
        (torch.zeros(1, 5), "at least 2 x 2"),
        (torch.zeros(5, 1), "at least 2 x 2"),
        (torch.zeros(5, 4), "zero"),
        (torch.ones(5, 4).fill_diagonal_(math.nan), "NaN"),
    ],
)
def test_refusals(weight, message):
    with pytest.raises(FullrankError, match=message):
        spectrum(weight)
