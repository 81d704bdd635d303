"""Training runs in the terminal: one run by its evaluations, several by a row each, and what stands out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fullrank.results.series import UNDECIDED

if TYPE_CHECKING:
    from rich.table import Table

    from fullrank.results import Training
    from fullrank.results.training import Evaluation

SHORT = {"dead_components": "dead", "collapsed_head": "collapsed", "curve_turned": "turned"}
MOST_ROWS = 24
"""Evaluations that are printed; results.json has them all."""


def evaluations(run: Training) -> Table:
    """One row an evaluation of the validation split, thinned where there are many."""
    from rich.markup import escape

    every = run.validation()
    drawn = _plain(f"Training {escape(run.name)}, head {escape(run.head)}")
    mixture = any("prior_entropy" in one.monitors for one in every)
    headers = [
        "step",
        "loss",
        "ppl",
        "eff. rank",
        "lp rank",
        "cosine",
        *(["prior H", "dead"] if mixture else []),
    ]
    for header in headers:
        drawn.add_column(header, justify="right", no_wrap=True)
    drawn.add_column("alarms", overflow="fold")
    before = -1
    for one in _thinned(every):
        alarms = [
            SHORT.get(alarm.kind, alarm.kind) for alarm in run.alarms if before < alarm.step <= one.step
        ]
        before = one.step
        monitor = one.monitors.get
        cells = [
            f"{one.step:,}", _fixed(one.loss, 4), _short(one.perplexity),
            _fixed(monitor("head_effective_rank"), 1), _rank(one), _fixed(monitor("anisotropy"), 3),
        ]  # fmt: skip
        if mixture:
            cells += [_fixed(monitor("prior_entropy"), 3), _fixed(monitor("dead_components"), 0)]
        drawn.add_row(*cells, escape(", ".join(dict.fromkeys(alarms))))
    shown = drawn.row_count
    drawn.caption = (
        "Validation; loss in nats per token. eff. rank: of W; lp rank: of sampled log-probabilities, of the "
        "most that the sample could show."
        + ("" if shown == len(every) else f" {shown} of {len(every)} evaluations.")
    )
    drawn.caption_justify = "left"
    return drawn


def side_by_side(runs: Sequence[Training]) -> Table:
    """One row a run."""
    from rich.markup import escape

    drawn = _plain(f"{len(runs)} training runs")
    drawn.add_column("run", overflow="fold", min_width=8)
    drawn.add_column("head", overflow="fold", min_width=7)
    for header in ("steps", "best", "valid ppl", "test ppl", "eff.", "lp rank", "alarms"):
        drawn.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        best, every = run.best(), run.validation()
        last = every[-1] if every else None
        test = math.exp(min(run.test.value, 700.0)) if run.test else math.nan
        valid = math.exp(min(run.valid.value, 700.0)) if run.valid else math.nan
        drawn.add_row(
            escape(run.name), escape(run.head), f"{run.steps:,}", _fixed(best.loss if best else None, 4),
            _short(valid), _short(test),
            _fixed(last.monitors.get("head_effective_rank") if last else None, 1), _rank(last),
            str(len(run.alarms)),
        )  # fmt: skip
    drawn.caption = (
        "best: lowest validation loss, nats per token; eff.: effective rank of W; lp rank: of sampled "
        "log-probabilities, of the most that the sample could show."
    )
    drawn.caption_justify = "left"
    return drawn


def findings(runs: Sequence[Training]) -> list[str]:
    """What stands beside the table: the test of each curve, alarms, and how a run ended."""
    lines = []
    for run in runs:
        before = f"{run.name}: " if len(runs) > 1 else ""
        one = run.saturation
        if one is None:
            lines.append(f"{before}no evaluation yet")
        elif one.reason:
            lines.append(f"{before}not tested for a turn: {one.reason}")
        elif one.turned:
            lines.append(
                f"{before}the validation loss turned after step {one.best_step:,} and lost "
                f"{one.lost_percent:.1f}% (p = {one.adjusted_p:.2g})"
            )
        elif one.outcome == UNDECIDED:
            lines.append(
                f"{before}undecided whether the validation loss turned: {one.lost_percent:.1f}% from best to "
                f"last (p = {one.adjusted_p:.2g})"
            )
        else:
            lines.append(f"{before}the validation loss did not turn; {one.power}")
        lines += [f"{before}alarm at step {alarm.step:,}: {alarm.message}" for alarm in run.alarms]
        if run.reason != "finished":
            end = {
                "": "has not ended",
                "stopped": "was stopped",
                "nan": "ended with a loss that is no number",
            }
            planned = f" of {run.planned:,}" if run.planned else ""
            lines.append(f"{before}the run {end.get(run.reason, run.reason)} (step {run.steps:,}{planned})")
    return lines


def _plain(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
        show_edge=False,
    )  # fmt: skip


def _thinned(every: Sequence[Evaluation]) -> list[Evaluation]:
    """At most MOST_ROWS of them at even distances, the last one among them."""
    stride = math.ceil(len(every) / MOST_ROWS) if every else 1
    return [one for place, one in enumerate(every) if (len(every) - 1 - place) % stride == 0]


def _fixed(value: float | None, places: int) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.{places}f}"


def _short(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.4g}"


def _rank(one: Evaluation | None) -> str:
    rank = math.nan if one is None else one.monitors.get("logprob_rank", math.nan)
    if one is None or math.isnan(rank):
        return ""
    ceiling = one.monitors.get("logprob_rank_ceiling", math.nan)
    return f"{rank:.0f}" + ("" if math.isnan(ceiling) else f"/{ceiling:.0f}")
