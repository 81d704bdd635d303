"""A fresh head predicts the frequencies of the training text before it has seen a step."""

import numpy as np
import pytest
import torch

from fullrank.heads import build
from fullrank.train.build import start_at_unigram

COUNTS = np.array([0, 5, 80, 1, 3_000, 12, 250])


@pytest.mark.parametrize("lift", [0.0, 7.0, -3.0])
@pytest.mark.parametrize("name", ["softmax", "sigsoftmax", "mos", "moss"])
def test_the_bias_alone_gives_every_token_its_frequency(name: str, lift: float) -> None:
    head = build(name, hidden=8, vocab=len(COUNTS), bias=True)
    start_at_unigram(head, COUNTS, lift=lift)
    # A state of zero: rows of zero, scores that are the bias.
    predicted = head(torch.zeros(1, 8))[0].exp()
    wanted = torch.from_numpy((COUNTS + 1) / (COUNTS + 1).sum()).float()
    assert torch.allclose(predicted, wanted, rtol=2e-5, atol=0)


def test_a_lift_moves_scores_to_where_the_function_is_straight() -> None:
    low, high = (build("sigsoftmax", hidden=8, vocab=len(COUNTS), bias=True) for _ in range(2))
    start_at_unigram(low, COUNTS, lift=-20.0)
    start_at_unigram(high, COUNTS, lift=40.0)
    log_frequency = torch.from_numpy(np.log(COUNTS + 1.0)).float()
    apart = log_frequency - log_frequency[0]
    # f is 2 z far below zero and z far above.
    for head, slope in ((low, 2.0), (high, 1.0)):
        bias = head.decoder.bias.detach()
        assert torch.allclose(slope * (bias - bias[0]), apart, atol=1e-3)


def test_without_a_bias_nothing_changes() -> None:
    head = build("softmax", hidden=8, vocab=len(COUNTS))
    before = [parameter.clone() for parameter in head.parameters()]
    start_at_unigram(head, COUNTS)
    assert all(torch.equal(*pair) for pair in zip(before, head.parameters(), strict=True))
