"""What the page of `fullrank study attention` has beside that of every study: the loss over temperatures, and
gradients and sensitivity over training."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from fullrank.report.charts import training_charts as charts
from fullrank.report.charts.axis import Axis
from fullrank.report.charts.curves import Curves, Point, Trace
from fullrank.report.charts.theme import MODEL_COLOURS, Key
from fullrank.report.figures import Cell, number
from fullrank.report.page import Column, Section, Table, chart_of, draw
from fullrank.report.text import shown
from fullrank.results import Estimate
from fullrank.results.grid import Grid, GridRun

LABELS = {
    "softmax": "softmax",
    "sparsemax": "sparsemax",
    "entmax15": "1.5-entmax",
    "sink": "softmax with a sink",
    "log_length": "scaled by log length",
    "sigmoid": "sigmoid",
}
"""What a reader sees."""

FOLLOWED = {
    "gradient_norm": (
        "Gradients over training",
        "norm before clipping",
        "The mean norm of the gradient since the evaluation before.",
    ),
    "attention_sensitivity": (
        "Sensitivity over training",
        "norm of the Jacobian",
        "The spectral norm of the Jacobian of attention weights in the scores that are divided by T, a mean "
        "over layers, heads and queries; of softmax at most 1 / (2 T).",
    ),
}
"""Monitors: title of the section, unit, and what it is."""


def label(name: str) -> str:
    return LABELS.get(name, shown(name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arm:
    normaliser: str
    temperature: float
    runs: tuple[GridRun, ...]

    def over_seeds(self, read: Callable[[GridRun], float]) -> Estimate | None:
        """The mean, with the lowest and the highest seed at the ends."""
        values = [value for run in self.runs if math.isfinite(value := read(run))]
        if not values:
            return None
        return Estimate(value=statistics.fmean(values), low=min(values), high=max(values))


def sections(record: Grid) -> tuple[Section, ...]:
    arms = _arms(record)
    if not arms:
        return ()
    return (_loss(arms), *(section for name in FOLLOWED if (section := _followed(arms, name)) is not None))


def _arms(record: Grid) -> list[_Arm]:
    found: dict[tuple[str, float], list[GridRun]] = {}
    for run in record.runs:
        try:
            place = (run.factors["normaliser"], float(run.factors["temperature"]))
        except (KeyError, ValueError):
            continue
        if "trial" not in run.factors and place[1] > 0:
            found.setdefault(place, []).append(run)
    return [
        _Arm(normaliser=name, temperature=temperature, runs=tuple(runs))
        for (name, temperature), runs in sorted(found.items(), key=lambda one: one[0][1])
    ]


def _names(arms: Sequence[_Arm]) -> list[str]:
    """Softmax first, for one colour each on every page."""
    order, found = list(LABELS), list(dict.fromkeys(arm.normaliser for arm in arms))
    return sorted(found, key=lambda name: order.index(name) if name in order else len(order))


def over_temperatures(arms: Sequence[_Arm]) -> Curves:
    """The loss of the best weights, a line a normaliser, with the range of its seeds."""
    traces, keys = [], []
    for place, name in enumerate(_names(arms)):
        colour = MODEL_COLOURS[place % len(MODEL_COLOURS)]
        points = []
        for arm in arms:
            loss = arm.over_seeds(_valid) if arm.normaliser == name else None
            if loss is not None:
                words = f"{label(name)}, T {arm.temperature:g}: {number(loss.value)}"
                points.append(Point(x=arm.temperature, y=loss, summary=f"{words} nats per token"))
        traces.append(Trace(colour=colour, points=tuple(points)))
        keys.append(Key(label=label(name), colour=colour, mark="line"))
    return Curves(
        x=Axis(title="temperature of attention", log=True, powers_of_two=True),
        y=Axis(title="validation loss, nats per token"),
        traces=tuple(traces),
        legend=tuple(keys),
    )


def _loss(arms: Sequence[_Arm]) -> Section:
    picture = over_temperatures(arms)
    chart = chart_of(
        picture, name="Validation loss over temperatures of attention",
        description="The figures are in the table below.",
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for name in _names(arms):
        for arm in arms:
            if arm.normaliser == name:
                rows.append(
                    (
                        f"{label(name)}, T {arm.temperature:g}",
                        f"{sum(run.valid is not None for run in arm.runs)} of {len(arm.runs)}",
                        arm.over_seeds(_valid),
                        arm.over_seeds(_mean("gradient_norm")),
                        arm.over_seeds(_mean("attention_sensitivity")),
                        arm.over_seeds(_last("attention_effective_tokens")),
                        arm.over_seeds(_last("attention_first")),
                    )
                )
    return Section(
        title="Loss over temperatures",
        identity="temperatures",
        text=(
            "Means over seeds; bands, and ranges in the table, reach from the lowest to the highest seed.",
        ),
        chart=chart,
        table=Table(
            caption="Each with the rate that it was tuned to.",
            columns=(
                Column(name="normaliser"),
                Column(name="seeds", unit="ended"),
                Column(name="loss", unit="range over seeds"),
                Column(name="gradient norm", unit="mean over training"),
                Column(name="sensitivity", unit="mean over training"),
                Column(name="effective tokens", unit="at the end"),
                Column(name="first position", unit="at the end"),
            ),
            rows=tuple(rows),
        ),
    )


def _followed(arms: Sequence[_Arm], monitor: str) -> Section | None:
    title, unit, words = FOLLOWED[monitor]
    heat = sorted({arm.temperature for arm in arms})
    looks = {
        one: (MODEL_COLOURS[place % len(MODEL_COLOURS)], charts.STYLES[place // len(MODEL_COLOURS) % 3])
        for place, one in enumerate(heat)
    }
    panels = []
    for name in _names(arms):
        traces = []
        for arm in arms:
            points = _points(arm, monitor) if arm.normaliser == name else ()
            if points:
                colour, style = looks[arm.temperature]
                traces.append(Trace(colour=colour, style=style, points=points, dots=len(points) == 1))
        values = [point.value for trace in traces for point in trace.points]
        if values:
            log = min(values) > 0 and max(values) > 10 * min(values)
            curves = Curves(x=Axis(title="step", low=0.0), y=Axis(title="", log=log), traces=tuple(traces))
            panels.append(
                charts.Panel(title=label(name), subtitle=f"{unit}, log scale" if log else unit, curves=curves)
            )
    if not panels:
        return None
    return Section(
        title=title,
        identity=monitor.replace("_", "-"),
        text=(f"{words} A line is the mean over seeds, its band their range.",),
        chart=draw(
            charts.grid, panels, name=title,
            description="Small pictures over steps, one a normaliser. The values are in results.json.",
            legend=tuple(
                Key(label=f"T {one:g}", colour=colour, mark=style) for one, (colour, style) in looks.items()
            ),
        ),
    )  # fmt: skip


def _points(arm: _Arm, monitor: str) -> tuple[Point, ...]:
    """At every step that all runs which got there have."""
    steps = sorted({point.step for run in arm.runs for point in run.curve})
    found = []
    for step in steps:
        values = arm.over_seeds(
            lambda run, step=step: next(  # type: ignore[misc]
                (point.monitors.get(monitor, math.nan) for point in run.curve if point.step == step), math.nan
            )
        )
        if values is not None:
            words = f"{label(arm.normaliser)}, T {arm.temperature:g}, step {step:,}: {number(values.value)}"
            found.append(Point(x=step, y=values, summary=shown(words, 120)))
    return tuple(found)


def _valid(run: GridRun) -> float:
    return math.nan if run.valid is None else run.valid


def _mean(monitor: str) -> Callable[[GridRun], float]:
    def read(run: GridRun) -> float:
        values = [point.monitors[monitor] for point in run.curve if monitor in point.monitors]
        return statistics.fmean(values) if values else math.nan

    return read


def _last(monitor: str) -> Callable[[GridRun], float]:
    return lambda run: run.curve[-1].monitors.get(monitor, math.nan) if run.curve else math.nan
