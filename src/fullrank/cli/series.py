"""`fullrank series`: metrics over training, as a table, results.json and report.html."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from rich.table import Table

    from fullrank.results import Series as Record
    from fullrank.results import Training, Trainings
    from fullrank.results.series import Saturation


@dataclass(frozen=True, kw_only=True)
class Series:
    """See a run over training: every metric, whether its loss curve turned, and how it compares by size.

    Example: fullrank series runs/a runs/b --out runs/series
    """

    sources: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Directories of `fullrank train` runs; or a CSV file with the columns model, step and metrics; or
    checkpoint directories; or a hub model."""
    out: Path = Path("runs/series")
    """Directory for results.json and report.html."""
    metric: str | None = None
    """The metric to test; the first loss of the file where not given."""
    revisions: tuple[str, ...] = ()
    """Revisions of the hub model, such as step1000 step3000."""
    text: tuple[Path, ...] = ()
    """Text files on which checkpoints are measured."""
    tokens_per_step: float | None = None
    """Training tokens a step, for the scaling law; or give a column tokens."""
    fit_from: float = 4e8
    """The scaling law is fitted on models of at least so many parameters, and extrapolated to the others."""
    web_text: bool = False
    """Take the token term and the floor of 1.69 nats that Hoffmann et al. found for web text as known; only
    for losses of such text in nats per token."""
    seed: int = 0
    """Seed of the simulations."""


def series(options: Series) -> Path:
    from rich.console import Console

    from fullrank import results
    from fullrank.cli import outcome, run_table
    from fullrank.cli.progress import Bar
    from fullrank.diagnose.series import runs
    from fullrank.diagnose.series import series as analysis

    console = Console()
    results.check_writable(options.out)
    of_runs = runs.are_runs(options.sources)
    if of_runs:
        _refuse(options)
    with Bar(console) as bar:
        record: Record | Training | Trainings
        if of_runs:
            record = runs.trainings(options.sources, progress=bar.update, seed=options.seed)
        else:
            record = analysis.run(
                options.sources,
                metric=options.metric,
                text=options.text,
                revisions=options.revisions,
                tokens_per_step=options.tokens_per_step,
                fit_from=options.fit_from,
                web_text=options.web_text,
                progress=bar.update,
                seed=options.seed,
            )
    made = results.provenance(seed=options.seed, device="cpu")
    outcome.write(record, made, options.out)
    if isinstance(record, results.Series):
        console.print(table(record))
        lines = findings(record)
    else:
        every = record.runs if isinstance(record, results.Trainings) else (record,)
        console.print(run_table.evaluations(every[0]) if len(every) == 1 else run_table.side_by_side(every))
        lines = run_table.findings(every)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return outcome.say_where(console, options.out)


def _refuse(options: Series) -> None:
    """Flags that mean nothing for training runs, whose logs say it all."""
    from fullrank.errors import FullrankError

    given = {
        "--metric": options.metric,
        "--revisions": options.revisions,
        "--text": options.text,
        "--tokens-per-step": options.tokens_per_step,
        "--web-text": options.web_text,
    }
    for flag, value in given.items():
        if value:
            raise FullrankError(f"{flag} is not for training runs, whose logs have all figures: leave it out")


def table(record: Record) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from fullrank.results.series import ANSWERS

    # Without inner lines, so that eight columns fit a terminal of 80.
    drawn = Table(
        title=f"Saturation of {escape(record.metric)}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    most = max((one.noise_correlation for one in record.saturation if not one.reason), default=0.0)
    drawn.add_column("model", overflow="fold", min_width=10)
    for header in ("shots", "best step", "lost % [95%]", "turned", "p", "seen from"):
        drawn.add_column(header, justify="right", no_wrap=True, min_width=5)
    for one in record.saturation:
        drawn.add_row(
            escape(one.model), "" if one.shots is None else str(one.shots), f"{one.best_step:,}",
            escape(lost(one)), ANSWERS[one.outcome],
            "" if one.reason else f"{one.p_value:.2g}",
            "" if not math.isfinite(one.smallest_rise_percent) else f"{one.smallest_rise_percent:.3g}%",
        )  # fmt: skip
    drawn.caption = (
        f"Turned: p < {record.level:g} after Holm, over all curves, for curves that never turned with "
        f"noise of neighbours correlated by up to {most:g}, and at least {record.material_percent:g}% lost "
        "from the best checkpoint to the last. Seen from: a rise of this size is found nine times in ten."
    )
    drawn.caption_justify = "left"
    return drawn


def lost(one: Saturation) -> str:
    low, high = one.interval
    return f"{one.lost_percent:.1f}" + ("" if math.isnan(low) else f" [{low:.0f}, {high:.0f}]")


def _open(one: Saturation) -> str:
    """Why the test did not decide, or what would let it."""
    if math.isnan(one.turned_up_to):
        return ", the noise leaves open a loss of {:.0f} to {:.0f}%".format(*one.interval)
    return (
        f", by itself it turned if the noise of neighbouring checkpoints correlates by {one.turned_up_to:g} "
        f"or less, and the points do not exclude {one.noise_correlation:g}"
    )


def findings(record: Record) -> list[str]:
    """What stands beside the table: what is undecided, controls, the scaling law, and what was assumed."""
    from fullrank.results.series import UNDECIDED

    lines = [
        f"{one.model}{'' if one.shots is None else f' ({one.shots}-shot)'}: undecided"
        + (f", {one.reason}" if one.reason else _open(one))
        for one in record.saturation
        if one.outcome == UNDECIDED
    ]
    lines += record.controls
    fit = record.scaling
    if fit is None:
        lines.append(f"no scaling law: {record.scaling_reason}")
    else:
        gaps = [
            f"{point.model} {gap.value:+.1f}% [{gap.low:+.0f}, {gap.high:+.0f}]"
            for point in fit.points
            if not point.fitted and (gap := point.final_gap_percent)
        ]
        lines.append(
            f"scaling law: A = {fit.A.value:.4g}, alpha = {fit.alpha.value:.3g}, E = {fit.E.value:.3g}; "
            "final loss of the models left out against it [95% of where one would lie]: "
            + (", ".join(gaps) or "none was left out")
        )
    return [*lines, *record.notes, "cause is not shown: see the page"]
