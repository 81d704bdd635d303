"""The record of the rank ladder."""

from __future__ import annotations

import dataclasses
import typing


@dataclasses.dataclass(frozen=True, kw_only=True)
class LadderRung:
    """One head on one synthetic language: what it could reach and what it reached."""

    head: str
    width: int
    components: int
    parameters: int
    least_rank: int
    """Least rank over the shift class of the learnt log-probabilities, on every context of the language."""
    kl: float
    """Mean over contexts of KL(truth || model), nats per token."""
    floor: float
    """The lowest KL found for any softmax of this width, with free context vectors, nats per token."""
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder:
    """The rank ladder: softmax below, at and above a known rank, and high-rank heads at the small width."""

    kind: typing.ClassVar[str] = "ladder"
    version: typing.ClassVar[int] = 2

    contexts: int
    vocabulary: int
    least_rank: int
    """Least rank of the language itself, by construction."""
    small_width: int
    steps: int
    entropy: float
    """Entropy of the truth, nats per token: the loss that no model goes under."""
    rungs: tuple[LadderRung, ...]
