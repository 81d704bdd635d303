"""Low rank: softmax whose rows pass an inner width r < D, p = softmax(W (B A h) + b).

The control for every claim about rank: the same W, tied or not, and a ceiling of r on the least rank. Where W
itself may be narrow, `softmax` with width=r is the same family at a lower cost.
Parameters: V D + H r + r D, + V with a bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads.base import require_positive
from fullrank.heads.rows import RowHead
from fullrank.heads.start import Start


class LowRank(RowHead):
    name = "low_rank"

    def __init__(
        self, *, hidden: int, vocab: int, rank: int, width: int | None = None, bias: bool = False
    ) -> None:
        super().__init__(hidden=hidden, vocab=vocab, width=width, bias=bias)
        require_positive(rank=rank)
        if rank > min(hidden, self.width):
            raise FullrankError(
                f"low_rank got rank={rank}, expected at most min(hidden, width)={min(hidden, self.width)}: "
                "a wider inner layer limits nothing"
            )
        self.down = nn.Linear(hidden, rank, bias=False)
        self.up = nn.Linear(rank, self.width, bias=False)

    def rows(self, states: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        return self.up(self.down(states[0]))[..., None, :], None

    @classmethod
    def options_for(cls, settings: Mapping[str, Any], widths: Sequence[int]) -> dict[str, Any]:
        made = super().options_for(settings, widths)
        # Half of what would limit nothing.
        rank = settings.get("rank") or max(1, min(widths[0], settings.get("width") or widths[0]) // 2)
        return {**made, "rank": rank}

    @classmethod
    def start_options(cls, start: Start, options: Mapping[str, Any]) -> dict[str, Any]:
        made = super().start_options(start, options)
        return {**made, "rank": made.get("rank", start.weight.shape[1])}

    @torch.no_grad()
    def start_from(self, start: Start) -> None:
        """B A is the projection on the r directions in which W is largest; at full rank, on all."""
        weight, rank = start.weight.float(), self.down.out_features
        directions = torch.linalg.eigh(weight.T @ weight).eigenvectors.flip(1)[:, :rank]
        if rank == self.width:
            directions = torch.eye(self.width)
        self.down.weight.copy_(directions.T)
        self.up.weight.copy_(directions)
        super().start_from(start)

    def starts_exactly(self, start: Start) -> bool:
        return self.down.out_features == self.width
