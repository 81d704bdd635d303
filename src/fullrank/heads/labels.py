"""What a head's loss is asked for, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fullrank.ops import TokenStats


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Targets, and how they count: as in `ops.mixture_nll`."""

    targets: Tensor
    """[...], one a hidden state."""
    reduction: str
    token_weight: Tensor | None
    """In the shape of the targets."""
    ignore_index: int
    stats: bool
    """Whether per-token statistics are asked for."""
    normaliser: bool = False
    """Whether the size of the normalisers is asked for."""


class Loss(NamedTuple):
    """What a head makes of labels."""

    value: Tensor
    """As the reduction has it; for "none" in the shape of the targets."""
    stats: TokenStats | None = None
    """Flat, where asked for."""
    log_prior: Tensor | None = None
    """[tokens, K] over the components of a mixture, from the pass that made the loss."""
    normaliser: Tensor | None = None
    """The mean of Σ_k prior_k l_k² over counted tokens, where asked for."""
