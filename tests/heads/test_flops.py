"""The count of a head's operations, against the products that torch counts in its forward pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fullrank.heads import HEADS, Head, RowHead, build
from fullrank.heads.vocab_parallel import shard
from fullrank.ops import autograd

N, H, V = 24, 16, 120
MOS, TRUNK = {"components": 3}, {"components": 5, "private": 4}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("softmax", {}), ("softmax", {"width": 8}), ("low_rank", {"rank": 4}), ("moc", MOS),
    ("mos", MOS), ("mos", {**MOS, "width": 8}), ("moss", {"components": 2}), ("sigsoftmax", {}), ("plif", {}),
    ("doc", {"layers": ((H, 2), (8, 1))}), ("trunk", {**TRUNK, "dropout": 0.5}),
    ("mixtape", {"gate_width": 10}), ("mixtape", {"gate_width": 10, "frequent": 30}),
    ("facets", {}), ("facets", {"softmaxes": 1, "layers": 1, "positions": 1}),
    ("pointer", {}), ("pointer", {"rerank": ()}), ("pointer", {"rerank": (50,), "context": False}),
    ("cache", {}), ("cache", {"maps": True, "base": "mos", "base_options": MOS}),
    ("cache", {"base": "moc", "base_options": MOS}), ("cache", {"base": "trunk", "base_options": TRUNK}),
]  # fmt: skip


def of_last_two(*args: Tensor, **_: Any) -> int:
    """Operations of mm(a, b) and addmm(sum, a, b), also with out=, which torch's formulas do not take."""
    return 2 * args[-2].shape[0] * args[-2].shape[1] * args[-1].shape[1]


of_last_two._get_raw = True  # type: ignore[attr-defined]


def forward_flops(head: Head, *, targets: bool = False) -> int:
    """Of the products in one forward pass over a text of N tokens."""
    draw = torch.Generator().manual_seed(0)
    states = [torch.randn(1, N, width, generator=draw) for width in head.state_widths]
    ids = torch.randint(V, (1, N), generator=draw)
    aten = torch.ops.aten
    formulas = dict.fromkeys((aten.mm, aten.addmm_), of_last_two)
    with FlopCounterMode(display=False, custom_mapping=formulas) as counted, torch.no_grad():
        head(states[0] if len(states) == 1 else states, ids if targets else None, context=ids)
    return counted.get_total_flops()


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_a_third_of_it_is_counted_forward(name: str, options: dict[str, Any]) -> None:
    """Backward is two products for one of forward."""
    head = build(name, hidden=H, vocab=V, **options)
    # Mixing K contexts or probabilities under the prior is of lower order.
    assert forward_flops(head) == pytest.approx(N * head.flops(N) / 3, rel=0.02)


def test_every_registered_head_is_counted() -> None:
    assert {name for name, _ in OPTIONS} == set(HEADS)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_trunk_scores_its_shared_part_once_unless_it_drops(
    monkeypatch: pytest.MonkeyPatch, dropout: float
) -> None:
    # A counter makes the loss one opaque operator otherwise.
    monkeypatch.setattr(autograd, "_plain", lambda *tensors: True)
    trunk = build("trunk", hidden=H, vocab=V, **TRUNK, dropout=dropout)
    assert forward_flops(trunk, targets=True) == pytest.approx(N * trunk.flops() / 3, rel=0.02)
    whole = build("mos", hidden=H, vocab=V, components=5)
    assert trunk.scored() == (whole.scored() if dropout else (12 + 5 * 4) * V)


@pytest.mark.parametrize(("name", "options"), [("softmax", {}), ("mos", MOS), ("moc", MOS)], ids=str)
def test_a_split_head_costs_what_the_plain_one_does(name: str, options: dict[str, Any]) -> None:
    plain, split = (build(name, hidden=H, vocab=V, **options) for _ in range(2))
    split = shard(split)
    assert split.flops() == plain.flops()
    assert forward_flops(split, targets=True) == pytest.approx(N * split.flops() / 3, rel=0.02)


def test_a_head_of_several_rows_counts_them_all() -> None:
    """One that is defined elsewhere, and says nothing of its operations."""

    class Opposites(RowHead):
        components = 2

        def rows(self, states: list[Tensor]) -> tuple[Tensor, Tensor]:
            rows = torch.stack([states[0], -states[0]], dim=-2)
            return rows, rows.new_full(rows.shape[:-1], -math.log(2))

    head = Opposites(hidden=H, vocab=V)
    assert forward_flops(head) == pytest.approx(N * head.flops() / 3, rel=0.02)
