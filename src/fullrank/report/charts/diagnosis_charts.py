"""Charts of result records, as Vega-Lite specifications.

The rank ladder is drawn twice with one grammar. One row a rung; a dot is what the head reached, a tick is
what a softmax of the same width is known to reach.

    ladder_kl     x = KL(truth || model), nats per token, log scale;   tick = the lowest found for a softmax
    ladder_rank   x = least rank of the learnt log-probabilities;      tick = the width, line = the language
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from fullrank.errors import FullrankError
from fullrank.report.charts.dots import SMALLEST_DRAWN, WIDE, LogAxis, Row, dots
from fullrank.report.charts.picture import Specification, printable, svg
from fullrank.report.figures import number
from fullrank.report.text import shown
from fullrank.results import Ladder, LadderRung

# Low-rank and mixture-of-contexts heads are one softmax over one context row, so the width bounds their rank.
SOFTMAX_HEADS = ("softmax", "low_rank", "moc")


def ladder_kl(record: Ladder, *, width: int = WIDE) -> Specification:
    """Each rung's KL to the truth beside the floor for a softmax of its width, `width` pixels wide in all."""
    rows = _rows(record)
    axis = LogAxis.over(value for row in rows for value in (row["kl"], row["floor"]))
    series = ("softmax", "high-rank head", "softmax floor")
    for row in rows:
        row["figure"] = f"{row['kl']:.3g}"
    points = [
        {**_words(row), "series": name, "x": axis.place(value), "beyond": axis.beyond(value)}
        for row in rows
        for name, value in ((row["family"], row["kl"]), (series[2], row["floor"]))
        if not math.isnan(value)
    ]
    small = small_floor(record)
    dashed = [] if small is None else [f"dashed: at width {record.small_width}, {small:.3g}"]
    return dots(
        [_words(row) for row in rows],
        points,
        series=series,
        scale={"type": "log", "domain": [axis.low, axis.high], "nice": False},
        axis={
            "values": axis.ticks(),
            "labelExpr": "format(datum.value, datum.value < 0.001 ? '.0e' : '~g')",
        },
        axis_title=[
            "KL(truth ‖ model), nats per token (log scale)",
            "; ".join(["floor: the lowest found for a softmax of that width", *dashed]),
        ],
        figure_title="KL",
        references=[] if small is None else [small],
        width=width,
    )


def ladder_rank(record: Ladder, *, width: int = WIDE) -> Specification:
    """Each rung's learnt least rank beside its width, a softmax's ceiling; a line at the language's rank."""
    rows = _rows(record)
    series = ("softmax", "high-rank head", "softmax ceiling")
    for row in rows:
        row["figure"] = str(row["least_rank"])
    points = [
        {**_words(row), "series": name, "x": value, "beyond": ""}
        for row in rows
        for name, value in ((row["family"], row["least_rank"]), (series[2], row["width"]))
    ]
    most = max([record.least_rank, *(point["x"] for point in points)])
    return dots(
        [_words(row) for row in rows],
        points,
        series=series,
        scale={"type": "linear", "domain": [0, most * 1.04], "nice": False},
        axis={"tickMinStep": 1, "tickCount": 8 if width >= WIDE else 5, "format": "d"},
        axis_title=[
            "least rank of the learnt log-probabilities",
            f"ceiling: the width; dashed: the language, {record.least_rank}",
        ],
        figure_title="rank",
        references=[record.least_rank],
        width=width,
    )


def ladder_svg(record: Ladder) -> str:
    """The KL chart as a picture that stands alone, titled, on white."""
    specification = ladder_kl(record)
    specification["title"] = {"text": "KL to the truth by output layer", "subtitle": ladder_subtitle(record)}
    specification["background"] = "white"
    return svg(specification, name="KL to the truth by output layer", description=ladder_subtitle(record))


def ladder_subtitle(record: Ladder) -> str:
    return (
        f"a language of least rank {record.least_rank}: {record.contexts} contexts, "
        f"{record.vocabulary} tokens; {record.steps} training steps"
    )


def ordered(record: Ladder) -> list[LadderRung]:
    """The rungs as they are shown: softmax by width, then the other heads in the record's order."""
    if not record.rungs:
        raise FullrankError("the ladder has no rungs, expected at least one: run its study again")
    softmax = sorted((rung for rung in record.rungs if rung.head == "softmax"), key=lambda rung: rung.width)
    return [*softmax, *(rung for rung in record.rungs if rung.head != "softmax")]


def small_floor(record: Ladder) -> float | None:
    """The floor for a softmax of the small width, which a line marks; None where there is none to draw."""
    for rung in record.rungs:
        if rung.head == "softmax" and rung.width == record.small_width:
            return rung.floor if SMALLEST_DRAWN <= rung.floor < math.inf else None
    return None


def _rows(record: Ladder) -> list[Row]:
    rungs = ordered(record)
    return [
        {
            **dataclasses.asdict(rung),
            "row": label,
            "family": "softmax" if rung.head in SOFTMAX_HEADS else "high-rank head",
            "summary": _summary(rung),
        }
        for rung, label in zip(rungs, _labels(rungs), strict=True)
    ]


def label(rung: LadderRung) -> str:
    """A rung in a few words."""
    return f"{shown(rung.head)}, width {rung.width}" + (
        f", K = {rung.components}" if rung.components > 1 else ""
    )


def _labels(rungs: Iterable[LadderRung]) -> Iterator[str]:
    """One label a rung, numbered where they repeat: a chart puts equal labels on one row."""
    seen: dict[str, int] = {}
    for rung in rungs:
        words = label(rung)
        seen[words] = seen.get(words, 0) + 1
        yield words if seen[words] == 1 else f"{words} ({seen[words]})"


def _summary(rung: LadderRung) -> str:
    return (
        f"{label(rung)}: KL {number(rung.kl)} nats per token; softmax floor {number(rung.floor)}; "
        f"least rank {rung.least_rank}; {rung.parameters:,} parameters; {number(rung.seconds)} s"
    )


def _words(row: Row) -> Row:
    """The row as JSON can hold it, with words for non-finite numbers as in a result file."""
    return {name: _word(value) for name, value in row.items()}


def _word(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return printable(value) if isinstance(value, str) else value
