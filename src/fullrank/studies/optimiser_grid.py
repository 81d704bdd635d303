"""`fullrank study optimiser`: how much of a turn is optimisation, and how much of a collapsed spectrum?

Rate, batch, weight decay and schedule, each at two or three levels, at two widths and for the same tokens.
What is measured is how far the end of a run lies above its best evaluation (the turn), where it ends, and the
effective rank of the head's matrix there.

Most tokens of a vocabulary are seldom in a batch, the smaller it is the more, and an Adam with a beta2 of
0.95 has forgotten their gradients when they come again. So the recipe's decay has runs with 0.999 too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from fullrank.results.grid import NATS, GridAnswer, GridRun, Statement
from fullrank.studies.grid import Study
from fullrank.studies.grid_plan import Done, Extent, Spec, compared, transformer

STATEMENT = Statement(
    question="How much of a late rise of the loss is optimisation: rate, batch, weight decay, schedule, "
    "Adam's memory? And how much of a head's collapsed spectrum?",
    hypothesis="A smaller batch and a fall of the rate at the end take most of a rise away at equal width "
    "and equal tokens (batch-size controls of Pythia; Kulkarni et al., 2602.20433). A fall of the rate "
    "lowers the effective rank of W at width 32 by more than 0.1 of the width, at 128 by less than at 32, "
    "while the loss falls: what the study of widths showed without having asked. With a beta2 of 0.999 for "
    "0.95 a batch of 4 loses less than half as much of the rank, and of the loss, against a batch of 16 "
    "(stated after the other factors were known).",
    comparison="Every level of a factor against the recipe's own level, over all combinations of the other "
    "factors, paired; the same 25 million tokens for all.",
    smallest=0.01,
    rule="An effect on the rise or on the end counts where its 95% interval over the paired combinations has "
    "one sign and its mean is at least the smallest effect; one on the rank likewise, with a smallest effect "
    "of 0.02 of the width.",
)

LEVELS = {
    "rate": ("0.25", "1", "4"),
    "batch": ("4", "16"),
    "decay": ("0", "0.1"),
    "schedule": ("constant", "cosine", "wsd"),
    "beta2": ("0.95", "0.999"),
}
OWN = {"rate": "1", "batch": "16", "decay": "0.1", "schedule": "constant", "beta2": "0.95"}
"""The level that the others of a factor are held against."""
SMALL_LEVELS = {
    "rate": ("1", "4"), "batch": ("4", "8"), "decay": ("0.1",), "schedule": ("constant",), "beta2": ("0.95",),
}  # fmt: skip
SMALL_OWN = {"rate": "1", "batch": "8", "decay": "0.1", "schedule": "constant", "beta2": "0.95"}
RATE = 4e-3
"""What widths of 32 to 512 want, within a factor of two."""
WIDTHS, SMALL_WIDTHS = (32, 128), (16,)

Key = tuple[tuple[str, str], ...]
"""The factors of a run."""


def _rise(run: GridRun) -> float | None:
    return None if run.last is None else run.last - min(point.loss for point in run.curve)


def _rank(run: GridRun) -> float | None:
    return run.curve[-1].monitors.get("head_effective_rank_share")


QUANTITIES: tuple[tuple[str, str, float, tuple[str, str], Callable[[GridRun], float | None]], ...] = (
    ("rise", NATS, 0.01, ("smaller", "larger"), _rise),
    ("end", NATS, 0.01, ("better", "worse"), lambda run: run.last),
    ("effective rank", "share of the width", 0.02, ("falls", "rises"), _rank),
)
"""What is compared: its name, unit, smallest effect of interest, words for below and above zero."""


def plan(done: Done, extent: Extent) -> list[Spec]:
    levels = SMALL_LEVELS if extent.small else LEVELS
    own = SMALL_OWN if extent.small else OWN
    specs = []
    for width in SMALL_WIDTHS if extent.small else WIDTHS:
        for values in itertools.product(*levels.values()):
            chosen = dict(zip(levels, values, strict=True))
            if chosen["beta2"] != own["beta2"] and chosen["decay"] != own["decay"]:
                continue
            # Equal tokens: fewer rows, more steps.
            more = int(own["batch"]) // int(chosen["batch"])
            recipe, settings = transformer(
                width, extent, steps=3000 * more, small_steps=80 * more, evaluations=15
            )
            settings = (
                *settings, f"batch={chosen['batch']}", f"optimiser.lr={RATE * float(chosen['rate']):g}",
                f"optimiser.weight_decay={chosen['decay']}", f"optimiser.schedule={chosen['schedule']}",
                f"optimiser.beta2={chosen['beta2']}",
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
    whole = [run for run in runs if run.last is not None]
    found: list[GridAnswer] = []
    for name, unit, smallest, words, measure in QUANTITIES:
        ends = {tuple(sorted(run.factors.items())): measure(run) for run in whole}
        found += _effects(
            name, {key: end for key, end in ends.items() if end is not None}, unit, smallest, words
        )
    return tuple(found)


def _effects(
    name: str, ends: Mapping[Key, float], unit: str, smallest: float, words: tuple[str, str]
) -> Iterator[GridAnswer]:
    """Of every level of a factor, at each width: over all combinations of the others, with either memory by
    itself; and of the memory, with either batch."""
    runs = [dict(key) for key in ends]
    small = any(run["batch"] == SMALL_OWN["batch"] for run in runs)
    own = SMALL_OWN if small else OWN
    asked = [
        (factor, level, {"beta2": memory}, "" if memory == own["beta2"] else f", beta2 {memory}")
        for memory in dict.fromkeys(run["beta2"] for run in runs)
        for factor, level in own.items()
        if factor != "beta2"
    ]
    for batch in dict.fromkeys(run["batch"] for run in runs):
        asked.append(("beta2", own["beta2"], {"batch": batch}, f", batch {batch}"))
    for factor, level, among, where in asked:
        others = [run for run in runs if run[factor] != level and among.items() <= run.items()]
        for other in dict.fromkeys(run[factor] for run in others):
            for width in dict.fromkeys(run["width"] for run in runs):
                pairs = [
                    ends[tuple(sorted(run.items()))] - ends[beside]
                    for run in others
                    if run[factor] == other and run["width"] == width
                    if (beside := tuple(sorted({**run, factor: level}.items()))) in ends
                ]
                label = f"{name} at width {width}{where}: {factor} {other} against {level}"
                yield compared(label, pairs, smallest, of="combinations", unit=unit, words=words)


OPTIMISER = Study(name="optimiser", statement=STATEMENT, plan=plan, answers=answers)
