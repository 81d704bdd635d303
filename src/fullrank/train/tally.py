"""Sums since the last line about training, and the watch for losses that are no numbers.

Loss, gradient norm and the first bad step stay on the device, so that counting a step does not wait for it;
reading them does. A checkpoint between two lines keeps the sums, so that the first line after a resume is
that of a run which was never stopped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fullrank.train.batches import Cursor


class Tally:
    """What the steps since the last line add up to; `kept` is what a checkpoint had counted."""

    def __init__(self, machine: Any, kept: dict[str, float]) -> None:
        self.machine = machine
        self.last = Cursor()
        """Where in the data the last step was."""
        self._where: dict[int, Cursor] = {}
        """The same of all steps since the last look at their losses."""
        self.begin()
        if kept:
            self.steps, self.tokens, self.seconds = int(kept["steps"]), int(kept["tokens"]), kept["seconds"]
            self._loss.fill_(kept["loss"])
            self._norm.fill_(kept["norm"])

    def begin(self) -> None:
        """Count from zero: a line has been written."""
        self.steps, self.tokens, self.seconds = 0, 0, 0.0
        device = self.machine.device
        self._loss, self._norm = (torch.zeros((), device=device, dtype=torch.float64) for _ in range(2))
        self._bad = torch.full((), -1, device=device, dtype=torch.int64)

    def add(self, step: int, cursor: Cursor, *, loss: Tensor, norm: Tensor, tokens: int) -> None:
        """Count the step that follows `step` done ones, whose batch was at `cursor`."""
        self._loss += loss
        self._norm += norm
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        self._bad = torch.where((self._bad < 0) & bad, step, self._bad)
        self.steps += 1
        self.tokens += tokens
        self._where[step] = self.last = cursor

    def first_bad(self) -> tuple[int, Cursor] | None:
        """The first step whose loss or gradient was no number, counted from 1, and where its batch was."""
        step = int(self._bad)
        if step < 0:
            self._where.clear()
            return None
        return step + 1, self._where[step]

    def totals(self) -> tuple[float, float]:
        """Loss and gradient norm summed, mean over the processes, which call this together."""
        values = torch.stack([self._loss, self._norm])
        if self.machine.num_processes > 1:
            values = self.machine.reduce(values, "mean")
        loss, norm = values.tolist()
        return loss, norm

    def means(self) -> tuple[float, float]:
        """Loss and gradient norm of a step; the processes call this together."""
        loss, norm = self.totals()
        return loss / max(1, self.steps), norm / max(1, self.steps)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def to_json(self) -> dict[str, float]:
        """What a checkpoint keeps; the processes call this together."""
        loss, norm = self.totals()
        return {
            "loss": loss,
            "norm": norm,
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
