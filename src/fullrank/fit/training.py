"""Train a head on frozen states: the loop.

AdamW. Learning rates rise over the first steps and fall to zero over the planned epochs; the weights that did
best on the text for choosing are kept, and training ends early when `patience` epochs brought nothing. What
moves, and how fast, is in `trainee`.

Crash-safe where a file is given: every so often each run leaves all that its rest depends on beside that file
(`checkpoints`), and the end of the training goes into it. The same call goes on from there and ends with the
same numbers, since batches and masks are functions of seed and step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.fit import checkpoints
from fullrank.fit.setting import Setting
from fullrank.fit.trainee import PIECE, Trainee
from fullrank.heads import Head

BATCH = 256
"""Tokens a step."""
WARM_UP = 5
"""Steps."""
EVERY = 10.0
"""Seconds of training that a crash may cost."""
DEAREST = 0.1
"""Share of the time that checkpoints may take; where they are slow, they are rarer."""


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
    file: Path | None = None,
    wanted: bool = True,
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[Fitted, dict[str, Tensor]]:
    """Race the learning rates over one pass of the text, go on with the best, keep the best stopping point.

    The start is a stopping point too: a head that only gets worse is returned as it came. The second result
    are the best weights, for `Trainee.load`. `file` is where the end is kept for a next process, with the
    best weights where these are `wanted`.
    """
    device = setting.parts.held_out.targets.device
    of = "" if file is None else _digest(setting, head, rates, epochs, patience, wanted, seed=seed)
    kept = None if file is None else checkpoints.read(file, of)
    facts = checkpoints.finished(kept)
    if kept is not None and facts is not None:
        progress(1.0)
        best_weights = {name: value.to(device) for name, value in checkpoints.best_of(kept).items()}
        return Fitted(losses=kept[0]["losses"].to(device), **facts), best_weights
    beside = [
        None if file is None else file.with_name(f"{file.stem}-rate{place}{file.suffix}")
        for place in range(len(rates))
    ]
    runs = [_Run(setting, head, rate, epochs, seed, one, of) for rate, one in zip(rates, beside, strict=True)]
    planned = len(runs) + epochs
    for number, run in enumerate(runs, start=1):
        if run.steps < run.each:
            run.epoch()
        progress(number / planned)
    # The same after a crash: the best's loss can only have fallen since.
    best = min(runs, key=lambda run: run.best[0])
    del runs, run
    while best.steps < best.total and best.idle < patience:
        best.epoch()
        progress((len(rates) + best.steps // best.each - 1) / planned)
    fitted = best.finish()
    if file is not None:
        facts = {name: value for name, value in vars(fitted).items() if name != "losses"}
        checkpoints.finish(file, of, fitted.losses, facts, best.best[2] if wanted else None)
        for one in beside:
            assert one is not None
            one.unlink(missing_ok=True)
    progress(1.0)
    return fitted, best.best[2]


def _digest(setting: Setting, head: Head, *plans: Any, seed: int) -> str:
    """Of all that a training's numbers depend on."""
    start = Trainee(head, setting, seed)
    # W is in the setting's own, and large.
    known = head.decoder.weight is setting.plain.decoder.weight
    plain = (bool, int, float, str, tuple, type(None))
    modules: list[Any] = [
        [
            name,
            type(module).__name__,
            {key: one for key, one in vars(module).items() if isinstance(one, plain)},
        ]
        for name, module in start.head.named_modules()
    ]
    tensors = [parameter for name, parameter in start.trained() if not (known and name == "matrix")]
    return checkpoints.digest(setting.digest, head.name, modules, plans, seed, BATCH, *tensors)


class _Run:
    """One training: AdamW, a short warm-up, falling to zero over the epochs.

    It starts where its file has it, and where that is none at the beginning.
    """

    def __init__(
        self,
        setting: Setting,
        head: Head,
        rate: float,
        epochs: int,
        seed: int,
        file: Path | None,
        of: str,
    ) -> None:
        self.setting, self.rate, self.seed, self.file = setting, rate, seed, file
        self.of = f"{of} {rate!r}"
        self.trainee = Trainee(head, setting, seed).to(setting.parts.fit.targets.device)
        self.parameters: dict[str, nn.Parameter] = dict(self.trainee.trained())
        self.optimiser = torch.optim.AdamW(self.trainee.groups(rate), betas=(0.9, 0.99), weight_decay=0.0)
        self.peaks = [group["lr"] for group in self.optimiser.param_groups]
        fit = setting.parts.fit
        self.count = self.trainee.count(fit)
        time_steps = fit.targets.shape[1] if self.trainee.head.reads_time else 1
        self.size = min(max(1, BATCH // time_steps), self.count)
        self.each = self.count // self.size
        """Steps an epoch."""
        self.steps, self.total = 0, epochs * self.each
        self.idle = 0
        """Epochs since the best one."""
        self.due = time.monotonic() + EVERY
        kept = None if file is None else checkpoints.read(file, self.of)
        if kept is None:
            self.best = (self._choose_loss(), 0, checkpoints.weights(self.parameters))
        else:
            state, weights = checkpoints.resume(kept, self.parameters, self.optimiser)
            self.steps, self.idle = state["steps"], state["idle"]
            self.best = (state["best_loss"], state["best_steps"], weights)

    def epoch(self) -> None:
        """To the end of the epoch, from its beginning or wherever a checkpoint has put it."""
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps // self.each + 1):
            order = torch.randperm(self.count, generator=generator)
        for number in range(self.steps % self.each, self.each):
            # Nothing but a head's dropout draws from this.
            torch.manual_seed((1_000_003 * self.seed + self.steps) % (1 << 63))
            pace = min(1.0, (self.steps + 1) / WARM_UP) * (1 - self.steps / self.total)
            for group, peak in zip(self.optimiser.param_groups, self.peaks, strict=True):
                group["lr"] = peak * pace
            chosen = order[number * self.size : (number + 1) * self.size]
            chosen = chosen.to(self.setting.parts.fit.targets.device)
            loss = self.trainee.batch_losses(True, chosen).mean() + self.trainee.alignment(chosen)
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
            self.steps += 1
            # The last step of an epoch belongs to the look at the text for choosing.
            if self.steps % self.each:
                self._keep()
        found = self._choose_loss()
        self.idle += 1
        # A loss that is NaN is no improvement either.
        if found < self.best[0]:
            self.best, self.idle = (found, self.steps, checkpoints.weights(self.parameters)), 0
        self._keep()

    def finish(self) -> Fitted:
        loss, steps, weights = self.best
        self.trainee.load(weights)
        return Fitted(
            losses=self.trainee.exact_losses(self.setting.parts.held_out),
            choose_loss=loss,
            rate=self.rate,
            steps=steps,
            trained=sum(parameter.numel() for parameter in self.parameters.values()),
        )

    def _keep(self) -> None:
        begun = time.monotonic()
        if self.file is None or begun < self.due:
            return
        state = {
            "steps": self.steps,
            "idle": self.idle,
            "best_loss": self.best[0],
            "best_steps": self.best[1],
        }
        checkpoints.keep(self.file, self.of, self.parameters, self.optimiser, state, self.best[2])
        ended = time.monotonic()
        self.due = ended + max(EVERY, (ended - begun) / DEAREST)

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
