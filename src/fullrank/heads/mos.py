"""Mixtures over one matrix: p = sum_k prior_k softmax(W context_k + b), Yang et al. 2018 (1711.03953).

    mos     mixture of softmaxes: rank not bounded by any multiple of D
    moss    the same with sigsoftmax components, Kanai et al. 2018 (1805.10829)
    moc     mixture of contexts: one softmax of the prior-weighted mean context; rank still bounded by D

`contexts.py` gives the two parametrisations. Parameters beyond softmax's matrix: K H D + K D + K H as
published; by default also the shared projection H D, none where H = D.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fullrank.heads.base import require_positive
from fullrank.heads.contexts import Contexts
from fullrank.heads.mixture import MixtureHead
from fullrank.heads.rows import Parts
from fullrank.heads.sigsoftmax import BentBySigmoid


class MixtureOfSoftmaxes(MixtureHead):
    name = "mos"
    worth_trying: ClassVar[bool] = True

    def __init__(
        self,
        *,
        hidden: int,
        vocab: int,
        components: int = 4,
        width: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        shared_dropout: bool = False,
        as_published: bool = False,
        centred: bool = True,
    ) -> None:
        super().__init__(hidden=hidden, vocab=vocab, width=width, bias=bias)
        require_positive(components=components)
        self.components = components
        self.contexts = Contexts(
            sources=((hidden, components),),
            width=self.width,
            as_published=as_published,
            centred=centred,
            dropout=dropout,
            shared_dropout=shared_dropout,
        )


class MixtureOfSigsoftmaxes(BentBySigmoid, MixtureOfSoftmaxes):
    name = "moss"


class MixtureOfContexts(MixtureOfSoftmaxes):
    name = "moc"
    worth_trying: ClassVar[bool] = False
    """No rank to gain: the control of mos."""

    def __init__(
        self, *, hidden: int, vocab: int, components: int = 4, width: int | None = None, bias: bool = False,
        dropout: float = 0.0, as_published: bool = False,
    ) -> None:  # fmt: skip
        # Centred, its one row would be P h whatever the components are.
        super().__init__(
            hidden=hidden, vocab=vocab, components=components, width=width, bias=bias, dropout=dropout,
            as_published=as_published, centred=False,
        )  # fmt: skip

    @property
    def row_count(self) -> int:
        return 1

    def rows(self, states: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        return self.parts(states).rows, None

    def parts(self, states: list[Tensor]) -> Parts:
        contexts, gate = self.contexts(states)
        row = torch.sum(gate.exp().to(contexts.dtype)[..., None] * contexts, dim=-2, keepdim=True)
        return Parts(row, torch.zeros_like(gate[..., :1]), gate)
