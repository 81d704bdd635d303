"""Spectra of tables against a dense SVD of the definition, and the approximate path against the exact one."""

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.corpus_limits import EFFORTS, LEAST, Config, made_up, measured, misses
from fullrank.corpus.curve import SHARES, Effort, Spectrum
from fullrank.corpus.gram import Gram
from fullrank.corpus.spectrum import grid_of, spectrum
from fullrank.corpus.table import CONSTRUCTIONS, Table, table
from fullrank.errors import FullrankError
from tests.corpus.rows import counts_of


def reference(rows: list[dict[int, int]], V: int, construction: str, prior: float | None) -> np.ndarray:
    """The table as its definition says, dense."""
    k = np.zeros((len(rows), V))
    for place, row in enumerate(rows):
        for token, count in row.items():
            k[place, token] = count
    n = k.sum(axis=1, keepdims=True)
    if construction == "weighted":
        return k / np.sqrt(n)
    if construction == "frequent":
        return (k / n)[n[:, 0] >= LEAST]
    if construction == "log":
        assert prior is not None
        unigram = (k.sum(axis=0) + 1) / (k.sum() + V)
        log = np.log((k + prior * unigram) / (n + prior))
        return log - log.mean(axis=1, keepdims=True)
    return k / n


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[dict[int, int]], int]:
    """Rows with repetitions, columns that nothing touches, single contexts, wide and narrow tables."""
    V = draw(st.integers(1, 24))
    row = st.dictionaries(st.integers(0, V - 1), st.integers(1, 5), min_size=1, max_size=min(V, 12))
    rows = draw(st.lists(row, min_size=1, max_size=30))
    again = draw(st.lists(st.sampled_from(rows), max_size=10))
    return rows + again, V


def check(found: Spectrum, dense: np.ndarray) -> None:
    sigma = np.linalg.svd(dense, compute_uv=False) if dense.size else np.zeros(0)
    norm = np.linalg.norm(dense)
    assert found.norm == pytest.approx(norm, rel=1e-9, abs=1e-5)
    assert found.contexts == len(dense)
    if norm < 1e-6:
        assert found.norm == 0
        return
    assert len(found.singular_values) == min(dense.shape)
    # A Gram matrix squares the condition number: 1e-8 of the largest is what fp64 leaves.
    np.testing.assert_allclose(found.singular_values, sigma, atol=2e-7 * sigma[0], rtol=1e-9)
    errors = np.sqrt(np.append(np.cumsum((sigma**2)[::-1])[::-1], 0.0)) / norm
    expected = [errors[min(d, len(sigma))] for d in found.grid]
    np.testing.assert_allclose(found.relative_error, expected, atol=2e-7)
    for name, share in SHARES.items():
        one = found.dimensions[name]
        assert one.low == one.value == one.high
        # Equal up to rounding is reached, on either side of an exact tie.
        assert errors[one.value] <= share * (1 + 1e-6) + 1e-7
        assert one.value == 0 or errors[one.value - 1] >= share * (1 - 1e-6) - 1e-7
        assert one.value - 1 <= one.real <= one.value + 1e-6
        # And of what the first dimension leaves.
        beyond = found.beyond_first[name].value
        if errors[1] > 1e-4:
            assert errors[beyond] <= share * errors[1] * (1 + 1e-6) + 1e-7


@settings(max_examples=40)
@given(corpora(), st.sampled_from(CONSTRUCTIONS))
def test_equals_a_dense_svd(corpus: tuple[list[dict[int, int]], int], construction: str) -> None:
    rows, V = corpus
    made = table(counts_of(rows, V), construction, least=LEAST)
    dense = reference(rows, V, construction, made.strength)
    if len(dense) == 0:
        with pytest.raises(FullrankError, match="no rows"):
            spectrum(made)
        return
    check(spectrum(made), dense)


@settings(max_examples=25)
@given(corpora(), st.sampled_from(CONSTRUCTIONS))
def test_the_operator_is_the_gram_matrix(corpus: tuple[list[dict[int, int]], int], construction: str) -> None:
    rows, V = corpus
    made = table(counts_of(rows, V), construction, least=LEAST)
    dense = reference(rows, V, construction, made.strength)
    gram, operator = dense.T @ dense, Gram(made)
    joined = gram[np.ix_(operator.columns, operator.columns)]
    scale = 1e-10 * max(np.abs(gram).max(initial=0.0), operator.scale, 1e-300)
    np.testing.assert_allclose(operator.dense(), joined, atol=scale)
    np.testing.assert_allclose(operator.apply(np.eye(operator.size)), joined, atol=scale)
    np.testing.assert_allclose(operator.diagonal, np.diag(joined), atol=scale)
    # What is left out meets nothing.
    alone = np.setdiff1d(np.arange(V), operator.columns)
    np.testing.assert_allclose(gram[np.ix_(alone, operator.columns)], 0.0, atol=scale)
    np.testing.assert_allclose(operator.alone, np.sort(np.diag(gram)[alone])[::-1], atol=scale)


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
@pytest.mark.parametrize(
    ("rows", "V"),
    [
        ([{0: 3}] * 5, 1),
        ([{2: 4}] * 3, 6),
        ([{0: 2, 3: 2}], 5),
        ([{1: 1, 2: 1}] * 4, 3),
        ([{0: 2}, {1: 2}, {2: 2}, {3: 2}], 4),
    ],
    ids=["one token", "one token of six", "a single context", "equal rows", "no branching row"],
)
def test_degenerate_corpora(construction: str, rows: list[dict[int, int]], V: int) -> None:
    made = table(counts_of(rows, V), construction, least=LEAST)
    check(spectrum(made), reference(rows, V, construction, made.strength))


def test_dimensions_by_hand() -> None:
    # Four orthogonal rows of equal norm: half of the error is left after three of them, by a tie.
    found = spectrum(table(counts_of([{0: 1}, {1: 1}, {2: 1}, {3: 1}], 4), "probability"))
    assert {name: one.value for name, one in found.dimensions.items()} == {"50": 3, "90": 4, "99": 4}
    assert found.singular_values == (1.0, 1.0, 1.0, 1.0)
    assert found.norm == 2.0


QUICK = EFFORTS["little"]


@functools.cache
def exact_of(construction: str) -> tuple[Table, Spectrum]:
    made = table(made_up(400, 1, contexts=2500), construction, least=LEAST)
    return made, spectrum(made)


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_limits_hold_the_exact_figures(construction: str) -> None:
    """One seed; the slow tier has many."""
    made, exact = exact_of(construction)
    assert exact.method == "exact"
    approximate = spectrum(made, effort=QUICK)
    assert approximate.method == "lanczos"
    sigma = np.array(approximate.singular_values)
    assert len(sigma) >= 32
    np.testing.assert_allclose(
        sigma, exact.singular_values[: len(sigma)], atol=approximate.singular_value_error, rtol=1e-9
    )
    assert approximate.norm == pytest.approx(exact.norm, rel=1e-12)
    assert misses(approximate, exact)[0] == 0
    # Limits that are wide enough hold always: these are narrow.
    for name, limits in approximate.dimensions.items():
        assert limits.high - limits.low <= 0.1 * 400, (construction, name)


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_limits_hold_where_few_steps_know_little(construction: str) -> None:
    """The limit of a dimension is not decided where its estimate is: there brackets can be narrow."""
    made, exact = exact_of(construction)
    for seed in range(3):
        assert misses(spectrum(made, seed=seed, effort=EFFORTS["least"]), exact)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_limits_hold_for_many_seeds(construction: str) -> None:
    found = measured(Config(efforts=("little",)), construction)["little"]
    # They are limits of 99.9%, and the figures of one spectrum hang together.
    assert found["figures_outside"] <= 0.004 * found["figures"]


@pytest.mark.slow(reason="three seconds; that limits hold, and are no wider than a tenth, is above")
def test_more_probes_and_steps_narrow_the_limits() -> None:
    made = table(made_up(700, 2, contexts=4000), "weighted")
    quick = spectrum(made, effort=Effort(leading=16, batches=1, steps=(12,), most_exact=0))
    careful = spectrum(made, effort=Effort(leading=64, batches=4, steps=(32, 64, 128), most_exact=0))
    for name in SHARES:
        one, other = careful.dimensions[name], quick.dimensions[name]
        assert one.high - one.low <= other.high - other.low
        assert other.low <= one.high
        assert one.low <= other.high
    assert quick.dimensions["90"].high - quick.dimensions["90"].low > 5


def test_memory_decides_the_method() -> None:
    made = table(made_up(700, 3, contexts=4000), "probability")
    needed = 8 * Gram(made).size ** 2
    assert spectrum(made, memory_bytes=4 * needed).method == "exact"
    assert spectrum(made, memory_bytes=int(0.9 * needed), effort=QUICK).method == "lanczos"
    with pytest.raises(FullrankError, match=r"too little: allow \d+\.\d GB"):
        spectrum(made, memory_bytes=100_000, effort=QUICK)


def test_the_same_seed_gives_the_same_figures_and_progress_rises() -> None:
    made, _ = exact_of("probability")
    events: list[tuple[str, float]] = []
    first, second = (
        spectrum(made, seed=7, effort=EFFORTS["least"], progress=lambda *event: events.append(event))
        for _ in range(2)
    )
    assert first.relative_error == second.relative_error
    assert first.dimensions == second.dimensions
    assert all(0 <= share <= 1 for _, share in events)
    assert {stage.split(": ")[1] for stage, _ in events} == {"leading values", "tail"}


@settings(max_examples=30)
@given(st.integers(1, 200_000))
def test_grid(V: int) -> None:
    grid = grid_of(V)
    assert grid[0] == 1
    assert grid[-1] == V
    assert list(grid) == sorted(set(grid))
    assert len(grid) <= 80


def test_real_dimension_is_where_the_line_meets_the_bound() -> None:
    # Squares 4, 1 of a total of 5: a quarter, 1.25, is left 0.25 before the end of the first.
    rows = [{0: 2}, {1: 1}]
    found = spectrum(table(counts_of(rows, 2), "weighted")).dimensions["50"]
    squares = np.array([2.0, 1.0])
    bound = 0.25 * squares.sum()
    assert found.value == 2
    assert found.real == pytest.approx(1 + (squares[1] - bound) / squares[1], abs=1e-6)
    assert math.ceil(found.real) == found.value
