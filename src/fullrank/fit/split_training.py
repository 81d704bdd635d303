"""Splitting directions trained by themselves: where the fits of a mixture begin.

The directions of `splitting` are the steepest way off the saddle of equal components. In a language model a
few rare tokens make them steep and they lead nowhere, while a fit of all of a mixture's maps has hundreds of
times as many entries to learn from the same text. So M is trained first inside its basis, W and the mean row
where they are, by the same loop as everything (`loop`).
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fullrank.fit import checkpoints, loop, split_heads, splitting, training
from fullrank.fit.setting import Setting
from fullrank.fit.trainee import Trainee
from fullrank.heads.mixture import MixtureHead

RATE = 0.12
"""How far a step moves M as a whole, in the units of its basis: there one is as much as the model's own
distribution makes the scores spread. These units are the same for every model, so no rates are raced."""
AWAY = 0.1
"""Size of the random part that M begins with, in the same units."""
STEPS = 300
"""At most, or three passes where these are more."""


class Inside:
    """M of a split, as `loop` fits it."""

    def __init__(
        self, setting: Setting, head: MixtureHead, directions: splitting.Directions, scale: float, seed: int
    ) -> None:
        number = min(head.components - 1, len(directions.found))
        random = torch.Generator().manual_seed(seed)
        away = torch.randn(directions.inner[:number].shape, generator=random).to(directions.inner)
        away *= AWAY / away.flatten(1).norm(dim=1)[:, None, None]
        lengths = directions.lengths(number)[:, None, None]
        self.inner = nn.Parameter(scale * lengths * directions.inner[:number] + away)
        self.basis, self.codes = directions.basis, split_heads.codes(head.components)[:, :number].to(away)
        self.trainee = Trainee(self.head(head, self.inner), setting, seed).to(self.inner.device)
        self.trainee.requires_grad_(False)
        self.contexts = cast(MixtureHead, self.trainee.head).contexts
        self.difference: Any = self.contexts.differences[0]
        self.start = [part.detach().to(away) for part in head.contexts.differences[0].parameters()]
        # From here on no parameters of their own, but what M makes of them.
        del self.difference.weight, self.difference.bias
        self.difference.weight, self.difference.bias = self.start

    def head(self, head: MixtureHead, inner: Tensor) -> MixtureHead:
        """A head with its components apart by these coordinates."""
        return split_heads.moved(head, self.codes, *splitting.in_units(self.basis, inner.detach()))

    def _place(self) -> None:
        units = splitting.in_units(self.basis, self.inner)
        weight, bias = self.contexts.moved(self.codes, *units)
        self.difference.weight, self.difference.bias = self.start[0] + weight, self.start[1] + bias

    # What the loop asks (`loop.Learner`).

    @property
    def device(self) -> torch.device:
        return self.trainee.device

    @property
    def examples(self) -> int:
        return self.trainee.examples

    @property
    def batch(self) -> int:
        return self.trainee.batch

    @property
    def graph(self) -> bool:
        # The maps that a step makes of M stay in the head.
        return False

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [("inner", self.inner)]

    def groups(self, rate: float) -> list[dict[str, Any]]:
        return [{"params": [self.inner], "lr": rate / math.sqrt(self.inner[0].numel())}]

    def loss(self, chosen: Tensor) -> Tensor:
        self._place()
        return self.trainee.loss(chosen)

    @torch.no_grad()
    def choose_loss(self) -> float:
        self._place()
        return self.trainee.choose_loss()


def trained(
    setting: Setting,
    head: MixtureHead,
    directions: splitting.Directions,
    scale: float,
    *,
    seed: int = 0,
    file: Path | None = None,
) -> MixtureHead:
    """A head split along directions that are trained, from `scale` times those found and a little away from
    them, as the text for choosing likes it best. In `file` the end is kept for a next process."""
    fixed = dataclasses.replace(setting, matrix=False)

    def make() -> Inside:
        return Inside(fixed, head, directions, scale, seed)

    made = make()
    each = max(1, made.examples // made.batch)
    plan = loop.Plan(rates=(RATE,), epochs=max(training.LEAST_EPOCHS, -(-STEPS // each)))
    of = ""
    if file is not None:
        begun = {"inner": made.inner, **vars(directions.basis)}
        of = training.digest(fixed, head, dataclasses.asdict(plan), seed=seed, begun=begun)
    kept = None if file is None else checkpoints.read(file, of)
    if kept is not None and checkpoints.finished(kept) is not None:
        return made.head(head, checkpoints.best_of(kept)["inner"].to(made.device))
    found = loop.fit(make, plan, seed=seed, file=file, of=of)
    if file is not None:
        checkpoints.finish(file, of, found.facts(), best=found.weights)
    return made.head(head, found.weights["inner"])
