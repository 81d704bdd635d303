"""A model's output layer as arrays: logits = f(W h + b), whatever the model's code calls it.

`weight` [V, D] and `bias` [V] carry the model's logit scale already, in fp32; `pointwise` is the identity or
the soft cap. Rows from `tokens` on are padding that no tokenizer entry names: the model gives them
probability, so losses count them, but nobody misses them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from fullrank.ops import IDENTITY, Pointwise, linear_logprob

CHUNK_BYTES = 1 << 28
"""Default bound on one V-wide buffer."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OutputLayer:
    weight: Tensor
    bias: Tensor | None = None
    pointwise: Pointwise = IDENTITY
    tokens: int

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    @property
    def linear(self) -> bool:
        return self.pointwise is IDENTITY

    @torch.no_grad()
    def logits(self, hidden: Tensor, columns: Tensor | None = None) -> Tensor:
        """[N, V], or [N, columns]. Callers hand over as many states as they can hold."""
        weight = self.weight if columns is None else self.weight[columns]
        scores = hidden @ weight.T
        if self.bias is not None:
            scores += self.bias if columns is None else self.bias[columns]
        return self.pointwise(scores)

    @torch.no_grad()
    def losses(self, hidden: Tensor, targets: Tensor, workspace: int | None = None) -> Tensor:
        """Loss of each token in nats [N], without an N x V table."""
        target, normaliser = linear_logprob(
            hidden, self.weight, targets, bias=self.bias, pointwise=self.pointwise, workspace=workspace
        )
        return normaliser - target

    def pieces(self, hidden: Tensor, limit: int = CHUNK_BYTES) -> Iterator[Tensor]:
        """States a piece at a time, so that one V-wide fp32 table of a piece stays under the limit."""
        yield from hidden.split(max(1, limit // (4 * self.vocabulary)))
