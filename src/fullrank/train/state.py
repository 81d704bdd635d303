"""What a checkpoint holds besides tensors: where a run stands, and what its evaluations have decided."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fullrank.errors import FullrankError
from fullrank.fit.budget import Watch
from fullrank.train.batches import Cursor


@dataclass
class State:
    """What a checkpoint holds besides tensors."""

    step: int = 0
    cursor: Cursor = dataclasses.field(default_factory=Cursor)
    epoch: float = 0.0
    tokens: int = 0
    stage: str = "train"
    stage_step: int = 0
    """The step at which the stage began."""
    history: list[float] = dataclasses.field(default_factory=list)
    """Validation losses of this stage."""
    averaged: int = 0
    """Iterates in the average; 0 where there is none."""
    best_loss: float | None = None
    best_step: int | None = None
    seconds: float = 0.0
    restarted: int = -1
    """The step at which a run that began in another had no optimiser to take over; -1 where it had."""
    skipped: int = 0
    """Steps left out because their gradient was no number."""
    watch: Watch = dataclasses.field(default_factory=Watch)
    """Of a run with a budget of seconds."""
    horizon: int = 0
    """Steps that its seconds first seemed to be, by which evaluations are spaced; 0 while nobody knows."""
    ended: str = ""
    """Why training is over; "" while it is not."""
    counts: dict[str, float] = dataclasses.field(default_factory=dict)
    """Sums since the last line about training (`tally.py`)."""

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "cursor": self.cursor.to_json()}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> State:
        try:
            return cls(
                **{**plain, "cursor": Cursor.from_json(plain["cursor"]), "watch": Watch(**plain["watch"])}
            )
        except (TypeError, KeyError) as error:
            raise FullrankError(
                f"a checkpoint of another version cannot be continued ({error}): continue with the fullrank "
                "that wrote it"
            ) from error
