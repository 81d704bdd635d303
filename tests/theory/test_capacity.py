"""Polytopes whose faces are known: what `top_m_capacity` counts must be their faces."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import ConvexHull

from fullrank.errors import FullrankError
from fullrank.theory import capacity
from fullrank.theory.capacity import is_free, top_m_capacity
from fullrank.theory.capacity_search import WitnessSearch, level_states
from fullrank.theory.linear_program import standardise


def moment_curve(V: int, D: int) -> np.ndarray:
    """Points on the trigonometric moment curve: a cyclic polytope, whose faces Gale's condition lists."""
    angle = 2 * np.pi * np.arange(V)[:, None] / V
    frequency = np.arange(1, D // 2 + 1)
    return np.concatenate([np.cos(angle * frequency), np.sin(angle * frequency)], axis=1)


def is_cyclic_face(tokens: np.ndarray, V: int, D: int) -> bool:
    """Gale's evenness: a facet is D/2 pairs of neighbours, a run of n vertices takes ceil(n/2) pairs."""
    chosen = np.zeros(V, dtype=bool)
    chosen[tokens] = True
    turned = np.roll(chosen, -int(np.flatnonzero(~chosen)[0]))
    edges = np.flatnonzero(np.diff(np.r_[0, turned, 0]))
    runs = edges[1::2] - edges[::2]
    return bool(2 * ((runs + 1) // 2).sum() <= D)


def orderings(seed: int, V: int, length: int, samples: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.stack([generator.permutation(V)[:length] for _ in range(samples)])


@pytest.mark.parametrize(("V", "D"), [(30, 2), (40, 6), (60, 8)])
def test_every_critical_size_on_the_moment_curve(V: int, D: int) -> None:
    orders = orderings(D, V, D + 1, samples=24)
    report = top_m_capacity(moment_curve(V, D), orders=orders)
    for order, size in zip(orders, report.sizes, strict=True):
        assert size >= D // 2  # neighbourly: every D/2 vertices are a face
        assert is_cyclic_face(order[:size], V, D)
        assert not is_cyclic_face(order[: size + 1], V, D)
    assert report.undecided == 0
    assert report.free_share(D // 2).value == 1
    assert report.free_share(D + 1).value == 0


def test_the_moment_curve_survives_any_map_of_its_space() -> None:
    orders = orderings(1, 40, 7, samples=8)
    map_ = np.random.default_rng(0).normal(size=(6, 10))
    plain = top_m_capacity(moment_curve(40, 6), orders=orders)
    mapped = top_m_capacity(
        torch.from_numpy(5 + 1e3 * moment_curve(40, 6) @ map_), orders=torch.from_numpy(orders)
    )
    assert mapped.rank == plain.rank == 6
    assert mapped.sizes == plain.sizes


@pytest.mark.parametrize("D", [1, 4, 9])
def test_all_sets_of_a_simplex_are_free(D: int) -> None:
    # D + 1 affinely independent rows; the whole vocabulary itself is free too.
    report = top_m_capacity(np.concatenate([np.eye(D), np.zeros((1, D))]), samples=5)
    assert report.sizes == (D + 1,) * 5
    assert report.capacity == D + 1
    assert report.interval[1] == D + 1
    # One more row, inside, and the largest face is a facet.
    inside = np.concatenate([np.eye(D), np.zeros((1, D)), np.full((1, D), 0.5 / D)])
    tokens = np.arange(D)
    assert is_free(inside, tokens) is True
    assert is_free(inside, np.arange(D + 1)) is False
    assert is_free(inside, np.array([D + 1])) is False


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), V=st.integers(8, 40), D=st.integers(2, 4))
def test_free_sets_are_the_faces_of_the_brute_force_hull(seed: int, V: int, D: int) -> None:
    generator = np.random.default_rng(seed)
    weight = generator.normal(size=(V, D))
    facets = [set(facet) for facet in ConvexHull(weight).simplices.tolist()]
    for m in range(1, D + 1):
        chosen = generator.permutation(V)[:m]
        assert is_free(weight, chosen) is any(set(chosen.tolist()) <= facet for facet in facets)
        # A random facet's own subset, so that free sets are met as well.
        face = generator.permutation(sorted(facets[generator.integers(len(facets))]))[:m]
        assert is_free(weight, face) is True


def test_a_free_set_takes_any_probabilities() -> None:
    weight = np.random.default_rng(3).normal(size=(40, 10))
    report = top_m_capacity(weight, samples=4, seed=3)
    tokens = np.random.default_rng(3).permutation(40)[: report.sizes[0]]
    assert is_free(weight, tokens) is True
    # Descend on the cross-entropy to a lopsided target: it is reached to any accuracy wished.
    target = torch.zeros(40, dtype=torch.float64)
    target[torch.from_numpy(tokens)] = torch.softmax(torch.linspace(0, 3, len(tokens)).double(), dim=0)
    state = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([state], max_iter=2000, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = -(target * torch.log_softmax(torch.from_numpy(weight) @ state, dim=0)).sum()
        value.backward()
        return value

    optimiser.step(loss)
    reached = torch.softmax(torch.from_numpy(weight) @ state, dim=0)
    assert (reached - target).abs().max() < 1e-4


def test_equal_rows_are_never_free() -> None:
    weight = moment_curve(20, 4)
    doubled = np.concatenate([weight, weight[3:4]])
    assert is_free(weight, np.array([3])) is True
    assert is_free(doubled, np.array([3])) is False
    assert is_free(doubled, np.array([3, 20])) is False
    assert is_free(doubled, np.array([5])) is True


def test_a_set_on_the_boundary_is_undecided() -> None:
    # A row at the middle of an edge is level with its two ends, which are therefore not free, by no margin.
    square = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, 0.0]])
    assert is_free(square, np.array([0])) is True
    assert is_free(square, np.array([0, 2])) is True
    assert is_free(square, np.array([0, 1])) is None
    report = top_m_capacity(square, orders=np.array([[0, 1]]))
    assert report.sizes == (1,)
    assert report.undecided == 1


def test_small_shapes_and_the_interval() -> None:
    assert top_m_capacity(np.ones((1, 1)), samples=1).capacity == 1
    assert top_m_capacity(np.array([[0.0], [1.0], [2.0]]), orders=np.array([[0, 1], [2, 1]])).sizes == (1, 1)
    report = top_m_capacity(np.random.default_rng(0).normal(size=(60, 12)), samples=20, share=0.9)
    assert report.interval[0] <= report.capacity <= report.interval[1]
    assert report.free_share(report.capacity).value >= 0.9 > report.free_share(report.capacity + 1).value
    share = report.free_share(report.capacity)
    assert share.low <= share.value <= share.high


def test_gaussian_rows_follow_the_weak_threshold() -> None:
    # Donoho and Tanner's weak threshold for the simplex at D/V = 1/2 is 0.558 D.
    report = top_m_capacity(np.random.default_rng(0).normal(size=(120, 60)), samples=15)
    assert abs(report.capacity / 60 - 0.558) < 0.05


def gaussian(seed: int, V: int, D: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(V, D))


@pytest.mark.parametrize(
    "weight",
    [moment_curve(40, 6), gaussian(1, 60, 20), 1e3 + gaussian(2, 300, 12) ** 3],
    ids=["moment curve", "wide", "heavy tails and a mean"],
)
def test_searched_sizes_never_exceed_the_exact_ones_and_come_near(weight: np.ndarray) -> None:
    exact = top_m_capacity(weight, samples=6)
    searched = top_m_capacity(weight, samples=6, exact=False)
    assert exact.exact
    assert not searched.exact
    assert all(low <= size for low, size in zip(searched.sizes, exact.sizes, strict=True))
    assert sum(searched.sizes) >= 0.9 * sum(exact.sizes)
    assert searched.capacity <= exact.capacity


def test_a_witness_holds_its_set_level_above_all_others() -> None:
    weight = 5 + gaussian(4, 400, 30)
    points = standardise(weight)
    search = WitnessSearch(points.rows)
    order = np.random.default_rng(0).permutation(400)
    witnesses = 0
    for m in range(1, 8):
        level = level_states(points.rows, order[:m])
        assert level is not None
        state = search.find(level)
        if state is None:
            continue
        witnesses += 1
        # On the given rows: one common logit on the set, and every other one lower.
        logits = weight @ (points.basis @ state)
        inside, outside = logits[order[:m]], np.delete(logits, order[:m])
        assert np.ptp(inside) < 1e-9
        assert outside.max() < inside.min() - 1e-8
        # A state far from the level is refused, also where the other rows score less than one.
        assert search.is_witness(level, state)
        assert not search.is_witness(level, 0 * state)
        assert not search.is_witness(level, 2 * state)
        assert not search.is_witness(level, state + 0.5 * points.rows[order[0]])
    assert witnesses >= 4


def test_a_search_finds_nothing_where_there_is_nothing() -> None:
    V, D = 40, 6
    points = standardise(moment_curve(V, D))
    search = WitnessSearch(points.rows)
    cases = {True: 0, False: 0}
    for tokens in orderings(5, V, 4, samples=8):
        level = level_states(points.rows, tokens)
        assert level is not None
        truth = is_cyclic_face(tokens, V, D)
        assert (search.find(level) is not None) == truth
        cases[truth] += 1
    assert min(cases.values()) > 0


def test_a_search_before_the_programs_changes_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = gaussian(6, 150, 12)
    plain = top_m_capacity(weight, samples=4)
    solved: list[int] = []
    sinks = capacity._sinks
    monkeypatch.setattr(capacity, "_sinks", lambda *given: (solved.append(1), sinks(*given))[1])
    top_m_capacity(weight, samples=4)
    without = len(solved)
    monkeypatch.setattr(capacity, "_SEARCH_FROM", 1)
    solved.clear()
    searched = top_m_capacity(weight, samples=4)
    assert searched.sizes == plain.sizes
    assert searched.undecided == plain.undecided == 0
    assert len(solved) < without


def test_the_time_limit_keeps_the_orderings_that_were_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = gaussian(7, 60, 8)
    complete = top_m_capacity(weight, samples=4)
    for exact in (True, False):
        empty = top_m_capacity(weight, samples=4, exact=exact, time_limit=0.0)
        assert (empty.sizes, empty.undecided, empty.capacity) == ((0,), 1, 0)
    ticks = iter(range(10**6))
    monkeypatch.setattr(capacity.time, "monotonic", lambda: float(next(ticks)))
    lengths = set()
    for limit in range(1, 40, 2):
        part = top_m_capacity(weight, samples=4, time_limit=limit)
        lengths.add(len(part.sizes))
        if len(part.sizes) > 1:
            assert part.sizes == complete.sizes[: len(part.sizes)]
        elif part.sizes != complete.sizes[:1]:
            assert part.sizes[0] < complete.sizes[0]
            assert part.undecided == 1
    assert {1, 2, 3} <= lengths


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"weight": np.zeros((0, 2))}, r"shape \(0, 2\)"),
        ({"weight": np.eye(3), "share": 0.0}, "share is 0.0"),
        ({"weight": np.eye(3), "samples": 0}, "samples is 0"),
        ({"weight": np.eye(3), "orders": np.array([[0, 3]])}, "run from 0 to 3, expected 0 to 2"),
        ({"weight": np.eye(3), "orders": np.array([[0, 1], [2, 2]])}, "row 1 of the tokens names one twice"),
        ({"weight": np.eye(3), "orders": np.array([0, 1])}, r"shape \(2,\)"),
        ({"weight": np.eye(3), "orders": np.array([[0.5]])}, "type float64"),
    ],
)
def test_refusals(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(FullrankError, match=words):
        top_m_capacity(**arguments)  # type: ignore[arg-type]


@pytest.mark.slow
def test_gaussian_rows_at_a_large_vocabulary() -> None:
    report = top_m_capacity(np.random.default_rng(0).normal(size=(20_000, 128)), samples=12)
    assert 10 <= report.capacity <= 20
    assert report.undecided == 0
