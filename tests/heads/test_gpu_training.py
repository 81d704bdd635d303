"""200 steps on the kernels end where 200 steps on the reference path do. Run with `pytest -m gpu`.

A network of two layers reads two tokens and predicts a third, one of four that they determine. Both paths
start from the same weights and see the same batches; products run in bf16 under autocast. Rounding lets the
two drift apart, so single losses may differ by 0.03 nats, and their mean over the last 50 steps by 0.005.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullrank.heads import build, rows, trunk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

D, V, TOKENS, STEPS = 128, 2048, 2048, 200


def losses(name: str, options: dict[str, Any]) -> list[float]:
    """The loss of each step; the last entry is the loss of new tokens after training."""
    torch.manual_seed(0)
    embedding = nn.Embedding(V, D)
    network = nn.Sequential(nn.Linear(2 * D, 4 * D), nn.GELU(), nn.Linear(4 * D, D), nn.LayerNorm(D))
    head = build(name, hidden=D, vocab=V, **options)
    model = nn.ModuleList([embedding, network, head]).cuda()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss() -> Tensor:
        first = torch.randint(V, (TOKENS,), device="cuda")
        second = torch.randint(V, (TOKENS,), device="cuda")
        target = (7 * second + 4 * (first % 2) + torch.randint(4, (TOKENS,), device="cuda")) % V
        with torch.autocast("cuda", torch.bfloat16):
            return head(network(embedding(torch.stack([first, second], 1)).flatten(1)), target)

    curve = []
    for _ in range(STEPS):
        value = loss()
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        curve.append(value.detach())
    with torch.no_grad():
        curve.append(loss())
    return torch.stack(curve).tolist()


@pytest.mark.parametrize(
    ("name", "options"), [("softmax", {}), ("mos", {"components": 4}), ("trunk", {"components": 4})]
)
def test_kernels_train_as_the_reference_does(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = losses(name, options)
    monkeypatch.setattr(rows, "mixture_nll", partial(rows.mixture_nll, impl="reference"))
    monkeypatch.setattr(trunk, "trunk_nll", partial(trunk.trunk_nll, impl="reference"))
    reference = losses(name, options)
    assert reference[-1] < reference[0] - 0.5
    difference = torch.tensor(fast) - torch.tensor(reference)
    assert difference.abs().max() < 0.03
    assert difference[-50:].mean().abs() < 0.005
