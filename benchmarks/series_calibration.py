"""How often `fullrank series` raises false alarms, finds planted turns, and covers planted losses.

    python -m benchmarks.series_calibration

False alarms: curves that never rise, in three kinds (a power law with its floor, the same that is level after
a while, level from the first checkpoint on), each with its own floor, slope and noise of 0.1% to 4%, whose
neighbours correlate. Power: a fall of 5% to 40% and a rise of 4% with 0.2% scatter, with standard errors of
test items that all checkpoints share. Coverage: models around a scaling law, with scatter of their own, and
one more model that the fit has not seen.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import numpy.typing
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fullrank.diagnose.series import scaling
from fullrank.diagnose.series.correlated_noise import autoregressive
from fullrank.diagnose.series.saturation import saturation
from fullrank.results import provenance, write_whole
from fullrank.results.series import NOT_TURNED, TURNED, UNDECIDED, Curve

Array = numpy.typing.NDArray[numpy.float64]
Random = numpy.random.Generator

PYTHIA_STEPS = (0, *(2**power for power in range(10)), 1000, 3000, *range(13_000, 144_000, 10_000))
STEPS: dict[str, Array] = {
    "14, linear": numpy.linspace(13_000, 143_000, 14),
    "14, logarithmic": numpy.geomspace(1000, 143_000, 14),
    "27, linear": numpy.linspace(5000, 135_000, 27),
    "27, as Pythia": numpy.array(PYTHIA_STEPS, dtype=float),
}
SHAPES = ("power law", "plateau", "level")
CORRELATIONS = (0.0, 0.5, 0.8, 0.9)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Simulate curves and laws, and write how often the answers are right."""

    curves: int = 300
    """That never turn, for every kind of steps, shape and correlation; five times as many level ones."""
    turns: int = 300
    """Curves that turn, for every kind of steps, place of the turn and standard error."""
    laws: int = 200
    """Scaling laws, for every number of models and scatter."""
    seed: int = 0
    """Of everything."""
    out: Path = Path("results/series_calibration.json")
    """Where the figures go."""


def curve(steps: Array, heights: Array, error: float | None = None) -> Curve:
    values = numpy.exp(heights)
    return Curve(
        model="simulated",
        shots=None,
        metric="loss",
        unit="nats",
        lower_is_better=True,
        steps=tuple(int(step) for step in steps),
        values=tuple(values.tolist()),
        standard_errors=None if error is None else tuple((error * values).tolist()),
        dropped=0,
    )


def never_turns(random: Random, steps: Array, shape: str, correlation: float) -> Array:
    """Logarithms of a loss that never rises, with noise."""
    noise = 10 ** random.uniform(-3, -1.4) * autoregressive(random, 1, len(steps), correlation)[0]
    return falling(random, steps, shape) + noise


def falling(random: Random, steps: Array, shape: str) -> Array:
    if shape == "level":
        return numpy.full(len(steps), 1.0)
    # A tenth of a percent of training stands for the warm-up, before which nothing is learnt.
    time = numpy.maximum(steps / steps[-1], 1e-3)
    if shape == "plateau":
        time = numpy.minimum(time, random.uniform(0.2, 0.7))
    floor, slope = random.uniform(1.7, 3.0), random.uniform(0.2, 0.8)
    return numpy.log(floor + random.uniform(0.05, 0.6) * time**-slope)


def turns(random: Random, steps: Array, place: float) -> Array:
    """A fall of 5% to 40% to a share of the way, and a rise of 4% from there on, with 0.2% scatter."""
    turn = round(place * (len(steps) - 1))
    before = steps[: turn + 1] / steps[turn]
    slope = random.uniform(0.2, 0.8)
    way = (before**-slope - 1) / (before[0] ** -slope - 1)
    rise = (steps[turn:] - steps[turn]) / (steps[-1] - steps[turn])
    heights = numpy.concatenate((random.uniform(0.05, 0.4) * way, 0.04 * rise[1:]))
    return heights + 0.002 * random.standard_normal(len(steps))


def shares(outcomes: list[str]) -> dict[str, float]:
    return {name: outcomes.count(name) / len(outcomes) for name in (TURNED, NOT_TURNED, UNDECIDED)}


def false_alarms(config: Config) -> list[dict[str, Any]]:
    found = []
    for name in track(STEPS, description="curves that never turn", transient=True):
        for shape in SHAPES if name != "27, as Pythia" else SHAPES[:2]:
            for correlation in CORRELATIONS:
                random = numpy.random.default_rng(config.seed)
                outcomes, alarms = [], 0
                # Alarms are most frequent on level curves, and are counted most closely there.
                count = config.curves * (5 if shape == "level" else 1)
                for _ in range(count):
                    one = saturation(curve(STEPS[name], never_turns(random, STEPS[name], shape, correlation)))
                    outcomes.append(one.outcome)
                    alarms += one.p_value < 0.01
                found.append(
                    {"checkpoints": name, "shape": shape, "correlation": correlation, "curves": count,
                     "p_below_0.01": alarms / count, **shares(outcomes)}
                )  # fmt: skip
    return found


def power(config: Config) -> list[dict[str, Any]]:
    found = []
    for name in track(
        ("14, linear", "14, logarithmic", "27, linear"), description="planted turns", transient=True
    ):
        for place in (0.4, 0.5, 0.6):
            for error in (None, 0.014):
                random = numpy.random.default_rng(config.seed + 1)
                outcomes, covered = [], 0
                for _ in range(config.turns):
                    # What the items have in common moves all checkpoints alike.
                    shared = (error or 0.0) * random.standard_normal()
                    one = saturation(curve(STEPS[name], turns(random, STEPS[name], place) + shared, error))
                    outcomes.append(one.outcome)
                    covered += one.interval[0] <= 100 * numpy.expm1(0.04) <= one.interval[1]
                found.append(
                    {"checkpoints": name, "turn_after": place, "standard_error": error,
                     "curves": config.turns, "interval_covers": covered / config.turns, **shares(outcomes)}
                )  # fmt: skip
    return found


def coverage(config: Config) -> list[dict[str, Any]]:
    """Of the law of Godey et al. on the Pile: models from 410M to 12B fitted, one of 160M predicted."""
    tokens, new = 3e11, 1.6e8
    found = []
    for count in track((5, 8), description="scaling laws", transient=True):
        for scatter in (0.003, 0.01, 0.03):
            for published in (True, False):
                random = numpy.random.default_rng(config.seed + 2)
                inside = 0
                for _ in range(config.laws):
                    sizes = numpy.append(numpy.geomspace(4.1e8, 1.2e10, count), new)
                    losses = scaling.predict(
                        sizes, tokens, A=119.09, alpha=0.246, B=410.7, beta=0.28, E=1.69
                    ) * numpy.exp(scatter * random.standard_normal(count + 1))
                    models = [
                        scaling.Model(
                            name=f"{size:g}",
                            parameters=float(size),
                            tokens=tokens,
                            final=float(loss),
                            best=float(loss),
                        )
                        for size, loss in zip(sizes, losses, strict=True)
                    ]
                    point = scaling.fit(
                        models, metric="loss", unit="nats", shots=None, published=published
                    ).points[0]
                    inside += point.predicted.low <= point.final <= point.predicted.high
                found.append(
                    {"models": count, "scatter": scatter, "constants": "published" if published else "fitted",
                     "laws": config.laws, "prediction_covers": inside / config.laws}
                )  # fmt: skip
    return found


def main(config: Config) -> None:
    parts: dict[str, Callable[[Config], list[dict[str, Any]]]] = {
        "false_alarms": false_alarms,
        "power": power,
        "coverage": coverage,
    }
    data = {name: part(config) for name, part in parts.items()}
    for name, rows in data.items():
        drawn = Table(title=name.replace("_", " "), title_justify="left")
        for header in rows[0]:
            drawn.add_column(header)
        for row in rows:
            drawn.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row.values()))
        Console(width=140).print(drawn)
    document = {
        "kind": "series_calibration",
        "version": 1,
        "made": dataclasses.asdict(provenance(seed=config.seed, device="cpu")),
        "data": {"config": {"curves": config.curves, "turns": config.turns, "laws": config.laws}, **data},
    }
    write_whole(config.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
