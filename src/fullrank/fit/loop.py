"""The loop that fits: a race of learning rates, a steady phase until the curve is flat, a fall to zero.

Whatever can say which of its parameters move and what a batch loses (`Learner`) is trained by it: heads on
stored states, the closest softmax to a mixture, a body with its head.

    race      every learning rate of the grid gets some steps from the same start, a pass over the text at
              most. Of those that are level the largest wins: a mixture leaves its saddle slowly, and the
              rate that has hardly moved in these steps would else win by not moving. While the winner stands
              at an end of the grid the grid grows there: its edge is never the answer unless that is as far
              as it goes
    steady    the best goes on at that rate until `patience` looks at the text for choosing in a row brought
              less than `tolerance` nats together, or the passes are used up
    fall      from the best weights so far the rate falls to zero, over half as long as these took

A look is at the mean of the weights over the second half of the steps before it: the mean is where the steps
wander about, and says what a rate has learnt and not how much it shakes. The best of these means is kept; the
start is one too, so that what only gets worse comes back as it
came. `converged` says that the steady phase ended by the curve and not by the number of passes.

Crash-safe where a file is given: at a look, every so often, each run leaves all that its rest depends on
beside that file (`checkpoints`). The same call goes on from there and ends with the same numbers, since
batches and masks are functions of seed and step.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fullrank.fit import captured, checkpoints
from fullrank.fit.optimiser import set_rate
from fullrank.models.randomness import restored_randomness, seed_generators

WARM_UP = 5
"""Steps."""
RACE = 240
"""Steps of the race, at most."""
STEP_RATIO = 4.0
"""Between neighbouring learning rates where a grid grows."""
GROWTH = 3
"""How often it may grow."""
LEVEL = 1e-3
"""Nats per token within which two rates are level after the race."""
EVERY = 10.0
"""Seconds of training that a crash may cost."""
DEAREST = 0.1
"""Share of the time that checkpoints may take; where they are slow, they are rarer."""


class Learner(Protocol):
    """What can be fitted."""

    @property
    def examples(self) -> int:
        """What batches are chosen from."""

    @property
    def batch(self) -> int:
        """Examples a step."""

    @property
    def device(self) -> torch.device: ...

    @property
    def graph(self) -> bool:
        """Whether a step may be one CUDA graph (`captured`)."""

    def trained(self) -> list[tuple[str, nn.Parameter]]: ...

    def groups(self, rate: float) -> list[dict[str, Any]]:
        """Parameters with their learning rates."""

    def loss(self, chosen: Tensor) -> Tensor:
        """The mean loss of some examples, differentiable."""

    def choose_loss(self) -> float:
        """Nats per token on the text for choosing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How long a fit goes on."""

    rates: tuple[float, ...]
    """The grid to begin with, rising."""
    epochs: int
    """Passes over the text, at most, after the race."""
    patience: int = 2
    tolerance: float = 5e-4
    """Nats per token that `patience` looks must bring together."""
    clip: float = math.inf
    """Largest norm of the gradient of all parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """The end of a fit."""

    choose_loss: float
    rate: float
    steps: int
    """Of the best weights."""
    converged: bool
    curve: tuple[tuple[int, float], ...]
    """(steps, nats on the text for choosing) at every look of the run that was best."""
    weights: dict[str, Tensor]
    """The best."""

    def facts(self) -> dict[str, Any]:
        """Everything but the weights, as JSON has it."""
        fields = dataclasses.fields(self)
        return {field.name: getattr(self, field.name) for field in fields if field.name != "weights"}


def fit(
    make: Callable[[], Learner],
    plan: Plan,
    *,
    seed: int,
    file: Path | None = None,
    of: str = "",
    progress: Callable[[float], None] = lambda share: None,
) -> Fit:
    """Fit what `make` makes, always the same start. `file` is what checkpoints stand beside, `of` the digest
    of all that the fit depends on."""
    planned, done = len(plan.rates) + plan.epochs, 0
    device = make().device
    beside: list[Path] = []

    def begin(rate: float) -> Run:
        nonlocal done
        place = None if file is None else file.with_name(f"{file.stem}-rate{rate:g}{file.suffix}")
        beside.extend([] if place is None else [place])
        run = Run(make(), rate, plan, seed=seed, file=place, of=f"{of} {rate!r}")
        if run.steps < min(RACE, run.each):
            run.advance(min(RACE, run.each))
        done += 1
        progress(min(1.0, done / planned))
        return run

    with restored_randomness(device), fast_products(device):
        waiting = list(plan.rates)
        raced: dict[float, float] = {}
        best: Run | None = None
        while waiting:
            run = begin(waiting.pop(0))
            raced[run.rate] = run.raced
            # Only the best is kept: a run can be as large as a model. The same after a crash, since what the
            # race said of a run does not change.
            level = min(raced.values()) + LEVEL
            if best is None or (run.raced <= level and (run.rate > best.rate or best.raced > level)):
                best = run
            del run
            grown = len(raced) - len(plan.rates)
            if not waiting and len(plan.rates) > 1 and grown < GROWTH:
                # Where the start is as good as anything, smaller steps lead nowhere either.
                if best.rate == min(raced) and abs(best.raced - best.curve[0][1]) > plan.tolerance:
                    waiting.append(best.rate / STEP_RATIO)
                elif best.rate == max(raced):
                    waiting.append(best.rate * STEP_RATIO)
        assert best is not None
        # Not in the race, whose steps are few.
        best.update.captures = best.learner.graph
        while not best.done:
            best.epoch()
            done += 1
            progress(min(1.0, done / planned))
    for place in beside:
        place.unlink(missing_ok=True)
    progress(1.0)
    return best.found()


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Products in TF32 while a fit goes on, three times as fast on a GPU: steps are noisier than rounding.
    What is judged is judged in fp32."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def updates(learner: Learner, optimiser: torch.optim.Optimizer, clip: float) -> captured.Update:
    """A step on some examples; knows no run, which would else never be let go."""

    def update(chosen: Tensor) -> tuple[Tensor, ...]:
        optimiser.zero_grad()
        learner.loss(chosen).backward()
        if math.isfinite(clip):
            nn.utils.clip_grad_norm_((parameter for _, parameter in learner.trained()), clip)
        optimiser.step()
        return ()

    return update


class Run:
    """One learning rate's run; it starts where its file has it, and where that is none at the beginning."""

    def __init__(
        self, learner: Learner, rate: float, plan: Plan, *, seed: int, file: Path | None = None, of: str = ""
    ) -> None:
        self.learner, self.rate, self.plan, self.seed = learner, rate, plan, seed
        self.file, self.of = file, of
        self.parameters: dict[str, nn.Parameter] = dict(learner.trained())
        self.optimiser = torch.optim.AdamW(
            learner.groups(rate), betas=(0.9, 0.99), weight_decay=0.0, fused=learner.device.type == "cuda"
        )
        for group in self.optimiser.param_groups:
            group["factor"] = group["lr"]
        self.update = captured.Step(
            updates(learner, self.optimiser, plan.clip),
            self.optimiser,
            captures=False,
            remedy="run it with --device cpu",
        )
        self.size = min(learner.batch, learner.examples)
        self.each = learner.examples // self.size
        """Steps a pass."""
        self.due = time.monotonic() + EVERY
        kept = None if file is None else checkpoints.read(file, of)
        if kept is None:
            start = _number(learner.choose_loss())
            self.steps, self.idle, self.mark = 0, 0, start
            self.turned: int | None = None
            """The step at which the rate began to fall."""
            self.fall, self.converged, self.raced = 0, False, start
            self.curve: list[tuple[int, float]] = [(0, start)]
            self.best = (start, 0, checkpoints.weights(self.parameters))
        else:
            state, weights = checkpoints.resume(kept, self.parameters, self.optimiser)
            self.steps, self.idle, self.mark = state["steps"], state["idle"], _number(state["mark"])
            self.turned, self.fall, self.converged = state["turned"], state["fall"], state["converged"]
            self.raced = _number(state["raced"])
            self.curve = [(step, _number(loss)) for step, loss in state["curve"]]
            self.best = (_number(state["best_loss"]), state["best_steps"], weights)

    @property
    def done(self) -> bool:
        return self.turned is not None and self.steps >= self.turned + self.fall

    def epoch(self) -> None:
        """To the end of the pass, from its beginning or wherever the race or a checkpoint has put it."""
        self.advance(self.each)

    def advance(self, until: int) -> None:
        """To a step of the present pass, and a look at the text for choosing."""
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps // self.each + 1):
            order = torch.randperm(self.learner.examples, generator=generator)
        # As a whole: a copy a step would wait for all that was launched before it.
        order = order.to(self.learner.device)
        first = self.steps % self.each
        mean: dict[str, Tensor] = {}
        count = 0
        for number in range(first, until):
            # Nothing but dropout draws from this.
            seed_generators((1_000_003 * self.seed + self.steps) % (1 << 63), self.learner.device)
            set_rate(self.optimiser, self._pace())
            self.update(order[number * self.size : (number + 1) * self.size])
            self.steps += 1
            if 2 * (number + 1) > first + until:
                count += 1
                for name, parameter in self.parameters.items():
                    if name in mean:
                        mean[name].lerp_(parameter.detach(), 1 / count)
                    else:
                        mean[name] = parameter.detach().clone()
        self._look(mean)
        self._keep()

    def _pace(self) -> float:
        if self.turned is not None:
            return 1.0 - (self.steps - self.turned) / self.fall
        return min(1.0, (self.steps + 1) / WARM_UP)

    def _look(self, mean: dict[str, Tensor]) -> None:
        live = checkpoints.weights(self.parameters)
        self._put(mean)
        found = _number(self.learner.choose_loss())
        self.curve.append((self.steps, found))
        if len(self.curve) == 2:
            self.raced = found
        if found < self.best[0]:
            self.best = (found, self.steps, mean)
        self._put(live)
        if self.turned is not None:
            return
        self.idle += 1
        if found < self.mark - self.plan.tolerance:
            self.mark, self.idle = found, 0
        flat = self.idle >= self.plan.patience
        # Two thirds of the passes steady, one falling.
        if flat or 3 * self.steps >= 2 * self.plan.epochs * self.each:
            self.turned, self.converged = self.steps, flat
            self.fall = self.each * max(1, round(self.best[1] / self.each / 2))
            self._put(self.best[2])
            if not math.isfinite(found):
                self.optimiser.state.clear()
                self.update.renew()

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])

    def found(self) -> Fit:
        loss, steps, weights = self.best
        return Fit(
            choose_loss=loss, rate=self.rate, steps=steps, converged=self.converged, curve=tuple(self.curve),
            weights=weights,
        )  # fmt: skip

    def _keep(self) -> None:
        begun = time.monotonic()
        if self.file is None or begun < self.due:
            return
        state = {
            "steps": self.steps, "idle": self.idle, "mark": self.mark, "turned": self.turned,
            "fall": self.fall, "converged": self.converged, "raced": self.raced, "curve": self.curve,
            "best_loss": self.best[0], "best_steps": self.best[1],
        }  # fmt: skip
        checkpoints.keep(self.file, self.of, self.parameters, self.optimiser, state, self.best[2])
        ended = time.monotonic()
        self.due = ended + max(EVERY, (ended - begun) / DEAREST)


def _number(loss: float) -> float:
    """A loss that is no number is worse than any."""
    return math.inf if math.isnan(loss) else loss
