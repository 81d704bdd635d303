"""The contract of a body: token ids in, hidden states out, and what it carries from one batch to the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

Carried = tuple[Tensor, ...]
"""What a recurrent body hands to the next batch of the same texts: tensors [batch, ...]. Empty for others."""


class BodyOutput(NamedTuple):
    states: list[Tensor]
    """What a head reads: one [batch, time, width] a layer, the last layer first, dropout applied."""
    raw: Tensor
    """The last layer [batch, time, width] before its dropout."""
    carried: Carried


class Body(nn.Module, ABC):
    """Token ids [batch, time] -> hidden states, without a head."""

    embedding: nn.Embedding
    """The input embedding, which a head may be tied to."""
    widths: tuple[int, ...]
    """Of `BodyOutput.states`, the last layer first."""
    context: int | None
    """The most tokens that one call can see; None for a recurrent body, which sees all that it carries."""

    @abstractmethod
    def start(self, batch: int, device: torch.device) -> Carried:
        """What is carried into the first batch of `batch` texts."""

    @abstractmethod
    def forward(self, ids: Tensor, carried: Carried = ()) -> BodyOutput:
        """ids [batch, time]; an empty `carried` starts afresh."""
