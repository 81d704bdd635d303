"""Curves from a CSV file: one row an evaluation of one checkpoint, one numeric column a metric.

    model,shots,step,lambada_ppl,lambada_ppl_stderr,lambada_acc
    pythia-70m,0,53000,94.32,3.99,0.297

`model` and `step` are required; `shots`, `parameters` and `tokens` are understood where they are there. A
column NAME_stderr or NAME_se holds the standard errors of NAME. Every other column of numbers is a metric.
Rows may come in any order. Values that are no finite number are left out and counted, and so are losses that
are not positive, because curves of losses are compared by their logarithm. Values of one model at one step
are averaged.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import statistics
from collections.abc import Iterable
from pathlib import Path

from fullrank.errors import FullrankError
from fullrank.results.reading import read_text
from fullrank.results.series import Curve
from fullrank.results.training import Training

LOSS_WORDS = ("ppl", "perplexity", "loss", "nll", "nats", "bpb", "bits")
"""A metric with one of these in its name is a loss: lower is better."""
SCORE_ENDINGS = ("acc", "accuracy", "acc_norm", "f1", "exact_match", "bleu", "score")
"""A metric whose name ends so is a score: higher is better."""
ERROR_ENDINGS = ("_stderr", "_se")
KEYS = ("model", "step", "shots", "parameters", "tokens")

Key = tuple[str, int | None]
"""A model and its shots."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """What a file of curves holds."""

    metrics: tuple[str, ...]
    """In the order of the file."""
    curves: tuple[Curve, ...]
    """Metric by metric, model by model, in the order of the file."""
    parameters: dict[str, float]
    """Of the models for which the file says it."""
    tokens: dict[tuple[str, int], float]
    """Seen by a model at a step, where the file says it."""
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
    line: int
    key: Key
    step: int
    cells: dict[str, str]


def lower_is_better(metric: str) -> bool | None:
    """By the metric's name; None where the name does not tell."""
    name = metric.lower()
    if name.endswith(SCORE_ENDINGS):
        return False
    return True if any(word in name for word in LOSS_WORDS) else None


def is_perplexity(metric: str) -> bool:
    return any(word in metric.lower() for word in ("ppl", "perplexity"))


def unit(metric: str) -> str:
    """By the metric's name; "" where the name does not tell."""
    name = metric.lower()
    if is_perplexity(name):
        return "perplexity"
    if any(word in name for word in ("bpb", "bits")):
        return "bits per byte" if "bpb" in name or "byte" in name else "bits"
    if any(word in name for word in ("nats", "nll", "loss")):
        return "nats per token" if "nats" in name else "nats"
    return "share" if lower_is_better(name) is False and "acc" in name else ""


def primary(metrics: Iterable[str], wanted: str | None) -> str:
    """The metric to test: the one asked for, else the first loss, else the first score."""
    there = list(metrics)
    if wanted is not None:
        if wanted not in there:
            raise FullrankError(f"no metric {wanted!r}: --metric is one of {', '.join(there)}")
        return wanted
    for direction in (True, False):
        for metric in there:
            if lower_is_better(metric) is direction:
                return metric
    raise FullrankError(
        f"none of the metrics {', '.join(there)} is a loss or a score by its name: choose with --metric"
    )


def read(path: Path) -> Table:
    """Read a CSV file of curves; raises FullrankError for what is not one."""
    header, rows = _rows(path)
    numeric = [name for name in header if name not in KEYS and _is_numeric(rows, name)]
    errors = {
        name.removesuffix(ending): name
        for name in numeric
        for ending in ERROR_ENDINGS
        if name.endswith(ending) and name.removesuffix(ending) in numeric
    }
    metrics = tuple(
        name for name in numeric if name not in errors.values() and not name.endswith(ERROR_ENDINGS)
    )
    if not metrics:
        raise FullrankError(
            f"{path} has no column of numbers to draw, only {', '.join(header)}: add a metric such as loss"
        )
    groups: dict[Key, list[_Row]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    curves = [
        curve(
            model=model,
            shots=shots,
            metric=metric,
            points=[
                (
                    row.step,
                    _number(row.cells[metric]),
                    _number(row.cells[errors[metric]]) if metric in errors else None,
                )
                for row in group
                if row.cells[metric] or metric == metrics[0]
            ],
        )
        for metric in metrics
        for (model, shots), group in groups.items()
    ]
    known = {name: _facts(rows, name) for name in ("parameters", "tokens")}
    ignored = [name for name in header if name not in KEYS and name not in numeric]
    notes = [f"columns without numbers were left out: {', '.join(ignored)}"] if ignored else []
    repeated = sum(len(group) - len({row.step for row in group}) for group in groups.values())
    if repeated:
        notes.append(f"{repeated} rows repeat a model, shots and step: their values were averaged")
    drawn = tuple(one for one in curves if one.steps or one.metric == metrics[0])
    return Table(
        metrics=metrics,
        curves=drawn,
        parameters={model: value for (model, _), value in known["parameters"].items()},
        tokens=known["tokens"],
        notes=(*notes, *dropped_notes(drawn)),
    )


def curve(
    *, model: str, shots: int | None, metric: str, points: Iterable[tuple[int, float, float | None]]
) -> Curve:
    """A curve from (step, value, standard error) in any order, with gaps and repetitions."""
    better = lower_is_better(metric)
    by_step: dict[int, list[tuple[float, float]]] = {}
    dropped = 0
    for step, value, error in points:
        if not math.isfinite(value) or (better and value <= 0):
            dropped += 1
            continue
        known = error is not None and math.isfinite(error) and error > 0
        by_step.setdefault(step, []).append((value, error if known and error is not None else math.nan))
    steps = sorted(by_step)
    # The mean error, not a smaller one: evaluations on one test set share it.
    errors = [statistics.fmean(error for _, error in by_step[step]) for step in steps]
    usual = [error for error in errors if not math.isnan(error)]
    return Curve(
        model=model,
        shots=shots,
        metric=metric,
        unit=unit(metric),
        lower_is_better=better,
        steps=tuple(steps),
        values=tuple(statistics.fmean(value for value, _ in by_step[step]) for step in steps),
        standard_errors=_filled(errors, statistics.median(usual)) if usual else None,
        dropped=dropped,
    )


def validation(run: Training) -> Curve:
    """The validation loss of a training run, with its standard errors."""
    points = [(one.step, one.loss, one.standard_error) for one in run.validation()]
    return curve(model=run.name, shots=None, metric="validation nats per token", points=points)


def _filled(errors: list[float], usual: float) -> tuple[float, ...]:
    """Gaps take the usual error; one far below it is a slip or a rounded zero, and must not rule the fit."""
    return tuple(usual if math.isnan(error) else max(error, 0.1 * usual) for error in errors)


def dropped_notes(curves: Iterable[Curve]) -> list[str]:
    counts: dict[str, int] = {}
    for one in curves:
        counts[one.metric] = counts.get(one.metric, 0) + one.dropped
    return [
        f"{count} values of {metric} were left out: not finite, or not positive where a loss must be"
        for metric, count in counts.items()
        if count
    ]


def _rows(path: Path) -> tuple[list[str], list[_Row]]:
    remedy = "pass a CSV file with the columns model, step and at least one metric"
    if not path.is_file():
        raise FullrankError(f"no file at {path}: {remedy}")
    try:
        text = read_text(path, encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FullrankError(f"{path} is not text: {remedy}") from error
    if "\0" in text:
        raise FullrankError(f"{path} is not text: {remedy}")
    lines = csv.reader(text.splitlines(), skipinitialspace=True)
    try:
        header = [name.strip() for name in next(lines, [])]
        header = [name.lower() if name.lower() in KEYS else name for name in header]
        lacking = [name for name in ("model", "step") if name not in header]
        if lacking:
            found = ", ".join(name[:40] for name in header[:12]) or "nothing"
            raise FullrankError(
                f"{path} has no column {' and no column '.join(lacking)}, only {found}: {remedy}"
            )
        if len(set(header)) < len(header):
            raise FullrankError(f"{path} names a column twice: give every column its own name")
        rows = [
            _row(path, lines.line_num, header, cells)
            for cells in lines
            if any(cell.strip() for cell in cells)
        ]
    except csv.Error as error:
        raise FullrankError(f"{path} cannot be read as CSV ({error}): {remedy}") from error
    if not rows:
        raise FullrankError(f"{path} has a header but no rows: {remedy}")
    return header, rows


def _row(path: Path, line: int, header: list[str], values: list[str]) -> _Row:
    if len(values) != len(header):
        raise FullrankError(
            f"line {line} of {path} has {len(values)} cells, expected {len(header)}: write one cell a column"
        )
    cells = {name: value.strip() for name, value in zip(header, values, strict=True)}
    if not cells["model"]:
        raise FullrankError(f"line {line} of {path} names no model: fill the column model")
    shots = cells.get("shots", "")
    return _Row(
        line=line,
        key=(cells["model"], _whole(path, line, "shots", shots) if shots else None),
        step=_whole(path, line, "step", cells["step"]),
        cells=cells,
    )


def _whole(path: Path, line: int, column: str, cell: str) -> int:
    value = _number(cell)
    if not (math.isfinite(value) and value >= 0 and value == int(value)):
        raise FullrankError(
            f"line {line} of {path} has {column} {cell[:40]!r}, expected a whole number: correct the cell"
        )
    return int(value)


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _is_numeric(rows: list[_Row], name: str) -> bool:
    """Whether most cells hold numbers; a stray "n/a" is one value that is left out."""
    filled = [row.cells[name] for row in rows if row.cells[name]]
    numbers = [cell for cell in filled if not math.isnan(_number(cell))]
    return 2 * len(numbers) > len(filled)


def _facts(rows: list[_Row], name: str) -> dict[tuple[str, int], float]:
    """A positive number a model and step, where the column is there and filled."""
    found = {}
    for row in rows:
        value = _number(row.cells.get(name, ""))
        if math.isfinite(value) and value > 0:
            found[row.key[0], row.step] = value
    return found
