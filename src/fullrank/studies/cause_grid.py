"""`fullrank study cause`: of a flat head and spread states, which brings the other, and which costs loss?

Late in the training of narrow models the spectrum of W changes, states come to lie together and some
dimensions grow large, all at once. Here one of them is held by a penalty (`train.penalty`) while the others
are left alone: the spectrum of W flat, in decay or in steep decay, the states white or together. What moves
in the others it has caused; what the loss pays is its price.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from fullrank.results.grid import GridAnswer, GridRun, Statement
from fullrank.studies.grid import Study
from fullrank.studies.grid_plan import (
    Done,
    Ends,
    Extent,
    Spec,
    compared,
    differences,
    seeded,
    transformer,
    tuned,
)

STATEMENT = Statement(
    question="Which of the spectrum of W and the spread of the states brings the other with it, which of "
    "them costs loss, and do outlier dimensions come with either?",
    hypothesis="The states lead: pushed together they flatten or fell the spectrum of W and cost loss, while "
    "a spectrum held flat or in decay leaves the states as they are (open question 1 of Godey et al., "
    "2404.07647, who see both at once).",
    comparison="Runs with a penalty on W or on the states, at two weights, against runs of the same seed "
    "with a weight of 0; the same tokens, and the same operations but for the penalty's; rates tuned for "
    "each on a quarter of a run; three seeds.",
    smallest=0.01,
    rule="A penalty costs loss where the 95% interval over seeds lies above zero and the mean is at least "
    "the smallest effect. It brings a quantity with it where that quantity's interval at the end has one "
    "sign and the mean is at least 0.05 (effective rank over D, cosine) or 0.2 (log of the outlier ratio). "
    "Nothing is said of what a penalty brings where it did not move the quantity that it is on.",
)

ARMS = {
    "none": ("spectrum", "flat"),
    "flat": ("spectrum", "flat"),
    "decay": ("spectrum", "decay"),
    "steep": ("spectrum", "steep"),
    "white": ("states", "white"),
    "together": ("states", "together"),
}
"""What each penalty is on, and its aim. The control has a weight of 0."""
WEIGHTS, SMALL_WEIGHTS = ("0.1", "1"), ("1",)
WIDTHS, SMALL_WIDTHS = (64, 256), (16,)
RATES = (0.5, 1.0, 2.0)

QUANTITIES: Mapping[str, tuple[str, float, Callable[[float], float]]] = {
    "head_effective_rank_share": ("share", 0.05, lambda value: value),
    "anisotropy": ("cosine", 0.05, lambda value: value),
    "state_outlier": ("log ratio", 0.2, math.log),
}
"""Monitors at the end: unit, smallest change of interest, and what is compared."""
HELD = {"spectrum": "head_effective_rank_share", "states": "anisotropy"}
"""The one that a penalty is on."""


def plan(done: Done, extent: Extent) -> list[Spec]:
    specs: list[Spec] = []
    for width in SMALL_WIDTHS if extent.small else WIDTHS:
        for arm in ARMS:
            for weight in ("0",) if arm == "none" else SMALL_WEIGHTS if extent.small else WEIGHTS:
                own = _of(width, arm, weight, extent)
                best, trials = tuned(done, own, RATES)
                specs += trials
                if best is None:
                    continue
                specs += seeded(own, extent.seeds, *best)
    return specs


def _of(width: int, arm: str, weight: str, extent: Extent) -> Spec:
    recipe, settings = transformer(width, extent, steps=1500, evaluations=8)
    on, aim = ARMS[arm]
    return Spec(
        name=f"width{width}-{arm}{weight}", recipe=recipe,
        settings=(*settings, "head.tie=false", f"penalty.{on}={aim}", f"penalty.{on}_weight={weight}"),
        factors={"width": str(width), "penalty": arm, "weight": weight},
    )  # fmt: skip


def answers(runs: Sequence[GridRun]) -> tuple[GridAnswer, ...]:
    whole = [run for run in runs if "trial" not in run.factors and run.valid is not None and run.curve]
    losses: Ends = {(*_arm(run), run.seed): run.valid for run in whole if run.valid is not None}
    found: list[GridAnswer] = []
    for arm in sorted(set(map(_arm, whole)), key=_place):
        width, penalty, weight = arm
        if penalty == "none":
            continue
        control, label = (width, "none", "0"), f"{penalty}, weight {weight}, width {width}"
        found.append(compared(f"loss: {label}", differences(losses, arm, control), STATEMENT.smallest))
        moved = {}
        for name, (unit, smallest, scale) in QUANTITIES.items():
            ends: Ends = {
                (*_arm(run), run.seed): scale(value) for run in whole if (value := _end(run, name)) > 0
            }
            moved[name] = compared(
                f"{name}: {label}", differences(ends, arm, control), smallest, unit=unit,
                words=("falls", "rises"),
            )  # fmt: skip
        held = HELD[ARMS[penalty][0]]
        for name, answer in moved.items():
            if name != held and moved[held].decision not in ("falls", "rises"):
                words = f"{answer.sentence}; but the penalty did not move what it is on: undecided"
                answer = dataclasses.replace(answer, decision="undecided", sentence=words)
            found.append(answer)
    return tuple(found)


def _arm(run: GridRun) -> tuple[str, str, str]:
    return run.factors["width"], run.factors["penalty"], run.factors["weight"]


def _place(arm: tuple[str, str, str]) -> tuple[int, int, float]:
    width, penalty, weight = arm
    return int(width), list(ARMS).index(penalty), float(weight)


def _end(run: GridRun, name: str) -> float:
    return run.curve[-1].monitors.get(name, math.nan)


CAUSE = Study(name="cause", statement=STATEMENT, plan=plan, answers=answers)
