"""Train a head on frozen states, and judge it: `loop` over what may move (`trainee`).

A head over W is trained in two parts: first what it adds to W, until that is flat, then W with it. W has V D
entries that each learn some noise, about 1/2N nats for N tokens; where it moves from the start, the text for
choosing ends a fit before the head has found what is there.

Where a file is given the end of a training goes into it, and the same call finds it there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fullrank.fit import checkpoints, loop
from fullrank.fit.setting import Setting
from fullrank.fit.trainee import Trainee
from fullrank.heads import Head

LEAST_EPOCHS = 3
"""Passes that any part of a fit has."""


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
    converged: bool
    """Whether the learning curve had become flat."""
    curve: tuple[tuple[int, float], ...]
    """(steps, nats on the text for choosing)."""
    divergences: Tensor | None = None
    """[held-out tokens] KL from the teacher in nats, over the whole vocabulary; None without one."""


def train(
    setting: Setting,
    head: Head,
    plan: loop.Plan,
    *,
    seed: int,
    file: Path | None = None,
    wanted: bool = True,
    start: Mapping[str, Tensor] | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[Fitted, dict[str, Tensor]]:
    """A head, trained and judged, and its best weights, for `Trainee.load`.

    `file` is where the end is kept for a next process, with the best weights where these are `wanted`;
    `start` has some of the weights to begin with, where not all are the head's own.
    """
    device = setting.parts.held_out.targets.device

    def make() -> Trainee:
        made = Trainee(head, setting, seed).to(device)
        made.load(start or {}, some=True)
        return made

    of = ""
    if file is not None:
        of = digest(setting, head, dataclasses.asdict(plan), wanted, seed=seed, begun=start or {})
    kept = None if file is None else checkpoints.read(file, of)
    facts = checkpoints.finished(kept)
    if kept is not None and facts is not None:
        progress(1.0)
        weights = {name: value.to(device) for name, value in checkpoints.best_of(kept).items()}
        facts["curve"] = tuple((step, loss) for step, loss in facts["curve"])
        divergences = kept[0]["divergences"].to(device) if setting.teacher is not None else None
        return Fitted(losses=kept[0]["losses"].to(device), divergences=divergences, **facts), weights
    found = loop.fit(make, plan, seed=seed, file=file, of=of, progress=progress)
    judged = make()
    judged.load(found.weights)
    trained = sum(parameter.numel() for _, parameter in judged.trained())
    losses, divergences = judged.exact_losses(setting.parts.held_out), judged.exact_divergences()
    facts = {**found.facts(), "trained": trained}
    if file is not None:
        best = found.weights if wanted else None
        checkpoints.finish(file, of, facts, losses=losses, divergences=divergences, best=best)
    return Fitted(losses=losses, divergences=divergences, **facts), found.weights


def train_in_turn(
    setting: Setting,
    head: Head,
    plan: loop.Plan,
    *,
    seed: int,
    file: Path | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[Fitted, dict[str, Tensor]]:
    """As `train`: first what a head adds to W, for half of the passes at most, then W as well, at the rate
    that the first part has raced."""
    fixed = dataclasses.replace(setting, matrix=False)
    alone = Trainee(head, fixed, seed)
    # The plain head is W itself. With an estimated normaliser a pass is dear, and few rows of W are trained.
    whole = head is setting.plain or setting.sampled is not None or not alone.trained()
    if not setting.matrix or whole:
        return train(setting, head, plan, seed=seed, file=file, progress=progress)
    each = max(1, alone.examples // alone.batch)
    half = dataclasses.replace(plan, epochs=max(LEAST_EPOCHS, plan.epochs // 2))
    first, weights = train(
        fixed, head, half, seed=seed, file=None if file is None else file.with_stem(f"{file.stem}-fixed"),
        progress=lambda share: progress(0.5 * share),
    )  # fmt: skip
    last = first.curve[-1][0]
    rest = max(LEAST_EPOCHS, plan.epochs - last // each)
    found, weights = train(
        setting, head, dataclasses.replace(plan, epochs=rest, rates=(first.rate,)), seed=seed, file=file,
        start=weights,
        progress=lambda share: progress(0.5 + 0.5 * share),
    )  # fmt: skip
    return dataclasses.replace(
        found, rate=first.rate, steps=first.steps + found.steps,
        curve=(*first.curve, *((last + steps, loss) for steps, loss in found.curve[1:])),
    ), weights  # fmt: skip


def digest(setting: Setting, head: Head, *plans: Any, seed: int, begun: Mapping[str, Tensor]) -> str:
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
    return checkpoints.digest(
        setting.digest, head.name, modules, plans, seed, start.batch, [*begun], *tensors, *begun.values()
    )
