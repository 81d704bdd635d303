"""PLIF: p = softmax(f(z)), f learned, monotone and piecewise linear, Ganea et al. 2019 (1902.08077).

The slopes are softplus(w), one a bin of [-limit, limit]; with spread=0 they all start at 1, so that f(z) is
z + limit and the head starts as softmax. The paper's w is normal with a spread of 1 on 100,000 bins; bins far
narrower than the scores' own rounding learn nothing, hence 1000 here.
Parameters: softmax's + bins.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import nn

from fullrank.errors import FullrankError
from fullrank.heads.base import require_positive
from fullrank.heads.softmax import Softmax
from fullrank.ops import PiecewiseLinear, Pointwise

UNIT = math.log(math.e - 1.0)
"""softplus(UNIT) = 1"""


class Plif(Softmax):
    name: ClassVar[str] = "plif"

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
