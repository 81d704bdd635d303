"""The pointwise function f that bends the scores of a head: a = f(z), p = softmax(a).

    identity            f(z) = z                                   softmax
    sigsoftmax          f(z) = z + log sigmoid(z)                  Kanai et al. 2018 (1805.10829)
    softcap             f(z) = cap * tanh(z / cap)                 logit soft-capping
    capped sigsoftmax   f(z) = u + log sigmoid(u + lift), u = cap * tanh(z / cap)
    piecewise linear    f(z) = (z - knot_i) s_i + delta sum_{m<i} s_m,   Ganea et al. 2019 (1902.08077)
                        i the bin of z among B bins of width delta on [-limit, limit], the outer bins
                        going on for ever; monotone because every slope s_i is positive

Each function has two faces. Calling it is the definition: out of place and differentiable. `evaluate_` is
what the fast path uses on a tile of scores: it may overwrite the scores and returns f and f' together, and
for a function with parameters what their gradient needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fullrank.errors import FullrankError


class Evaluated(NamedTuple):
    """f on one tile of scores."""

    value: Tensor
    """f(z); may share the memory of z."""
    slope: Tensor | None
    """f'(z); None where f' is 1 or was not asked for."""
    bins: Tensor | None = None
    """Piecewise linear only: the bin of every score."""
    offset: Tensor | None = None
    """The derivative of f(z) in what f trains: for piecewise linear, z - knot of its bin."""


class Pointwise(ABC):
    """A pointwise function. `kind`, `constant` and `trained` are all that an operator needs to rebuild it."""

    kind: ClassVar[str]
    tile_buffers: ClassVar[int] = 4
    """Buffers of a tile's size that a pass holds at once, at worst, in fp32: the tile, and for the mixture's
    statistics two of its size where K = 1; then f', and what making it takes."""

    @property
    def constant(self) -> float:
        """The one number that shapes f, where it has one."""
        return 0.0

    @property
    def trained(self) -> Tensor | None:
        """The parameters of f, where it has some."""
        return None

    @abstractmethod
    def __call__(self, scores: Tensor) -> Tensor:
        """f, differentiable."""

    @abstractmethod
    def evaluate_(self, scores: Tensor, *, gradient: bool) -> Evaluated:
        """f on a tile that may be overwritten, with f' if `gradient`."""

    def gradient_of_trained(self, sums: Tensor, moments: Tensor) -> Tensor:
        """The gradient of `trained` from sums over all scores, a bin at a time where there are bins.

        sums are of g, the gradient in f(z), and moments of g times the offset.
        """
        return moments


@dataclass(frozen=True)
class Identity(Pointwise):
    kind: ClassVar[str] = "identity"

    def __call__(self, scores: Tensor) -> Tensor:
        return scores

    def evaluate_(self, scores: Tensor, *, gradient: bool) -> Evaluated:
        return Evaluated(scores, None)


@dataclass(frozen=True)
class Sigsoftmax(Pointwise):
    """Not shift-invariant: far above zero it is softmax(z), far below zero it is softmax(2z)."""

    kind: ClassVar[str] = "sigsoftmax"
    tile_buffers: ClassVar[int] = 6

    def __call__(self, scores: Tensor) -> Tensor:
        # logsigmoid, never log(sigmoid): the latter is -inf in fp32 from z = -104 on.
        return scores + functional.logsigmoid(scores)

    def evaluate_(self, scores: Tensor, *, gradient: bool) -> Evaluated:
        slope = torch.sigmoid(scores).neg_().add_(2.0) if gradient else None
        return Evaluated(scores.add_(functional.logsigmoid(scores)), slope)


@dataclass(frozen=True)
class Softcap(Pointwise):
    """f(z) = cap tanh(z / cap)."""

    cap: float
    kind: ClassVar[str] = "softcap"
    tile_buffers: ClassVar[int] = 6

    def __post_init__(self) -> None:
        if not self.cap > 0 or self.cap == float("inf"):
            raise FullrankError(f"softcap got cap={self.cap}, expected a positive finite number")

    @property
    def constant(self) -> float:
        return self.cap

    def __call__(self, scores: Tensor) -> Tensor:
        return self.cap * torch.tanh(scores / self.cap)

    def evaluate_(self, scores: Tensor, *, gradient: bool) -> Evaluated:
        ratio = scores.div_(self.cap).tanh_()
        slope = torch.square(ratio).neg_().add_(1.0) if gradient else None
        return Evaluated(ratio.mul_(self.cap), slope)


@dataclass(frozen=True, eq=False)
class CappedSigsoftmax(Pointwise):
    """Sigsoftmax of soft-capped scores.

    A cap bounds scores, so no bias could lift them to where sigsoftmax is softmax: the lift [1] is added
    after the cap, and trained.
    """

    lift: Tensor
    cap: float
    kind: ClassVar[str] = "capped_sigsoftmax"
    # Both slopes, the offset, and the fp64 gradient with one temporary.
    tile_buffers: ClassVar[int] = 9

    def __post_init__(self) -> None:
        Softcap(self.cap)
        if self.lift.shape != (1,):
            raise FullrankError(f"the lift has shape {list(self.lift.shape)}, expected one number, [1]")

    @property
    def constant(self) -> float:
        return self.cap

    @property
    def trained(self) -> Tensor:
        return self.lift

    def __call__(self, scores: Tensor) -> Tensor:
        capped = Softcap(self.cap)(scores)
        return capped + functional.logsigmoid(capped + self.lift.to(scores.dtype))

    def evaluate_(self, scores: Tensor, *, gradient: bool) -> Evaluated:
        capped, slope, *_ = Softcap(self.cap).evaluate_(scores, gradient=gradient)
        lifted = capped + self.lift.to(scores.dtype)
        value = capped.add_(functional.logsigmoid(lifted))
        if slope is None:
            return Evaluated(value, None)
        falling = lifted.neg_().sigmoid_()
        return Evaluated(value, slope.addcmul_(slope, falling), None, falling)


@dataclass(frozen=True, eq=False)
class PiecewiseLinear(Pointwise):
    """Slopes [B], positive, one a bin. Their gradient comes back through whatever made them positive."""

    slopes: Tensor
    limit: float
    kind: ClassVar[str] = "plif"
    # Bins of 8 bytes, offsets, and the fp64 gradient that is summed over the bins with one temporary.
    tile_buffers: ClassVar[int] = 9

    def __post_init__(self) -> None:
        if self.slopes.ndim != 1 or self.slopes.numel() < 1:
            raise FullrankError(
                f"piecewise linear slopes have shape {list(self.slopes.shape)}, expected [bins], bins >= 1"
            )
        if not self.limit > 0 or self.limit == float("inf"):
            raise FullrankError(f"piecewise linear got limit={self.limit}, expected a positive finite number")

    @property
    def constant(self) -> float:
        return self.limit

    @property
    def trained(self) -> Tensor:
        return self.slopes

    @property
    def bins(self) -> int:
        return self.slopes.shape[0]

    @property
    def step(self) -> float:
        return 2.0 * self.limit / self.bins

    def _locate(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The bin of each score and its distance from that bin's left knot."""
        position = (scores + self.limit) / self.step
        # A NaN or infinite score must not become an index out of range; its value is lost in f, not here.
        bins = position.nan_to_num(0.0).clamp(0, self.bins - 1).long()
        return bins, scores - (bins.to(scores.dtype) * self.step - self.limit)

    def _rises(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        slopes = self.slopes.to(dtype)
        return slopes, (torch.cumsum(slopes, 0) - slopes) * self.step

    def __call__(self, scores: Tensor) -> Tensor:
        bins, offset = self._locate(scores)
        slopes, base = self._rises(scores.dtype)
        return offset * slopes[bins] + base[bins]

    def evaluate_(self, scores: Tensor, *, gradient: bool) -> Evaluated:
        bins, offset = self._locate(scores)
        slopes, base = self._rises(scores.dtype)
        slope = slopes[bins]
        value = torch.addcmul(base[bins], offset, slope, out=scores)
        return Evaluated(value, slope, bins, offset) if gradient else Evaluated(value, None)

    def gradient_of_trained(self, sums: Tensor, moments: Tensor) -> Tensor:
        """A slope acts on its own bin's scores through the offset, and lifts every later bin by delta."""
        later = sums.sum() - torch.cumsum(sums, 0)
        return moments + self.step * later


IDENTITY = Identity()
"""f(z) = z: softmax."""
SIGSOFTMAX = Sigsoftmax()
"""f(z) = z + log sigmoid(z)."""


def from_parts(kind: str, constant: float, trained: Tensor | None) -> Pointwise:
    """Rebuild a pointwise function inside an operator, whose arguments are tensors and plain values."""
    if kind == Identity.kind:
        return IDENTITY
    if kind == Sigsoftmax.kind:
        return SIGSOFTMAX
    if kind == Softcap.kind:
        return Softcap(constant)
    if kind == CappedSigsoftmax.kind and trained is not None:
        return CappedSigsoftmax(trained, constant)
    if kind == PiecewiseLinear.kind and trained is not None:
        return PiecewiseLinear(trained, constant)
    raise FullrankError(
        f"no pointwise function {kind!r}: expected identity, sigsoftmax, softcap, capped_sigsoftmax or plif"
    )
