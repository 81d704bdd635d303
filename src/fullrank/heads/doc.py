"""Direct output connection: a mixture of softmaxes whose contexts come from several layers.

Takase et al. 2018 (1808.10143). `layers` gives (width, contexts) for each layer read, the last layer first;
the prior reads the last layer alone, and one dropout mask serves all components. forward takes the states in
the same order. Parameters beyond softmax's matrix, as published: sum_l K_l (H_l D + D) + K H_1.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads.base import RowHead
from fullrank.heads.contexts import Contexts


class DirectOutputConnection(RowHead):
    name: ClassVar[str] = "doc"

    def __init__(
        self,
        *,
        hidden: int,
        vocab: int,
        layers: tuple[tuple[int, int], ...] | None = None,
        width: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        as_published: bool = False,
    ) -> None:
        super().__init__(hidden=hidden, vocab=vocab, width=width, bias=bias)
        layers = ((hidden, 3), (hidden, 1)) if layers is None else tuple(layers)
        whole = all(len(layer) == 2 and all(isinstance(size, int) for size in layer) for layer in layers)
        if not layers or not whole or layers[0][0] != hidden or any(a < 1 or b < 0 for a, b in layers):
            raise FullrankError(
                f"doc got layers={layers}, expected whole (width, contexts) a layer, the last layer first "
                f"with width hidden={hidden}"
            )
        if sum(count for _, count in layers) < 1:
            raise FullrankError(f"doc got layers={layers}, expected at least one context in all")
        self.state_widths = tuple(source for source, _ in layers)
        self.components = sum(count for _, count in layers)
        self.contexts = Contexts(
            sources=layers, width=self.width, as_published=as_published, dropout=dropout, shared_dropout=True
        )
        if as_published:
            for difference in self.contexts.differences:
                if isinstance(difference, nn.Linear):
                    nn.init.zeros_(difference.bias)

    def rows(self, states: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        return self.contexts(states)
