"""Shared-trunk mixture: p = sum_k prior_k softmax(W c_k + b) with c_k = [trunk (D - r) ; private_k (r)].

The K rows of a token differ in their last r entries alone, so their scores share the trunk's product:
z_k = W_trunk trunk + W_private private_k, (D - r + K r) / D of one softmax's product instead of K.
Parameters beyond softmax's matrix, by default: K H r + K r + K H, + H D where H != D.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads.base import require_positive
from fullrank.heads.contexts import Contexts
from fullrank.heads.labels import Labels, Loss
from fullrank.heads.mixture import MixtureHead
from fullrank.heads.rows import reduction_of, shaped
from fullrank.ops import trunk_nll


class Trunk(MixtureHead):
    name = "trunk"
    worth_trying: ClassVar[bool] = True
    published: ClassVar[Mapping[str, Any] | None] = None

    def __init__(
        self,
        *,
        hidden: int,
        vocab: int,
        components: int = 4,
        private: int | None = None,
        width: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        as_published: bool = False,
        centred: bool = True,
    ) -> None:
        super().__init__(hidden=hidden, vocab=vocab, width=width, bias=bias)
        private = max(1, self.width // 4) if private is None else private
        require_positive(components=components, private=private)
        if private > self.width:
            raise FullrankError(f"trunk got private={private}, expected at most the row's width={self.width}")
        self.components, self.private = components, private
        self.contexts = Contexts(
            sources=((hidden, components),),
            width=self.width,
            private=private,
            as_published=as_published,
            centred=centred,
            dropout=dropout,
        )

    @classmethod
    def equal_size(cls, width: int) -> dict[str, int]:
        # Ten components.
        return {"width": width * 23 // 24, "private": width * 5 // 24}

    def scored(self) -> int:
        if self.softcap is not None or self.contexts.dropout.probability > 0.0:
            # Every component has its own row then: see `_loss`.
            return super().scored()
        return (self.width - self.private + self.components * self.private) * self.vocab

    def _loss(self, states: list[Tensor], labels: Labels, context: Tensor | None) -> Loss:
        # What the shared pass does not serve goes as whole rows: see `ops.trunk_nll`.
        plain = self.softcap is None and not labels.stats and not labels.normaliser
        if not plain or self.private == self.width or self.contexts.dropping or self.components == 1:
            return super()._loss(states, labels, context)
        common, owned, log_prior = self.contexts.parts(states)
        assert common is not None
        log_prior = log_prior.flatten(0, -2)
        loss = trunk_nll(
            common.flatten(0, -2), owned.flatten(0, -3), log_prior, self.decoder.weight,
            labels.targets.flatten(), bias=self.decoder.bias, ignore_index=labels.ignore_index,
            **reduction_of(labels),
        )  # fmt: skip
        return Loss(shaped(loss, labels), None, log_prior)
