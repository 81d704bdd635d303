"""PLIF: p = softmax(f(z)), f learned, monotone and piecewise linear, Ganea et al. 2019 (1902.08077).

The slopes are softplus(w), one a bin of [-limit, limit]; with spread=0 they all start at 1, so that f(z) is
z + limit and the head starts as softmax. The paper's w is normal with a spread of 1 on 100,000 bins; bins far
narrower than the scores' own rounding learn nothing, hence 1000 here.
Parameters: softmax's + bins.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads.base import require_positive
from fullrank.heads.softmax import Softmax
from fullrank.heads.start import Start
from fullrank.ops import PiecewiseLinear, Pointwise, Softcap

UNIT = math.log(math.e - 1.0)
"""softplus(UNIT) = 1"""


class Plif(Softmax):
    name = "plif"
    worth_trying: ClassVar[bool] = True
    precise: tuple[str, ...] = ("decoder.bias", "steepness")

    def __init__(
        self,
        *,
        hidden: int,
        vocab: int,
        width: int | None = None,
        bias: bool = False,
        bins: int = 1000,
        limit: float = 20.0,
        spread: float = 0.0,
    ) -> None:
        super().__init__(hidden=hidden, vocab=vocab, width=width, bias=bias)
        require_positive(bins=bins)
        if not 0 < limit < math.inf or not 0 <= spread < math.inf:
            raise FullrankError(
                f"plif got limit={limit} and spread={spread}, expected finite limit > 0 and spread >= 0"
            )
        self.limit = limit
        self.steepness = nn.Parameter(UNIT + spread * torch.randn(bins))

    @property
    def pointwise(self) -> Pointwise:
        return PiecewiseLinear(nn.functional.softplus(self.steepness), self.limit)

    @classmethod
    def start_options(cls, start: Start, options: Mapping[str, Any]) -> dict[str, Any]:
        """Bins over the scores that came up and a quarter more; for a soft cap as far as it still rises."""
        made = super().start_options(start, options)
        wide = 1.25 * max(abs(start.low), abs(start.high), 16.0)
        limit = math.ceil(wide if start.softcap is None else max(wide, 4.0 * start.softcap))
        return {**made, "limit": made.get("limit", float(limit))}

    @torch.no_grad()
    def start_from(self, start: Start) -> None:
        """Slopes 1, or those of the soft cap, which it then is nearly: piecewise linear is not tanh."""
        if start.softcap is not None:
            knots = torch.linspace(-self.limit, self.limit, len(self.steepness) + 1, dtype=torch.float64)
            slopes = Softcap(start.softcap)(knots).diff() / knots.diff()
            # The inverse of softplus.
            self.steepness.copy_(slopes + torch.log(-torch.expm1(-slopes)))
        super().start_from(dataclasses.replace(start, softcap=None))

    def starts_exactly(self, start: Start) -> bool:
        return start.softcap is None

    def pace(self, name: str, parameter: Tensor, sizes: Sequence[float]) -> float:
        return 1.0 if name == "steepness" else super().pace(name, parameter, sizes)
