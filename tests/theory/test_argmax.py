"""Planted tokens, brute-force hulls and exact ties: what `unargmaxable` says must be true and proved."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import ConvexHull

from fullrank.errors import FullrankError
from fullrank.theory.argmax import ArgmaxReport, unargmaxable
from fullrank.theory.argmax_search import MARGIN, Search
from fullrank.theory.linear_program import equal_rows, standardise


def check_proofs(weight: np.ndarray, bias: np.ndarray | None, report: ArgmaxReport) -> None:
    """Recompute every witness and certificate from the report and the given numbers alone."""
    assert report.witnesses is not None
    height = np.zeros(len(weight)) if bias is None else bias
    assert report.argmaxable + len(report.never) + len(report.undecided) == report.vocabulary == len(weight)
    has_witness = ~torch.isnan(report.witnesses).any(dim=1).numpy()
    assert has_witness.sum() == report.argmaxable
    assert not has_witness[list(report.never + report.undecided)].any()
    for token in np.flatnonzero(has_witness):
        logits = weight @ report.witnesses[token].numpy() + height
        assert (np.delete(logits, token) < logits[token]).all()
    mean = np.unique(weight, axis=0).mean(axis=0)
    for certificate in report.certificates:
        rivals, weights = list(certificate.rivals), np.array(certificate.weights)
        assert certificate.token not in rivals
        assert (weights >= 0).all()
        assert weights.sum() <= 1
        if certificate.depth > 0 and (bias is None or len(np.unique(bias)) == len(bias)):
            row = weights @ weight[rivals] + certificate.depth * mean
            np.testing.assert_allclose(row, weight[certificate.token], atol=1e-9 * np.abs(weight).max())
            bias_of_row = weights @ height[rivals] + certificate.depth * height.mean()
            assert bias_of_row >= height[certificate.token] - 1e-9 * np.abs(height).max()


def planted(seed: int, V: int, D: int, inside: int) -> np.ndarray:
    """Rows on a sphere, all of them vertices, then `inside` rows that are deep mixtures of all of them."""
    generator = np.random.default_rng(seed)
    sphere = generator.normal(size=(V - inside, D))
    sphere /= np.linalg.norm(sphere, axis=1, keepdims=True)
    mixtures = generator.dirichlet(np.full(V - inside, 0.5), size=inside)
    return np.concatenate([sphere, mixtures @ sphere])


@pytest.mark.parametrize(("V", "D"), [(60, 2), (120, 3), (300, 8), (600, 24)])
def test_finds_exactly_the_planted_tokens(V: int, D: int) -> None:
    weight = planted(V, V, D, inside=20)
    # A stretched, sheared and shifted copy has the same hull structure.
    map_ = np.random.default_rng(1).normal(size=(D, D)) * np.logspace(0, 4, D)
    for matrix in (weight, weight @ map_ + 100 * np.ones(D)):
        report = unargmaxable(matrix, witnesses=True)
        assert report.never == tuple(range(V - 20, V))
        assert report.undecided == ()
        check_proofs(matrix, None, report)


def test_screen_and_programs_agree_with_planting_when_norms_vary() -> None:
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(600, 10)) * np.exp(0.4 * generator.normal(size=(600, 1)))
    weight[:50] = generator.dirichlet(np.ones(200), size=50) @ weight[-200:]
    report = unargmaxable(torch.from_numpy(weight).float(), witnesses=True)
    assert set(range(50)) <= set(report.never)
    assert report.undecided == ()
    # Both stages had work, and the programs found witnesses that the screen had not.
    assert len(report.never) < report.after_screen == report.programs
    check_proofs(weight.astype(np.float32).astype(np.float64), None, report)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), V=st.integers(6, 60), D=st.integers(2, 4))
def test_matches_the_brute_force_hull(seed: int, V: int, D: int) -> None:
    weight = np.random.default_rng(seed).normal(size=(V, D))
    report = unargmaxable(weight, witnesses=True)
    vertices = set(ConvexHull(weight).vertices.tolist())
    assert set(range(V)) - vertices == set(report.never) | set(report.undecided)
    assert report.undecided == ()
    check_proofs(weight, None, report)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    V=st.integers(6, 60),
    D=st.integers(1, 3),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
)
def test_matches_the_brute_force_upper_hull_with_a_bias(seed: int, V: int, D: int, scale: float) -> None:
    generator = np.random.default_rng(seed)
    weight, bias = generator.normal(size=(V, D)), scale * generator.normal(size=V)
    report = unargmaxable(weight, bias, witnesses=True)
    # A point far below changes nothing above it and closes the hull; a vertex counts if it is on a facet
    # that faces up, or is a vertex of the rows' own hull, which leads at infinity.
    lifted = np.column_stack([weight, bias / scale])
    hull = ConvexHull(lifted)
    upper = set(hull.simplices[hull.equations[:, D] > 0].ravel().tolist())
    assert upper == set(range(V)) - set(report.never)
    assert report.undecided == ()
    check_proofs(weight, bias, report)


def test_a_bias_can_lift_a_token_or_sink_it() -> None:
    weight = planted(3, 200, 5, inside=1)
    inner = 199
    lifted, sunk = np.zeros(200), np.zeros(200)
    lifted[inner], sunk[0] = 2.0, -50.0
    assert unargmaxable(weight).never == (inner,)
    assert unargmaxable(weight, lifted).never == ()
    # Token 0 is a vertex of the rows' hull: far enough out its row beats any finite bias.
    # The inner token's certificate is made of rows with a bias of at least its own: all but token 0.
    report = unargmaxable(weight, sunk, witnesses=True)
    assert report.never == (inner,)
    assert report.undecided == ()
    check_proofs(weight, sunk, report)


def test_a_subspace_and_a_bias_that_only_shifts_the_state_change_nothing() -> None:
    weight = planted(4, 120, 5, inside=10)
    wide = weight @ np.random.default_rng(2).normal(size=(5, 30))
    for matrix, bias in ((weight, weight @ np.arange(5) + 7.0), (wide, None)):
        report = unargmaxable(matrix, bias, witnesses=True)
        assert report.rank == 5
        assert report.never == tuple(range(110, 120))
        check_proofs(matrix, bias, report)


def test_equal_rows_only_tie() -> None:
    weight = planted(5, 50, 4, inside=0)
    doubled = np.concatenate([weight, weight[[7, 7, 9]]])
    report = unargmaxable(doubled, witnesses=True)
    assert report.never == (7, 9, 50, 51, 52)
    assert {c.residual for c in report.certificates} == {0.0}
    check_proofs(doubled, None, report)
    # A higher bias breaks the tie: 51 leads its equals, 9 and 52 still tie.
    bias = np.zeros(53)
    bias[51] = 0.25
    report = unargmaxable(doubled, bias, witnesses=True)
    assert report.never == (7, 9, 50, 52)
    check_proofs(doubled, bias, report)
    # Zero and negative zero are equal; a single zero row lies inside the octahedron.
    zeros = np.concatenate([np.eye(3), -np.eye(3), np.zeros((1, 3)), -np.zeros((1, 3))])
    assert unargmaxable(zeros).never == (6, 7)
    report = unargmaxable(zeros[:-1], witnesses=True)
    assert report.never == (6,)
    check_proofs(zeros[:-1], None, report)


def test_a_row_on_the_boundary_is_never_called_argmaxable_and_near_ones_are_undecided() -> None:
    square = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    for offset, verdict in ((-1e-3, "never"), (0.0, "undecided"), (1e-12, "undecided"), (1e-3, "argmaxable")):
        report = unargmaxable(np.concatenate([square, [[1.0 + offset, 0.1]]]))
        assert (4 in report.never, 4 in report.undecided) == (verdict == "never", verdict == "undecided"), (
            offset
        )
        assert report.argmaxable >= 4


def test_small_shapes() -> None:
    assert unargmaxable(np.ones((1, 1))).argmaxable == 1
    assert unargmaxable(np.ones((2, 3))).never == (0, 1)
    assert unargmaxable(np.ones((2, 3)), np.array([0.0, 1.0]), witnesses=True).never == (0,)
    # On a line only the two ends lead.
    line = unargmaxable(torch.tensor([[0.0], [3.0], [1.0], [-2.0], [2.0]]), witnesses=True)
    assert line.never == (0, 2, 4)
    assert line.rank == 1
    # No more rows than dimensions, affinely independent: every token leads, with or without a bias.
    few = np.random.default_rng(0).normal(size=(5, 9))
    assert unargmaxable(few).argmaxable == 5
    report = unargmaxable(few, np.array([0.0, 5.0, -5.0, 1e3, 2.0]), witnesses=True)
    assert report.argmaxable == 5
    check_proofs(few, np.array([0.0, 5.0, -5.0, 1e3, 2.0]), report)


def test_a_time_limit_leaves_tokens_undecided_and_progress_is_reported() -> None:
    weight = planted(7, 200, 8, inside=20)
    report = unargmaxable(weight, time_limit=0.0)
    assert report.argmaxable == 0
    assert len(report.undecided) == report.after_screen == 200
    events: list[tuple[str, int, int]] = []
    unargmaxable(weight, progress=lambda *event: events.append(event))
    assert (events[0], events[-1]) == (("screen", 0, 200), ("programs", 19, 20))


def narrow(weight: np.ndarray) -> Search:
    """The distinct rows after the screen in a subspace, with its witnesses."""
    search = Search(np.unique(weight, axis=0), None, keep=True, deadline=math.inf, progress=None)
    left = search.narrow(np.arange(len(search.argmaxable)))
    assert (left == np.flatnonzero(~search.argmaxable)).all()
    return search


def check_leads(search: Search) -> None:
    """Every token that the subspace proved leads from its witness by what counts, in fp64 and on W itself."""
    weight = search.weight.numpy()
    assert search.witnesses is not None
    assert (np.isnan(search.witnesses).any(axis=1) == ~search.argmaxable).all()
    for token in np.flatnonzero(search.argmaxable):
        state = search.witnesses[token]
        logits = weight @ state
        lead = logits[token] - np.delete(logits, token).max()
        assert lead > MARGIN * np.linalg.norm(weight, axis=1).max() * np.linalg.norm(state)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    V=st.integers(2, 90),
    D=st.sampled_from([1, 3, 12, 80]),
    norms=st.sampled_from([0.0, 0.5, 4.0]),
    condition=st.sampled_from([0, 3, 7]),
    mean=st.sampled_from([0.0, 1.0, 1e4]),
    equals=st.booleans(),
)
def test_tokens_proved_in_a_subspace_lead_in_fp64(
    seed: int, V: int, D: int, norms: float, condition: int, mean: float, equals: bool
) -> None:
    generator = np.random.default_rng(seed)
    weight = generator.normal(size=(V, D)) * np.exp(norms * generator.normal(size=(V, 1)))
    weight = weight * np.logspace(0, condition, D) @ generator.normal(size=(D, D)) + mean
    if equals:
        weight[V // 2 :] = weight[: V - V // 2]
    if len(np.unique(weight, axis=0)) > 1:
        check_leads(narrow(weight))


@pytest.mark.parametrize("D", [8, 100])
def test_a_subspace_in_single_precision_does_not_take_a_near_tie_for_a_lead(D: int) -> None:
    # Of each pair the second row leads the first one, from the first one's point, by less than fp32 can tell.
    generator = np.random.default_rng(D)
    first = generator.normal(size=(400, D))
    search = narrow(np.concatenate([first, first * (1 + 3e-8 * generator.uniform(size=(400, 1)))]))
    check_leads(search)
    assert not search.argmaxable.any()
    # Where fp32 can tell, it does: the longer row of a pair leads, the shorter does not.
    rows = np.concatenate([first, 1.01 * first])
    search = narrow(rows)
    check_leads(search)
    longer = np.linalg.norm(search.weight.numpy(), axis=1) > 1.005 * np.linalg.norm(first, axis=1).min()
    assert not search.argmaxable[~longer].any()
    assert search.argmaxable.sum() >= (0.9 * 400 if D == 100 else 1)


@pytest.mark.slow(reason="a wide matrix is the point, five seconds; narrow ones are in the default tier")
def test_a_subspace_decides_most_tokens_of_a_wide_matrix() -> None:
    weight = planted(8, 900, 150, inside=30)
    search = narrow(weight)
    check_leads(search)
    assert search.argmaxable.sum() > 0.95 * 870
    report = unargmaxable(weight, witnesses=True)
    assert report.never == tuple(range(870, 900))
    check_proofs(weight, None, report)


@pytest.mark.parametrize("condition", [1, 50, 5e3, 1e6, 1e10])
def test_standard_coordinates_are_those_of_an_svd(condition: float) -> None:
    # Through the Gram matrix once (to 100), twice (to 1e4) and an SVD: equal up to a rotation, so in Z Z'.
    generator = np.random.default_rng(0)
    left = np.linalg.qr(generator.normal(size=(200, 9)) - 0.1)[0]
    weight = left * np.geomspace(1, 1 / condition, 9) @ np.linalg.qr(generator.normal(size=(9, 9)))[0]
    points = standardise(weight)
    centred = weight - weight.mean(axis=0)
    basis = np.linalg.svd(centred, full_matrices=False)[0]
    assert points.rows.shape == (200, 9)
    np.testing.assert_allclose(points.rows.T @ points.rows / 200, np.eye(9), atol=1e-12)
    # The smallest directions are as exact as the given numbers are, a rounding times the condition number.
    allowed = 1e-12 + 1e-14 * condition
    np.testing.assert_allclose(points.rows @ points.rows.T / 200, basis @ basis.T, atol=allowed)
    np.testing.assert_allclose(centred @ points.basis, points.rows, atol=200 * allowed)


@pytest.mark.parametrize("collide", [False, True])
def test_equal_rows_share_a_number_and_only_they(collide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if collide:  # every row has the same key
        monkeypatch.setattr(np, "einsum", lambda _, rows, factors: np.zeros(len(rows), dtype=np.uint64))
    rows = np.random.default_rng(0).integers(-1, 2, size=(300, 5)).astype(np.float64)
    rows[::7] *= -1  # makes negative zeros
    _, truth = np.unique(rows + 0.0, axis=0, return_inverse=True)
    numbers = equal_rows(rows)
    assert ((numbers[:, None] == numbers) == (truth[:, None] == truth)).all()
    rows[0] = np.nextafter(rows[1], 2)
    assert equal_rows(rows)[0] not in equal_rows(rows)[1:]


@pytest.mark.parametrize(
    ("weight", "bias", "words"),
    [
        (np.zeros((0, 4)), None, r"shape \(0, 4\).*expected \[V, D\]"),
        (np.zeros(4), None, r"shape \(4,\).*expected \[V, D\]"),
        (np.array([[1.0], [np.nan]]), None, "weight holds 1 values that are NaN"),
        (np.ones((3, 2)), np.zeros(2), r"bias has shape \(2,\), expected \[3\]"),
        (np.ones((2, 2)), np.array([0.0, -np.inf]), "bias holds 1 values"),
    ],
)
def test_refusals(weight: np.ndarray, bias: np.ndarray | None, words: str) -> None:
    with pytest.raises(FullrankError, match=words):
        unargmaxable(weight, bias)


@pytest.mark.slow
def test_fifty_thousand_tokens_are_all_decided() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50_000, 64, generator=generator)
    weight[:200] = 0.2 * weight[:200]
    report = unargmaxable(weight)
    assert report.undecided == ()
    assert report.never == tuple(range(200))
