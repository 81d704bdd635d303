"""The page of a study that trains: what was stated, what the rule decides, the curves and every run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from fullrank.report.charts.axis import Axis
from fullrank.report.charts.curves import Curves, Point, Trace
from fullrank.report.charts.intervals import Intervals, Mark
from fullrank.report.charts.theme import HIGH_RANK_COLOUR, MODEL_COLOURS, REFERENCE, Key
from fullrank.report.figures import figure, number
from fullrank.report.page import Column, Page, Section, Table, draw
from fullrank.report.pages.attention_grid_section import sections as attention_sections
from fullrank.report.pages.domain_grid_section import sections as domain_sections
from fullrank.report.text import shown
from fullrank.results.grid import Grid, GridAnswer, GridPoint, GridRun

STYLES = ("line", "dashed", "dotted")
MOST_SENTENCES = 12
"""More are not read: then pictures and table say it."""
SHOWN = {
    "": "validation loss, nats per token",
    "head_effective_rank_share": "effective rank of W over its width",
    "anisotropy": "mean cosine of two states",
    "state_outlier": "largest dimension of the states over the median one",
}
"""What is drawn over the tokens of a run: its loss, and monitors."""


def grid_page(record: Grid) -> Page:
    statement = record.statement
    return Page(
        title=f"Study: {shown(record.name)}",
        lead=shown(statement.question, 500),
        warnings=_warnings(record),
        sections=(
            Section(
                title="Stated before it was run",
                identity="stated",
                items=(
                    f"Hypothesis: {shown(statement.hypothesis, 800)}",
                    f"Comparison: {shown(statement.comparison, 800)}",
                    f"Smallest effect of interest: {number(statement.smallest)} {shown(statement.unit)}",
                    f"Rule: {shown(statement.rule, 800)}",
                ),
            ),
            *_decided(record),
            *(attention_sections(record) if record.name == "attention" else ()),
            *(domain_sections(record) if record.name == "domains" else ()),
            *(_timed(record) if record.name == "published" else ()),
            *_curves(record),
            _runs(record),
        ),
    )


def _warnings(record: Grid) -> tuple[str, ...]:
    found = []
    if record.small:
        found.append("This is the small version: it shows that the study runs, and decides nothing.")
    if record.settings:
        found.append(
            f"Of all runs, where the study says nothing else: {shown(', '.join(record.settings), 400)}."
        )
    if record.missing:
        found.append(f"Runs of the plan that have not been made yet: {len(record.missing)}.")
    after = sum(run.after_looking for run in record.runs)
    if after:
        found.append(
            f"{after} of {len(record.runs)} runs were made after the study's file was changed, with results "
            "known."
        )
    return tuple(found)


def effects(record: Grid, wanted: Callable[[GridAnswer], bool] = lambda one: True) -> Iterator[Intervals]:
    """What was decided, a picture for each unit: beside zero and, in the statement's unit, the smallest
    effect of interest."""
    drawn = [one for one in record.answers if one.effect and math.isfinite(one.effect.low) and wanted(one)]
    units = dict.fromkeys(one.unit for one in drawn)
    for unit in sorted(units, key=lambda unit: unit != record.statement.unit):
        yield _effects(record, unit, [one for one in drawn if one.unit == unit])


def _effects(record: Grid, unit: str, answers: Sequence[GridAnswer]) -> Intervals:
    stated = unit == record.statement.unit
    smallest = record.statement.smallest
    marks, figures = [], []
    for one in answers:
        assert one.effect is not None
        figures.append(figure(one.effect))
        marks.append(
            Mark(
                row=shown(one.label, 80), model="effect", value=one.effect.value, low=one.effect.low,
                high=one.effect.high, colour=HIGH_RANK_COLOUR, summary=shown(one.sentence, 400),
            )
        )  # fmt: skip
    return Intervals(
        x=Axis(title=shown(unit)), rows=tuple(mark.row for mark in marks), marks=tuple(marks),
        models=("effect",), figures=tuple(figures), lines=(-smallest, 0.0, smallest) if stated else (0.0,),
        legend=(
            Key(label="mean, 95% interval", colour=HIGH_RANK_COLOUR, mark="dot"),
            Key(
                label="zero and the smallest effect of interest" if stated else "zero",
                colour=REFERENCE, mark="line",
            ),
        ),
    )  # fmt: skip


def _decided(record: Grid) -> Iterator[Section]:
    pictures = {
        picture.x.title: draw(
            picture.specification, name="Effects", description="All figures are in the table of effects.",
            legend=picture.legend,
        )
        for picture in effects(record)
    }  # fmt: skip
    first = next(iter(pictures), "")
    many = len(record.answers) > MOST_SENTENCES
    yield Section(
        title="What the rule decides",
        identity="decided",
        text=(_counted(record),) if many or not record.answers else (),
        chart=pictures.pop(first, None),
        table=Table(
            caption="Effects, each in its unit.",
            columns=(
                Column(name="comparison"),
                Column(name="effect", unit="95% interval"),
                Column(name="unit"),
                Column(name="runs"),
                Column(name="would have been seen"),
                Column(name="decision"),
            ),
            rows=tuple(
                (shown(one.label, 120), one.effect, shown(one.unit), one.seeds, _seen(one), _decision(one))
                for one in record.answers
            ),
        )
        if record.answers
        else None,
        items=() if many else tuple(shown(one.sentence, 600) for one in record.answers),
    )
    for unit, chart in pictures.items():
        yield Section(title=f"Effects in {unit}", chart=chart)


def _counted(record: Grid) -> str:
    if not record.answers:
        return "Nothing yet: runs are missing."
    counts = Counter(one.decision for one in record.answers)
    words = ", ".join(f"{count} {shown(decision)}" for decision, count in counts.most_common())
    return f"{len(record.answers)} comparisons: {words}. The pictures and the table have all of them."


def _seen(answer: GridAnswer) -> float | str:
    return answer.seen if math.isfinite(answer.seen) else "unknown"


def _decision(answer: GridAnswer) -> str:
    """With what its sentence says beyond it."""
    more = answer.sentence.partition(f": {answer.decision};")[2]
    return shown(f"{answer.decision};{more}" if more else answer.decision, 300)


def curves(record: Grid, monitor: str = "") -> Curves:
    """Every whole run over its tokens: the validation loss, or a monitor."""

    def height(point: GridPoint) -> float:
        return point.monitors.get(monitor, math.nan) if monitor else point.loss

    return _traced(
        record.runs, lambda run, point: point.tokens, height,
        x=Axis(title="tokens", log=True), y=Axis(title=SHOWN[monitor]),
    )  # fmt: skip


def over_minutes(record: Grid) -> Curves:
    """The validation perplexity of every whole run over its time, which its steps share alike."""
    return _traced(
        record.runs, lambda run, point: run.seconds / 60 * point.step / run.curve[-1].step,
        lambda point: math.exp(min(point.loss, 50.0)),
        x=Axis(title="minutes of training"), y=Axis(title="validation perplexity", log=True),
    )  # fmt: skip


def _traced(
    runs: Sequence[GridRun],
    along: Callable[[GridRun, GridPoint], float],
    height: Callable[[GridPoint], float],
    *,
    x: Axis,
    y: Axis,
) -> Curves:
    whole = [run for run in runs if "trial" not in run.factors and len(run.curve) > 1]
    coloured = _coloured(whole)
    names = list(dict.fromkeys(coloured(run) for run in whole))
    looks = {name: MODEL_COLOURS[place % len(MODEL_COLOURS)] for place, name in enumerate(names)}
    # More of them than colours: the second round is dashed.
    styles = {name: STYLES[min(2, place // len(MODEL_COLOURS))] for place, name in enumerate(names)}
    traces = []
    for run in whole:
        points = tuple(
            Point(x=along(run, point), y=value, summary=f"{shown(run.name)}: {number(value)}")
            for point in run.curve
            if along(run, point) > 0 and math.isfinite(value := height(point))
        )
        if points:
            name = coloured(run)
            traces.append(Trace(colour=looks[name], style=styles[name], dots=False, points=points))
    return Curves(
        x=x,
        y=y,
        traces=tuple(traces),
        legend=tuple(Key(label=shown(name), colour=looks[name], mark=styles[name]) for name in names),
    )


def _timed(record: Grid) -> Iterator[Section]:
    picture = over_minutes(record)
    if picture.traces:
        yield Section(
            title="Perplexity over minutes",
            identity="minutes",
            text=("Of validation text, one line a run. Runs that shared a device say little here.",),
            chart=draw(
                picture.specification, name="Validation perplexity, over minutes of training",
                description="The ends of losses are in the table below.", legend=picture.legend,
            ),
        )  # fmt: skip


def _curves(record: Grid) -> Iterator[Section]:
    for monitor, title in SHOWN.items():
        picture = curves(record, monitor)
        if not picture.traces:
            continue
        yield Section(
            title="Curves" if not monitor else title[0].upper() + title[1:],
            identity=monitor or "curves",
            text=("One line a run. Runs of one colour differ in what the legend leaves out, as the seed.",)
            if not monitor
            else (),
            chart=draw(
                picture.specification, name=f"{title[0].upper()}{title[1:]}, over tokens",
                description="The ends of losses are in the table below." if not monitor else "",
                legend=picture.legend,
            ),
        )  # fmt: skip


def _coloured(runs: Sequence[GridRun]) -> Callable[[GridRun], str]:
    """What a run's colour says: the first two factors, of those in which the runs differ."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.factors.items():
            values.setdefault(name, set()).add(value)
    told = [name for name in values if len(values[name]) > 1][:2] or list(values)[:2]
    return lambda run: ", ".join(f"{name} {run.factors[name]}" for name in told if name in run.factors)


def _runs(record: Grid) -> Section:
    factors: Sequence[str] = list(dict.fromkeys(name for run in record.runs for name in run.factors))
    return Section(
        title="Runs",
        identity="runs",
        table=Table(
            caption="Validation and test loss in nats per token, with the best weights of each run.",
            columns=(
                Column(name="run"),
                *(Column(name=shown(name)) for name in factors),
                Column(name="seed"),
                Column(name="parameters"),
                Column(name="tokens"),
                Column(name="validation"),
                Column(name="at the end"),
                Column(name="test"),
                Column(name="remark"),
            ),
            rows=tuple(
                (
                    shown(run.name, 80),
                    *(shown(run.factors.get(name, "")) for name in factors),
                    run.seed,
                    run.parameters,
                    run.tokens,
                    run.valid,
                    run.last,
                    run.test,
                    shown(run.failure, 120) or ("after looking" if run.after_looking else ""),
                )
                for run in record.runs
            ),
            folded=f"All {len(record.runs)} runs",
        ),
    )
