"""Token weights, and the loss of a batch from those of its tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fullrank.ops.targets import Asked, Counted


class Weights(NamedTuple):
    """Weights of all tokens where they are not all 1: share [N] as given, `largest` of them.

    The gradients are made for weights of at most 1 and scaled once at the end: in fp16 a row times 1/N would
    be a subnormal number.
    """

    share: Tensor
    largest: Tensor

    @property
    def at_most_one(self) -> Tensor:
        return self.share / self.largest


def weights_of(
    asked: Asked, token_weight: Tensor | None, ignore_index: int, wide: torch.dtype
) -> Weights | None:
    targets = asked.targets
    if token_weight is None and not asked.captured:
        return None
    share = torch.ones_like(targets, dtype=wide) if token_weight is None else token_weight.to(wide)
    share = torch.where(targets != ignore_index, share, 0.0)
    largest = share.abs().amax() if share.numel() else share.new_ones(())
    return Weights(share, torch.where(largest == 0, 1.0, largest))


def reduced(
    nll: Tensor, counted: Counted, weights: Weights | None, *, mean: bool
) -> tuple[Tensor, Tensor | float]:
    """The loss, and the factor that the gradients still lack."""
    if weights is None:
        if not mean:
            return nll.sum(), 1.0
        count = counted.count or 0
        # Nothing counted, nothing lost: loss 0 and gradient 0, not 0/0.
        inverse = 1.0 / max(count, 1)
        return nll.mean() if count == nll.shape[0] > 0 else nll.sum() * inverse, inverse
    # A token that is given no weight counts nothing, even at an infinite loss.
    loss, factor = torch.where(weights.share == 0, 0.0, nll * weights.share).sum(), weights.largest.clone()
    if mean:
        mass = weights.share.sum()
        scale = torch.where(mass == 0, 0.0, 1.0 / mass)
        loss, factor = loss * scale, factor * scale
    return counted.spoil(loss), counted.spoil(factor)


def reduce_losses(nll: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
    """The loss of tokens with losses nll [n] and weights [n], None for 1 each; differentiable in nll.

    A token of weight 0 counts nothing, even at an infinite loss. Where nothing counts, or the weights sum to
    0, a mean is 0 with gradient 0, not 0/0. Ignored tokens are not among them, or have weight 0.
    """
    if weight is not None:
        weight = weight.to(nll.dtype)
        nll = torch.where(weight == 0, 0.0, nll) * weight
    if reduction == "none":
        return nll
    total = nll.sum()
    return total if reduction == "sum" else total * inverse_mass(nll, weight)


def inverse_mass(nll: Tensor, weight: Tensor | None) -> Tensor | float:
    """What makes a mean of a sum over tokens: one over the sum of their weights, 0 where that is 0."""
    if weight is None:
        return 1.0 / nll.numel() if nll.numel() else 0.0
    mass = weight.to(nll.dtype).sum()
    return torch.where(mass == 0, 0.0, 1.0 / mass)
