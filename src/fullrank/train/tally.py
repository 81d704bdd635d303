"""Sums since the last line about training, and the watch for losses that are no numbers.

A step whose loss or gradient is no number is left out of the weights and of these sums, and counted. Loss,
gradient norm and the longest row of such steps stay on the device, so that counting a step does not wait for
it; reading them does. A checkpoint between two lines keeps the sums, so that the first line after a resume is
that of a run which was never stopped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fullrank.ops.arguments import widest_dtype
from fullrank.train.batches import Cursor


class Tally:
    """What the steps since the last line add up to; `kept` is what a checkpoint had counted."""

    def __init__(self, machine: Any, kept: dict[str, float]) -> None:
        self.machine = machine
        self.last = Cursor()
        """Where in the data the last step was."""
        self._where: dict[int, Cursor] = {}
        """The same of all steps since the last look at their losses."""
        self._row = torch.zeros((), device=machine.device, dtype=torch.int64)
        """Steps in a row up to the last one that were left out."""
        self.begin()
        if kept:
            self.steps, self.tokens, self.seconds = int(kept["steps"]), int(kept["tokens"]), kept["seconds"]
            self._loss.fill_(kept["loss"])
            self._norm.fill_(kept["norm"])
            self._skipped.fill_(int(kept.get("skipped", 0)))
            self._row.fill_(int(kept.get("row", 0)))

    def begin(self) -> None:
        """Count from zero: a line has been written."""
        self.steps, self.tokens, self.seconds = 0, 0, 0.0
        device = self.machine.device
        widest = widest_dtype(device)
        self._loss, self._norm = (torch.zeros((), device=device, dtype=widest) for _ in range(2))
        self._skipped, self._longest = (torch.zeros((), device=device, dtype=torch.int64) for _ in range(2))
        self._ended = torch.full((), -1, device=device, dtype=torch.int64)

    def add(self, step: int, cursor: Cursor, *, loss: Tensor, norm: Tensor, tokens: int) -> None:
        """Count the step that follows `step` done ones, whose batch was at `cursor`."""
        good = torch.isfinite(norm) & torch.isfinite(loss)
        self._loss += torch.where(good, loss, 0.0)
        self._norm += torch.where(good, norm, 0.0)
        self._skipped += ~good
        self._row = torch.where(good, 0, self._row + 1)
        longer = self._row > self._longest
        self._longest = torch.where(longer, self._row, self._longest)
        self._ended = torch.where(longer, step, self._ended)
        self.steps += 1
        self.tokens += tokens
        self._where[step] = self.last = cursor

    def bad_row(self, most: int) -> tuple[int, Cursor] | None:
        """The step, counted from 1, that made more than `most` in a row whose loss or gradient was no number,
        and where its batch was."""
        if int(self._longest) <= most:
            self._where.clear()
            return None
        step = int(self._ended)
        return step + 1, self._where.get(step, self.last)

    @property
    def skipped(self) -> int:
        """Steps since the last line that were left out."""
        return int(self._skipped)

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
        counted = max(1, self.steps - self.skipped)
        return loss / counted, norm / counted

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
            "skipped": self.skipped,
            "row": int(self._row),
        }
