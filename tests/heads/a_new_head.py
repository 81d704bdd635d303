"""A head that the package does not know, as somebody else would write it: all there is of it is this file.

    p = sum_k prior_k softmax(exp(a_k) W x + b),   prior = softmax(G x),   a = 0 at the start

A mixture whose components are the state at temperatures of their own. They start equal, so that it starts as
plain softmax, and the gates part them. Parameters: V D + K H + K, + H D where H != D, + V with a bias.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from fullrank.heads import RowHead


class ScaledCopies(RowHead):
    name = "scaled_copies"
    mixture: ClassVar[bool] = True
    worth_trying: ClassVar[bool] = True

    def __init__(
        self, *, hidden: int, vocab: int, components: int = 3, width: int | None = None, bias: bool = False
    ) -> None:
        super().__init__(hidden=hidden, vocab=vocab, width=width, bias=bias)
        self.components = components
        square = self.width == hidden
        self.project: nn.Module = nn.Identity() if square else nn.Linear(hidden, self.width, bias=False)
        self.gate = nn.Linear(hidden, components, bias=False)
        self.log_scale = nn.Parameter(torch.zeros(components))

    def rows(self, states: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        row = self.project(states[0])[..., None, :]
        return row * self.log_scale.exp()[:, None], self.gate(states[0]).log_softmax(-1)
