"""Tables from counts: the prior, blocks that are left out, folded contexts, and what is refused."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.corpus_limits import counted
from fullrank.corpus import table as tables
from fullrank.corpus.counts import BlockCounts, Counts
from fullrank.corpus.gram import Gram
from fullrank.corpus.table import CONSTRUCTIONS, Folded, Left, Table, prior_strength, spans, table
from fullrank.errors import FullrankError


def pairs(seed: int, size: int = 300, V: int = 12) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    contexts = np.minimum(generator.geometric(0.05, size), 60)
    return contexts, (contexts * generator.integers(0, 3, size) + generator.integers(0, 2, size)) % V


def same(one: Table, other: Table) -> None:
    assert one.contexts == other.contexts
    assert one.vocabulary == other.vocabulary
    first, second = Gram(one), Gram(other)
    np.testing.assert_allclose(first.alone, second.alone, rtol=1e-12)
    np.testing.assert_array_equal(first.columns, second.columns)
    np.testing.assert_allclose(first.dense(), second.dense(), rtol=1e-9, atol=1e-9 * first.scale)


@settings(max_examples=20)
@given(st.integers(0, 1000), st.sampled_from(CONSTRUCTIONS))
def test_a_table_without_a_block_is_that_of_the_other_text(seed: int, construction: str) -> None:
    contexts, tokens = pairs(seed)
    block = np.arange(len(tokens)) * 5 // len(tokens)
    counts = counted(contexts, tokens, 12)
    _, row = np.unique(contexts, return_inverse=True)
    _, entry = np.unique(row * 12 + tokens, return_inverse=True)
    key, count = np.unique(entry * 5 + block, return_counts=True)
    by_block = BlockCounts(
        start=np.searchsorted(key // 5, np.arange(counts.entries + 1)).astype(np.int64),
        block=(key % 5).astype(np.int32),
        count=count.astype(np.int64),
        blocks=5,
    )
    kept = block != 2
    same(
        table(counts, construction, least=2, strength=3.0, left=Left(blocks=by_block, out=2)),
        table(counted(contexts[kept], tokens[kept], 12), construction, least=2, strength=3.0),
    )


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_pieces_make_no_difference(construction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counted(*pairs(3), 12)
    whole = table(counts, construction, least=2)
    monkeypatch.setattr(tables, "PIECE", 7)
    monkeypatch.setattr(tables, "ROWS", 3)
    cut = table(counts, construction, least=2)
    assert len(list(spans(counts))) > 10
    assert len(cut.branching) > len(whole.branching)
    assert cut.strength == whole.strength
    same(cut, whole)


def test_spans_hold_every_row_once_even_very_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PIECE", 4)
    widths = np.array([1, 9, 1, 1, 5, 0, 2])
    counts = Counts(
        indptr=np.concatenate([[0], np.cumsum(widths)]),
        next=np.zeros(19, dtype=np.int32),
        count=np.ones(19, dtype=np.int64),
        vocabulary=1,
        tokens=19,
    )
    found = list(spans(counts))
    assert found[0][0] == 0
    assert found[-1][1] == 7
    assert all(one[1] == other[0] for one, other in itertools.pairwise(found))


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_folding_contexts_seen_once_changes_nothing(construction: str) -> None:
    counts = counted(*pairs(5, size=150), 12)
    totals = np.add.reduceat(counts.count, counts.indptr[:-1])
    rare = totals == 1
    assert 0 < rare.sum() < len(totals)
    keep = np.repeat(~rare, np.diff(counts.indptr))
    folded = Folded(
        counts=Counts(
            indptr=np.concatenate([[0], np.cumsum(np.diff(counts.indptr)[~rare])]),
            next=counts.next[keep],
            count=counts.count[keep],
            vocabulary=12,
            tokens=counts.tokens,
        ),
        once=np.bincount(counts.next[~keep], minlength=12),
    )
    same(
        table(folded, construction, least=2, strength=2.0), table(counts, construction, least=2, strength=2.0)
    )


def test_prior_predicts_left_out_tokens_best() -> None:
    contexts, tokens = pairs(8, size=2000)
    counts = counted(contexts, tokens, 12)
    seen = np.bincount(tokens, minlength=12)
    unigram = (seen + 1) / (seen.sum() + 12)

    def likelihood(strength: float) -> float:
        total = 0.0
        for context in np.unique(contexts):
            here = np.bincount(tokens[contexts == context], minlength=12)
            for token in np.flatnonzero(here):
                left = (here[token] - 1 + strength * unigram[token]) / (here.sum() - 1 + strength)
                total += here[token] * np.log(left)
        return total

    found = prior_strength(counts, unigram)
    assert tables.STRENGTHS[0] < found < tables.STRENGTHS[1]
    assert likelihood(found) >= max(likelihood(1.5 * found), likelihood(found / 1.5))


def test_prior_of_contexts_seen_once_is_one() -> None:
    counts = counted(np.arange(6), np.array([0, 1, 2, 0, 1, 2]), 3)
    assert prior_strength(counts, np.full(3, 1 / 3)) == 1.0


def test_a_table_is_sparse() -> None:
    # A million by a million would not fit: what is kept grows with the entries only.
    V = 1_000_000
    counts = counted(np.repeat(np.arange(1000), 2), np.arange(2000) * 500, V)
    for construction in CONSTRUCTIONS:
        made = table(counts, construction, least=1)
        assert made.entries == 2000
        assert made.diagonal.shape == (V,)
    assert Gram(table(counts, "probability")).size == 2000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"construction": "logs"}, "unknown, expected one of probability, weighted"),
        ({"construction": "frequent", "least": 0}, "pass 1 or more"),
        ({"construction": "log", "strength": 0.0}, "expected a positive number of tokens"),
    ],
)
def test_bad_settings(options: dict[str, object], words: str) -> None:
    with pytest.raises(FullrankError, match=words):
        table(counted(*pairs(1), 12), **options)  # type: ignore[arg-type]


def test_no_frequent_context_is_an_empty_table() -> None:
    assert table(counted(np.arange(4), np.arange(4), 4), "frequent", least=2).contexts == 0
