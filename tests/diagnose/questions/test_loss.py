"""Loss: bits per byte and perplexity by hand; every position counted once."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from fullrank.diagnose.questions.loss import loss


def test_bits_per_byte_and_perplexity_by_hand():
    # Four tokens of 1 bit, 2, 3 and 6 bits, over 1 + 2 + 3 + 0 bytes: 12 bits in 6 bytes, 3 bits a token.
    losses = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64) * math.log(2)
    found = loss(losses, torch.tensor([1, 2, 3, 0]), torch.arange(4), torch.tensor([0, 0, 1, 1]))
    assert found.nats_per_token.value == pytest.approx(3 * math.log(2))
    assert found.bits_per_byte.value == pytest.approx(2.0)
    assert found.perplexity.value == pytest.approx(8.0)
    assert (found.tokens, found.bytes, found.blocks) == (4, 6, 2)
    # Block sums of the excess are -3 and +3 bits: s = sqrt(2 * 18) / 4 bits.
    assert found.standard_error == pytest.approx(1.5 * math.log(2))
    assert found.perplexity.low == pytest.approx(math.exp(found.nats_per_token.low))
    assert found.bits_per_byte.high == pytest.approx(found.nats_per_token.high * 4 / 6 / math.log(2))


def test_bits_per_byte_do_not_depend_on_the_tokenizer():
    # The same text and probability, each token of two bytes split in halves of one byte and half the loss.
    losses = torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    coarse = loss(losses, torch.full((50,), 2), torch.arange(50), torch.arange(50) // 10)
    halves = (losses / 2).repeat_interleave(2)
    fine = loss(halves, torch.ones(100), torch.arange(100), torch.arange(100) // 20)
    for field in ("value", "low", "high"):
        assert getattr(fine.bits_per_byte, field) == pytest.approx(getattr(coarse.bits_per_byte, field))


def test_the_standard_error_is_that_of_the_interval():
    losses = torch.randn(60, generator=torch.Generator().manual_seed(0))
    found = loss(losses, torch.ones(60), torch.arange(60) % 12, torch.arange(60) // 12)
    from scipy import stats

    reach = found.nats_per_token.high - found.nats_per_token.value
    assert reach == pytest.approx(found.standard_error * stats.t.ppf(0.975, 4))


@given(positions=some.lists(some.integers(0, 600), min_size=1, max_size=80), seed=some.integers(0, 100))
def test_bins_of_positions_cover_every_token_once(positions, seed):
    places = torch.tensor(positions)
    losses = torch.randn(len(places), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    blocks = torch.arange(len(places)) % 3
    found = loss(losses, torch.ones(len(places)), places, blocks).by_position
    total, counted = 0.0, 0
    for one, following in zip(found, [*found[1:], None], strict=True):
        inside = (places >= one.first) & (places <= one.last)
        counted += int(inside.sum())
        total += one.nats.value * int(inside.sum())
        assert one.nats.value == pytest.approx(float(losses[inside].mean()))
        assert one.first <= one.last
        assert following is None or one.last < following.first
    assert counted == len(places)
    assert total == pytest.approx(float(losses.sum()), abs=1e-9)
    assert found[-1].last == max(positions)


def test_bins_double():
    found = loss(torch.rand(100), torch.ones(100), torch.arange(100), torch.arange(100) // 10).by_position
    bounds = [(one.first, one.last) for one in found]
    assert bounds == [(0, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 63), (64, 99)]


def test_a_falling_loss_by_position_is_seen():
    places = torch.arange(512).repeat(8)
    losses = 5.0 - torch.log1p(places.double()) / 2
    found = loss(losses, torch.ones(4096), places, torch.arange(8).repeat_interleave(512)).by_position
    values = [one.nats.value for one in found]
    assert values == sorted(values, reverse=True)


def test_odd_texts_give_odd_figures_and_no_crash():
    # No bytes at all (every token a part of a character): no bits per byte.
    found = loss(torch.ones(4), torch.zeros(4), torch.arange(4), torch.arange(4))
    assert math.isnan(found.bits_per_byte.value)
    # A loss beyond exp's range, one block: endless, and not an exception.
    found = loss(
        torch.tensor([900.0, 800.0]), torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    )
    assert found.perplexity.value == math.inf
    assert (found.perplexity.low, found.perplexity.high) == (0.0, math.inf)
    assert found.by_position[0].last == 0
