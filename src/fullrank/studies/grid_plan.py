"""What a study of trainings declares: runs, the rates that they want, the rule that decides most of it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from fullrank.errors import FullrankError
from fullrank.results import Estimate
from fullrank.results.grid import NATS, GridAnswer, GridRun
from fullrank.results.series import Curve

Done = Mapping[str, GridRun]
"""Runs that are made, by name."""

GROWTH = 3
"""How often a grid of rates may grow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """One of several texts that a study trains on: a path of text, or a directory of tokens."""

    name: str
    data: tuple[Path, ...] = ()
    tokens: Path | None = None
    facts: dict[str, str] = dataclasses.field(default_factory=dict)
    """What is known of it, such as its vocabulary; plans make factors of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One run to be made."""

    name: str
    recipe: str
    head: str = "softmax"
    settings: tuple[str, ...] = ()
    factors: dict[str, str]
    seed: int = 0
    branch: str = ""
    """NAME@STEP of a run that this one goes on from."""
    text: Text | None = None
    """None is the study's own."""
    digest: str = ""
    """Of the tokens that it must read, where other runs have read some; plans leave it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extent:
    """How large a study is made."""

    small: bool = False
    seeds: int = 3
    scale: float = 1.0
    """Of the length of all runs."""
    texts: tuple[Text, ...] = ()
    """Where a study is over several."""
    settings: tuple[str, ...] = ()
    """Of all runs, where the study does not say otherwise."""

    def steps(self, full: int) -> int:
        return max(8, round(self.scale * full))


def transformer(
    width: int, extent: Extent, *, steps: int, small_steps: int = 80, evaluations: int
) -> tuple[str, tuple[str, ...]]:
    """The recipe of a body of some width and its settings: a pythia-14m of another width, or the tiny one."""
    count = extent.steps(small_steps if extent.small else steps)
    settings = (
        *extent.settings, f"body.hidden={width}", f"body.heads={max(1, width // 32)}", f"steps={count}",
        f"evaluate_every={max(1, count // evaluations)}",
    )  # fmt: skip
    if extent.small:
        return "transformer-tiny", settings
    # Narrow bodies gain more from many steps than from large ones.
    return "transformer-14m", (*settings, "batch=16", "evaluate_tokens=65536", "final_tokens=262144")


def check_heads(given: Sequence[str], known: Mapping[str, object]) -> None:
    """Raise unless --heads are none, or softmax and others that a study knows."""
    if any(label not in known for label in given) or (given and "softmax" not in given):
        others = ", ".join(label for label in known if label != "softmax")
        raise FullrankError(f"--heads {' '.join(given)}: expected softmax and any of {others}")


def steps_of(settings: Sequence[str]) -> int:
    return next(int(one.partition("=")[2]) for one in settings if one.startswith("steps="))


def whole_flops(done: Done, own: Spec, trials: Sequence[Spec]) -> float:
    """Floating-point operations of the whole of a run, as its trials count a token: what others are given."""
    from fullrank.train.config import override
    from fullrank.train.recipes import recipe

    config = override(recipe(own.recipe, own.head), own.settings)
    counted = next(run for trial in trials if (run := done[trial.name]).tokens > 0)
    return counted.flops / counted.tokens * config.batch * config.length * config.steps


def within(own: Spec, budget: str) -> Spec:
    """A run with a budget in place of its steps, and so its trials; as it is while there is none."""
    if not budget:
        return own
    return dataclasses.replace(own, settings=(*own.settings, "steps=0", f"budget={budget}"))


def loss_curve(run: GridRun) -> Curve:
    """A run's validation loss, as the tests of series take it."""
    return Curve(
        model=run.name, shots=None, metric="loss", unit="nats per token", lower_is_better=True,
        steps=tuple(point.step for point in run.curve), values=tuple(point.loss for point in run.curve),
        standard_errors=tuple(point.standard_error for point in run.curve), dropped=0,
    )  # fmt: skip


def seeded(own: Spec, seeds: int, *settings: str) -> list[Spec]:
    """A run a seed, with more settings."""
    return [
        dataclasses.replace(
            own, name=f"{own.name}-seed{seed}", seed=seed, settings=(*own.settings, *settings)
        )
        for seed in range(seeds)
    ]


def tuned(
    done: Done, own: Spec, factors: Sequence[float], *, share: float = 0.25
) -> tuple[tuple[str, ...] | None, list[Spec]]:
    """The learning rate that a run wants, as a setting: trials of a share of its length at factors of the
    recipe's rate, and further ones while the best stands at an end. None while trials are missing."""
    from fullrank.fit.budget import Budget
    from fullrank.train.config import override
    from fullrank.train.recipes import recipe

    config = override(recipe(own.recipe, own.head), own.settings)
    steps, budget = max(4, int(share * config.steps)), Budget.parse(config.budget)
    shorter: tuple[str, ...] = (f"steps={steps}", f"evaluate_every={steps}")
    if budget is not None:
        shorter = (f"budget={budget.measure}={share * budget.amount:g}",)
    grid = sorted(factors)
    for _ in range(GROWTH + 1):
        trials = [
            dataclasses.replace(
                own,
                name=f"{own.name}-rate{factor:g}",
                settings=(*own.settings, *shorter, f"optimiser.lr={config.optimiser.lr * factor:g}"),
                factors={**own.factors, "trial": f"{factor:g}"},
            )
            for factor in grid
        ]  # fmt: skip
        if any(trial.name not in done for trial in trials):
            return None, trials
        losses = [done[trial.name].valid for trial in trials]
        finite = [math.inf if loss is None else loss for loss in losses]
        best = finite.index(min(finite))
        if 0 < best < len(grid) - 1:
            break
        grid = sorted([*grid, grid[0] / 2 if best == 0 else grid[-1] * 2])
    return (f"optimiser.lr={config.optimiser.lr * grid[best]:g}",), trials


Ends = Mapping[tuple[str | int, ...], float]
"""What runs ended with, by arm and seed: (*arm, seed)."""


def differences(ends: Ends, one: Sequence[str], other: Sequence[str]) -> list[float]:
    """Of one arm less another, of the same seeds."""
    return [
        end - ends[*other, seed]
        for (*arm, seed), end in ends.items()
        if arm == list(one) and (*other, seed) in ends
    ]


def compared(
    label: str,
    differences: Sequence[float],
    smallest: float,
    of: str = "seeds",
    *,
    unit: str = NATS,
    words: tuple[str, str] = ("better", "worse"),
) -> GridAnswer:
    """An effect over seeds, or over other pairs: each a difference of two runs that share it.

    By the usual rule: better or worse where the interval has one sign and the effect is of interest, no
    difference of interest where the interval lies within the smallest effect on both sides, undecided else.
    What is no loss has `words` of its own for below and above zero.
    """
    count = len(differences)
    if count < 2:
        said, effect = f"{label}: no {of} to say it by", None
        if differences:
            said = f"{label}: {differences[0]:+.4f} {unit} in one of the {of}, too few to say"
            effect = Estimate(value=differences[0], low=-math.inf, high=math.inf)
        return GridAnswer(
            label=label, effect=effect, seeds=count, seen=math.inf, decision="undecided", sentence=said,
            unit=unit,
        )  # fmt: skip
    from scipy import stats

    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(count)
    reach = float(stats.t.ppf(0.975, count - 1)) * error
    effect = Estimate(value=mean, low=mean - reach, high=mean + reach)
    # Differences that are all alike, as of curves whose end is the best, do not tell how they scatter.
    seen = float(stats.t.ppf(0.975, count - 1) + stats.t.ppf(0.8, count - 1)) * error or math.inf
    power = (
        f"{seen:.4f} would have been seen" if math.isfinite(seen) else "all alike: their noise is not known"
    )
    if effect.high < 0 and mean <= -smallest:
        decision = words[0]
    elif effect.low > 0 and mean >= smallest:
        decision = words[1]
    elif -smallest < effect.low and effect.high < smallest:
        decision = "no difference of interest"
    else:
        decision = "undecided"
    sentence = (
        f"{label}: {mean:+.4f} {unit} (95%: {effect.low:+.4f} to {effect.high:+.4f} over {count} "
        f"{of}; {power}): {decision}"
    )
    return GridAnswer(
        label=label, effect=effect, seeds=count, seen=seen, decision=decision, sentence=sentence, unit=unit
    )
