"""Sigsoftmax: p_v ~ exp(z_v) sigmoid(z_v), Kanai et al. 2018 (1805.10829). No parameters beyond softmax's.

log p is not linear in z, so its rank is not bounded by D. Not shift-invariant: logits far below zero are
sharpened twofold, so on a model trained with softmax start from a bias well above zero.
"""

from __future__ import annotations

from typing import ClassVar

from fullrank.heads.softmax import Softmax
from fullrank.ops import SIGSOFTMAX, Pointwise


class Sigsoftmax(Softmax):
    name: ClassVar[str] = "sigsoftmax"

    @property
    def pointwise(self) -> Pointwise:
        return SIGSOFTMAX
