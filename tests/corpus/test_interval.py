"""The jackknife: a mean's standard error by hand, coverage of a planted truth, and its limits."""

import dataclasses
import math

import numpy as np
import pytest

from benchmarks.corpus_limits import counted
from fullrank.corpus.counts import BlockCounts, Counts
from fullrank.corpus.curve import Dimension, Spectrum
from fullrank.corpus.interval import from_parts, jackknife
from fullrank.corpus.spectrum import spectrum
from fullrank.corpus.table import Left, table
from fullrank.errors import FullrankError


def fake(real: float, error: float, *, low: int | None = None, high: int | None = None) -> Spectrum:
    value = math.ceil(real)
    one = Dimension(
        value=value, low=value if low is None else low, high=value if high is None else high, real=real
    )
    same = {"50": one, "90": one, "99": one}
    return Spectrum(
        construction="probability", contexts=9, vocabulary=1000, method="exact", joined=9, norm=1.0,
        singular_values=(1.0,), singular_value_error=0.0, grid=(1,), relative_error=(error,),
        relative_error_low=(error,), relative_error_high=(error,), dimensions=same, beyond_first=same,
        probes=0, steps=0, products=0, seconds=0.0,
    )  # fmt: skip


def test_standard_error_of_a_mean() -> None:
    # Of a mean of blocks, the jackknife's standard error is s / sqrt(g), exactly.
    values = np.array([10.0, 14.0, 9.0, 17.0, 12.0])
    without = [(values.sum() - value) / 4 for value in values]
    found = from_parts(fake(float(values.mean()), 0.4), [fake(one, one / 40) for one in without])
    reach = 2.7764451 * values.std(ddof=1) / math.sqrt(5)
    one = found.dimensions["50"]
    assert one.value == 13
    assert (one.low, one.high) == pytest.approx((13 - reach, 13 + reach), abs=1e-5)
    assert found.blocks == 5
    assert found.relative_error_low[0] == pytest.approx(0.4 - reach / 40, abs=1e-6)
    assert found.relative_error_high[0] == pytest.approx(0.4 + reach / 40, abs=1e-6)


def test_limits_of_the_method_are_part_of_the_interval() -> None:
    whole = fake(100.0, 0.5, low=94, high=106)
    found = from_parts(whole, [fake(100.0, 0.5)] * 4).dimensions["90"]
    assert (found.low, found.high) == pytest.approx((94, 106))
    wide = dataclasses.replace(whole, relative_error_low=(0.45,), relative_error_high=(0.57,))
    assert from_parts(wide, [fake(100.0, 0.5)] * 4).relative_error_high == (0.57,)


def test_ends_stay_on_the_scale() -> None:
    parts = [fake(real, 0.5) for real in (1.0, 400.0, 900.0)]
    found = from_parts(fake(500.0, 0.9), parts)
    assert found.dimensions["50"].low == 0.0
    assert found.dimensions["50"].high == 1000.0
    assert 0 <= found.relative_error_low[0] <= found.relative_error_high[0] <= 1


def test_needs_two_blocks() -> None:
    with pytest.raises(FullrankError, match="at least two blocks of text, got 1"):
        jackknife(fake(3.0, 0.5), lambda block: fake(3.0, 0.5), 1, progress=lambda share: None)


def drawn(seed: int, blocks: int, contexts: int) -> tuple[Counts, BlockCounts]:
    """A text of blocks of a language with few contexts, so that its table settles."""
    generator = np.random.default_rng(seed)
    V, size = 30, 400
    block = np.repeat(np.arange(blocks), size)
    # Each block has its own mix of contexts, as documents have topics.
    mix = generator.dirichlet(np.full(contexts, 0.5), size=blocks)
    row = np.concatenate([generator.choice(contexts, size=size, p=one) for one in mix])
    token = (row + generator.integers(0, 4, len(row)) * generator.integers(0, 8, len(row))) % V
    entry, count = np.unique((row * V + token) * blocks + block, return_counts=True)
    key = np.unique(entry // blocks)
    start = np.searchsorted(entry // blocks, np.append(key, key[-1] + 1)).astype(np.int64)
    return counted(row, token, V), BlockCounts(
        start=start, block=(entry % blocks).astype(np.int32), count=count.astype(np.int64), blocks=blocks
    )


def test_intervals_hold_the_mean_over_texts_of_this_size() -> None:
    place = 6
    others = [spectrum(table(drawn(1000 + seed, 20, 20)[0], "weighted")) for seed in range(60)]
    expected = np.mean([one.relative_error for one in others], axis=0)
    inside = 0
    widths = []
    for seed in range(15):
        counts, blocks = drawn(seed, 20, 20)
        whole = spectrum(table(counts, "weighted"))

        def without(block: int, counts: Counts = counts, blocks: BlockCounts = blocks) -> Spectrum:
            return spectrum(table(counts, "weighted", left=Left(blocks=blocks, out=block)))

        told: list[float] = []
        found = jackknife(whole, without, 20, progress=told.append)
        assert told[-1] == 1.0
        inside += found.relative_error_low[place] <= expected[place] <= found.relative_error_high[place]
        widths.append(found.relative_error_high[place] - found.relative_error_low[place])
    assert inside >= 12
    # And they are as wide as texts differ, not wider.
    spread = np.std([one.relative_error[place] for one in others])
    assert 2 * spread < np.mean(widths) < 8 * spread
