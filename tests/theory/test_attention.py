"""Every statement of docs/attention_theory.md, on rows that hypothesis makes up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.theory.attention import (
    Sets,
    difference_quotient,
    entropy,
    jacobian_frobenius,
    jacobian_norm,
    random_ranks,
    softmax_range,
    top_ranks,
)

numbers = st.floats(-30, 30, allow_nan=False, width=32)
rows = st.lists(numbers, min_size=1, max_size=24).map(
    lambda scores: torch.tensor(scores, dtype=torch.float64)
)
temperatures = st.floats(0.1, 5.0)


def softmax(scores: Tensor, temperature: float = 1.0) -> Tensor:
    return torch.softmax(scores / temperature, -1)


def jacobian(weights: Tensor, temperature: float = 1.0) -> Tensor:
    return (torch.diag(weights) - torch.outer(weights, weights)) / temperature


# Spread


@given(rows, st.floats(1e-3, 10.0))
@settings(max_examples=20)
def test_the_entropy_is_that_of_the_shares(scores: Tensor, factor: float) -> None:
    weights = softmax(scores)
    assert float(entropy(factor * weights)) == pytest.approx(float(entropy(weights)), abs=1e-9)
    assert 1 - 1e-9 <= float(entropy(weights).exp()) <= len(scores) * (1 + 1e-9)
    assert float(entropy(torch.eye(5)[2])) == 0
    assert float(entropy(torch.tensor([0.5, 0.0, 0.5])).exp()) == pytest.approx(2)
    assert math.isnan(float(entropy(torch.zeros(3))))


# The envelope


@given(rows, temperatures)
@settings(max_examples=20)
def test_every_weight_lies_in_the_envelope_of_the_range(scores: Tensor, temperature: float) -> None:
    weights, count = softmax(scores, temperature), len(scores)
    width = float(scores.max() - scores.min()) / temperature
    assert float(weights.max()) * count <= math.exp(min(width, 700)) * (1 + 1e-9)
    assert float(weights.min()) * count >= math.exp(-width) * (1 - 1e-9)
    # The sharp ends lie within, and hold too.
    low, high = softmax_range(scores.max(), scores.min(), torch.tensor(count), temperature)
    assert float(high) * count <= math.exp(min(width, 700)) * (1 + 1e-9)
    assert float(low) * count >= math.exp(-width) * (1 - 1e-9)
    assert float(low) * (1 - 1e-9) <= float(weights.min())
    assert float(weights.max()) <= float(high) * (1 + 1e-9)


@given(st.integers(2, 30), st.floats(0, 20), st.booleans())
@settings(max_examples=20)
def test_the_sharp_ends_are_reached(count: int, width: float, lowest: bool) -> None:
    scores = torch.full((count,), width if lowest else 0.0, dtype=torch.float64)
    scores[0] = 0.0 if lowest else width
    ends = softmax_range(torch.tensor(width), torch.tensor(0.0), torch.tensor(count))
    weights = softmax(scores)
    assert float(ends[0 if lowest else 1]) == pytest.approx(float(weights[0]), rel=1e-6)


@given(st.integers(0, 2**31), st.integers(1, 8), st.integers(1, 20), temperatures)
@settings(max_examples=20)
def test_the_range_is_at_most_twice_the_norms(seed: int, width: int, count: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(width, generator=generator, dtype=torch.float64)
    keys = torch.randn(count, width, generator=generator, dtype=torch.float64)
    scores = keys @ query
    norms = float(query.norm() * keys.norm(dim=-1).max())
    spread = float(scores.max() - scores.min())
    assert spread <= 2 * norms * (1 + 1e-12)
    # And so the effective number is at least n exp(-2 D / T).
    effective = float(entropy(softmax(scores, temperature)).exp())
    assert effective >= count * math.exp(-spread / temperature) * (1 - 1e-9)


# Sensitivity


@given(rows, temperatures)
@settings(max_examples=20)
def test_the_norm_is_the_largest_eigenvalue(scores: Tensor, temperature: float) -> None:
    weights = softmax(scores, temperature)
    exact = float(torch.linalg.eigvalsh(jacobian(weights, temperature))[-1])
    assert float(jacobian_norm(weights, temperature)) == pytest.approx(exact, abs=1e-13 / temperature)


@given(rows, st.floats(0.0, 1.0))
@settings(max_examples=20)
def test_the_norm_of_weights_beside_a_sink(scores: Tensor, left: float) -> None:
    weights = left * softmax(scores)
    exact = float(torch.linalg.eigvalsh(jacobian(weights))[-1])
    assert float(jacobian_norm(weights)) == pytest.approx(exact, abs=1e-13)


@given(rows, temperatures)
@settings(max_examples=20)
def test_the_norm_is_at_most_half_over_the_temperature(scores: Tensor, temperature: float) -> None:
    assert float(jacobian_norm(softmax(scores, temperature), temperature)) <= 0.5 / temperature + 1e-12


@pytest.mark.parametrize("temperature", [0.05, 1.0, 3.0])
@pytest.mark.parametrize("others", [0, 1, 40])
def test_a_two_way_tie_has_the_largest_norm(temperature: float, others: int) -> None:
    weights = torch.zeros(2 + others, dtype=torch.float64)
    weights[:2] = 0.5
    assert float(jacobian_norm(weights, temperature)) == pytest.approx(0.5 / temperature, rel=1e-12)
    # The published 1 / (4 T) is the largest entry of the same matrix.
    assert float(jacobian(weights, temperature).abs().max()) == pytest.approx(0.25 / temperature)


def test_norms_of_uniform_and_of_one_hot_weights() -> None:
    for count in (1, 2, 500):
        uniform = torch.full((count,), 1 / count, dtype=torch.float64)
        assert float(jacobian_norm(uniform)) == pytest.approx(1 / count if count > 1 else 0, abs=1e-15)
    assert float(jacobian_norm(torch.eye(17)[0])) == pytest.approx(0, abs=1e-15)


@given(rows, temperatures, st.integers(0, 2**31), st.floats(1e-5, 2.0))
@settings(max_examples=20)
def test_the_estimator_never_exceeds_the_bound(
    scores: Tensor, temperature: float, seed: int, step: float
) -> None:
    draw = torch.randn(len(scores), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    direction = draw / draw.norm()
    found = float(difference_quotient(scores, direction, temperature=temperature, step=step))
    # Two points of the simplex are at most sqrt(2) apart, so the second bound is over the step.
    bound = min(0.5 / temperature, math.sqrt(2) / step)
    assert found <= bound * (1 + 1e-6) + 1e-9 / step


def test_the_published_bound_fails_along_the_tie() -> None:
    direction = torch.tensor([1.0, -1.0], dtype=torch.float64) / math.sqrt(2)
    found = float(difference_quotient(torch.zeros(2), direction, temperature=1.0, step=1e-3))
    assert found == pytest.approx(0.5, rel=1e-5)
    assert found > 0.25


def test_the_estimator_sees_the_frobenius_norm_over_the_root_of_the_length() -> None:
    """Its mean square over directions is |J|_F^2 / n: far below the spectral norm of a long row."""
    torch.manual_seed(0)
    scores = torch.randn(400, dtype=torch.float64)
    weights = softmax(scores)
    draws = torch.randn(4000, 400, dtype=torch.float64)
    directions = draws / draws.norm(dim=-1, keepdim=True)
    found = difference_quotient(scores.expand(4000, 400), directions, step=1e-4)
    exact = float(jacobian_frobenius(weights)) / math.sqrt(400)
    assert float(jacobian_frobenius(weights)) == pytest.approx(float(jacobian(weights).norm()), rel=1e-12)
    assert float(found.square().mean().sqrt()) == pytest.approx(exact, rel=0.02)
    assert exact < float(jacobian_norm(weights)) / 2


def test_hidden_scores_stay_hidden() -> None:
    scores = torch.tensor([0.3, -torch.inf, 1.0])
    direction = torch.tensor([0.6, 0.0, 0.8])
    seen = difference_quotient(scores[[0, 2]], direction[[0, 2]])
    assert float(difference_quotient(scores, direction)) == pytest.approx(float(seen), rel=1e-9)


# Sets


def drawn(seed: int, count: int, width: int, sharp: float) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [3, n], values [n, width] and what is visible; the last positions of each row are hidden."""
    generator = torch.Generator().manual_seed(seed)
    visible = torch.ones(3, count, dtype=torch.bool)
    for row, hidden in enumerate((0, 1, 2)):
        visible[row, count - hidden :] = False
    scores = sharp * torch.randn(3, count, generator=generator, dtype=torch.float64)
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
    values = torch.randn(count, width, generator=generator, dtype=torch.float64)
    return weights, values, visible


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Weights, values and visible positions, and a set of the first `size` of the ranks."""

    weights: Tensor
    values: Tensor
    visible: Tensor
    ranks: Tensor
    size: int
    top: bool

    @property
    def sets(self) -> Sets:
        return Sets(self.weights, self.values, self.visible)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    seed, top = draw(st.integers(0, 2**31)), draw(st.booleans())
    sharp = draw(st.sampled_from([0.0, 0.5, 3.0, 12.0]))
    weights, values, visible = drawn(seed, draw(st.integers(6, 20)), draw(st.integers(1, 6)), sharp)
    ranks = top_ranks(weights, visible) if top else random_ranks(visible, torch.Generator().manual_seed(seed))
    size = draw(st.integers(1, 3))
    return Case(weights=weights, values=values, visible=visible, ranks=ranks, size=size, top=top)


def by_hand(weights: Tensor, values: Tensor, seen: Tensor, members: list[int]) -> dict[str, float]:
    """The definitions, written out for one row."""
    points = weights[:, None] * values
    total = points[members].sum(0)
    lengths = (total - points).norm(dim=-1)
    outside = [place for place in range(len(weights)) if seen[place] and place not in members]
    inner = [float(lengths[place]) for place in members]
    outer = [float(lengths[place]) for place in outside]
    recall = sum(one < min(outer) for one in inner) / len(members)
    precision = len(members) / (len(members) + sum(one <= max(inner) for one in outer))
    mass = float(weights[members].sum())
    first = max(float((values[i] - values[j]).norm()) for i in members for j in outside)
    second = max(float(values[i].norm()) for i in members)
    rest = float(weights[outside].sum())
    gaps = sum(abs(mass - float(weights[j])) for j in outside)
    return {
        "recall": recall,
        "precision": precision,
        "f": 2 * recall * precision / (recall + precision),
        "distance": sum(outer),
        "mass": mass,
        "bound": first * rest + second * gaps,
    }


@given(cases())
@settings(max_examples=20)
def test_sets_are_what_the_definitions_say(case: Case) -> None:
    separation = case.sets.separation(case.ranks, [case.size, 1])
    bound = case.sets.bound(case.ranks, [case.size, 1])
    for row in range(3):
        weights, visible = case.weights[row], case.visible[row]
        members = case.ranks[row].argsort()[: case.size].tolist()
        assert bool(visible[members].all())
        expected = by_hand(weights, case.values, visible, members)
        # Distances that are equal up to rounding may fall on either side: leave such draws out.
        points = weights[:, None] * case.values
        lengths = (points[members].sum(0) - points).norm(dim=-1)[visible].sort().values
        assume(bool((lengths.diff() > 1e-9).all()))
        for name in ("recall", "precision", "f", "distance", "mass"):
            assert float(getattr(separation, name)[row, 0]) == pytest.approx(expected[name], abs=1e-7), name
        assert float(bound[row, 0]) == pytest.approx(expected["bound"], abs=1e-6)


@given(cases())
@settings(max_examples=20)
def test_the_distance_never_exceeds_its_bound(case: Case) -> None:
    separation, bound = (
        case.sets.separation(case.ranks, [case.size]),
        case.sets.bound(case.ranks, [case.size]),
    )
    assert bool((separation.distance <= bound * (1 + 1e-9) + 1e-12).all())
    if case.top:
        # For largest weights the absolute values can be dropped.
        longest = [case.values[ranks.argsort()[: case.size]].norm(dim=-1).max() for ranks in case.ranks]
        mass = separation.mass[:, 0]
        second = torch.stack(longest) * ((case.visible.sum(-1) - case.size) * mass - (1 - mass))
        assert bool((bound[:, 0] - second >= -1e-7).all())


@given(cases())
@settings(max_examples=20)
def test_recall_and_precision_are_one_together(case: Case) -> None:
    separation = case.sets.separation(case.ranks, [case.size])
    assert torch.equal(separation.recall == 1, separation.precision == 1)
    assert bool(((separation.f >= 0) & (separation.f <= 1)).all())
    assert bool((separation.precision > 0).all())


@given(cases())
@settings(max_examples=20)
def test_a_set_of_one_is_always_apart(case: Case) -> None:
    """So top and random agree at N = 1, and only larger sets say anything."""
    assume(bool((case.weights[case.visible] > 1e-4).all()))
    assert bool((case.sets.separation(case.ranks, [1]).f == 1).all())


@given(st.integers(0, 2**31), st.floats(0.1, 10.0))
@settings(max_examples=15)
def test_turning_and_stretching_the_values_changes_no_separation(seed: int, factor: float) -> None:
    weights, values, visible = drawn(seed, 12, 4, 2.0)
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q
    ranks = top_ranks(weights, visible)
    plain = Sets(weights, values, visible).separation(ranks, [2, 5])
    turned = Sets(weights, factor * values @ turn, visible).separation(ranks, [2, 5])
    torch.testing.assert_close(turned.recall, plain.recall)
    torch.testing.assert_close(turned.precision, plain.precision)
    torch.testing.assert_close(turned.distance, factor * plain.distance)


@pytest.mark.parametrize("size", [2, 5, 16])
def test_no_share_is_forced_on_a_head(size: int) -> None:
    """The separable share of a top set can be 1 and can be 0, at any size: 80% is a figure, not a law."""
    count = 4 * size
    weights = torch.full((1, count), 0.25 / (count - size), dtype=torch.float64)
    weights[0, :size] = 0.75 / size
    visible = torch.ones(1, count, dtype=torch.bool)
    ranks = top_ranks(weights, visible)
    apart = Sets(weights, torch.eye(count), visible).separation(ranks, [size])
    assert float(apart.recall) == 1.0
    # Values that cancel within the set: its sum is where the unimportant tokens are.
    opposed = torch.zeros(count, 2, dtype=torch.float64)
    angles = 2 * math.pi * torch.arange(size, dtype=torch.float64) / size
    opposed[:size] = torch.stack([angles.cos(), angles.sin()], dim=-1)
    assert float(Sets(weights, opposed, visible).separation(ranks, [size]).recall) == 0.0


def test_ranks() -> None:
    visible = torch.tensor([[True, True, False, True]])
    assert top_ranks(torch.tensor([[0.1, 0.6, 0.9, 0.3]]), visible).tolist() == [[2, 0, 3, 1]]
    drawn = torch.cat([random_ranks(visible, torch.Generator().manual_seed(seed)) for seed in range(400)])
    assert bool((drawn[:, 2] == 3).all())
    # Every visible position comes first about as often: 133 of 400, standard deviation 9.4.
    assert all(90 < int((drawn[:, place] == 0).sum()) < 180 for place in (0, 1, 3))


# Refusals


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda sets, ranks: sets.separation(ranks, [6]), r"sets of \[6\].*sees 6 positions"),
        (lambda sets, ranks: sets.bound(ranks, [0]), r"sets of \[0\]"),
        (lambda sets, ranks: Sets(torch.ones(3, 8), torch.ones(5, 2), torch.ones(3, 8)), "do not fit"),
        (lambda sets, ranks: jacobian_norm(torch.tensor([0.9, 0.9])), "sum to more than 1"),
        (lambda sets, ranks: jacobian_norm(torch.tensor([-0.1, 0.9])), "negative"),
        (lambda sets, ranks: jacobian_norm(torch.ones(1), 0.0), "temperature"),
        (lambda sets, ranks: jacobian_frobenius(torch.ones(1), math.nan), "temperature"),
        (lambda sets, ranks: difference_quotient(*torch.zeros(2, 2), temperature=-1.0), "temperature"),
        (lambda sets, ranks: softmax_range(*torch.ones(3), math.inf), "temperature"),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[Sets, Tensor], object], words: str) -> None:
    weights, values, visible = drawn(0, 8, 2, 1.0)
    with pytest.raises(FullrankError, match=words):
        call(Sets(weights, values, visible), top_ranks(weights, visible))
