"""Softmax: p = softmax(W x + b), with x the hidden state, or its projection where the widths differ.

Log-probabilities of rank at most D + 1, D + 2 with a bias; least rank over the shift class D, D + 1.
Parameters: V D, + V with a bias, + H D where H != D.
"""

from __future__ import annotations

from torch import Tensor, nn

from fullrank.heads.rows import RowHead


class Softmax(RowHead):
    name = "softmax"
    row_map = "project.weight"

    def __init__(self, *, hidden: int, vocab: int, width: int | None = None, bias: bool = False) -> None:
        super().__init__(hidden=hidden, vocab=vocab, width=width, bias=bias)
        self.project: nn.Module = (
            nn.Identity() if self.width == hidden else nn.Linear(hidden, self.width, bias=False)
        )

    @property
    def one_matrix(self) -> bool:
        return self.width == self.hidden and self.softcap is None

    def rows(self, states: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        return self.project(states[0])[..., None, :], None
