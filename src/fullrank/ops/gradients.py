"""Which gradients a pass makes, and those that are sums over all rows: of W, b and the slopes of f.

A piecewise-linear f has one slope a bin. Its gradient is a histogram over the bins of the gradient in f(z):
per bin the sum, and the sum times the place in the bin, both in fp64. The lift of a capped sigsoftmax goes
the same way, with one bin for all scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fullrank.ops.pointwise import Evaluated, Pointwise


class Needs(NamedTuple):
    """Which gradients a pass makes."""

    rows: bool = False
    prior: bool = False
    weight: bool = False
    bias: bool = False
    slopes: bool = False

    @property
    def products(self) -> bool:
        """Whether the scores' gradient Q is needed at all."""
        return self.rows or self.weight or self.bias or self.slopes

    @property
    def rows_alone(self) -> bool:
        """W and everything that is summed over rows is frozen."""
        return self.rows and not (self.weight or self.bias or self.slopes)


@dataclass
class Gradients:
    """Sums over all rows, in fp32 or wider unless W's is of few products; None where not asked for.

    A bin of a piecewise-linear f takes in a share of all scores, one by one: fp32 would lose digits.
    """

    weight: Tensor | None
    bias: Tensor | None
    sums: Tensor | None
    """Per bin of f, the sum of the gradient in f(z)."""
    moments: Tensor | None
    unwritten: bool = False
    """W's holds nothing yet, not even zeros: the first product is written and not added."""

    def trimmed(self, V: int) -> Gradients:
        """Without padding, and with zeros where no product was."""
        if self.unwritten and self.weight is not None:
            self.weight.zero_()
        weight = None if self.weight is None else self.weight[:V]
        bias = None if self.bias is None else self.bias[:V]
        return Gradients(weight=weight, bias=bias, sums=self.sums, moments=self.moments)

    def slopes(self, pointwise: Pointwise) -> Tensor | None:
        if self.sums is None or self.moments is None:
            return None
        return pointwise.gradient_of_trained(self.sums, self.moments)


def empty_gradients(
    needs: Needs,
    weight: Tensor,
    pointwise: Pointwise,
    wide: torch.dtype,
    entries: int | None = None,
    *,
    unwritten: bool = False,
    weight_dtype: torch.dtype | None = None,
) -> Gradients:
    """Zeros; W's and b's with `entries` rows where they are padded for the products.

    `unwritten` leaves W's to the first product, which must be of all entries. W's is `wide` unless told
    otherwise.
    """
    V, D = weight.shape
    entries = V if entries is None else entries

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=wide, device=weight.device)

    trained = pointwise.trained
    slopes, bins = needs.slopes and trained is not None, 0 if trained is None else len(trained)
    return Gradients(
        weight=(
            None
            if not needs.weight
            else torch.empty(entries, D, dtype=weight_dtype or wide, device=weight.device)
            if unwritten
            else zeros(entries, D)
        ),
        bias=zeros(entries) if needs.bias else None,
        sums=zeros(bins).double() if slopes else None,
        moments=zeros(bins).double() if slopes else None,
        unwritten=unwritten and needs.weight,
    )


def add_slope_gradient(gradients: Gradients, bent: Evaluated, upstream: Tensor) -> None:
    """Histogram the gradient in f(z) over the bins of f; overwrites upstream, in fp64."""
    if gradients.sums is None or gradients.moments is None or bent.offset is None:
        return
    if bent.bins is None:
        gradients.moments.add_(upstream.mul_(bent.offset).sum())
        return
    bins = bent.bins.flatten()
    gradients.sums.index_add_(0, bins, upstream.flatten())
    gradients.moments.index_add_(0, bins, upstream.mul_(bent.offset).flatten())
