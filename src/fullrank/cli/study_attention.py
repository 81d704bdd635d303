"""`fullrank study attention`: a small transformer trained with every normaliser in place of softmax."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from fullrank.errors import FullrankError

if TYPE_CHECKING:
    from rich.table import Table

    from fullrank.results import AttentionStudy


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Train transformer-tiny with every normaliser of attention; run it again to continue.

    Example: fullrank study attention --data wikitext-2 --out runs/attention
    """

    data: tuple[Path, ...] = ()
    """A directory with train, valid and test text, or any files and directories, which are split by lines."""
    normalisers: tuple[str, ...] = ("softmax", "sparsemax", "entmax15", "sink", "log_length", "sigmoid")
    """Which to train, softmax among them."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each normaliser a seed."""
    steps: int = 300
    """Of every run."""
    settings: Annotated[
        tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE"), tyro.conf.UseAppendAction
    ] = ()
    """Any other setting of the recipe, the same in all runs, such as length=256; may be given many times."""
    device: str = "auto"
    """cpu, cuda, mps, or auto: cuda where there is one."""
    out: Path = Path("runs/attention")
    """Directory for the runs, results.json and report.html. Runs that are finished are kept."""


def attention(options: Attention) -> Path:
    from rich.console import Console

    from fullrank import report, results
    from fullrank.cli import outcome
    from fullrank.cli.progress import Bar, device_name, device_of
    from fullrank.studies import attention as study

    config = study.Config(
        normalisers=options.normalisers, seeds=options.seeds, steps=options.steps, changes=options.settings
    )
    if not options.data:
        raise FullrankError("nothing to train on: pass --data with a directory or files of text")
    results.check_writable(options.out)
    report.check_installed()
    device = device_of(options.device)
    console = Console()
    made = results.provenance(seed=None, device=device_name(device))
    try:
        with Bar(console) as bar:
            record = study.run(
                options.data,
                options.out,
                config,
                cache=results.cache_directory() / "tokens",
                device=device,
                progress=bar.update,
                say=lambda message: console.print(message, highlight=False, markup=False, soft_wrap=True),
            )
    except study.Stopped as stopped:
        console.print("stopped; run the same command to continue", highlight=False)
        raise SystemExit(128 + (stopped.signal or signal.SIGTERM)) from None
    outcome.write(record, made, options.out)
    console.print(table(record))
    return outcome.say_where(console, options.out)


def table(record: AttentionStudy) -> Table:
    """Validation loss by normaliser with its spread, against softmax, and what the last layer does."""
    import statistics

    from rich.table import Table

    title = f"{record.recipe}, {record.training_steps:,} steps: validation loss, nats per token"
    drawn = Table(title=title, title_justify="left")
    drawn.add_column("normaliser")
    for name in ("loss", "spread over seeds", "minus softmax, 95%", "effective tokens", "first position"):
        drawn.add_column(name, justify="right")
    for row in record.compared():
        last = [run.layers[-1] for run in record.of(row.normaliser) if run.layers]
        between = row.difference
        drawn.add_row(
            row.normaliser,
            f"{row.valid:.4f}",
            f"{row.spread:.4f}",
            "" if between is None else f"{between.value:+.4f} ({between.low:+.4f} to {between.high:+.4f})",
            f"{statistics.fmean(one.effective_tokens for one in last):.1f}" if last else "",
            f"{statistics.fmean(one.first_mass for one in last):.3f}" if last else "",
        )
    return drawn
