"""Pictures of training runs: the loss over steps, and small multiples of everything else.

    loss      validation loss with its 95% band, a line a run; of a run alone its training loss as well
    grid      one small picture a quantity, a line a run, all over the same steps
    shares    one small picture a mixture, a line a component

A run has one look on the whole page: a colour for its head and a stroke for its repetition, so that seeds of
one head stand together. A diamond marks an alarm on the quantity that it is about.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from fullrank.errors import FullrankError
from fullrank.report.charts.axis import Axis
from fullrank.report.charts.curves import Curves, Point, Reference, Trace
from fullrank.report.charts.picture import Specification
from fullrank.report.charts.series_charts import LOG_FROM, THOUSANDS
from fullrank.report.charts.theme import INK, MODEL_COLOURS, MUTED, REFERENCE, WIDE, Key, configuration
from fullrank.report.figures import number
from fullrank.report.pages.training_quantities import Quantity
from fullrank.report.text import shown, unique
from fullrank.results import Estimate
from fullrank.results.training import Evaluation, RaisedAlarm, Training

STYLES = ("line", "dashed", "dotted")
MOST_DOTS = 60
"""Marks of single evaluations in one picture, beyond which lines stand alone."""
EARLY = 0.1
"""What lies in this share of the steps does not decide the height of the loss's picture."""
MOST_MIXTURES = 6
# Five characters at most, so that labels fit between two plots.
SHORT = f"datum.value && abs(datum.value) < 0.001 ? format(datum.value, '.0e') : {THOUSANDS}"
LABELS, BETWEEN_COLUMNS, BETWEEN_ROWS = 44, 62, 96
"""Pixels: left of the first plot, and between plots."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """A run, the name that it goes by, and how its lines look."""

    run: Training
    name: str
    colour: str
    style: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """One small picture."""

    title: str
    subtitle: str
    curves: Curves
    count: bool = False
    """Whether the values are whole numbers."""


def looks(runs: Sequence[Training]) -> tuple[Look, ...]:
    """How each run is drawn; raises where there are more than lines can be told apart."""
    most = len(MODEL_COLOURS) * len(STYLES)
    if len(runs) > most:
        raise FullrankError(f"got {len(runs)} runs, a page can tell {most} apart: compare fewer at a time")
    heads = list(dict.fromkeys(run.head for run in runs))
    repeated = max(sum(run.head == head for run in runs) for head in heads)
    places = []
    for order, run in enumerate(runs):
        # By head where colours and strokes suffice, else one after the other.
        if len(heads) <= len(MODEL_COLOURS) and repeated <= len(STYLES) and len(heads) > 1:
            before = sum(one.head == run.head for one in runs[:order])
            places.append((heads.index(run.head), before))
        else:
            places.append((order % len(MODEL_COLOURS), order // len(MODEL_COLOURS)))
    names = unique([shown(run.name, 32) or "run" for run in runs])
    return tuple(
        Look(run=run, name=name, colour=MODEL_COLOURS[colour], style=STYLES[style])
        for run, name, (colour, style) in zip(runs, names, places, strict=True)
    )


def legend(drawn: Sequence[Look]) -> tuple[Key, ...]:
    """A line a run, where there are several, and what a diamond means where there is one."""
    keys = [Key(label=one.name, colour=one.colour, mark=one.style) for one in drawn] if len(drawn) > 1 else []
    if any(one.run.alarms for one in drawn):
        keys.append(Key(label="alarm", colour=INK, mark="diamond"))
    return tuple(keys)


def loss(drawn: Sequence[Look]) -> Curves:
    """Validation losses with their 95% bands, and the training loss of a run alone."""
    traces = []
    keys = list(legend(drawn))
    if len(drawn) == 1:
        points = [Point(x=one.step, y=one.loss) for one in drawn[0].run.points]
        traces.append(Trace(colour=MUTED, points=tuple(points), dots=len(points) == 1))
        keys[:0] = [
            Key(label="validation, 95% interval", colour=drawn[0].colour, mark=drawn[0].style),
            Key(label="training", colour=MUTED, mark="line"),
        ]
    many = sum(len(one.run.validation()) for one in drawn) > MOST_DOTS
    marked = []
    for look in drawn:
        points = [_loss_point(look, one) for one in look.run.validation()]
        traces.append(Trace(colour=look.colour, points=tuple(points), style=look.style, dots=not many))
        # One evaluation alone is no line.
        if many and len(points) == 1:
            traces[-1] = dataclasses.replace(traces[-1], dots=True)
        marked.append(_marks(look, look.run.alarms, lambda one: one.loss))
    high = _late_high(traces, _last(drawn))
    return Curves(
        x=_steps(drawn),
        y=Axis(title="nats per token", high=high),
        traces=tuple(traces),
        marked=tuple(trace for trace in marked if trace.points),
        legend=tuple(keys),
        notes=() if high is None else (f"The beginning, above {number(high)} nats, is cut off.",),
    )


def _loss_point(look: Look, one: Evaluation) -> Point:
    half = 1.96 * one.standard_error
    estimate = Estimate(value=one.loss, low=one.loss - half, high=one.loss + half)
    told = f"{look.name}, step {one.step:,}: {one.loss:.4f} ± {number(half)} nats, perplexity "
    return Point(x=one.step, y=estimate, summary=told + number(one.perplexity))


def _late_high(traces: Iterable[Trace], last: int) -> float | None:
    """Where to end the axis so that a steep beginning does not press the rest flat; None to show it all."""
    every = [point for trace in traces for point in trace.points if math.isfinite(point.value)]
    late = [point.value for point in every if point.x >= EARLY * last]
    if len(late) < 8:
        return None
    low, high = min(late), max(late)
    # The curve may still fall steeply after that: half of its way is then enough to see.
    middle = sorted(late)[len(late) * 3 // 4]
    high = min(high, low + 4.0 * (middle - low)) if middle > low else high
    if max(point.value for point in every) - low < 1.5 * (high - low):
        return None
    return high + 0.06 * ((high - low) or abs(high))


def _steps(drawn: Sequence[Look]) -> Axis:
    return Axis(title="step", low=0.0, high=1.02 * _last(drawn) or 10.0)


def _last(drawn: Sequence[Look]) -> int:
    return max(look.run.steps for look in drawn)


def _marks(look: Look, alarms: Iterable[RaisedAlarm], value: Callable[[Evaluation], float]) -> Trace:
    """A diamond on the run's curve for every alarm."""
    points = []
    for alarm in alarms:
        # A run that diverged has no evaluation at that step.
        there = [one for one in look.run.validation() if one.step <= alarm.step]
        if there:
            told = f"{look.name}, step {alarm.step:,}: {shown(alarm.message, 300)}"
            points.append(Point(x=alarm.step, y=value(there[-1]), summary=told))
    return Trace(colour=INK, points=tuple(points))


def panels(drawn: Sequence[Look], quantities: Iterable[Quantity]) -> list[Panel]:
    """A picture of every quantity that some run has."""
    found = []
    for quantity in quantities:
        traces, marked = [], []
        bounds: dict[tuple[float, str], None] = {}
        for look in drawn:
            points = _points(look, quantity)
            if not points:
                continue
            dots = len(points) == 1 or (quantity.trained is None and len(points) <= 30 and len(drawn) == 1)
            traces.append(Trace(colour=look.colour, points=tuple(points), style=look.style, dots=dots))
            bounds |= {(round(value, 6), style): None for value, style in quantity.bounds(look.run)}
            if quantity.value is not None:
                these = [one for one in look.run.alarms if one.kind in quantity.alarms]
                marked.append(_marks(look, these, quantity.value))
        if not traces:
            continue
        values = [point.value for trace in traces for point in trace.points]
        high = _late_high(traces, _last(drawn)) if quantity.steep else None
        log = high is None and min(values) > 0 and max(values) > LOG_FROM * min(values)
        curves = Curves(
            x=_steps(drawn),
            y=_counting(values) if quantity.count else Axis(title="", log=log, high=high),
            traces=tuple(traces),
            horizontal=tuple(
                Reference(value=value, colour=REFERENCE, style=style)
                for value, style in bounds
                if math.isfinite(value)
            ),
            marked=tuple(trace for trace in marked if trace.points),
        )
        how = "log scale" if log else "" if high is None else "beginning cut off"
        subtitle = ", ".join(filter(None, (quantity.unit, how)))
        found.append(Panel(title=quantity.title, subtitle=subtitle, curves=curves, count=quantity.count))
    return found


def _counting(values: list[float]) -> Axis:
    return Axis(title="", low=0.0, high=1.05 * max([1.0, *values]))


def _points(look: Look, quantity: Quantity) -> list[Point]:
    pairs: list[tuple[int, float]] = []
    if quantity.value is not None:
        pairs = [(one.step, quantity.value(one)) for one in look.run.validation()]
    elif quantity.trained is not None:
        pairs = [(one.step, quantity.trained(one)) for one in look.run.points]
    return [
        Point(x=step, y=value, summary=f"{look.name}, step {step:,}: {number(value)}")
        for step, value in pairs
        if math.isfinite(value)
    ]


def shares(drawn: Sequence[Look]) -> list[Panel]:
    """The mean prior of every component, one picture a mixture."""
    found = []
    for look in drawn:
        evaluations = [one for one in look.run.validation() if one.parts("component_shares")]
        if not evaluations:
            continue
        K = len(evaluations[-1].parts("component_shares"))
        traces = []
        for k in range(K):
            points = [
                Point(
                    x=one.step,
                    y=one.parts("component_shares")[k],
                    summary=f"component {k}, step {one.step:,}: {one.parts('component_shares')[k]:.2%}",
                )
                for one in evaluations
                if k < len(one.parts("component_shares"))
            ]
            colour = MODEL_COLOURS[k % len(MODEL_COLOURS)]
            style = STYLES[k // len(MODEL_COLOURS) % len(STYLES)]
            traces.append(
                Trace(colour=colour, points=tuple(points), style=style, dots=len(points) <= 30 and K <= 12)
            )
        curves = Curves(
            x=_steps(drawn),
            y=Axis(title="", low=0.0),
            traces=tuple(traces),
            horizontal=(Reference(value=1 / K, colour=REFERENCE, style="dotted"),),
        )
        title = "shares" if len(drawn) == 1 else f"shares, {look.name}"
        found.append(Panel(title=title, subtitle=f"mean prior of {K}, dotted: 1 / K", curves=curves))
    return found[:MOST_MIXTURES]


def grid(drawn: Sequence[Panel], *, width: int) -> Specification:
    """Small pictures side by side, `width` pixels wide in all."""
    wide = width >= WIDE
    columns = min(len(drawn), 3) if wide else 1
    # Plots stand flush, so that they line up whatever their labels; labels and titles go between them.
    inner = (width - LABELS - (columns - 1) * BETWEEN_COLUMNS) // columns
    height = {1: 200, 2: 150, 3: 110}[columns] if wide else 140
    config = configuration()
    # Flush plots count only the least extent of their labels, and some are wider.
    config["padding"] |= {"left": 14}
    config["title"] |= {
        "fontSize": 13,
        "offset": 6,
        "subtitlePadding": 3,
        "frame": "group",
    }
    return {
        "concat": [_small(panel, inner, height) for panel in drawn],
        "columns": columns,
        "bounds": "flush",
        "spacing": {"row": BETWEEN_ROWS, "column": BETWEEN_COLUMNS},
        "config": config,
    }


def _small(panel: Panel, width: int, height: int) -> Specification:
    made = panel.curves.specification(width=width)
    for layer in made["layer"]:
        for name, ticks in (("x", 4), ("y", 4)):
            axis = layer["encoding"].get(name, {}).get("axis")
            if axis is None:
                continue
            axis |= {"labelFontSize": 11, "titlePadding": 4, "labelOverlap": True}
            if axis.get("tickCount"):
                axis["tickCount"] = ticks
            axis["labelExpr"] = SHORT
            if name == "y":
                axis |= {"minExtent": 34, "title": None}
                if panel.count:
                    axis["labelExpr"] = "datum.value % 1 ? '' : format(datum.value, 'd')"
        mark = layer["mark"]
        if mark["type"] == "point":
            mark["size"] = 70 if mark["shape"] == "diamond" else 18
        elif mark["type"] == "line":
            mark["strokeWidth"] = 1.8
    return {
        "width": width,
        "height": height,
        "title": {"text": panel.title, "subtitle": panel.subtitle},
        "layer": made["layer"],
    }
