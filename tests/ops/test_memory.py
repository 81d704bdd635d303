"""The memory's two numbers against their definition, whatever the tiles, and what is out of sight."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.ops.memory import chunked as memory
from fullrank.ops.memory.chunked import memory_logsumexp
from fullrank.ops.memory.reference import memory_logsumexp as reference

Case = tuple[Tensor, Tensor, Tensor, Tensor]


def case(B: int, T: int, L: int, *, D: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64) -> Case:
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(B, T, D, generator=generator, dtype=torch.float64).to(dtype)
    keys = torch.randn(B, L, D, generator=generator, dtype=torch.float64).to(dtype)
    # A few tokens and some holes, so that there are repetitions and nothing at all.
    tokens = torch.randint(-1, 3, (B, L), generator=generator)
    targets = torch.randint(-1, 4, (B, T), generator=generator)
    return queries, keys, tokens, targets


def slow(
    queries: Tensor, keys: Tensor, tokens: Tensor, targets: Tensor, first: int | None, window: int | None
) -> list[list[tuple[float, float]]]:
    """(agreeing, every) one entry at a time."""
    out = []
    for b in range(len(queries)):
        rows = []
        for t in range(queries.shape[1]):
            agreeing = every = 0.0
            for i in range(keys.shape[1]):
                seen = first is None or (i < first + t and (window is None or i >= first + t - window))
                if seen and int(tokens[b, i]) >= 0:
                    term = math.exp(float(queries[b, t] @ keys[b, i]))
                    every += term
                    agreeing += term if int(tokens[b, i]) == int(targets[b, t]) else 0.0
            rows.append(tuple(math.log(x) if x else -math.inf for x in (agreeing, every)))
        out.append(rows)
    return out


@settings(max_examples=25, deadline=None)
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 6),
    L=st.integers(0, 9),
    first=st.one_of(st.none(), st.integers(0, 4)),
    window=st.one_of(st.none(), st.integers(1, 5)),
    workspace=st.sampled_from([1, 200, 700, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_the_definition_in_any_tiles(
    B: int, T: int, L: int, first: int | None, window: int | None, workspace: int, seed: int
) -> None:
    queries, keys, tokens, targets = case(B, T, L, seed=seed)
    window = None if first is None else window
    expected = torch.tensor(slow(queries, keys, tokens, targets, first, window), dtype=torch.float64)
    leaves = queries.requires_grad_(), keys.requires_grad_()
    upstream = torch.randn(2, B, T, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    gradients = []
    for found in (
        memory_logsumexp(*leaves, tokens, targets, first=first, window=window, workspace=workspace),
        reference(*leaves, tokens, targets, first=first, window=window),
    ):
        torch.testing.assert_close(torch.stack(found, -1), expected.view(B, T, 2), rtol=1e-10, atol=1e-10)
        # A position that sees nothing is -inf, and has no gradient to give.
        weighed = sum(
            torch.where(torch.isfinite(one), one, 0.0).mul(up).sum()
            for one, up in zip(found, upstream, strict=True)
        )
        gradients.append(torch.autograd.grad(weighed, leaves))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_gradcheck() -> None:
    queries, keys, tokens, targets = case(2, 4, 5, seed=3)

    def both(queries: Tensor, keys: Tensor) -> Tensor:
        found = memory_logsumexp(queries, keys, tokens, targets, first=1, window=3, workspace=300)
        return torch.stack([torch.where(torch.isfinite(one), one, 0.0) for one in found])

    assert torch.autograd.gradcheck(both, (queries.requires_grad_(), keys.requires_grad_()))


def test_nothing_seen_gives_no_nan() -> None:
    queries, keys, tokens, targets = case(1, 3, 0)
    queries.requires_grad_()
    agreeing, every = memory_logsumexp(queries, keys, tokens, targets)
    assert bool(torch.isneginf(agreeing).all())
    assert bool(torch.isneginf(every).all())
    torch.logaddexp(every, torch.zeros_like(every)).sum().backward()
    assert queries.grad is not None
    assert not bool(queries.grad.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_scores_in_narrow_types(dtype: torch.dtype) -> None:
    queries, keys, tokens, targets = case(1, 5, 8, D=64, dtype=dtype)
    queries = queries * 8
    exact = reference(queries.double(), keys.double(), tokens, targets, first=8)
    found = memory_logsumexp(queries, keys, tokens, targets, first=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = memory_logsumexp(queries, keys, tokens, targets, first=8)
    for ours, other, theirs in zip(found, again, exact, strict=True):
        assert ours.dtype == torch.float32
        assert float(theirs.max()) > 80
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours, other, rtol=0, atol=0)


def test_no_tile_is_larger_than_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, tokens, targets = case(2, 700, 900, dtype=torch.float32)
    sizes: list[int] = []
    product = memory._product

    def noted(left: Tensor, right: Tensor) -> Tensor:
        found = product(left, right)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(memory, "_product", noted)
    memory_logsumexp(queries, keys, tokens, targets, workspace=1 << 20)
    assert max(sizes) * 4 * memory.COPIES <= 1 << 20
    # Little of the future is scored: all in all 700 x 900, of which 700 x 350 are seen.
    assert 2 * 700 * 350 <= sum(sizes) < 1.25 * 2 * 700 * 350


def test_arguments_that_cannot_be() -> None:
    queries, keys, tokens, targets = case(2, 3, 4)
    with pytest.raises(FullrankError, match=r"\[2, 3, 3\].*\[2, 4, 2\].*one D"):
        memory_logsumexp(queries, keys[..., 1:], tokens, targets)
    with pytest.raises(FullrankError, match=r"tokens have shape \[2, 3\].*\[2, 4\], one a key"):
        memory_logsumexp(queries, keys, tokens[:, 1:], targets)
    with pytest.raises(FullrankError, match=r"float64.*whole numbers"):
        memory_logsumexp(queries, keys, tokens.double(), targets)
    with pytest.raises(FullrankError, match=r"window=0.*None for all"):
        memory_logsumexp(queries, keys, tokens, targets, window=0)
