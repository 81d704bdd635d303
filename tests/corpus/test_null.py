"""The null keeps contexts' counts and classes' tokens, and breaks what joins them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.corpus.null import shuffled
from fullrank.corpus.spectrum import spectrum
from fullrank.corpus.table import table
from tests.corpus.rows import counts_of


def summary(rows: list[dict[int, int]]) -> tuple[list[int], dict[int, list[int]]]:
    """Counts of all contexts, and the tokens of every class, sorted."""
    totals = [sum(row.values()) for row in rows]
    classes: dict[int, list[int]] = {}
    for row, total in zip(rows, totals, strict=True):
        tokens = [token for token, count in row.items() for _ in range(count)]
        classes.setdefault(total.bit_length(), []).extend(tokens)
    return sorted(totals), {name: sorted(tokens) for name, tokens in classes.items()}


@settings(max_examples=30)
@given(
    st.lists(
        st.dictionaries(st.integers(0, 9), st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=20
    ),
    st.integers(0, 5),
)
def test_margins_are_kept(rows: list[dict[int, int]], seed: int) -> None:
    found = shuffled(counts_of(rows, 10), seed)
    after = [{token: 1} for token in np.repeat(np.arange(10), found.once)]
    for first, last in zip(found.counts.indptr[:-1], found.counts.indptr[1:], strict=True):
        tokens = found.counts.next[first:last]
        assert len(set(tokens)) == last - first > 0
        after.append(dict(zip(tokens.tolist(), found.counts.count[first:last].tolist(), strict=True)))
    assert summary(after) == summary(rows)


def test_dependence_goes() -> None:
    # Eight contexts that are always followed by their own token: after the shuffle all rows are alike.
    counts = counts_of([{token: 400} for token in range(8)], 8)
    before = spectrum(table(counts, "probability"))
    after = spectrum(table(shuffled(counts, 0), "probability"))
    assert before.dimensions["90"].value == 8
    assert after.dimensions["50"].value == 1
    assert after.singular_values[0] ** 2 > 0.9 * after.norm**2


def test_contexts_seen_once_and_seeds() -> None:
    counts = counts_of([{token % 5: 1} for token in range(20)], 5)
    assert spectrum(table(shuffled(counts, 0), "probability")).singular_values == (
        spectrum(table(counts, "probability")).singular_values
    )
    mixed = counts_of([{0: 3, 1: 1}, {2: 4}, {3: 2, 4: 2}] * 4, 5)
    draws = [shuffled(mixed, seed).counts for seed in (0, 0, 1)]
    assert np.array_equal(draws[0].next, draws[1].next)
    assert not np.array_equal(draws[0].next, draws[2].next)
