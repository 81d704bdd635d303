"""The mixture record against values worked out by hand on planted mixtures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.heads import MixtureRecord, RowHead, record
from fullrank.heads.record import describe_mixture
from fullrank.ops import IDENTITY, SIGSOFTMAX

PEAKED = (math.log(3.0), 0.0)
"""Scores of p = (3/4, 1/4) over two tokens."""
FLAT = (0.0, 0.0)
PEAKED_TO_FLAT = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
FLAT_TO_PEAKED = 0.5 * math.log(2.0 / 3.0) + 0.5 * math.log(2.0)


def describe(scores: list[list[tuple[float, float]]], prior: list[list[float]]) -> MixtureRecord:
    """Tokens of components of scores: W is the identity, so a row is its scores."""
    return describe_mixture(
        torch.tensor(scores), torch.tensor(prior).log(), torch.eye(2), bias=None, pointwise=IDENTITY
    )


def test_known_divergences() -> None:
    found = describe([[PEAKED, FLAT]], [[0.5, 0.5]])
    assert found.tokens == 1
    assert found.divergence[0] == pytest.approx((0.0, PEAKED_TO_FLAT), abs=1e-6)
    assert found.divergence[1] == pytest.approx((FLAT_TO_PEAKED, 0.0), abs=1e-6)


def test_divergence_is_the_mean_over_tokens() -> None:
    found = describe([[PEAKED, FLAT], [FLAT, FLAT]], [[0.5, 0.5], [0.5, 0.5]])
    assert found.divergence[0][1] == pytest.approx(PEAKED_TO_FLAT / 2, abs=1e-6)


def test_copies_have_no_divergence() -> None:
    found = describe([[PEAKED, PEAKED, PEAKED]] * 5, [[0.2, 0.3, 0.5]] * 5)
    assert all(value == pytest.approx(0.0, abs=1e-6) for row in found.divergence for value in row)
    assert found.shares == pytest.approx((0.2, 0.3, 0.5))


def test_dead_component_has_no_share() -> None:
    found = describe([[PEAKED, FLAT]] * 3, [[1.0, 0.0]] * 3)
    assert found.shares == (1.0, 0.0)
    assert found.prior_entropy == 0.0
    assert found.divergence[0][1] == pytest.approx(PEAKED_TO_FLAT, abs=1e-6)


def test_shares_and_entropy_are_means_over_tokens() -> None:
    found = describe([[PEAKED, FLAT]] * 2, [[1.0, 0.0], [0.5, 0.5]])
    assert found.shares == pytest.approx((0.75, 0.25))
    assert found.prior_entropy == pytest.approx(math.log(2.0) / 2)


def test_components_too_sharp_for_fp32_probabilities_are_told_apart() -> None:
    """Each gives the other's token exp(-300), which underflows; the divergence is 300 nats."""
    found = describe([[(300.0, 0.0), (0.0, 300.0)]], [[0.5, 0.5]])
    assert found.divergence[0][1] == pytest.approx(300.0)
    assert found.divergence[1][0] == pytest.approx(300.0)


def test_masked_token_adds_nothing() -> None:
    scores = torch.tensor([[[*PEAKED, 9.0], [*FLAT, -9.0]]])
    found = describe_mixture(
        scores,
        torch.tensor([[0.5, 0.5]]).log(),
        torch.eye(3),
        bias=torch.tensor([0.0, 0.0, -torch.inf]),
        pointwise=IDENTITY,
    )
    assert found.divergence[0][1] == pytest.approx(PEAKED_TO_FLAT, abs=1e-6)


def test_pointwise_function_shapes_the_components() -> None:
    scores = torch.tensor([[[1.0, -2.0], [0.5, 3.0]]])
    found = describe_mixture(
        scores, torch.tensor([[0.5, 0.5]]).log(), torch.eye(2), bias=None, pointwise=SIGSOFTMAX
    )
    bent = (scores.exp() * scores.sigmoid())[0]
    first, second = bent / bent.sum(-1, keepdim=True)
    assert found.divergence[0][1] == pytest.approx((first * (first / second).log()).sum().item(), rel=1e-5)


def test_pieces_change_nothing(cases: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    head: Any = cases["mos"].build()
    states = torch.randn(7, 5, 6)
    whole = head.describe(states)
    monkeypatch.setattr(record, "RECORD_BYTES", 4 * 4 * 3 * 11 * 2)
    pieces = head.describe(states)
    assert pieces.shares == whole.shares
    for row, other in zip(pieces.divergence, whole.divergence, strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-7)


def test_record_of_a_head_agrees_with_its_components(mixture: Any) -> None:
    """A mixture's record, from the distributions of its rows one at a time."""
    head = mixture.build()
    assert isinstance(head, RowHead)
    inputs = mixture.inputs(head, (9,))
    found = head.describe(inputs.states)
    rows, log_prior = head.rows(inputs.each)
    K = rows.shape[-2]
    prior = torch.ones(9, 1) if log_prior is None else log_prior.exp()
    assert found.tokens == 9
    assert found.shares == pytest.approx(tuple(prior.mean(0).tolist()), abs=1e-6)
    assert sum(found.shares) == pytest.approx(1.0, abs=1e-6)

    def distribution(k: int) -> Tensor:
        scores = rows[:, k] @ head.decoder.weight.t()
        bent = scores.exp() * scores.sigmoid() if head.name == "moss" else scores.exp()
        return bent / bent.sum(-1, keepdim=True)

    for i in range(K):
        for j in range(K):
            p, q = distribution(i), distribution(j)
            expected = (p * (p / q).log()).sum(-1).mean().item()
            assert found.divergence[i][j] == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_no_tokens_make_an_empty_record(cases: dict[str, Any]) -> None:
    found = cases["mos"].build().describe(torch.zeros(0, 6))
    assert found.tokens == 0
    assert found.shares == (0.0, 0.0, 0.0)
    assert found.prior_entropy == 0.0
