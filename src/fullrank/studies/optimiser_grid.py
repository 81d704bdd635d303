"""`fullrank study optimiser`: how much of a turn is optimisation?

Rate, batch, weight decay and schedule, each at two or three levels, at two widths and for the same tokens.
What is measured is how far the end of a run lies above its best evaluation (the turn), and where it ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fullrank.results.grid import GridAnswer, GridRun, Statement
from fullrank.studies.grid import Study
from fullrank.studies.grid_plan import Done, Extent, Spec, compared, transformer

STATEMENT = Statement(
    question="How much of a late rise of the loss is optimisation: rate, batch, weight decay, schedule?",
    hypothesis="A smaller batch and a fall of the rate at the end take most of a rise away at equal width "
    "and equal tokens (batch-size controls of Pythia; Kulkarni et al., 2602.20433).",
    comparison="Every level of a factor against the recipe's own level, over all combinations of the other "
    "factors, paired; the same tokens for all.",
    smallest=0.01,
    rule="An effect on the rise counts where its 95% interval over the paired combinations has one sign and "
    "its mean is at least the smallest effect.",
)

LEVELS = {
    "rate": ("0.5", "1", "4"),
    "batch": ("16", "64"),
    "decay": ("0", "0.1"),
    "schedule": ("constant", "cosine"),
}
OWN = {"rate": "1", "batch": "64", "decay": "0.1", "schedule": "constant"}
"""The level that the others of a factor are held against."""
SMALL_LEVELS = {"rate": ("1", "4"), "batch": ("4", "8"), "decay": ("0.1",), "schedule": ("constant",)}
SMALL_OWN = {"rate": "1", "batch": "8", "decay": "0.1", "schedule": "constant"}
RATE = 2e-3
WIDTHS, SMALL_WIDTHS = (64, 256), (16,)


def plan(done: Done, extent: Extent) -> list[Spec]:
    levels = SMALL_LEVELS if extent.small else LEVELS
    own = SMALL_OWN if extent.small else OWN
    specs = []
    for width in SMALL_WIDTHS if extent.small else WIDTHS:
        for values in itertools.product(*levels.values()):
            chosen = dict(zip(levels, values, strict=True))
            # Equal tokens: fewer rows, more steps.
            more = int(own["batch"]) // int(chosen["batch"])
            recipe, settings = transformer(
                width, extent, steps=1500 * more, small_steps=80 * more, evaluations=12
            )
            settings = (
                *settings, f"batch={chosen['batch']}", f"optimiser.lr={RATE * float(chosen['rate']):g}",
                f"optimiser.weight_decay={chosen['decay']}", f"optimiser.schedule={chosen['schedule']}",
            )  # fmt: skip
            specs.append(
                Spec(
                    name=f"width{width}-" + "-".join(f"{name}{value}" for name, value in chosen.items()),
                    recipe=recipe,
                    settings=settings,
                    factors={"width": str(width), **chosen},
                )
            )
    return specs


def answers(runs: Sequence[GridRun]) -> tuple[GridAnswer, ...]:
    rises = {
        tuple(sorted(run.factors.items())): run.last - min(point.loss for point in run.curve)
        for run in runs
        if run.last is not None
    }
    small = any(run.factors["batch"] == SMALL_LEVELS["batch"][0] for run in runs)
    own = SMALL_OWN if small else OWN
    found = []
    for factor, level in own.items():
        for other in dict.fromkeys(run.factors[factor] for run in runs if run.factors[factor] != level):
            for width in dict.fromkeys(run.factors["width"] for run in runs):
                pairs = [
                    rise - rises[beside]
                    for key, rise in rises.items()
                    if dict(key)[factor] == other and dict(key)["width"] == width
                    if (beside := tuple(sorted({**dict(key), factor: level}.items()))) in rises
                ]
                label = f"rise at width {width}: {factor} {other} against {level}"
                found.append(compared(label, pairs, STATEMENT.smallest, of="combinations"))
    return tuple(found)


OPTIMISER = Study(name="optimiser", statement=STATEMENT, plan=plan, answers=answers)
