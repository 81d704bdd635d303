"""Scores by token, densely and by the columns that a memory holds."""

from __future__ import annotations

import pytest
import torch

from fullrank.heads.memory import add_by_token, by_token, either


@pytest.mark.parametrize("size", [1.0, 300.0])
@pytest.mark.parametrize("entries", [0, 1, 9])
def test_a_base_with_the_memory_added(entries: int, size: float) -> None:
    """Repeated tokens, entries that are not seen, holes, and a base of probability 0."""
    generator = torch.Generator().manual_seed(entries)
    base = torch.randn(3, 6, generator=generator, dtype=torch.float64).log_softmax(1)
    base[0, 2] = -torch.inf
    scores = size * torch.randn(3, entries, generator=generator, dtype=torch.float64)
    tokens = torch.randint(-1, 4, (3, entries), generator=generator)
    seen = (torch.rand(3, entries, generator=generator) < 0.6) & (tokens >= 0)
    expected = either(base, by_token(scores, seen, tokens, 6))
    torch.testing.assert_close(add_by_token(base.clone(), scores, seen, tokens), expected)
