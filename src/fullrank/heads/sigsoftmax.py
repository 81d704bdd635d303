"""Sigsoftmax: p_v ~ exp(z_v) sigmoid(z_v), Kanai et al. 2018 (1805.10829). No parameters beyond softmax's.

log p is not linear in z, so its rank is not bounded by D. Not shift-invariant: logits far below zero are
sharpened twofold, so on a model trained with softmax start from a bias well above zero. Over a soft cap,
which bounds what a bias can do, a number that is added after the cap takes that part:

    p_v ~ exp(u_v) sigmoid(u_v + lift),   u = c tanh(z / c)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fullrank.heads.base import Head
from fullrank.heads.softmax import Softmax
from fullrank.heads.start import Start
from fullrank.ops import SIGSOFTMAX, CappedSigsoftmax, Pointwise, Softcap

MARGIN = 16.0
"""How far above zero the lowest score that is allowed for is lifted: log sigmoid(16) = -1e-7."""


class BentBySigmoid(Head):
    """A head whose scores are bent by z + log sigmoid(z), over a soft cap where one is set."""

    lift: nn.Parameter
    """[1], 0 at the start; only there over a soft cap."""
    precise: tuple[str, ...] = ("decoder.bias", "lift")
    offsets: ClassVar[tuple[float, ...]] = (0.0, 5.0, 10.0, 20.0, 40.0)

    @property
    def pointwise(self) -> Pointwise:
        if self.softcap is None:
            return SIGSOFTMAX
        return CappedSigsoftmax(self.lift, self.softcap)

    def cap_scores(self, cap: float) -> None:
        Softcap(cap)  # refuses what is no cap
        self.softcap, self.lift = cap, nn.Parameter(torch.zeros_like(self.decoder.weight[0, :1]))

    @classmethod
    def start_options(cls, start: Start, options: Mapping[str, Any]) -> dict[str, Any]:
        made = super().start_options(start, options)
        return made if start.softcap is not None else {**made, "bias": True}

    @torch.no_grad()
    def start_from(self, start: Start) -> None:
        """b is raised until log sigmoid(z) is nothing on every score that came up; then this is softmax. Over
        a soft cap the lift does that, for every score there can be."""
        super().start_from(start)
        if self.softcap is not None:
            self.lift.fill_(MARGIN + self.softcap)
            return
        given = torch.zeros(self.vocab) if start.bias is None else start.bias.float()
        # Other text may have lower scores than those seen, the more so the wider they spread.
        raised = given.to(start.weight.device) + (MARGIN + (start.high - start.low) / 2 - start.low)
        self.decoder.bias = nn.Parameter(raised)

    def pace(self, name: str, parameter: Tensor, sizes: Sequence[float]) -> float:
        return 1.0 if name == "lift" else super().pace(name, parameter, sizes)

    def bias_for(self, frequency: Tensor, lift: float) -> Tensor:
        """It is z where scores are large, 2 z where they are small, and curved between: `lift` says where."""
        return unsigmoid(frequency * math.exp(lift))


def unsigmoid(frequency: Tensor) -> Tensor:
    """z with exp(z) sigmoid(z) = p, of which z = log((p + sqrt(p^2 + 4 p)) / 2) is the only one."""
    return torch.log((frequency + torch.sqrt(frequency.square() + 4 * frequency)) / 2)


class Sigsoftmax(BentBySigmoid, Softmax):
    name = "sigsoftmax"
    worth_trying: ClassVar[bool] = True
