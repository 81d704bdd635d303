"""Direct output connection: a mixture of softmaxes whose contexts come from several layers.

Takase et al. 2018 (1808.10143). `layers` gives (width, contexts) for each layer read, the last layer first;
the prior reads the last layer alone, and one dropout mask serves all components. forward takes the states in
the same order. Parameters beyond softmax's matrix, as published: sum_l K_l (H_l D + D) + K H_1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from fullrank.errors import FullrankError
from fullrank.heads.contexts import Contexts
from fullrank.heads.mixture import MixtureHead
from fullrank.heads.start import Start


class DirectOutputConnection(MixtureHead):
    name = "doc"
    published: ClassVar[Mapping[str, Any] | None] = {
        "components": 20, "contexts": (15, 5), "dropout": 0.6, "balance": 0.001,
    }  # fmt: skip

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
        centred: bool = True,
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
            sources=layers,
            width=self.width,
            as_published=as_published,
            centred=centred,
            dropout=dropout,
            shared_dropout=True,
        )
        if as_published:
            for difference in self.contexts.differences:
                if isinstance(difference, nn.Linear):
                    nn.init.zeros_(difference.bias)

    @classmethod
    def options_for(cls, settings: Mapping[str, Any], widths: Sequence[int]) -> dict[str, Any]:
        """The last layer and the one below it, 3 contexts of the first for 1 of the second as published,
        unless the setting `contexts` gives their numbers."""
        components = settings["components"]
        lower = components // 4 if len(widths) > 1 else 0
        contexts = settings.get("contexts") or ((components - lower, lower) if lower else (components,))
        if len(contexts) > len(widths):
            raise FullrankError(
                f"doc got contexts={contexts} for {len(contexts)} layers and the body has {len(widths)}: "
                "give one number a layer, the last layer first"
            )
        layers = tuple(zip(widths, contexts, strict=False))
        return {**super().options_for(settings, widths), "layers": layers}

    @classmethod
    def start_options(cls, start: Start, options: Mapping[str, Any]) -> dict[str, Any]:
        made = super().start_options(start, options)
        return {**made, "layers": made.get("layers", [[start.widths[0], 3], [start.widths[1], 1]])}
