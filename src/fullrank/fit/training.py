"""Train a head on frozen states, and judge it: `loop` over what may move (`trainee`).

Where a file is given the end of a training goes into it, and the same call finds it there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from fullrank.fit import checkpoints, loop
from fullrank.fit.setting import Setting
from fullrank.fit.trainee import Trainee
from fullrank.heads import Head


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
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[Fitted, dict[str, Tensor]]:
    """A head, trained and judged, and its best weights, for `Trainee.load`.

    `file` is where the end is kept for a next process, with the best weights where these are `wanted`.
    """
    device = setting.parts.held_out.targets.device

    def make() -> Trainee:
        return Trainee(head, setting, seed).to(device)

    of = "" if file is None else _digest(setting, head, dataclasses.asdict(plan), wanted, seed=seed)
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
        checkpoints.finish(file, of, losses, facts, found.weights if wanted else None, divergences)
    return Fitted(losses=losses, divergences=divergences, **facts), found.weights


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
    return checkpoints.digest(setting.digest, head.name, modules, plans, seed, start.batch, *tensors)
