"""Mixtures of contexts: what mos, moss, moc, trunk and doc share.

    rows and prior   those of `contexts.py`, `centred` or not

All components start equal, so such a mixture starts as a given output layer whatever its gates say. Gates
are drawn for states of unit size. Centred, they read states at unit size; otherwise `start_from` divides them
by the size of the states. From a given layer a mixture is not centred unless requested: its body may be
frozen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads.contexts import Contexts
from fullrank.heads.rows import RowHead
from fullrank.heads.start import Start

YANG = {"components": 15, "dropout": 0.29}
"""Yang et al. 2018 (1711.03953) on both texts."""


class MixtureHead(RowHead):
    """A head whose rows and prior are made by `self.contexts`."""

    contexts: Contexts
    mixture: ClassVar[bool] = True
    row_map: ClassVar[str] = "contexts.shared.weight"
    published: ClassVar[Mapping[str, Any] | None] = YANG

    def rows(self, states: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        return self.contexts(states)

    @classmethod
    def equal_size(cls, width: int) -> dict[str, int]:
        # Ten components.
        return {"width": width * 5 // 6}

    @classmethod
    def start_options(cls, start: Start, options: Mapping[str, Any]) -> dict[str, Any]:
        made = super().start_options(start, options)
        if made.pop("as_published", False):
            raise FullrankError(
                f"as_published squeezes the contexts of {cls.name} by tanh, so no start of it is the "
                "original: leave it out"
            )
        if "centred" in cls.options():
            made.setdefault("centred", False)
        return made

    @torch.no_grad()
    def start_from(self, start: Start) -> None:
        if start.size > 0 and not self.contexts.centred:
            self.contexts.gate.weight.div_(start.size)
        super().start_from(start)

    def redraw(self, size: float) -> None:
        self.contexts.redraw(size)

    def pace(self, name: str, parameter: Tensor, sizes: Sequence[float]) -> float:
        return self.contexts.pace(name.removeprefix("contexts."), parameter, sizes)
