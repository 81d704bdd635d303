"""`fullrank study width`: do narrow models turn, and does the head move before they do?

Transformers of several widths under one rule of initialisation, their rates tuned a width, at a constant rate
and with a fall at the end, on one text. The loss of every run is asked whether it turned, by the test of
`fullrank series`, all runs of the study together; and at which evaluation each monitor was furthest from
where it ended, against the best loss.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from fullrank.diagnose.series.saturation import saturations
from fullrank.results import Estimate
from fullrank.results.grid import GridAnswer, GridRun, Statement
from fullrank.studies.grid import Study
from fullrank.studies.grid_plan import Done, Extent, Spec, loss_curve, seeded, transformer, tuned

STATEMENT = Statement(
    question="Does the validation loss of narrow transformers turn late in training, and do spectrum, "
    "anisotropy and outlier dimensions of the head move before, with or after it?",
    hypothesis="Below some width the loss turns before the end of training at a constant rate, and the "
    "head's effective rank falls before the loss rises (Godey et al., 2404.07647).",
    comparison="Widths 32 to 512 under one rule of initialisation, rates tuned a width on a quarter of the "
    "run; the narrower the longer, 16,000 steps of 8,192 tokens at 32 and 2,000 from 256 on, times --scale; "
    "constant rate against a fall at the end (WSD); three seeds.",
    smallest=0.01,
    rule="A run has turned where the test of series says so at 1%, corrected over all runs of the study. A "
    "width turns where all its seeds do, and does not where none may have; else it is undecided. A monitor "
    "moves first where its extreme lies at an earlier evaluation than the best loss in all seeds.",
)

WIDTHS = (32, 64, 128, 256, 512)
SMALL_WIDTHS = (16, 32)
RATES = (1.0, 2.0, 4.0)
"""Of the recipe's own, which follows the width."""
MOVING = ("head_effective_rank_share", "anisotropy", "state_outlier")


def plan(done: Done, extent: Extent) -> list[Spec]:
    widths = SMALL_WIDTHS if extent.small else WIDTHS
    specs: list[Spec] = []
    for width in widths:
        own = _of(width, extent)
        best, trials = tuned(done, own, RATES)
        specs += trials
        if best is None:
            continue
        for schedule in ("constant", "wsd"):
            whole = dataclasses.replace(
                own,
                name=f"width{width}-{schedule}",
                factors={"width": str(width), "schedule": schedule},
            )
            specs += seeded(whole, extent.seeds, *best, f"optimiser.schedule={schedule}")
    return specs


def _of(width: int, extent: Extent) -> Spec:
    # A token costs about its width: narrow runs, which are said to turn, are as dear as wide ones.
    recipe, settings = transformer(width, extent, steps=2000 * max(1, 256 // width), evaluations=20)
    return Spec(name=f"width{width}", recipe=recipe, settings=settings, factors={"width": str(width)})


def answers(runs: Sequence[GridRun]) -> tuple[GridAnswer, ...]:
    whole = [run for run in runs if "schedule" in run.factors and not run.failure and len(run.curve) > 5]
    tested = saturations([loss_curve(run) for run in whole]) if whole else []
    records = {run.name: found.record for run, found in zip(whole, tested, strict=True)}
    found: list[GridAnswer] = []
    groups = dict.fromkeys((run.factors["width"], run.factors["schedule"]) for run in whole)
    for width, schedule in groups:
        mine = [run for run in whole if (run.factors["width"], run.factors["schedule"]) == (width, schedule)]
        label, tests = f"width {width}, {schedule} rate", [records[run.name] for run in mine]
        said = [one.outcome for one in tests]
        highest = max(one.interval[-1] for one in tests)
        weakest = max(tests, key=lambda one: one.smallest_rise_percent)
        rises = [run.curve[-1].loss - min(point.loss for point in run.curve) for run in mine]
        decision = "undecided"
        if len(mine) > 1 and len(set(said)) == 1:
            decision = said[0]
        # Of all seeds, by the test: an end that is the best has a rise of 0 in every seed, and no spread.
        best = min(point.loss for run in mine for point in run.curve) / 100
        effect = Estimate(
            value=statistics.fmean(rises),
            low=best * min(one.interval[0] for one in tests),
            high=best * highest,
        )
        sentence = (
            f"{label}: {', '.join(said)} (seed by seed); the end lies {max(rises):.4f} nats per token above "
            f"the best at most, {highest:.1f}% by the upper end of its interval, and in the least clear one "
            f"{weakest.power}; {_order(mine)}"
        )
        found.append(
            GridAnswer(
                label=label, effect=effect, seeds=len(mine), seen=best * weakest.smallest_rise_percent,
                decision=decision, sentence=sentence,
            )
        )  # fmt: skip
    return tuple(found)


def _order(runs: Sequence[GridRun]) -> str:
    """Which monitors had their extreme before the best loss."""
    words = []
    for name in MOVING:
        before = []
        for run in runs:
            values = [point.monitors.get(name, math.nan) for point in run.curve]
            if any(math.isnan(value) for value in values) or not values:
                continue
            end = values[-1]
            extreme = max(range(len(values)), key=lambda place: abs(values[place] - end))
            best = min(range(len(values)), key=lambda place: run.curve[place].loss)
            before.append(extreme < best)
        if before:
            words.append(
                f"{name} was furthest from its end before the best loss in {sum(before)} of {len(before)}"
            )
    return "; ".join(words) or "no monitors"


WIDTH = Study(name="width", statement=STATEMENT, plan=plan, answers=answers)
