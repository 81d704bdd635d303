"""`fullrank study attention`: normalisers of attention, each trained at several temperatures.

    normaliser     what turns scores into weights (`models.normalisers`)
    temperature    T, which divides the scores of every layer and head in training and ever after

A temperature is no other model: queries over T are the same function (tests/models/test_temperature.py). What
it changes is the start, where scores are 1 / T as large, and what a step does to them. So a loss that a low
temperature costs is a cost of training.

Beside the loss every run has, at each evaluation, the norm of its gradient since the one before and the
sensitivity of its attention: the spectral norm of the Jacobian of weights in scores (docs/attention.md).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from fullrank.errors import FullrankError
from fullrank.models.normalisers import NORMALISERS, check_available, check_temperature
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
    question="Does training at a low temperature of attention cost loss, from which temperature on, and do "
    "other normalisers than softmax bear it better?",
    hypothesis="At T = 0.25 softmax ends at a higher loss than at T = 1, with larger gradients and a more "
    "sensitive attention, and sigmoid and the sparse normalisers lose less by it (Mudarisov et al., "
    "2508.17821, who see the norm of the Jacobian grow like 1 / T in a trained model and infer that training "
    "suffers). Against it speaks that a temperature is a factor on the queries, which training can undo.",
    comparison="Each T against T = 1 of the same normaliser and seed; each normaliser against softmax of the "
    "same T and seed. One transformer of width 128 with contexts of 256, the same tokens for all, rates "
    "tuned for every pair of normaliser and T on a quarter of a run, three seeds.",
    smallest=0.01,
    rule="Better or worse where the 95% interval over seeds has one sign and the mean is at least the "
    "smallest effect, no difference of interest where the interval lies within it on both sides, else "
    "undecided; worse, too, where two or more of the seeds did not end. A low temperature hurts from the "
    "highest T below 1 that is worse than 1 with all T below it. Gradients and sensitivity of softmax rise "
    "or fall where the interval of the logarithm of their mean over a run has one sign and 0.1 or more.",
)

SOFTMAX, ONE = "softmax", 1.0
"""What others are held against."""
USED, SMALL_USED = tuple(NORMALISERS), (SOFTMAX, "sparsemax", "sigmoid")
TEMPERATURES, SMALL_TEMPERATURES = (0.25, 0.5, 1.0, 2.0), (0.25, 1.0)
WIDTH, SMALL_WIDTH = 128, 32
LENGTH = 256
RATES = (0.5, 1.0, 2.0)
"""Of the recipe's own."""
QUANTITIES = {"gradient_norm": "gradient", "attention_sensitivity": "sensitivity"}
"""Of softmax over training, as they are called in answers."""
SMALLEST_RATIO = 0.1


def study(normalisers: Sequence[str] = (), temperatures: Sequence[float] = ()) -> Study:
    """The study of some normalisers and temperatures; of its own where none are given."""
    for name in normalisers:
        check_available(name)
    for temperature in temperatures:
        check_temperature(temperature, "--temperatures")
    _require("normalisers", normalisers, SOFTMAX)
    _require("temperatures", [f"{one:g}" for one in temperatures], f"{ONE:g}")

    def plan(done: Done, extent: Extent) -> list[Spec]:
        specs: list[Spec] = []
        for name in normalisers or (SMALL_USED if extent.small else USED):
            check_available(name)
            for temperature in temperatures or (SMALL_TEMPERATURES if extent.small else TEMPERATURES):
                own = _of(name, temperature, extent)
                best, trials = tuned(done, own, RATES)
                specs += trials
                if best is not None:
                    specs += seeded(own, extent.seeds, *best)
        return specs

    return Study(name="attention", statement=STATEMENT, plan=plan, answers=answers)


def _require(what: str, given: Sequence[str], wanted: str) -> None:
    if given and (wanted not in given or len(set(given)) < len(given)):
        raise FullrankError(
            f"the {what} are {', '.join(given)}: expected different ones, {wanted} among them, which the "
            "others are compared with"
        )


def _of(name: str, temperature: float, extent: Extent) -> Spec:
    width = SMALL_WIDTH if extent.small else WIDTH
    recipe, settings = transformer(width, extent, steps=1000, evaluations=10)
    if not extent.small:
        settings = (*settings, f"length={LENGTH}")
    return Spec(
        name=f"{name}-t{temperature:g}", recipe=recipe,
        settings=(*settings, f"body.normaliser={name}", f"body.attention_temperature={temperature:g}"),
        factors={"normaliser": name, "temperature": f"{temperature:g}"},
    )  # fmt: skip


def answers(runs: Sequence[GridRun]) -> tuple[GridAnswer, ...]:
    whole = [run for run in runs if "trial" not in run.factors]
    names = list(dict.fromkeys(_arm(run)[0] for run in whole))
    # Runs stand in the order of their ends.
    arms = sorted(set(map(_arm, whole)), key=lambda arm: (names.index(arm[0]), float(arm[1])))
    losses: Ends = {(*_arm(run), run.seed): run.valid for run in whole if run.valid is not None}
    lost = {arm: sum(run.valid is None for run in whole if _arm(run) == arm) for arm in arms}

    def against(label: str, arm: tuple[str, str], control: tuple[str, str]) -> GridAnswer:
        found = compared(label, differences(losses, arm, control), STATEMENT.smallest)
        if not lost[arm]:
            return found
        decision = "worse" if lost[arm] > 1 and not lost.get(control, 0) else found.decision
        words = f"{found.sentence}; {lost[arm]} seeds did not end: {decision}"
        return dataclasses.replace(found, decision=decision, sentence=words)

    found: list[GridAnswer] = []
    for name in names:
        control = (name, f"{ONE:g}")
        warm = {
            float(arm[1]): against(f"{name}: T {arm[1]} against 1", arm, control)
            for arm in arms
            if arm[0] == name and arm != control
        }
        found += [*warm.values(), *_from_where(name, warm)]
    for arm in arms:
        if arm[0] != SOFTMAX:
            found.append(against(f"{arm[0]} against softmax: T {arm[1]}", arm, (SOFTMAX, arm[1])))
    return (*found, *_followed(whole, arms))


def _from_where(name: str, warm: dict[float, GridAnswer]) -> list[GridAnswer]:
    """The highest temperature below 1 from which on down all are worse."""
    low = sorted(temperature for temperature in warm if temperature < ONE)
    if not low:
        return []
    hurts = []
    for temperature in low:
        if warm[temperature].decision != "worse":
            break
        hurts.append(temperature)
    said = {warm[temperature].decision for temperature in low}
    if hurts:
        decision = f"hurts from T {hurts[-1]:g} down"
    elif "worse" in said or "undecided" in said:
        decision = "undecided"
    else:
        decision = f"hurts nowhere down to T {low[0]:g}"
    lowest = warm[low[0]]
    return [
        GridAnswer(
            label=f"{name}: low temperatures", effect=None, seeds=lowest.seeds, seen=lowest.seen,
            decision=decision, sentence=f"{name}: a low temperature {decision}"
            if decision != "undecided"
            else f"{name}: undecided from which temperature a low one hurts",
        )
    ]  # fmt: skip


def _followed(whole: Sequence[GridRun], arms: Sequence[tuple[str, str]]) -> list[GridAnswer]:
    """Gradients and sensitivity of softmax at every temperature against those at 1."""
    found = []
    for monitor, word in QUANTITIES.items():
        means: Ends = {
            (*_arm(run), run.seed): math.log(value)
            for run in whole
            if (value := over_training(run, monitor)) > 0
        }
        for arm in arms:
            if arm[0] == SOFTMAX and arm[1] != f"{ONE:g}":
                pairs = differences(means, arm, (SOFTMAX, f"{ONE:g}"))
                found.append(
                    compared(
                        f"{word} of softmax: T {arm[1]} against 1", pairs, SMALLEST_RATIO, unit="log ratio",
                        words=("falls", "rises"),
                    )
                )  # fmt: skip
    return found


def over_training(run: GridRun, monitor: str) -> float:
    """The mean of a monitor over the evaluations of a run; nan where it has none."""
    values = [point.monitors[monitor] for point in run.curve if monitor in point.monitors]
    return statistics.fmean(values) if values else math.nan


def _arm(run: GridRun) -> tuple[str, str]:
    return run.factors["normaliser"], run.factors["temperature"]
