"""The tables of training runs: one row a run, one row an evaluation, one row a setting."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fullrank.report.charts.training_charts import Look
from fullrank.report.figures import NONE, Cell
from fullrank.report.page import Column, Section, Table
from fullrank.report.text import shown
from fullrank.results import Estimate, Training
from fullrank.results.training import Evaluation


def summary(drawn: Sequence[Look]) -> Table:
    """How good each run is."""
    rows: list[tuple[Cell, ...]] = []
    for look in drawn:
        run, best, every = look.run, look.run.best(), look.run.validation()
        rows.append(
            (
                _label(look),
                best.step if best else None,
                best.loss if best else None,
                run.valid,
                perplexity(run.valid),
                perplexity(run.test),
                every[-1].bits_per_byte if every else None,
            )
        )
    names = (
        ("run", ""), ("best step", ""), ("best loss", "nats"), ("final loss", "nats"),
        ("perplexity", "validation"), ("perplexity", "test"), ("bits per byte", "validation"),
    )  # fmt: skip
    return Table(
        caption=(
            "Losses per token. Final: of the best weights where a run has finished, else of its last "
            "evaluation; intervals are 95%, by the standard errors of the evaluations."
        ),
        columns=tuple(Column(name=name, unit=unit) for name, unit in names),
        rows=tuple(rows),
    )


def facts(drawn: Sequence[Look]) -> Table:
    """Size, rank and speed of each run, at its last evaluation."""
    rows: list[tuple[Cell, ...]] = []
    for look in drawn:
        run, every = look.run, look.run.validation()
        monitors = every[-1].monitors if every else {}
        speeds = sorted(one.tokens_per_second for one in run.points if math.isfinite(one.tokens_per_second))
        rows.append(
            (
                _label(look),
                run.parameters,
                run.steps,
                _whole(monitors.get("head_effective_rank")),
                _whole(monitors.get("logprob_rank")),
                _whole(monitors.get("logprob_rank_ceiling")),
                speeds[len(speeds) // 2] if speeds else None,
                len(run.alarms),
            )
        )
    names = (
        ("run", ""), ("parameters", ""), ("steps", ""), ("effective rank", "of W"),
        ("rank", "of log-probabilities"), ("its ceiling", "in the sample"), ("speed", "tokens per second"),
        ("alarms", ""),
    )  # fmt: skip
    return Table(
        caption="Size, rank and speed: ranks at the last evaluation, the median speed.",
        columns=tuple(Column(name=name, unit=unit) for name, unit in names),
        rows=tuple(rows),
    )


def perplexity(loss: Estimate | None) -> Estimate | None:
    if loss is None or not loss.value < 700 or loss.high > 700:
        return None
    return Estimate(value=math.exp(loss.value), low=math.exp(loss.low), high=math.exp(loss.high))


def _whole(value: float | None) -> Cell:
    return None if value is None or not math.isfinite(value) else round(value)


def _label(look: Look) -> str:
    """A run's name, with its head where the name does not tell it."""
    head = shown(look.run.head, 40)
    return look.name if not head or head in look.name else f"{look.name}, {head}"


def every_evaluation(run: Training) -> Section | None:
    if not run.evaluations:
        return None
    names = list(dict.fromkeys(name for one in run.evaluations for name in one.monitors))
    columns = ("step", "split", "loss", "standard error", "perplexity", "bits per byte", *names)
    return Section(
        title="Every evaluation",
        table=Table(
            caption="Losses in nats per token. Monitors are measured on validation text.",
            columns=tuple(Column(name=shown(name, 40).replace("_", " ")) for name in columns),
            rows=tuple(_row(one, names) for one in run.evaluations),
            folded=f"{len(run.evaluations)} evaluation{'s' if len(run.evaluations) > 1 else ''}",
        ),
    )


def _row(one: Evaluation, names: list[str]) -> tuple[Cell, ...]:
    figures = (one.loss, one.standard_error, one.perplexity, one.bits_per_byte)
    monitors = (one.monitors.get(name) for name in names)
    return (one.step, shown(one.split, 20), *figures, *monitors)


def settings(run: Training) -> Section:
    def rows(facts: dict[str, str]) -> tuple[tuple[Cell, ...], ...]:
        return tuple((shown(name, 60), shown(value, 200)) for name, value in facts.items())

    spent = f"{_time(run.seconds)} in all, {_time(run.seconds_training)} of it training"
    if math.isfinite(run.monitor_share):
        spent += f"; monitors took {run.monitor_share:.1%}"
    columns = (Column(name="setting"), Column(name="value"))
    tables = [Table(caption="", columns=columns, rows=rows(run.config), folded="Settings")]
    if run.data:
        facts = (Column(name="fact"), Column(name="value"))
        tables.append(Table(caption="", columns=facts, rows=rows(run.data), folded="Data"))
    resumed = f" It was resumed {run.starts - 1} times." if run.starts > 1 else ""
    return Section(title="Settings and time", text=(f"{spent}.{resumed}",), more_tables=tuple(tables))


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def differences(drawn: Sequence[Look]) -> Section:
    names = list(dict.fromkeys(name for look in drawn for name in look.run.config))
    differing = [name for name in names if len({look.run.config.get(name) for look in drawn}) > 1]
    return Section(
        title="Settings that differ",
        text=() if differing else ("All settings are the same.",),
        table=Table(
            caption="Everything else is the same in all runs.",
            columns=(Column(name="setting"), *(Column(name=look.name) for look in drawn)),
            rows=tuple(
                (shown(name, 60), *(shown(look.run.config.get(name, NONE), 60) for look in drawn))
                for name in differing
            ),
        )
        if differing
        else None,
    )
