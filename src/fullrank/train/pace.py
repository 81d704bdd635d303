"""How long a run is, what it does every so many steps, and which rows of a batch a process takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fullrank.errors import FullrankError
from fullrank.fit.budget import UNKNOWN, Budget
from fullrank.train.batches import Streams, Windows
from fullrank.train.config import Config

LOG_LINES = 10
"""Lines about training from one evaluation to the next."""
EARLY = 512
"""The last of the snapshots that Pythia keeps of a beginning."""
EVALUATED, FEWEST = 0.003, 16_384
"""Where nobody says how many: tokens of an evaluation for each that was trained since the last one, at most
2% of the time (a small model's step is one graph, and evaluation goes a fifth as fast through its tokens);
and the fewest that tell something."""
AGREE_EVERY = 8
"""Steps between two looks at whether another process was told to stop, on devices, which a look holds up."""


def own_rows(config: Config, machine: Any) -> slice:
    """This process's rows of a batch."""
    parts = machine.num_processes * config.accumulate
    share, rest = divmod(config.batch, parts)
    if rest:
        raise FullrankError(
            f"batch={config.batch} cannot be shared by {machine.num_processes} processes in "
            f"{config.accumulate} parts each: choose a multiple of {parts}"
        )
    size = share * config.accumulate
    return slice(machine.process_index * size, (machine.process_index + 1) * size)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Numbers of steps."""

    steps: int
    """Of the whole run, at most."""
    stage_steps: int
    """Of its first stage."""
    evaluate_every: int
    evaluate_tokens: int
    """0 is all."""
    log_every: int
    checkpoint_every: int
    """0 is at every evaluation."""
    agree_every: int

    @classmethod
    def of(
        cls, config: Config, batches: Streams | Windows, machine: Any, *, flops: int = 0, horizon: int = 0
    ) -> Pace:
        """`flops` of a token and the `horizon` that a budget of seconds has turned out to be, 0 while that is
        not known, are for runs with a budget."""
        steps, stage_steps = _totals(config, batches)
        budget = Budget.parse(config.budget)
        if budget is not None:
            known = horizon or budget.steps(tokens=config.batch * config.length, flops=flops)
            steps = stage_steps = known or UNKNOWN
        evaluate_every = config.evaluate_every or max(1, min(batches.steps(0), steps // 10))
        evaluate_tokens = config.evaluate_tokens
        if evaluate_tokens < 0:
            trained = evaluate_every * config.batch * config.length
            evaluate_tokens = max(FEWEST, round(EVALUATED * trained))
        # A launcher waits half a minute before it kills: slow steps must not come before the look.
        at_once = machine.num_processes == 1 or machine.device.type == "cpu"
        return cls(
            steps=steps,
            stage_steps=stage_steps,
            evaluate_every=evaluate_every,
            evaluate_tokens=evaluate_tokens,
            log_every=max(1, evaluate_every // LOG_LINES),
            checkpoint_every=config.checkpoint_every,
            agree_every=1 if at_once else AGREE_EVERY,
        )

    def snapshot(self, step: int, every: int) -> bool:
        """Whether a snapshot belongs to a step: every so many, and at 0 and the powers of two up to 512."""
        return every > 0 and (step % every == 0 or (step <= EARLY and step & (step - 1) == 0))


def _totals(config: Config, batches: Streams | Windows) -> tuple[int, int]:
    """Steps of the whole run at most, and of its first stage."""
    whole = int(config.epochs)
    # Lengths differ from epoch to epoch only with jitter, and then by little: sum some, not all.
    some = [batches.steps(epoch) for epoch in range(min(whole + 1, 4))]
    mean = sum(some) / len(some)
    first = max(1, sum(some[:whole]) + round(mean * (config.epochs - min(whole, len(some)))))
    finetune = round(mean * config.optimiser.finetune_epochs)
    steps = config.steps or first + finetune
    # Without a second stage the first one, and its schedule, is as long as the run.
    return steps, min(first, steps) if finetune else steps
