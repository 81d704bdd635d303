"""A step of a fit as one CUDA graph learns what a plain one does. Run with `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from fullrank.fit import loop, training
from fullrank.fit.setting import Setting, prepare
from fullrank.fit.states import Part, split
from fullrank.fit.trainee import Trainee
from fullrank.heads import Head, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

D, V = 64, 1000
PLAN = loop.Plan(rates=(0.03, 0.12), epochs=6, patience=2)


def setting_on_the_device() -> Setting:
    """A model that is half right: tokens from another softmax over the same states."""
    draw = torch.Generator().manual_seed(0)
    plain = build("softmax", hidden=D, vocab=V).requires_grad_(False)
    hidden = torch.randn(128, 64, D, generator=draw)
    with torch.no_grad():
        truth = torch.randn(V, D, generator=draw) / 4
        plain.decoder.weight.copy_(truth + torch.randn(V, D, generator=draw) / 4)
    targets = torch.multinomial((hidden.flatten(0, 1) @ truth.T).softmax(1), 1, generator=draw).view(128, 64)
    blocks = torch.arange(128)[:, None].expand(128, 64)
    part = Part(states=(hidden.cuda(),), targets=targets.cuda(), ids=targets.cuda(), blocks=blocks.cuda())
    return prepare(plain.cuda(), split(part), rows=V, exact=True, matrix=True, limit=1 << 26, seed=0)


def head_over(setting: Setting, name: str) -> Head:
    if name == "softmax":
        return setting.plain
    options = {"components": 3} if name in ("mos", "trunk") else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head = build(name, hidden=D, vocab=V, **options).cuda()
    head.decoder.weight = setting.plain.decoder.weight
    return head


@pytest.mark.parametrize("name", ["softmax", "mos", "trunk", "sigsoftmax"])
def test_a_fit_by_graphs_ends_where_a_plain_one_does(
    name: str, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = setting_on_the_device()
    head = head_over(setting, name)
    by_graphs, _ = training.train_in_turn(setting, head, PLAN, seed=0)
    # All but the race.
    assert replays[0] > by_graphs.curve[-1][0] // 2
    before = replays[0]
    monkeypatch.setattr(Trainee, "graph", False)
    plain, _ = training.train_in_turn(setting, head, PLAN, seed=0)
    assert replays[0] == before
    learnt = plain.curve[0][1] - plain.choose_loss
    assert learnt > 0.05
    # Scores leave a captured product as exponentials, and a plain one, of so few tokens, as bf16.
    assert by_graphs.choose_loss == pytest.approx(plain.choose_loss, abs=0.05 * learnt)
    assert float((by_graphs.losses - plain.losses).mean()) == pytest.approx(0, abs=0.05 * learnt)
