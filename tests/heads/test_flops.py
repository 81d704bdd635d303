"""What a head says a token costs, against the products that torch counts in its forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fullrank.heads import build

N, H, V = 24, 16, 40


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softmax", {}), ("softmax", {"width": 8}), ("low_rank", {"rank": 4}), ("moc", {"components": 3}),
        ("mos", {"components": 3}), ("mos", {"components": 3, "width": 8}), ("moss", {"components": 2}),
        ("sigsoftmax", {}), ("plif", {}), ("doc", {"layers": ((H, 2), (8, 1))}),
    ],
    ids=str,
)  # fmt: skip
def test_a_third_of_it_is_counted_forward(name: str, options: dict[str, Any]) -> None:
    """Backward is two products for one of forward."""
    head = build(name, hidden=H, vocab=V, **options)
    states = [torch.randn(N, width) for width in head.state_widths]
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        head(states[0] if len(states) == 1 else states)
    # Mixing K contexts or probabilities under the prior is of lower order.
    assert counted.get_total_flops() == pytest.approx(N * head.flops() / 3, rel=0.05)


def test_a_trunk_scores_its_shared_part_once() -> None:
    trunk = build("trunk", hidden=H, vocab=V, components=5, private=4)
    own = 6 * (5 * 4 * H + 5 * H)
    assert trunk.flops() == 6 * (12 + 5 * 4) * V + own
    whole = build("mos", hidden=H, vocab=V, components=5)
    assert trunk.scored() < whole.scored() == 5 * H * V
