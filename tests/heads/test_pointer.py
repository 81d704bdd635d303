"""Softmax-CPR against a loop written from its definition; it must see no future id and start as softmax."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads.pointer import Pointer
from fullrank.heads.softmax import Softmax

H, V, D = 3, 12, 4
IDS = torch.tensor([[5, 2, 5, 5, 7], [9, 1, 0, 9, 1]])
"""Repetitions, id 0 seen in one sequence and not in the other."""


def build(*, warm: bool = True, **options: Any) -> Pointer:
    torch.manual_seed(0)
    head = Pointer(**{"hidden": H, "vocab": V, "width": D, "rerank": (5, 2), **options}).double()
    if warm:
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_()
    return head


def some_states(width: int = H) -> Tensor:
    return torch.randn(2, 5, width, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


@torch.no_grad()
def slow_log_probs(head: Pointer, states: Tensor, ids: Tensor) -> Tensor:
    """One position and one vocabulary entry at a time, with plain lists."""
    out = torch.zeros(*states.shape[:2], V, dtype=torch.float64)
    bias = [0.0] * V if head.decoder.bias is None else head.decoder.bias.tolist()

    def score(row: Tensor, v: int) -> float:
        return float(row @ head.decoder.weight[v]) + bias[v]

    for b in range(states.shape[0]):
        for t in range(states.shape[1]):
            state = states[b, t]
            logits = [score(head.base(state), v) for v in range(V)]
            for size, reranker in zip(head.sizes, head.rerankers, strict=True):
                for v in sorted(range(V), key=lambda v: -logits[v])[:size]:
                    logits[v] = score(reranker(state), v)
            for v in range(V):
                where = [i for i in range(t + 1) if int(ids[b, i]) == v]
                if where and head.seen is not None:
                    logits[v] = score(head.seen(state), v)
                if where and head.query is not None and head.key is not None:
                    query = head.query(state)
                    logits[v] += sum(float(query @ head.key(states[b, i])) for i in where) / len(where)
            total = math.log(sum(math.exp(logit) for logit in logits))
            out[b, t] = torch.tensor([logit - total for logit in logits], dtype=torch.float64)
    return out


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"hidden": D, "bias": True, "rerank": (6, 3, 1)},
    {"rerank": (), "pointer": False},
    {"rerank": (), "context": False},
    {"context": False, "bias": True},
    {"pointer": False},
    {"context": False, "pointer": False},
    {"rerank": (100, 20)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ids", [IDS, IDS.masked_fill(IDS == 5, -1)], ids=["ids", "with padding"])
def test_the_definition_entry_by_entry(options: dict[str, Any], ids: Tensor) -> None:
    head = build(**options)
    states = some_states(head.hidden)
    with torch.no_grad():
        expected = slow_log_probs(head, states, ids)
        torch.testing.assert_close(head(states, context=ids), expected, rtol=1e-9, atol=1e-9)
        for v in range(V):
            losses = head(states, torch.full((2, 5), v), context=ids, reduction="none")
            torch.testing.assert_close(losses, -expected[..., v], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", OPTIONS[:-1], ids=str)
def test_gradients_are_those_of_the_log_probabilities(options: dict[str, Any]) -> None:
    head = build(**options)
    states = some_states(head.hidden).requires_grad_()
    targets = torch.tensor([[0, 9, 5, -100, 7], [9, 2, -100, 4, 11]])
    counted = targets != -100
    leaves = [states, *head.parameters()]
    chosen = head(states, context=IDS)[counted].gather(1, targets[counted][:, None])
    plain = torch.autograd.grad(-chosen.mean(), leaves)
    loss = torch.autograd.grad(head(states, targets, context=IDS), leaves)
    for ours, theirs in zip(loss, plain, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_gradcheck_away_from_ties() -> None:
    head = build(bias=True)
    targets = torch.tensor([[0, 9, 5, 7, 7], [9, 2, 1, 4, 11]])

    def loss(states: Tensor, weight: Tensor, key: Tensor) -> Tensor:
        changed = {"decoder.weight": weight, "key.weight": key}
        return torch.func.functional_call(head, changed, (states, targets), {"context": IDS})

    leaves = [some_states(), head.decoder.weight, head.key.weight]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)


@pytest.mark.parametrize("hidden", [H, D])
def test_it_starts_as_plain_softmax_and_every_part_can_leave_the_start(hidden: int) -> None:
    head = build(warm=False, hidden=hidden, bias=True)
    plain = Softmax(hidden=hidden, vocab=V, width=D, bias=True).double()
    with torch.no_grad():
        head.decoder.weight.normal_()
        head.decoder.bias.normal_()
        plain.decoder.load_state_dict(head.decoder.state_dict())
        if hidden != D:
            plain.project.weight.copy_(head.base.weight)
    states = some_states(hidden)
    torch.testing.assert_close(head(states, context=IDS), plain(states), rtol=0, atol=1e-12)
    head(states, torch.randint(V, (2, 5)), context=IDS).backward()
    for part in (head.seen, head.query, *head.rerankers):
        assert float(part.weight.grad.abs().max()) > 1e-4


def test_no_position_sees_what_comes_after_it_or_another_sequence() -> None:
    head = build()
    states = some_states()
    before = head(states, context=IDS)
    later, moved = IDS.clone(), states.clone()
    later[0, 3] = 11
    moved[0, 3] += 1.0
    for after in (head(states, context=later), head(moved, context=IDS)):
        same = (before == after).all(-1)
        assert same.tolist() == [[True, True, True, False, False], [True] * 5]
    targets = torch.randint(V, (2, 5))
    losses = [head(states, targets, context=ids, reduction="none") for ids in (IDS, later)]
    assert (losses[0] == losses[1]).tolist() == [[True, True, True, False, False], [True] * 5]


def test_an_unseen_id_keeps_its_base_logit_up_to_the_normaliser() -> None:
    head, plain = build(rerank=()), build(rerank=(), context=False)
    plain.load_state_dict({name: value for name, value in head.state_dict().items() if "seen" not in name})
    with torch.no_grad():
        plain.query.weight.zero_()
        difference = head(some_states(), context=IDS) - plain(some_states(), context=IDS)
    for b, t in ((0, 0), (0, 4), (1, 2)):
        unseen = sorted(set(range(V)) - set(IDS[b, : t + 1].tolist()))
        shift = difference[b, t, unseen]
        torch.testing.assert_close(shift, shift[:1].expand_as(shift))


def test_what_padding_holds_does_not_matter() -> None:
    head = build()
    ids, targets = IDS.clone(), torch.randint(V, (2, 5))
    ids[:, 3:] = -1
    targets[:, 3:] = -100
    losses = []
    for filling in (0.0, math.nan):
        states = some_states()
        states[:, 3:] = filling
        head.zero_grad()
        losses.append(head(states, targets, context=ids))
        losses[-1].backward()
        for name, parameter in head.named_parameters():
            assert bool(parameter.grad.isfinite().all()), name
    assert float(losses[0].detach()) == float(losses[1].detach())


def test_drawing_and_the_most_probable_tokens() -> None:
    head = build()
    log_probs = head(some_states(), context=IDS)
    values, ids = head.top(some_states(), 3, context=IDS)
    torch.testing.assert_close(values, log_probs.gather(-1, ids).detach())
    drawn = head.sample(some_states(), context=IDS, generator=torch.Generator().manual_seed(0))
    assert drawn.shape == (2, 5)


def test_parameter_count() -> None:
    def count(**options: Any) -> int:
        return sum(parameter.numel() for parameter in build(**options).parameters())

    assert count() == V * D + H * D * (1 + 1 + 2 + 2)
    assert count(hidden=D, bias=True) == V * D + V + D * D * (1 + 2 + 2)
    assert count(rerank=(), pointer=False) == V * D + H * D * (1 + 1)
    assert count(rerank=(3,), context=False) == V * D + H * D * (1 + 2 + 1)


def test_arguments_and_options_that_cannot_be() -> None:
    head = build()
    with pytest.raises(FullrankError, match=r"context=input_ids, \[2, 5\]"):
        head(some_states())
    with pytest.raises(FullrankError, match=r"\[10, 3\].*\[batch, time, H\]"):
        head(some_states().flatten(0, 1), context=IDS.flatten())
    with pytest.raises(FullrankError, match=rf"ids up to {V}.*V={V}"):
        head(some_states(), context=IDS.masked_fill(IDS == 5, V))
    with pytest.raises(FullrankError, match=r"torch.float32"):
        head(some_states(), context=IDS.float())
    with pytest.raises(FullrankError, match="every part switched off"):
        build(context=False, pointer=False, rerank=())
    with pytest.raises(FullrankError, match="rerank=0"):
        build(rerank=(5, 0))
    alone = build(context=False, pointer=False)
    assert alone(some_states().flatten(0, 1)).shape == (10, V)
