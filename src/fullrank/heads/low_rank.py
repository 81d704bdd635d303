"""Low rank: softmax whose rows pass an inner width r < D, p = softmax(W (B A h) + b).

The control for every claim about rank: the same W, tied or not, and a ceiling of r on the least rank. Where W
itself may be narrow, `softmax` with width=r is the same family at a lower cost.
Parameters: V D + H r + r D, + V with a bias.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads.base import RowHead, require_positive


class LowRank(RowHead):
    name: ClassVar[str] = "low_rank"

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
