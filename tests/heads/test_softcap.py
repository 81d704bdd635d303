"""Scores bent by a soft cap, in every head that leaves its scores straight; and another matrix in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullrank.errors import FullrankError
from fullrank.heads import HEADS, Head, build

H, V, CAP = 12, 37, 1.5
OPTIONS: dict[str, dict[str, Any]] = {
    "low_rank": {"rank": 5},
    "doc": {"layers": ((H, 2), (H, 1))},
    "mixtape": {"gate_width": 3, "frequent": 10},
    "facets": {"layers": 2, "positions": 2, "partitions": 3},
    "pointer": {"rerank": (4,)},
}
BENT = ("sigsoftmax", "moss", "plif")
STRAIGHT = sorted(set(HEADS) - set(BENT))


def made(name: str, **changes: Any) -> tuple[Head, list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    head = build(name, hidden=H, vocab=V, bias=True, **{**OPTIONS.get(name, {}), **changes}).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter))
    states = [torch.randn(2, 7, H, dtype=torch.float64) for _ in range(head.states)]
    return head, states, torch.randint(V, (2, 7))


@pytest.mark.parametrize("name", STRAIGHT)
def test_loss_and_log_probabilities_agree_under_a_cap(name: str) -> None:
    head, states, ids = made(name)
    head.requires_grad_(False)
    if name == "cache":
        head.memory_weight.fill_(-100.0)  # the memory's scores are not capped
    straight = head(states, context=ids)
    head.cap_scores(CAP)
    capped = head(states, context=ids)
    torch.testing.assert_close(capped.logsumexp(-1), torch.zeros(2, 7, dtype=torch.float64))
    # No two scores can be further apart than twice the cap, which they were.
    spread = capped.max(-1).values - capped.min(-1).values
    assert float(spread.max()) <= 2 * CAP + 1e-9
    assert float((straight.max(-1).values - straight.min(-1).values).max()) > 2 * CAP
    targets = torch.randint(V, (2, 7))
    loss = head(states, targets, context=ids, reduction="none")
    torch.testing.assert_close(loss, -capped.gather(-1, targets[..., None])[..., 0])


@pytest.mark.parametrize("name", ["mos", "moss"])
@pytest.mark.parametrize("cap", [0.0, -1.0, float("inf")])
def test_impossible_caps(cap: float, name: str) -> None:
    head, _, _ = made(name)
    with pytest.raises(FullrankError, match="positive finite"):
        head.cap_scores(cap)
    assert head.softcap is None


@pytest.mark.parametrize("name", sorted(set(HEADS) - {"mixtape"}))
@pytest.mark.parametrize("rows", [V - 5, V + 5])
def test_another_matrix(name: str, rows: int) -> None:
    # A reranker of more tokens than there are takes all of them.
    options = {"rerank": (V,)} if name == "pointer" else {}
    head, states, ids = made(name, **options)
    head.replace_decoder(nn.Linear(H, rows, dtype=torch.float64))
    ids = ids % rows
    found = head(states, context=ids)
    assert found.shape == (2, 7, rows)
    loss = head(states, ids, context=ids)
    torch.testing.assert_close(loss, -found.gather(-1, ids[..., None]).mean())


def test_matrices_that_do_not_fit() -> None:
    with pytest.raises(FullrankError, match=r"\[37, 11\] cannot replace W of shape \[37, 12\]"):
        made("mos")[0].replace_decoder(nn.Linear(H - 1, V))
    with pytest.raises(FullrankError, match="mixtape"):
        made("mixtape")[0].replace_decoder(nn.Linear(H, V + 1))


def test_heads_that_read_earlier_states() -> None:
    reading = {name for name in HEADS if made(name)[0].reads_time}
    assert reading == {"pointer", "facets", "cache"}
    assert not made("facets", positions=1)[0].reads_time
    assert not made("pointer", context=False, pointer=False)[0].reads_time
