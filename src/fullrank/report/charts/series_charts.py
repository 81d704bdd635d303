"""Pictures of a series: small multiples of curves over steps, and losses over model sizes.

    panels    one picture a model and shots, side by side: the primary metric after its steep beginning,
              in percent above the best checkpoint, with error bars
    overview  one picture a metric and shots, a line a model, all steps
    scaling   loss over parameters, the fitted law through the models that it was fitted on

Every panel of one kind has the same axes, so that heights compare. What has no place on an axis (step 0 and
values of 0 on a log scale) is drawn at its edge or left out; results.json holds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fullrank.report.charts.axis import Axis
from fullrank.report.charts.curves import thinned
from fullrank.report.charts.picture import Specification
from fullrank.report.charts.theme import (
    HIGH_RANK_COLOUR,
    INK,
    MODEL_COLOURS,
    MUTED,
    REFERENCE,
    SOFTMAX_COLOUR,
    WIDE,
    Key,
    configuration,
)
from fullrank.report.figures import number
from fullrank.report.text import shown
from fullrank.results.series import Curve, Saturation, Scaling

TURNED, STEADY = HIGH_RANK_COLOUR, SOFTMAX_COLOUR
MOST_PANELS = 24
"""More curves than this are in results.json only: a page of a hundred small pictures shows nothing."""
LABEL = 26
FARTHEST = 1.0
"""Earlier points are drawn while they lie within this share of the best value."""
COLUMNS_WIDE, COLUMNS_NARROW = 3, 1
# Above this ratio of largest to smallest, a linear axis shows only the largest.
LOG_FROM = 20.0
THOUSANDS = (
    "datum.value >= 1e6 ? format(datum.value / 1e6, '~g') + 'M' : "
    "datum.value >= 1000 ? format(datum.value / 1000, '~g') + 'k' : format(datum.value, '~g')"
)

PANEL_LEGEND = (
    Key(label="turned", colour=TURNED, mark="line"),
    Key(label="not turned, or undecided", colour=STEADY, mark="line"),
    Key(label="best checkpoint", colour=INK, mark="ring"),
    Key(label="last checkpoint", colour=INK, mark="diamond"),
)
SCALING_LEGEND = (
    Key(label="fitted, last checkpoint", colour=STEADY, mark="dot"),
    Key(label="left out, last checkpoint", colour=TURNED, mark="diamond"),
    Key(label="best checkpoint", colour=MUTED, mark="ring"),
    Key(label="the law, with its 95% interval", colour=REFERENCE, mark="dashed"),
)


def name(model: str, shots: int | None, limit: int = LABEL) -> str:
    """A curve in a few words."""
    return shown(model, limit) + ("" if shots is None else f", {shots}-shot")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """One small picture."""

    title: str
    subtitle: str
    colour: str
    lines: tuple[tuple[str, tuple[dict[str, Any], ...]], ...]
    """Colour and rows (x, y, low, high, summary, mark) of every line."""


def panels(pairs: Sequence[tuple[Curve, Saturation]], *, width: int) -> Specification:
    """The late phase of every curve, in percent of its best value away from it."""
    drawn = [_late(curve, found) for curve, found in pairs[:MOST_PANELS]]
    lower = pairs[0][0].lower_is_better is not False
    title = "% above the best" if lower else "% below the best"
    return _grid(drawn, x=Axis(title="step", log=True), y=Axis(title=title), width=width)


def overview(curves: Sequence[Curve], colours: dict[str, str], *, width: int) -> Specification:
    """Every metric over all steps, a line a model."""
    grouped: dict[tuple[str, int | None], list[Curve]] = {}
    for curve in curves:
        if curve.steps:
            grouped.setdefault((curve.metric, curve.shots), []).append(curve)
    drawn = []
    for (metric, shots), members in list(grouped.items())[:MOST_PANELS]:
        values = [value for curve in members for value in curve.values if value > 0]
        all_values = [value for curve in members for value in curve.values]
        log = len(values) == len(all_values) and max(values) > LOG_FROM * min(values)
        rows = tuple(
            (
                colours.get(curve.model, MUTED),
                tuple(
                    {
                        "x": max(step, 0.5),
                        "y": value,
                        "summary": f"{shown(curve.model)}, step {step:,}: {number(value)}",
                        "mark": "point",
                    }
                    for step, value in zip(curve.steps, curve.values, strict=True)
                ),
            )
            for curve in members
        )
        subtitle = members[0].unit + (", log scale" if log else "")
        drawn.append(
            (Panel(title=name(metric, shots), subtitle=subtitle.lstrip(", "), colour=INK, lines=rows), log)
        )
    return _free_grid(drawn, width=width)


def model_colours(curves: Sequence[Curve]) -> dict[str, str]:
    """A colour a model, as far as they go; the others share grey."""
    models = list(dict.fromkeys(curve.model for curve in curves))
    return dict(zip(models, MODEL_COLOURS, strict=False))


def _late(curve: Curve, found: Saturation) -> Panel:
    """The points after the early phase, and what was found, of one curve."""
    sign = 1.0 if curve.lower_is_better is not False else -1.0
    best = found.best_value
    first = next((place for place, step in enumerate(curve.steps) if step >= found.first_step), 0)
    # The rest of the way down, as far as it does not press the end flat.
    while first and abs(curve.values[first - 1] / (best or 1.0) - 1) <= FARTHEST:
        first -= 1
    rows = []
    for place, (step, value) in enumerate(zip(curve.steps, curve.values, strict=True)):
        if place < first or not best:
            continue
        row: dict[str, Any] = {
            "x": max(step, 0.5),
            "y": 100 * sign * (value / best - 1),
            "summary": f"{shown(curve.model)}, step {step:,}: {number(value)}",
            "mark": "best" if step == found.best_step else "last" if step == found.final_step else "point",
        }
        if curve.standard_errors is not None:
            error = 196 * curve.standard_errors[place] / abs(best)
            row |= {"low": row["y"] - error, "high": row["y"] + error}
            row["summary"] += f" ± {number(1.96 * curve.standard_errors[place])}"
        rows.append(row)
    verdict = "too few points" if found.reason else f"lost {found.lost_percent:.1f}%"
    verdict += "" if found.reason else f", {found.outcome}"
    colour = TURNED if found.turned else STEADY
    return Panel(
        title=name(curve.model, curve.shots), subtitle=verdict, colour=colour, lines=((colour, tuple(rows)),)
    )


def _grid(drawn: Sequence[Panel], *, x: Axis, y: Axis, width: int) -> Specification:
    """Panels with the same axes."""
    rows = [row for panel in drawn for _, line in panel.lines for row in line]
    # Error bars of a steep first point would press everything else flat, so only the points count.
    x, y = x.fitted([row["x"] for row in rows]), y.fitted([0.0, 5.0, *(row["y"] for row in rows)])
    return _assembled(
        [_panel(panel, x, y, width=width, columns=_columns(len(drawn), width)) for panel in drawn],
        width=width,
    )


def _free_grid(drawn: Sequence[tuple[Panel, bool]], *, width: int) -> Specification:
    """Panels with the same steps but each its own height."""
    steps = [row["x"] for panel, _ in drawn for _, line in panel.lines for row in line]
    x = Axis(title="step", log=True).fitted(steps)
    made = []
    for panel, log in drawn:
        y = Axis(title="", log=log).fitted([row["y"] for _, line in panel.lines for row in line])
        made.append(_panel(panel, x, y, width=width, columns=_columns(len(drawn), width)))
    return _assembled(made, width=width)


def _assembled(made: list[dict[str, Any]], *, width: int) -> Specification:
    config = configuration()
    config["title"] |= {
        "fontSize": 13,
        "offset": 6,
        "subtitleFontSize": 12,
        "subtitlePadding": 3,
        "frame": "bounds",
    }
    return {
        "concat": made,
        "columns": _columns(len(made), width),
        "spacing": {"row": 22, "column": 18},
        "config": config,
    }


def _columns(count: int, width: int) -> int:
    """Panels side by side: the page stretches a picture to its width, so that few panels are wide ones."""
    return min(count, COLUMNS_WIDE if width >= WIDE else COLUMNS_NARROW)


def _panel(panel: Panel, x: Axis, y: Axis, *, width: int, columns: int) -> dict[str, Any]:
    # Labels of the y axis take about 50 pixels of every panel.
    inner = (width - 18 * (columns - 1)) // columns - 52
    across = {"field": "x", "type": "quantitative", **x.encoding(ticks=4)}
    along = {"field": "y", "type": "quantitative", **y.encoding(ticks=4)}
    across["axis"] |= {"grid": False, "labelFontSize": 11, "titlePadding": 4, "labelOverlap": True}
    across["axis"]["labelExpr"] = THOUSANDS
    if y.log:
        along["axis"]["labelExpr"] = THOUSANDS
    along["axis"] |= {
        "grid": True,
        "labelFontSize": 11,
        "titlePadding": 4,
        "minExtent": 34,
        "labelOverlap": True,
    }
    along["axis"]["title"] = y.title or None
    layers = []
    for place, (colour, line) in enumerate(panel.lines):
        rows = thinned([row for row in line if x.holds(row["x"]) and y.holds(row["y"])])
        layers += _line(
            rows, colour, across, along, dots=len(rows) <= 40 and len(panel.lines) == 1, order=place
        )
    return {
        "width": inner,
        "height": 120 if columns == COLUMNS_WIDE else 140 if width < WIDE else 200,
        "title": {
            "text": panel.title,
            "subtitle": panel.subtitle,
            "subtitleColor": panel.colour if panel.colour != INK else MUTED,
        },
        "layer": [layer for layer in layers if layer["data"]["values"]]
        or [{"data": {"values": [{}]}, "mark": {"type": "point", "opacity": 0, "aria": False}}],
    }


def _line(
    rows: list[dict[str, Any]],
    colour: str,
    across: dict[str, Any],
    along: dict[str, Any],
    *,
    dots: bool,
    order: int,
) -> list[dict[str, Any]]:
    place = {"x": across, "y": along}
    told = {"description": {"field": "summary", "type": "nominal"}}

    def points(which: str, mark: dict[str, Any]) -> dict[str, Any]:
        return {
            "data": {"values": [row for row in rows if row["mark"] == which]},
            "mark": {"type": "point", "opacity": 1, "clip": False, **mark},
            "encoding": {**place, **told},
        }

    layers = [
        {
            "data": {"values": [row for row in rows if "low" in row]},
            "mark": {
                "type": "rule",
                "stroke": colour,
                "strokeWidth": 1,
                "opacity": 0.5,
                "clip": True,
                "aria": False,
            },
            "encoding": {"x": across, "y": {**along, "field": "low"}, "y2": {"field": "high"}},
        },
        {
            "data": {"values": rows},
            "mark": {"type": "line", "stroke": colour, "strokeWidth": 1.8, "clip": True, "aria": False},
            "encoding": {**place, "order": {"field": "x", "type": "quantitative"}},
        },
    ]
    if dots:
        layers.append(points("point", {"shape": "circle", "size": 22, "fill": colour, "strokeWidth": 0}))
    layers.append(
        points("best", {"shape": "circle", "size": 70, "stroke": INK, "strokeWidth": 2, "filled": False})
    )
    layers.append(points("last", {"shape": "diamond", "size": 80, "fill": INK, "strokeWidth": 0}))
    return layers


def scaling(fit: Scaling, *, width: int) -> Specification:
    """Final and best losses over parameters, and the law."""
    wide = width >= WIDE
    points = fit.points
    losses = [value for point in points for value in (point.final, point.best, point.predicted.value)]
    x = Axis(title="parameters (log scale)", log=True).fitted([point.parameters for point in points])
    sizes = [point.parameters for point in points]
    middle = (min(sizes) * max(sizes) ** 2) ** (1 / 3)
    y = Axis(title=f"loss, {fit.unit}" if len(fit.unit) < 30 else "loss, nats (log of the metric)").fitted(
        losses
    )
    across = {"field": "x", "type": "quantitative", **x.encoding(ticks=8 if wide else 5)}
    along = {"field": "y", "type": "quantitative", **y.encoding(ticks=6)}
    across["axis"] |= {"grid": False, "labelExpr": (
        "datum.value >= 1e9 ? format(datum.value / 1e9, '~g') + 'B' : format(datum.value / 1e6, '~g') + 'M'"
    )}  # fmt: skip
    along["axis"]["grid"] = True
    rows = [
        {
            "x": point.parameters,
            "y": point.predicted.value,
            "final": point.final,
            "best": point.best,
            "label": shown(point.model, 22),
            "fitted": point.fitted,
            # In the right third names stand left of their points, below the law: in the frame, off the line.
            "left": point.parameters > middle,
            "summary": (
                f"{shown(point.model)}: final {number(point.final)}, law {number(point.predicted.value)}, "
                f"{point.final_gap_percent.value:+.1f}%"
            ),
            **(
                {"low": point.predicted.low, "high": point.predicted.high}
                if y.holds(point.predicted.low)
                else {}
            ),
        }
        for point in points
        if x.holds(point.parameters) and y.holds(point.predicted.value)
    ]
    quiet = {"clip": True, "aria": False}

    def marks(field: str, chosen: list[dict[str, Any]], mark: dict[str, Any]) -> dict[str, Any]:
        return {
            "data": {"values": chosen},
            "mark": {"type": "point", "opacity": 1, **mark},
            "encoding": {
                "x": across,
                "y": {**along, "field": field},
                "description": {"field": "summary", "type": "nominal"},
            },
        }

    layers = [
        {
            "data": {"values": [row for row in rows if "low" in row]},
            "mark": {"type": "area", "fill": REFERENCE, "fillOpacity": 0.14, **quiet},
            "encoding": {"x": across, "y": {**along, "field": "low"}, "y2": {"field": "high"}},
        },
        {
            "data": {"values": rows},
            "mark": {"type": "line", "stroke": REFERENCE, "strokeWidth": 1.5, "strokeDash": [5, 4], **quiet},
            "encoding": {"x": across, "y": along},
        },
        marks("best", rows,
              {"shape": "circle", "size": 60, "stroke": MUTED, "strokeWidth": 1.5, "filled": False}),
        marks("final", [row for row in rows if row["fitted"]],
              {"shape": "circle", "size": 80, "fill": STEADY, "strokeWidth": 0}),
        marks("final", [row for row in rows if not row["fitted"]],
              {"shape": "diamond", "size": 110, "fill": TURNED, "strokeWidth": 0}),
        *(
            {
                "data": {"values": [row for row in rows if row["left"] == left and len(rows) <= 12]},
                "mark": {
                    "type": "text", "align": "right" if left else "left", "color": INK, "aria": False,
                    "dx": -8 if left else 8, "dy": 12 if left else -10,
                },
                "encoding": {
                    "x": across,
                    "y": {**along, "field": "final"},
                    "text": {"field": "label", "type": "nominal"},
                },
            }
            for left in (False, True)
        ),
    ]  # fmt: skip
    return {
        "width": width,
        "height": 270 if wide else 230,
        "autosize": {"type": "fit-x"},
        "config": configuration(),
        "layer": [layer for layer in layers if layer["data"]["values"]],
    }
