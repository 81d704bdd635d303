"""Train a head on frozen states: the loop.

AdamW. Learning rates rise over the first steps and fall to zero over the planned epochs; the weights that did
best on the text for choosing are kept, and training ends early when `patience` epochs brought nothing. What
moves, and how fast, is in `trainee`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fullrank.heads import Head
from fullrank.hf.trainee import PIECE, Setting, Trainee

BATCH = 256
"""Tokens a step."""
WARM_UP = 5
"""Steps."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """A head after its training."""

    losses: Tensor
    """[held-out tokens] nats, over the whole vocabulary."""
    choose_loss: float
    rate: float
    steps: int
    trained: int
    """Parameters."""


def train(
    setting: Setting,
    head: Head,
    *,
    rates: Sequence[float],
    epochs: int,
    patience: int,
    seed: int,
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[Fitted, Trainee]:
    """Race the learning rates over one pass of the text, go on with the best, keep the best stopping point.

    The start is a stopping point too: a head that only gets worse is returned as it came. The second result
    holds the best weights.
    """
    runs = [_Run(setting, head, rate, epochs, seed) for rate in rates]
    planned = len(runs) + epochs
    for number, run in enumerate(runs, start=1):
        run.epoch()
        progress(number / planned)
    best = min(runs, key=lambda run: run.best[0])
    del runs
    for number in range(epochs - 1):
        if best.idle >= patience:
            break
        best.epoch()
        progress((len(rates) + number + 1) / planned)
    progress(1.0)
    return best.finish()


class _Run:
    """One training: AdamW, a short warm-up, falling to zero over the epochs."""

    def __init__(self, setting: Setting, head: Head, rate: float, epochs: int, seed: int) -> None:
        self.setting, self.rate = setting, rate
        self.trainee = Trainee(head, setting, seed).to(setting.parts.fit.targets.device)
        self.optimiser = torch.optim.AdamW(self.trainee.groups(rate), betas=(0.9, 0.99), weight_decay=0.0)
        self.peaks = [group["lr"] for group in self.optimiser.param_groups]
        self.generator = torch.Generator().manual_seed(seed)
        fit = setting.parts.fit
        self.count = self.trainee.count(fit)
        time = fit.targets.shape[1] if self.trainee.head.reads_time else 1
        self.size = min(max(1, BATCH // time), self.count)
        self.steps, self.total = 0, epochs * (self.count // self.size)
        self.idle = 0
        """Epochs since the best one."""
        self.best = (self._choose_loss(), 0, self._copy())

    def epoch(self) -> None:
        order = torch.randperm(self.count, generator=self.generator)
        for start in range(0, self.count - self.size + 1, self.size):
            pace = min(1.0, (self.steps + 1) / WARM_UP) * (1 - self.steps / self.total)
            for group, peak in zip(self.optimiser.param_groups, self.peaks, strict=True):
                group["lr"] = peak * pace
            chosen = order[start : start + self.size].to(self.setting.parts.fit.targets.device)
            loss = self.trainee.batch_losses(True, chosen).mean()
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
            self.steps += 1
        found = self._choose_loss()
        self.idle += 1
        # A loss that is NaN is no improvement either.
        if found < self.best[0]:
            self.best, self.idle = (found, self.steps, self._copy()), 0

    def finish(self) -> tuple[Fitted, Trainee]:
        loss, steps, state = self.best
        with torch.no_grad():
            for name, parameter in self.trainee.trained():
                parameter.copy_(state[name])
        fitted = Fitted(
            losses=self.trainee.exact_losses(self.setting.parts.held_out),
            choose_loss=loss,
            rate=self.rate,
            steps=steps,
            trained=sum(parameter.numel() for _, parameter in self.trainee.trained()),
        )
        return fitted, self.trainee

    @torch.no_grad()
    def _choose_loss(self) -> float:
        choose = self.setting.parts.choose
        total = 0.0
        self.trainee.head.eval()
        size = max(1, PIECE // choose.targets.shape[1]) if self.trainee.head.reads_time else PIECE
        for part in torch.arange(self.trainee.count(choose), device=choose.targets.device).split(size):
            total += float(self.trainee.batch_losses(False, part).double().sum())
        self.trainee.head.train()
        return total / len(choose)

    def _copy(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.trainee.trained()}
