"""Normalisers: definitions by bisection in fp64, gradients, masks, and what each must and must not see."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.models.normalisers import (
    LOG_LENGTH_SCALE,
    NORMALISERS,
    check_available,
    normalise,
    sensitivity,
)

NAMES = tuple(NORMALISERS)
SPARSE = ("sparsemax", "entmax15")
LENGTH = 9


def by_bisection(scores: list[float], name: str) -> list[float]:
    """sparsemax and 1.5-entmax of a row by definition: the threshold at which the weights sum to 1."""
    power, factor = (1, 1.0) if name == "sparsemax" else (2, 0.5)
    scaled = [factor * score for score in scores]

    def weights(threshold: float) -> list[float]:
        return [max(score - threshold, 0.0) ** power for score in scaled]

    low, high = max(scaled) - 1.0, max(scaled)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(weights(middle)) > 1 else (low, middle)
    return weights((low + high) / 2)


def written_out(scores: list[float], name: str) -> list[float]:
    """Every normaliser of one row, in plain Python."""
    count = len(scores)
    if name in SPARSE:
        return by_bisection(scores, name)
    if name == "sigmoid":
        return [1 / (1 + count * math.exp(-score)) for score in scores]
    factor = LOG_LENGTH_SCALE * math.log(count) if name == "log_length" else 1.0
    powers = [math.exp(factor * score) for score in scores]
    total = sum(powers) + (1.0 if name == "sink" else 0.0)
    return [power / total for power in powers]


@st.composite
def rows(draw: Any) -> tuple[Tensor, Tensor]:
    """Scores [3, L] with ties and distance among them, and a mask under which a row may see nothing."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.1, 1.0, 4.0]))
    scores = spread * torch.randn(3, LENGTH, dtype=torch.float64, generator=generator)
    scores = scores.round() if draw(st.booleans()) else scores
    mask = torch.rand(3, LENGTH, generator=generator) < draw(st.sampled_from([0.15, 0.6, 1.0]))
    return scores, mask


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(rows())
def test_weights_are_the_definition_on_what_is_visible(name: str, drawn: tuple[Tensor, Tensor]) -> None:
    scores, mask = drawn
    weights = normalise(scores, mask=mask, name=name)
    assert weights.dtype == torch.float64
    assert bool((weights >= 0).all())
    assert bool((weights[~mask] == 0).all())
    for row in range(3):
        seen = scores[row][mask[row]].tolist()
        if seen:
            expected = torch.tensor(written_out(seen, name), dtype=torch.float64)
            torch.testing.assert_close(weights[row][mask[row]], expected, rtol=1e-9, atol=1e-9)
    sums = weights.sum(-1)[mask.any(-1)]
    if NORMALISERS[name].sums_to_one:
        torch.testing.assert_close(sums, torch.ones_like(sums))
    elif name == "sink":
        assert bool((sums < 1).all())
    # What is hidden, or -inf, or not there at all, is the same thing.
    hidden = scores.masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(normalise(hidden, name=name), weights, rtol=1e-12, atol=1e-12)
    other = torch.where(mask, scores, 7.5)
    assert torch.equal(normalise(other, mask=mask, name=name), weights)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(rows(), st.permutations(range(LENGTH)), st.floats(-20, 20))
def test_order_permutations_and_shifts(
    name: str, drawn: tuple[Tensor, Tensor], order: list[int], shift: float
) -> None:
    scores, mask = drawn
    weights = normalise(scores, mask=mask, name=name)
    moved = normalise(scores[:, order], mask=mask[:, order], name=name)
    torch.testing.assert_close(moved, weights[:, order], rtol=1e-12, atol=1e-12)
    # A larger score never weighs less.
    higher = (scores[:, :, None] > scores[:, None, :]) & mask[:, :, None] & mask[:, None, :]
    gap = weights[:, :, None] - weights[:, None, :]
    assert bool((gap[higher] >= -1e-14).all())
    shifted = normalise(scores + shift, mask=mask, name=name)
    if NORMALISERS[name].sums_to_one:
        torch.testing.assert_close(shifted, weights, rtol=1e-8, atol=1e-8)
    else:
        # These see how large the scores are: more of everything weighs more.
        above = (shifted - weights)[mask] * math.copysign(1, shift)
        assert bool((above >= -1e-14).all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_temperature_divides_the_scores(name: str, temperature: float) -> None:
    scores = torch.randn(4, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = normalise(scores, name=name, temperature=temperature)
    torch.testing.assert_close(weights, normalise(scores / temperature, name=name))


def causal() -> Tensor:
    """[5, 5] of which the first row sees nothing."""
    return torch.ones(5, 5).tril(-1).bool()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_weights(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(2, 5, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    parameter = None
    if NORMALISERS[name].parameter is not None:
        parameter = torch.tensor([[[0.3]], [[0.7]]], dtype=torch.float64, requires_grad=True)
    inputs = (scores,) if parameter is None else (scores, parameter)

    def weights(scores: Tensor, parameter: Tensor | None = None) -> Tensor:
        return normalise(scores, mask=causal(), name=name, temperature=0.8, parameter=parameter)

    assert torch.autograd.gradcheck(weights, inputs)
    (gradient,) = torch.autograd.grad(weights(*inputs).square().sum(), scores)
    assert bool((gradient[:, ~causal()] == 0).all())
    assert bool(gradient[:, 3:].any())


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_see_nothing_are_zero_and_have_no_gradient(name: str) -> None:
    scores = torch.full((2, 4), -torch.inf)
    scores[1] = torch.tensor([1.0, -torch.inf, 2.0, 0.5])
    scores.requires_grad_()
    weights = normalise(scores, name=name)
    assert bool((weights[0] == 0).all())
    assert weights[1, 1] == 0
    (gradient,) = torch.autograd.grad((weights * torch.arange(4.0)).sum(), scores)
    assert bool(gradient.isfinite().all())
    assert bool((gradient[0] == 0).all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_numbers_are_computed_in_fp32_and_scores_may_be_large(name: str, dtype: torch.dtype) -> None:
    scores = (50 * torch.randn(6, 64, generator=torch.Generator().manual_seed(2))).to(dtype)
    weights = normalise(scores, name=name)
    assert weights.dtype == dtype
    exact = normalise(scores.double(), name=name)
    torch.testing.assert_close(weights.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_ones_drop_far_positions_and_agree_with_their_package_alone(name: str) -> None:
    import entmax

    scores = 2 * torch.randn(50, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    weights = normalise(scores, name=name)
    torch.testing.assert_close(weights, getattr(entmax, name)(scores, dim=-1))
    far = scores < scores.amax(-1, keepdim=True) - (1 if name == "sparsemax" else 2)
    assert bool(far.any())
    assert bool((weights[far] == 0).all())
    assert not bool((normalise(scores, name="softmax") == 0).any())
    # sparsemax keeps no more positions than 1.5-entmax does.
    kept = {one: int((normalise(scores, name=one) > 0).sum()) for one in SPARSE}
    assert kept["sparsemax"] < kept["entmax15"] < scores.numel()


def test_known_values() -> None:
    zeros = torch.zeros(1, 4, dtype=torch.float64)
    sums = {name: float(normalise(zeros, name=name).sum()) for name in NAMES}
    assert sums == pytest.approx({**dict.fromkeys(NAMES, 1.0), "sink": 4 / 5, "sigmoid": 4 / 5})
    scores = torch.tensor([[1.0, 0.5, -3.0]], dtype=torch.float64)
    assert normalise(scores, name="sparsemax").tolist() == [[0.75, 0.25, 0.0]]
    # Of two scores 0.75 apart in 1.5-entmax: (x/2 + 3/16)^2 + (x/2 - 3/16)^2 = 1.
    pair = normalise(torch.tensor([[0.75, 0.0]], dtype=torch.float64), name="entmax15")
    middle = math.sqrt(0.5 - (3 / 16) ** 2)
    assert pair.tolist() == [pytest.approx([(middle + 3 / 16) ** 2, (middle - 3 / 16) ** 2])]


def test_a_sink_of_minus_infinity_is_softmax_and_a_large_one_takes_all() -> None:
    scores = torch.randn(3, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    without = normalise(scores, name="sink", parameter=-math.inf)
    torch.testing.assert_close(without, normalise(scores, name="softmax"))
    assert float(normalise(scores, name="sink", parameter=80.0).sum()) < 1e-30
    # The sink is one more score that nothing is read from.
    beside = torch.cat([scores, torch.full((3, 1), 0.4, dtype=torch.float64)], dim=1)
    expected = normalise(beside, name="softmax")[:, :-1]
    torch.testing.assert_close(normalise(scores, name="sink", parameter=0.4), expected)


def test_log_length_multiplies_the_scores_and_is_softmax_at_its_own_length() -> None:
    scores = torch.randn(2, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(normalise(scores, name="log_length"), normalise(scores, name="softmax"))
    few = torch.arange(512) < 20
    scaled = normalise(scores, mask=few, name="log_length", parameter=0.43)
    expected = normalise(0.43 * math.log(20) * scores, mask=few, name="softmax")
    torch.testing.assert_close(scaled, expected)
    # Subtracted, as some have it, the logarithm would leave softmax as it is.
    plain = normalise(scores - 0.43 * math.log(20), mask=few, name="softmax")
    torch.testing.assert_close(plain, normalise(scores, mask=few, name="softmax"))
    assert not torch.allclose(scaled, plain, rtol=1e-2)
    alone = torch.arange(512) == 3
    assert float(normalise(scores, mask=alone, name="log_length")[0, 3]) == 1.0


def test_its_largest_weight_does_not_fade_with_length() -> None:
    """One score 5 above all others: softmax gives it ever less, log_length does not."""
    found: dict[str, list[float]] = {"softmax": [], "log_length": []}
    for length in (100, 1000, 10_000):
        scores = torch.full((1, length), -2.0, dtype=torch.float64)
        scores[0, -1] = 3.0
        found["softmax"].append(float(normalise(scores, name="softmax")[0, -1]))
        found["log_length"].append(float(normalise(scores, name="log_length", parameter=0.43)[0, -1]))
    assert found["softmax"][0] > found["softmax"][1] > found["softmax"][2]
    assert found["softmax"][2] < 0.02
    assert min(found["log_length"]) > 0.99


def test_nothing_in_nothing_out() -> None:
    for name in NAMES:
        assert normalise(torch.zeros(2, 0), name=name).shape == (2, 0)
        assert normalise(torch.zeros(0, 3), name=name).shape == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "sparsmax"}, "did you mean 'sparsemax'"),
        ({"name": "softmax", "temperature": 0.0}, "expected a finite number above 0"),
        ({"name": "softmax", "temperature": math.nan}, "expected a finite number above 0"),
        ({"name": "softmax", "parameter": 1.0}, "softmax has no parameter"),
        ({"name": "softmax", "mask": torch.ones(2, 3)}, "expected bool"),
        ({"name": "softmax", "mask": torch.ones(2, 4, dtype=torch.bool)}, "expected one that broadcasts"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(FullrankError, match=message):
        normalise(torch.zeros(2, 3), **arguments)


def test_scores_that_are_no_numbers_with_a_point_are_refused() -> None:
    with pytest.raises(FullrankError, match="expected floating-point numbers"):
        normalise(torch.zeros(2, 3, dtype=torch.int64), name="softmax")
    with pytest.raises(FullrankError, match="one row a query"):
        normalise(torch.zeros(()), name="softmax")


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "entmax", None)
    for name in SPARSE:
        with pytest.raises(FullrankError, match=r"pip install 'fullrank\[attention\]'"):
            normalise(torch.zeros(1, 2), name=name)
        with pytest.raises(FullrankError, match="pip install"):
            check_available(name)
    check_available("sink")
    assert float(normalise(torch.zeros(1, 2), name="softmax").sum()) == 1.0


@pytest.mark.parametrize("name", NAMES)
@given(rows(), st.sampled_from([0.25, 1.0, 1.7]), st.sampled_from([None, 0.6, -0.3]))
@settings(max_examples=30, deadline=None)
def test_the_sensitivity_is_the_norm_of_the_jacobian(
    name: str, made: tuple[Tensor, Tensor], temperature: float, value: float | None
) -> None:
    scores, mask = made
    parameter = None if NORMALISERS[name].parameter is None else value
    options: dict[str, Any] = {"name": name, "temperature": temperature, "parameter": parameter}

    def weights(row: Tensor, seen: Tensor) -> Tensor:
        return normalise(row, mask=seen, **options)

    found = sensitivity(normalise(scores, mask=mask, **options), mask, **options)
    for row, seen, norm in zip(scores, mask, found.tolist(), strict=True):
        table = torch.autograd.functional.jacobian(lambda one, seen=seen: weights(one, seen), row)
        assert norm == pytest.approx(float(torch.linalg.matrix_norm(table, 2)), rel=1e-7, abs=1e-9)
    if name == "softmax":
        assert bool((found <= 0.5 / temperature * (1 + 1e-12)).all())


def test_temperatures_and_parameters_may_differ_from_row_to_row() -> None:
    scores = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(scores, dtype=torch.bool)
    factors, heat = torch.tensor([0.4, 0.9], dtype=torch.float64), torch.tensor([0.5, 2.0])
    whole = normalise(scores, name="log_length", parameter=factors[:, None, None])
    found = sensitivity(
        whole, mask, name="log_length", parameter=factors[:, None, None], temperature=heat[:, None]
    )
    for head in range(2):
        one = sensitivity(
            whole[head], mask[head], name="log_length", parameter=float(factors[head]),
            temperature=float(heat[head]),
        )  # fmt: skip
        torch.testing.assert_close(found[head], one)
