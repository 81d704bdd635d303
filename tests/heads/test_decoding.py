"""Exact sampling and exact top-m, for heads that are rows and for those that are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads import RowHead, rows

DRAWS = 8_000
LEAST_P = 1e-4
"""Below this the draws are not from the distribution. The seeds are fixed, so the test does not flicker."""


def goodness(drawn: Tensor, probs: Tensor) -> float:
    """p-value of the chi-square test of draws [n] against probs [V], rare tokens pooled."""
    counts = torch.bincount(drawn, minlength=probs.shape[0]).double()
    expected = probs.double() * drawn.shape[0]
    common = expected >= 5
    seen = [*counts[common].tolist(), counts[~common].sum().item()]
    hoped = [*expected[common].tolist(), expected[~common].sum().item()]
    if hoped[-1] < 5:  # a pool too small for the test joins the rest
        seen[-2:], hoped[-2:] = [sum(seen[-2:])], [sum(hoped[-2:])]
    scale = sum(seen) / sum(hoped)
    return float(stats.chisquare(seen, [value * scale for value in hoped]).pvalue)


def worst_goodness(case: Any, sampler: Callable[[Any, Any, torch.Generator], Tensor]) -> float:
    """The least p-value over three positions, each drawn many times at once."""
    head = case.build(seed=3)
    inputs = case.inputs(head, (1, 3), seed=4)
    many = inputs.repeated(DRAWS)
    drawn = sampler(head, many, torch.Generator().manual_seed(0))
    assert drawn.shape == (DRAWS, 3)
    with torch.no_grad():
        probs = head(inputs.states, **inputs.context)[0].exp()
    assert (probs.max(-1).values < 0.95).any(), "a test of draws needs something to draw"
    return min(goodness(drawn[:, place], probs[place]) for place in range(3))


def test_samples_follow_the_distribution(case: Any) -> None:
    found = worst_goodness(
        case, lambda head, many, generator: head.sample(many.states, **many.context, generator=generator)
    )
    assert found > LEAST_P


def likeliest_component_only(head: Any, many: Any, generator: torch.Generator) -> Tensor:
    rows, log_prior = head.rows(many.each)
    which = log_prior.argmax(-1)[..., None, None].expand(-1, -1, 1, head.width)
    return draw(head, rows.gather(2, which)[:, :, 0], generator)


def components_alike(head: Any, many: Any, generator: torch.Generator) -> Tensor:
    rows, _ = head.rows(many.each)
    which = torch.randint(head.components, (*rows.shape[:2], 1, 1), generator=generator)
    return draw(head, rows.gather(2, which.expand(-1, -1, 1, head.width))[:, :, 0], generator)


def mean_context(head: Any, many: Any, generator: torch.Generator) -> Tensor:
    rows, log_prior = head.rows(many.each)
    return draw(head, (rows * log_prior.exp()[..., None]).sum(2), generator)


def draw(head: Any, rows: Tensor, generator: torch.Generator) -> Tensor:
    probs = torch.softmax(head.decoder(rows), -1).flatten(0, 1)
    return torch.multinomial(probs, 1, generator=generator).view(rows.shape[:2])


@pytest.mark.parametrize("wrong", [likeliest_component_only, components_alike, mean_context])
def test_wrong_samplers_fail_the_same_test(cases: dict[str, Any], wrong: Any) -> None:
    with torch.no_grad():
        assert worst_goodness(cases["mos"], wrong) < LEAST_P


def test_samples_repeat_with_the_generator(case: Any) -> None:
    head = case.build()
    many = case.inputs(head).repeated(50)
    first, again, other = (
        head.sample(many.states, **many.context, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("m", [1, 4, 11])
def test_top_is_that_of_the_whole_distribution(case: Any, m: int) -> None:
    head = case.build()
    inputs = case.inputs(head, (3, 5))
    values, ids = head.top(inputs.states, m, **inputs.context)
    with torch.no_grad():
        log_probs = head(inputs.states, **inputs.context)
    expected = torch.sort(log_probs, dim=-1, descending=True)
    assert ids.shape == (3, 5, m)
    torch.testing.assert_close(values, expected.values[..., :m], atol=1e-6, rtol=0)
    torch.testing.assert_close(log_probs.gather(-1, ids), values, atol=1e-6, rtol=0)
    assert all(row.unique().numel() == m for row in ids.flatten(0, 1))


def test_top_of_a_mixture_is_not_that_of_a_component(cases: dict[str, Any]) -> None:
    """Two components that agree on no first choice, and on a common second one: the mixture's first."""
    head = cases["mos-square-with-bias"].build(components=2, warm=False)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.decoder.weight[0, 0], head.decoder.weight[1, 0] = 5.0, -5.0
        head.decoder.bias[2] = 4.6
        head.contexts.differences[0].bias[0], head.contexts.differences[0].bias[4] = 1.0, -1.0
    values, ids = head.top(torch.zeros(1, 4), 1)
    assert ids.tolist() == [[2]]
    torch.testing.assert_close(values, head(torch.zeros(1, 4)).max(-1, keepdim=True).values)
    rows, _ = head.rows([torch.zeros(1, 4)])
    assert head.decoder(rows).argmax(-1).tolist() == [[0, 1]]


@pytest.mark.parametrize("name", ["softmax", "mos"])
def test_decoding_in_pieces_is_the_same(
    cases: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = cases[name].build()
    assert isinstance(head, RowHead)
    states = torch.randn(7, 3, 6)
    values, ids = head.top(states, 4)
    monkeypatch.setattr(rows, "DECODING_BYTES", 4 * 11 * 5)
    pieces, same_ids = head.top(states, 4)
    torch.testing.assert_close(pieces, values, atol=1e-6, rtol=0)
    assert torch.equal(ids, same_ids)
    # A multiple of the piece, so that every piece draws, and few enough draws that pieces stay quick.
    monkeypatch.setattr(rows, "DECODING_BYTES", 4 * 11 * DRAWS // 4)
    found = worst_goodness(
        cases[name], lambda head, many, generator: head.sample(many.states, generator=generator)
    )
    assert found > LEAST_P


def test_samples_come_from_all_rows_of_a_head_that_does_not_count_them() -> None:
    """Each of two equal components is sure of a token of its own."""

    class Opposites(RowHead):
        def rows(self, states: list[Tensor]) -> tuple[Tensor, Tensor]:
            rows = torch.stack([states[0], -states[0]], dim=-2)
            return rows, rows.new_full(rows.shape[:-1], math.log(0.5))

    head = Opposites(hidden=1, vocab=2)
    with torch.no_grad():
        head.decoder.weight.copy_(torch.tensor([[50.0], [-50.0]]))
    drawn = head.sample(torch.ones(400, 1), generator=torch.Generator().manual_seed(0))
    assert 140 < int((drawn == 0).sum()) < 260


@pytest.mark.parametrize("m", [0, -1, 12, 2.0])
def test_impossible_top_is_named(case: Any, m: Any) -> None:
    head = case.build()
    inputs = case.inputs(head)
    with pytest.raises(FullrankError, match=rf"m={m}.*1 <= m <= V=11"):
        head.top(inputs.states, m, **inputs.context)


def test_no_tokens_decode_to_nothing(case: Any) -> None:
    head = case.build()
    inputs = case.inputs(head, (0, 3))
    assert head.sample(inputs.states, **inputs.context).shape == (0, 3)
    values, ids = head.top(inputs.states, 2, **inputs.context)
    assert values.shape == ids.shape == (0, 3, 2)


def test_decoding_leaves_no_graph(case: Any) -> None:
    head = case.build()
    inputs = case.inputs(head, gradient=True)
    values, _ = head.top(inputs.states, 2, **inputs.context)
    assert not values.requires_grad
    assert head.sample(inputs.states, **inputs.context).dtype == torch.int64
