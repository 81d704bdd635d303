"""HistAlign's ranking loss against its definition, pair by pair, and where there is nothing to rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads import CacheHead, build
from fullrank.heads.alignment import alignment_loss

H, V = 3, 6
IDS = torch.tensor([[5, 2, 5, 4, 5, 2, 0], [1, 1, 0, 3, 1, 3, 1]])
TARGETS = torch.tensor([[2, 5, 4, 5, 2, 5, 2], [1, 0, 3, 1, -100, 1, 0]])
B, TIME = IDS.shape


def make(seed: int = 0, **options: Any) -> CacheHead:
    torch.manual_seed(seed)
    head = build("cache", hidden=H, vocab=V, **options).double()
    assert isinstance(head, CacheHead)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return head


def states(seed: int = 0, time: int = TIME) -> Tensor:
    return torch.randn(B, time, H, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow(
    head: CacheHead, hidden: Tensor, targets: Tensor, ids: Tensor, margin: float, pairs: str
) -> tuple[list[Tensor], list[int]]:
    """One position, one memory and one pair at a time, with the ranks of a plain sort."""
    losses, counts = [], []
    table = head.decoder.weight.detach()
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            target = int(targets[b, t])
            query = hidden[b, t] if head.query is None else head.query(hidden[b, t])
            memories = []
            for i in range(t):
                if head.window is not None and i < t - head.window:
                    continue
                token = int(ids[b, i + 1])
                if token < 0 or int(ids[b, i]) < 0 or int(ids[b, t]) < 0:
                    continue
                key = hidden[b, i] if head.key is None else head.key(hidden[b, i])
                likeness = float(
                    torch.cosine_similarity(table[max(target, 0)].float(), table[token].float(), 0)
                )
                memories.append((token != target, -likeness, i, query @ key / head.temperature, token))
            memories.sort(key=lambda one: one[:3])
            terms = [
                (other[3] - own[3] + margin * (j - i)).clamp_min(0.0)
                for i, own in enumerate(memories)
                for j, other in enumerate(memories)
                if target >= 0 and own[4] == target and other[4] != target and j > i
            ]
            total = torch.stack(terms).sum() if terms else hidden.sum() * 0.0
            losses.append(total / max(1, len(terms)) if pairs == "mean" else total)
            counts.append(len(terms))
    return losses, counts


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    margin=st.sampled_from([0.0, 1e-3, 0.5]),
    pairs=st.sampled_from(["mean", "sum"]),
    window=st.one_of(st.none(), st.integers(1, 4)),
    holes=st.booleans(),
)
def test_the_definition_pair_by_pair(
    seed: int, margin: float, pairs: str, window: int | None, holes: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1 if holes else 0, 4, (B, TIME), generator=generator)
    targets = torch.randint(0, 4, (B, TIME), generator=generator)
    head = make(seed, window=window, maps=True)
    hidden = states(seed).requires_grad_()
    each, counts = slow(head, hidden, targets, ids, margin, pairs)
    expected = torch.stack(each).view(B, TIME)
    options: dict[str, Any] = {"context": ids, "margin": margin, "pairs": pairs}
    found = alignment_loss(head, hidden, targets, reduction="none", **options)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    mean = alignment_loss(head, hidden, targets, **options)
    several = sum(count > 0 for count in counts)
    torch.testing.assert_close(mean, expected.sum() / max(1, several), rtol=1e-9, atol=1e-9)
    leaves = [hidden, head.query.weight, head.key.weight]
    upstream = torch.randn(B, TIME, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad((found * upstream).sum(), leaves)
    theirs = torch.autograd.grad((expected * upstream).sum(), leaves, allow_unused=True)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if other is None else other)


def test_margins_grow_with_rank() -> None:
    """With equal scores the loss of a position is the margin times the mean distance of the ranks."""
    head = make()
    hidden = torch.zeros(B, TIME, H, dtype=torch.float64)
    # At the end of the first text: memories 2 5 4 5 2 0, target 2: ranks 0 and 1, the others at 2 to 5.
    found = alignment_loss(head, hidden, TARGETS, context=IDS, margin=0.1, reduction="none")
    assert float(found[0, -1]) == pytest.approx(0.1 * (3.5 - 0.5))
    summed = alignment_loss(head, hidden, TARGETS, context=IDS, margin=0.1, reduction="none", pairs="sum")
    assert float(summed[0, -1]) == pytest.approx(0.1 * 3.0 * 8)


def test_memories_in_the_right_order_lose_nothing() -> None:
    head = make()
    hidden = torch.zeros(1, 4, H, dtype=torch.float64)
    hidden[0, 1, 0], hidden[0, 3, 0] = 5.0, 5.0
    ids, targets = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[-100, -100, -100, 2]])
    # Entries (h_0, 1), (h_1, 2), (h_2, 3): the query is like h_1, whose token is the target.
    assert float(alignment_loss(head, hidden, targets, context=ids)) == 0.0
    wrong = alignment_loss(head, hidden, targets.masked_fill(targets == 2, 3), context=ids)
    assert float(wrong) > 5.0


def test_copies_in_a_context_without_labels_are_credited() -> None:
    head = make()
    last = TARGETS.masked_fill(torch.arange(TIME) < TIME - 1, -100)
    each = alignment_loss(head, states(), TARGETS, context=IDS, reduction="none")
    found = alignment_loss(head, states(), last, context=IDS, reduction="none")
    torch.testing.assert_close(found[:, -1], each[:, -1])
    assert float(found[0, -1]) > 0
    assert not bool(found[:, :-1].any())


@pytest.mark.parametrize(
    ("targets", "ids"),
    [
        (torch.full_like(TARGETS, -100), IDS),
        (torch.full_like(TARGETS, 3), torch.full_like(IDS, 3)),
        (torch.full_like(TARGETS, 5), torch.full_like(IDS, 1)),
        (TARGETS, torch.full_like(IDS, -1)),
    ],
    ids=["nothing counts", "only positives", "never seen", "no memory"],
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_to_rank_is_zero_with_gradient_zero(targets: Tensor, ids: Tensor, reduction: str) -> None:
    head = make(maps=True)
    hidden = states().requires_grad_()
    loss = alignment_loss(head, hidden, targets, context=ids, reduction=reduction)
    assert not bool(loss.detach().any())
    loss.sum().backward()
    assert hidden.grad is not None
    assert not bool(hidden.grad.any())


def test_one_position_alone() -> None:
    hidden = states(time=1).requires_grad_()
    loss = alignment_loss(make(), hidden, TARGETS[:, :1], context=IDS[:, :1])
    assert float(loss.detach()) == 0.0
    loss.backward()


def test_pieces_and_a_carried_memory_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make(maps=True)
    whole = alignment_loss(head, states(), TARGETS, context=IDS, reduction="none")
    memory = head.remember(states()[:, :3], context=IDS[:, :3])
    for tokens in (1, 3, TIME, 2 * TIME):
        monkeypatch.setattr("fullrank.heads.alignment.piece_tokens", lambda device, columns, n=tokens: n)
        found = alignment_loss(head, states(), TARGETS, context=IDS, reduction="none")
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
        rest = alignment_loss(
            head, states()[:, 3:], TARGETS[:, 3:], context=IDS[:, 3:], memory=memory, reduction="none"
        )
        torch.testing.assert_close(rest, whole[:, 3:], rtol=1e-9, atol=1e-9)


def test_gradcheck() -> None:
    head = make(maps=True)

    def loss(hidden: Tensor, query: Tensor, key: Tensor) -> Tensor:
        changed = {"head.query.weight": query, "head.key.weight": key}
        return torch.func.functional_call(_Loss(head), changed, (hidden,))

    leaves = [states(), head.query.weight, head.key.weight]
    assert torch.autograd.gradcheck(
        loss, [leaf.detach().clone().requires_grad_() for leaf in leaves], fast_mode=True
    )


class _Loss(torch.nn.Module):
    def __init__(self, head: CacheHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        return alignment_loss(self.head, hidden, TARGETS, context=IDS, margin=0.05)


def test_training_on_it_brings_the_right_memories_up() -> None:
    """Two kinds of states in turn: the memory of the same kind must win, and at first does not."""
    torch.manual_seed(0)
    head = build("cache", hidden=4, vocab=8, maps=True)
    kinds = torch.eye(4)[:2]
    ids = torch.tensor([[6, 2, 3, 2, 3, 2, 3]])
    hidden = kinds[[0, 1, 0, 1, 0, 1, 0]][None]
    with torch.no_grad():
        head.query.weight.copy_(torch.eye(4)[[1, 0, 2, 3]])  # every state looks for the other kind
    targets = torch.tensor([[2, 3, 2, 3, 2, 3, 2]])
    optimiser = torch.optim.Adam(head.query.parameters(), lr=0.05)
    before = head.cache_only(hidden, context=ids)[0, -1].argmax()
    losses = []
    for _ in range(100):
        loss = alignment_loss(head, hidden, targets, context=ids, margin=0.1)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.05 * losses[0]
    assert int(before) == 3
    assert int(head.cache_only(hidden, context=ids)[0, -1].argmax()) == 2


def test_arguments_that_cannot_be() -> None:
    head = make()
    for options, message in [
        ({"reduction": "all"}, "reduction='all'.*mean, sum, none"),
        ({"pairs": "some"}, "pairs='some'.*mean, sum"),
        ({"margin": -1.0}, "margin=-1.0.*0 or more"),
        ({"embedding": torch.zeros(2, 3)}, r"\[2, 3\].*V=6"),
    ]:
        with pytest.raises(FullrankError, match=message):
            alignment_loss(head, states(), TARGETS, context=IDS, **options)
    with pytest.raises(FullrankError, match=r"context=input_ids, \[2, 7\]"):
        alignment_loss(head, states(), TARGETS, context=None)  # type: ignore[arg-type]
