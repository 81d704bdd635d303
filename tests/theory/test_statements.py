"""One property test, or more, for every numbered statement of docs/theory.md, under its number.

Where a statement is about rank, matrices are small and integer and ranks are counted in fractions, so that
the statement is tested and not a tolerance; what the package computes in floating point is held to the same
answer.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fullrank.theory import expressible, factorise, least_rank, shift_class_ranks

quick = settings(max_examples=20)

Exact = list[list[Fraction]]
seeds = st.integers(0, 2**31)


def exact(rows: list[list[int]]) -> Exact:
    return [[Fraction(entry) for entry in row] for row in rows]


def exact_rank(matrix: Exact) -> int:
    rows, rank = [list(row) for row in matrix], 0
    for column in range(len(rows[0])):
        pivot = next((i for i in range(rank, len(rows)) if rows[i][column] != 0), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for i in range(rank + 1, len(rows)):
            factor = rows[i][column] / rows[rank][column]
            rows[i] = [entry - factor * top for entry, top in zip(rows[i], rows[rank], strict=True)]
        rank += 1
    return rank


def exact_centre(matrix: Exact) -> Exact:
    return [[entry - sum(row) / len(row) for entry in row] for row in matrix]


def transpose(matrix: Exact) -> Exact:
    return [list(column) for column in zip(*matrix, strict=True)]


def in_column_space(vector: list[Fraction], matrix: Exact) -> bool:
    joined = [[*row, entry] for row, entry in zip(matrix, vector, strict=True)]
    return exact_rank(joined) == exact_rank(matrix)


def shifted(matrix: Exact, shift: list[Fraction]) -> Exact:
    return [[entry + amount for entry in row] for row, amount in zip(matrix, shift, strict=True)]


def tensor(matrix: Exact) -> Tensor:
    return torch.tensor([[float(entry) for entry in row] for row in matrix], dtype=torch.float64)


@st.composite
def low_rank_logits(draw: st.DrawFn) -> Exact:
    """Integer logits of every rank from zero up, as a product of thin integer matrices."""
    N, V, D = draw(st.integers(1, 6)), draw(st.integers(2, 6)), draw(st.integers(0, 5))
    entry = st.integers(-3, 3)
    H = draw(st.lists(st.lists(entry, min_size=D, max_size=D), min_size=N, max_size=N))
    W = draw(st.lists(st.lists(entry, min_size=D, max_size=D), min_size=V, max_size=V))
    return exact([[sum(h * w for h, w in zip(row, token, strict=True)) for token in W] for row in H])


@st.composite
def logits_and_means(draw: st.DrawFn) -> tuple[Exact, list[Fraction]]:
    """Logits and row means for a member of their class: in col(B) half of the time, anything otherwise."""
    A = draw(low_rank_logits())
    B = exact_centre(A)
    if draw(st.booleans()):
        mix = draw(st.lists(st.integers(-3, 3), min_size=len(B[0]), max_size=len(B[0])))
        return A, [sum((m * entry for m, entry in zip(mix, row, strict=True)), Fraction(0)) for row in B]
    means = draw(st.lists(st.integers(-5, 5), min_size=len(B), max_size=len(B)))
    return A, [Fraction(mean) for mean in means]


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sigsoftmax_logits(scores: Tensor) -> Tensor:
    return scores + torch.nn.functional.logsigmoid(scores)


@quick
@given(seeds, st.integers(1, 6), st.integers(2, 8))
def test_statement_1_the_class_is_what_softmax_cannot_tell_apart(seed: int, N: int, V: int) -> None:
    logits = 3 * gaussian(seed, N, V)
    log_probs = torch.log_softmax(logits, dim=1)
    member = log_probs + 10 * gaussian(seed + 1, N, 1)
    torch.testing.assert_close(member.softmax(dim=1), log_probs.exp())
    # The converse, with its sign: A' = A + lse(A').
    torch.testing.assert_close(logits, log_probs + logits.logsumexp(dim=1, keepdim=True))
    torch.testing.assert_close((logits - log_probs).std(dim=1), torch.zeros(N, dtype=torch.float64))
    stranger = member.clone()
    stranger[0, 0] += 0.1
    assert not torch.allclose(stranger.softmax(dim=1), log_probs.exp(), rtol=1e-6, atol=0)


@quick
@given(low_rank_logits(), st.data())
def test_statement_2_ranks_in_the_class_differ_by_at_most_one(A: Exact, data: st.DataObject) -> None:
    shifts = st.lists(st.integers(-5, 5).map(Fraction), min_size=len(A), max_size=len(A))
    first, second = shifted(A, data.draw(shifts)), shifted(A, data.draw(shifts))
    assert abs(exact_rank(first) - exact_rank(second)) <= 1


@quick
@given(logits_and_means())
def test_statement_3_centring_gives_the_rank_of_every_member(drawn: tuple[Exact, list[Fraction]]) -> None:
    A, means = drawn
    B = exact_centre(A)
    member = shifted(B, means)
    least = exact_rank(B)
    assert exact_rank(member) == least + (not in_column_space(means, B))
    assert least_rank(tensor(member)).rank == least
    assert least_rank(torch.log_softmax(tensor(member), dim=1)).rank == least


def test_statement_3_both_cases_of_the_condition_occur() -> None:
    B = exact_centre(exact([[1, 0, 0], [2, 0, 0]]))
    inside, outside = [Fraction(3), Fraction(6)], [Fraction(3), Fraction(5)]
    assert exact_rank(B) == 1
    assert exact_rank(shifted(B, inside)) == 1
    assert exact_rank(shifted(B, outside)) == 2


@quick
@given(logits_and_means())
def test_statement_4_which_ranks_occur(drawn: tuple[Exact, list[Fraction]]) -> None:
    A, means = drawn
    B = exact_centre(A)
    least = exact_rank(B)
    ranks = shift_class_ranks(tensor(shifted(B, means)))
    assert ranks.least == least
    assert ranks.greatest == (least if least == len(B) else least + 1)
    assert ranks.own == exact_rank(shifted(B, means))
    # The greater rank is taken: the unit vectors span everything, so one of them is outside a proper col(B).
    units = [[Fraction(int(i == j)) for j in range(len(B))] for i in range(len(B))]
    assert max(exact_rank(shifted(B, unit)) for unit in units) == ranks.greatest


@quick
@given(low_rank_logits())
def test_statement_5_a_width_expresses_what_its_rank_allows(A: Exact) -> None:
    least = exact_rank(exact_centre(A))
    log_probs = torch.log_softmax(tensor(A), dim=1)
    width = max(least, 1)
    assert expressible(log_probs, width)
    found = factorise(log_probs, width)
    assert found.exact
    torch.testing.assert_close(
        torch.log_softmax(found.H @ found.W.T, dim=1), log_probs, rtol=1e-10, atol=1e-10
    )
    if least > 1:
        assert not expressible(log_probs, least - 1)


@quick
@given(seeds, st.integers(1, 12), st.integers(2, 12), st.integers(1, 4))
def test_statement_5_no_head_exceeds_its_width(seed: int, N: int, V: int, D: int) -> None:
    logits = gaussian(seed, N, D) @ gaussian(seed + 1, V, D).T
    assert least_rank(torch.log_softmax(logits, dim=1)).rank <= D


# Several fits an example.
@settings(max_examples=2)
@given(seeds, st.integers(2, 4))
def test_statement_6_the_floor_is_zero_exactly_from_the_least_rank_on(seed: int, rank: int) -> None:
    log_probs = torch.log_softmax(1.5 * gaussian(seed, 12, rank) @ gaussian(seed + 1, 8, rank).T, dim=1)
    assume(least_rank(log_probs).rank == rank)
    losses = [factorise(log_probs, width, hops=2).loss for width in range(1, rank + 1)]
    assert all(before > after for before, after in itertools.pairwise(losses))
    assert losses[-1] < 1e-13
    # Attained, not approached: the floor below the rank stands well clear of what rounding explains.
    assert losses[-2] > 1e-7


# A fit an example.
@settings(max_examples=3)
@given(st.integers(3, 10))
def test_statement_6_zeros_need_no_width(V: int) -> None:
    angle = 2 * math.pi * torch.arange(V, dtype=torch.float64) / V
    W = torch.stack([angle.cos(), angle.sin()], dim=1)
    rival = math.cos(2 * math.pi / V)
    for t in (1.0, 3.0, 9.0):
        loss = -torch.log_softmax(t * W @ W.T, dim=1).diagonal().mean()
        assert 0 < loss <= (V - 1) * math.exp(-t * (1 - rival))
    found = factorise(torch.eye(V, dtype=torch.float64).log(), 2, hops=0)
    assert not found.exact
    assert 0 <= found.loss < 1e-3


@st.composite
def logits_for_a_bias(draw: st.DrawFn) -> Exact:
    """Low-rank logits, half of the time with a bias added, so that ones are often in col(B)."""
    A = draw(low_rank_logits())
    if draw(st.booleans()):
        bias = draw(st.lists(st.integers(-5, 5), min_size=len(A[0]), max_size=len(A[0])))
        A = [[entry + amount for entry, amount in zip(row, bias, strict=True)] for row in A]
    return A


@quick
@given(logits_for_a_bias(), st.data())
def test_statement_7_a_bias_saves_one_dimension_or_none(A: Exact, data: st.DataObject) -> None:
    B = exact_centre(A)
    ones = [Fraction(1)] * len(B)
    least = exact_rank(B) - in_column_space(ones, B)
    best = exact_rank(transpose(exact_centre(transpose(B))))
    assert best == least
    # No bias does better than the mean context.
    other = data.draw(st.lists(st.integers(-5, 5), min_size=len(B[0]), max_size=len(B[0])))
    rest = [[entry - amount for entry, amount in zip(row, other, strict=True)] for row in A]
    assert exact_rank(exact_centre(rest)) >= least
    log_probs = torch.log_softmax(tensor(A), dim=1)
    assert least_rank(log_probs, bias=True).rank == least
    assert expressible(log_probs, max(least, 1), bias=True)
    if least > 1:
        assert not expressible(log_probs, least - 1, bias=True)


@quick
@given(seeds, st.integers(2, 6))
def test_statement_7_a_head_with_a_bias_has_one_dimension_more(seed: int, D: int) -> None:
    N, V = 20, 15
    logits = gaussian(seed, N, D) @ gaussian(seed + 1, V, D).T + gaussian(seed + 2, V)
    log_probs = torch.log_softmax(logits, dim=1)
    assert least_rank(log_probs, bias=True).rank == D
    assert least_rank(log_probs).rank == D + 1
    assert shift_class_ranks(log_probs).own == D + 2


@quick
@given(seeds, st.integers(3, 8))
def test_statement_8_normalisation_ceilings(seed: int, D: int) -> None:
    N, V = 25, 20
    states, W, gain = gaussian(seed, N, D), gaussian(seed + 1, V, D), gaussian(seed + 2, D).abs() + 0.5
    shift, bias = gaussian(seed + 3, D), gaussian(seed + 4, V)
    plain = torch.nn.functional.layer_norm(states, [D], gain)
    moved = torch.nn.functional.layer_norm(states, [D], gain, shift)
    assert least_rank(plain @ W.T).rank == D - 1
    assert least_rank(plain @ W.T + bias).rank == D
    assert least_rank(moved @ W.T).rank == D
    assert least_rank(moved @ W.T + bias).rank == D
    assert least_rank(torch.nn.functional.rms_norm(states, [D], gain) @ W.T).rank == D


@quick
@given(seeds, st.integers(1, 6))
def test_statement_8_normalisation_costs_at_most_one_dimension(seed: int, D: int) -> None:
    H, W = gaussian(seed, 10, D), gaussian(seed + 1, 9, D)
    radius = 1.01 * H.norm(dim=1).max()
    rest = (radius.square() - H.square().sum(dim=1, keepdim=True)).sqrt()
    scale = math.sqrt(D + 1) / radius
    states = scale * torch.cat([H, rest], dim=1)
    wide = torch.cat([W, torch.zeros(9, 1, dtype=torch.float64)], dim=1) / scale
    normalised = torch.nn.functional.rms_norm(states, [D + 1], eps=0.0)
    torch.testing.assert_close(normalised @ wide.T, H @ W.T)


@quick
@given(seeds, st.integers(1, 4), st.integers(2, 6))
def test_statement_9_mixture_of_contexts_stays_within_the_width(seed: int, D: int, K: int) -> None:
    N, V = 20, 16
    prior = gaussian(seed, N, K).softmax(dim=1)
    contexts = gaussian(seed + 1, N, K, D).tanh()
    logits = torch.einsum("nk,nkd,vd->nv", prior, contexts, gaussian(seed + 2, V, D))
    assert least_rank(torch.log_softmax(logits, dim=1)).rank == D


def test_statement_10_coefficients_of_tanh_alternate_and_never_vanish() -> None:
    coefficients = [Fraction(1)]
    for k in range(1, 40):
        products = sum(coefficients[i] * coefficients[k - 1 - i] for i in range(k))
        coefficients.append(-products / (2 * k + 1))
    assert all((c > 0) == (k % 2 == 0) and c != 0 for k, c in enumerate(coefficients))
    series = sum(float(c) * 0.3 ** (2 * k + 1) for k, c in enumerate(coefficients))
    assert math.isclose(series, math.tanh(0.3), rel_tol=1e-14)


def log_cosh(values: Tensor) -> Tensor:
    return torch.logaddexp(values, -values) - math.log(2.0)


# Far apart, because the functions are independent however near they are, but only far ones in 53 bits.
slopes = st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0, 8.0]), min_size=1, max_size=6)


@quick
@given(slopes)
def test_statement_10_log_cosh_lemma(slope: list[float]) -> None:
    points = torch.linspace(0.0, 3.0, 12, dtype=torch.float64)
    matrix = log_cosh(torch.tensor(slope, dtype=torch.float64)[:, None] * points)
    # Repeated slopes are repeated rows: distinctness is needed, and is all that is needed.
    assert least_rank(matrix).rank == len(set(slope))


@quick
@given(slopes)
def test_statement_11_mixture_of_two_softmaxes_of_width_one(slope: list[float]) -> None:
    points = torch.linspace(0.0, 3.0, 12, dtype=torch.float64)
    scores = torch.tensor(slope, dtype=torch.float64)[:, None] * points
    components = torch.stack([scores, -scores], dim=1)
    log_prior = torch.log_softmax(components.logsumexp(dim=2), dim=1)
    mixture = (log_prior[:, :, None] + torch.log_softmax(components, dim=2)).logsumexp(dim=1)
    torch.testing.assert_close(mixture.exp().sum(dim=1), torch.ones(len(slope), dtype=torch.float64))
    assert least_rank(mixture).rank == len(set(slope))


@quick
@given(seeds, st.integers(2, 4), st.integers(2, 3))
def test_statement_11_random_mixtures_reach_the_ceiling(seed: int, K: int, D: int) -> None:
    N, V = 40, 30
    components = torch.einsum("nkd,vd->nkv", 3 * gaussian(seed, N, K, D), gaussian(seed + 1, V, D))
    log_prior = torch.log_softmax(gaussian(seed + 2, N, K), dim=1)
    mixture = (log_prior[:, :, None] + torch.log_softmax(components, dim=2)).logsumexp(dim=1)
    assert least_rank(mixture).rank == V - 1 > K * (D + 1)


@quick
@given(slopes)
def test_statement_12_sigsoftmax_of_width_one(slope: list[float]) -> None:
    points = torch.linspace(-3.0, 3.0, 13, dtype=torch.float64)
    scores = torch.tensor(slope, dtype=torch.float64)[:, None] * points
    assert least_rank(sigsoftmax_logits(scores)).rank == len(set(slope))
    torch.testing.assert_close(
        sigsoftmax_logits(scores), 1.5 * scores - log_cosh(scores / 2) - math.log(2.0), rtol=1e-12, atol=1e-12
    )


@quick
@given(seeds, st.integers(2, 4))
def test_statement_12_random_sigsoftmax_reaches_the_ceiling(seed: int, D: int) -> None:
    N, V = 40, 30
    scores = 4 * gaussian(seed, N, D) @ gaussian(seed + 1, V, D).T
    assert least_rank(scores).rank == D
    assert least_rank(sigsoftmax_logits(scores)).rank == V - 1


@quick
@given(st.floats(-3, 3), st.floats(-3, 3))
def test_statement_13_odds_depend_on_the_shift(first: float, second: float) -> None:
    assume(abs(first - second) > 0.01)
    scores = torch.tensor([first, second], dtype=torch.float64)
    odds = [float(sigsoftmax_logits(scores + shift).diff().abs()) for shift in (-40.0, -2.0, 0.0, 2.0, 40.0)]
    assert all(before > after for before, after in itertools.pairwise(odds))
    assert math.isclose(odds[0], 2 * abs(first - second), rel_tol=1e-9)
    assert math.isclose(odds[-1], abs(first - second), rel_tol=1e-9)


@quick
@given(seeds, st.floats(-5, 25))
def test_statement_13_a_large_shift_gives_softmax(seed: int, shift: float) -> None:
    scores = 3 * gaussian(seed, 12)
    bound = math.exp(-(float(scores.min()) + shift))
    near = torch.log_softmax(sigsoftmax_logits(scores + shift), dim=0)
    error = float((near - torch.log_softmax(scores, dim=0)).abs().max())
    assert error <= bound + 1e-13


@quick
@given(st.floats(-20, 20))
def test_statement_13_without_a_shift_softmax_is_not_contained(context: float) -> None:
    assume(abs(context) > 1e-3)
    scores = context * torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    plain, bent = torch.log_softmax(scores, dim=0), torch.log_softmax(sigsoftmax_logits(scores), dim=0)
    assert math.isclose(float(plain[0] + plain[2]), float(2 * plain[1]), rel_tol=1e-12)
    curvature = float(2 * bent[1] - bent[0] - bent[2])
    assert math.isclose(curvature, 2 * math.log(math.cosh(context / 2)), rel_tol=1e-6)
    assert curvature > 0


@quick
@given(
    seeds,
    st.integers(2, 20),
    st.integers(2, 20),
    st.integers(0, 3),
    st.floats(0, 300),
    st.sampled_from([8, 11]),
)
def test_statement_14_no_rank_is_made_of_noise(
    seed: int, N: int, V: int, D: int, offset: float, bits: int
) -> None:
    A = gaussian(seed, N, D) @ gaussian(seed + 1, V, D).T + offset * gaussian(seed + 2, N, 1)
    dtype = {8: torch.bfloat16, 11: torch.float16}[bits]
    rounded = A.to(dtype).double()
    noise = float(torch.linalg.matrix_norm(rounded - A, ord=2))
    # Below 2^-14 the steps of fp16 are all of one size, 2^-24.
    assert noise <= 2.0**-bits * float(A.norm()) + 2.0**-25 * math.sqrt(N * V)
    B = A - A.mean(dim=1, keepdim=True)
    values = torch.linalg.svdvals(rounded - rounded.mean(dim=1, keepdim=True))
    least = least_rank(A).rank
    above = int((values > noise * (1 + 1e-9)).sum())
    assert above <= least
    if least and float(torch.linalg.svdvals(B)[least - 1]) > 2.001 * noise:
        assert above == least


@quick
@given(low_rank_logits(), st.data())
def test_statement_15_scaling_keeps_the_least_rank(A: Exact, data: st.DataObject) -> None:
    factor = st.integers(1, 9).map(Fraction)
    S = data.draw(st.lists(factor, min_size=len(A), max_size=len(A)))
    T = data.draw(st.lists(factor, min_size=len(A[0]), max_size=len(A[0])))
    scaled = [[s * entry * t for entry, t in zip(row, T, strict=True)] for s, row in zip(S, A, strict=True)]
    square = sum(t * t for t in T)
    off = [
        [
            entry - sum(x * y for x, y in zip(row, T, strict=True)) / square * t
            for entry, t in zip(row, T, strict=True)
        ]
        for row in scaled
    ]
    assert exact_rank(off) == exact_rank(exact_centre(A))


@quick
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=6, unique=True))
def test_correction_the_rank_of_probabilities_is_not_bounded(slope: list[int]) -> None:
    # 2^(a x) in place of e^(a x), so that the count is exact; normalising scales rows and keeps the rank.
    powers = [[Fraction(2) ** (a * x) for x in range(len(slope))] for a in slope]
    assert exact_rank(powers) == len(slope)
    if len(slope) > 1:
        logits = exact([[a * x for x in range(len(slope))] for a in slope])
        assert exact_rank(exact_centre(logits)) <= 1
