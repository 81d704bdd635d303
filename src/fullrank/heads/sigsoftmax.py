"""Sigsoftmax: p_v ~ exp(z_v) sigmoid(z_v), Kanai et al. 2018 (1805.10829). No parameters beyond softmax's.

log p is not linear in z, so its rank is not bounded by D. Not shift-invariant: logits far below zero are
sharpened twofold, so on a model trained with softmax start from a bias well above zero. Over a soft cap,
which bounds what a bias can do, a number that is added after the cap takes that part:

    p_v ~ exp(u_v) sigmoid(u_v + lift),   u = c tanh(z / c)
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from fullrank.heads.base import Head
from fullrank.heads.softmax import Softmax
from fullrank.ops import SIGSOFTMAX, CappedSigsoftmax, Pointwise, Softcap


class BentBySigmoid(Head):
    """A head whose scores are bent by z + log sigmoid(z), over a soft cap where one is set."""

    lift: nn.Parameter
    """[1], 0 at the start; only there over a soft cap."""

    @property
    def pointwise(self) -> Pointwise:
        if self.softcap is None:
            return SIGSOFTMAX
        return CappedSigsoftmax(self.lift, self.softcap)

    def cap_scores(self, cap: float) -> None:
        Softcap(cap)  # refuses what is no cap
        self.softcap, self.lift = cap, nn.Parameter(torch.zeros_like(self.decoder.weight[0, :1]))


class Sigsoftmax(BentBySigmoid, Softmax):
    name: ClassVar[str] = "sigsoftmax"
