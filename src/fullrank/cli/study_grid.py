"""`fullrank study width | heads | optimiser`: grids of trainings within a budget; `pythia`: public curves."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from fullrank.errors import FullrankError

if TYPE_CHECKING:
    from rich.table import Table

    from fullrank.results import Grid


@dataclass(frozen=True, kw_only=True)
class _Grid:
    data: tuple[Path, ...] = ()
    """A directory with train, valid and test text, or any files and directories, which are split by lines."""
    tokens: Path | None = None
    """Tokens made elsewhere, in place of --data."""
    small: bool = False
    """Tiny models and short runs, minutes on two cores: to see that it works."""
    seeds: int = 3
    scale: float = 1.0
    """Of the length of all runs."""
    processes: int = 1
    """Runs at once: small models do not fill a GPU."""
    seconds: float = math.inf
    """After which no run begins; the same command goes on."""
    device: str = "auto"
    """cpu, cuda, mps, or auto: cuda where there is one."""
    out: Path | None = None
    """Directory for runs, results.json and report.html, runs/NAME by default. results.json is enough to go on
    from on another machine."""


@dataclass(frozen=True, kw_only=True)
class Width(_Grid):
    """Do narrow transformers turn late in training, and does the head move before?

    Example: fullrank study width --data wikitext-2 --small
    """


@dataclass(frozen=True, kw_only=True)
class Heads(_Grid):
    """Which head at equal compute and at equal tokens, from scratch and swapped in.

    Example: fullrank study heads --data wikitext-2 --small
    """


@dataclass(frozen=True, kw_only=True)
class Optimiser(_Grid):
    """How much of a late rise is rate, batch, weight decay or schedule?

    Example: fullrank study optimiser --data wikitext-2 --small
    """


@dataclass(frozen=True, kw_only=True)
class Pythia:
    """Which public Pythias turn, what the scaling law says, and what a smaller batch changes.

    Example: fullrank study pythia curves.csv
    """

    curves: Annotated[Path, tyro.conf.Positional]
    """A CSV file with the columns model, shots, step and metrics (docs/series.md)."""
    out: Path = Path("runs/pythia")
    """Directory for results.json and report.html."""
    seed: int = 0
    """Seed of the simulations."""


def pythia_study(options: Pythia) -> None:
    from rich.console import Console

    from fullrank import report, results
    from fullrank.cli import outcome
    from fullrank.cli.progress import Bar
    from fullrank.cli.series import findings
    from fullrank.cli.series import table as series_table
    from fullrank.studies import pythia_curves

    results.check_writable(options.out)
    report.check_installed()
    console = Console()
    stated = pythia_curves.STATEMENT
    for name, words in (("hypothesis", stated.hypothesis), ("rule", stated.rule)):
        console.print(f"{name}: {words}", highlight=False, markup=False)
    with Bar(console) as bar:
        record = pythia_curves.run(options.curves, progress=bar.update, seed=options.seed)
    outcome.write(record, results.provenance(seed=options.seed, device="cpu"), options.out)
    console.print(series_table(record))
    for line in findings(record):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    outcome.say_where(console, options.out)


def grid_study(options: _Grid) -> None:
    from rich.console import Console

    from fullrank import report, results
    from fullrank.cli import outcome
    from fullrank.cli.progress import Bar, device_name, device_of
    from fullrank.studies import grid
    from fullrank.studies.grid_plan import Extent
    from fullrank.studies.grid_workers import Place, Stopped

    study = _study(options)
    if bool(options.data) == (options.tokens is not None):
        raise FullrankError("nothing to train on, or two things: pass --data with text, or --tokens")
    if options.seeds < 1 or options.processes < 1 or not options.scale > 0 or not options.seconds > 0:
        raise FullrankError(
            f"--seeds {options.seeds}, --processes {options.processes}, --scale {options.scale:g} and "
            f"--seconds {options.seconds:g}: expected all of them above 0"
        )
    out = options.out or Path("runs") / study.name
    results.check_writable(out)
    report.check_installed()
    device = device_of(options.device)
    console = Console()
    made = results.provenance(seed=None, device=device_name(device))
    place = Place(
        out=out, cache=results.cache_directory() / "tokens", data=options.data, tokens=options.tokens,
        device=device, processes=options.processes, seconds=options.seconds,
    )  # fmt: skip
    extent = Extent(small=options.small, seeds=options.seeds, scale=options.scale)
    try:
        with Bar(console) as bar:
            record = grid.run(
                study, place, extent, progress=bar.update,
                say=lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True),
            )  # fmt: skip
    except Stopped:
        console.print("stopped; run the same command to continue", highlight=False)
        raise SystemExit(128 + signal.SIGTERM) from None
    outcome.write(record, made, out)
    console.print(table(record))
    if record.missing:
        console.print(
            f"{len(record.missing)} runs are missing: run the same command to go on", highlight=False
        )
    outcome.say_where(console, out)


def _study(options: _Grid) -> Any:
    from fullrank.studies.head_grid import HEAD
    from fullrank.studies.optimiser_grid import OPTIMISER
    from fullrank.studies.width_grid import WIDTH

    return {Width: WIDTH, Heads: HEAD, Optimiser: OPTIMISER}[type(options)]


def table(record: Grid) -> Table:
    """What the rule decides."""
    from rich.table import Table

    small = ", small: decides nothing" if record.small else ""
    drawn = Table(title=f"{record.name}{small}: {len(record.runs)} runs", title_justify="left")
    drawn.add_column("comparison")
    for name in ("effect, nats per token", "would have been seen", "decision"):
        drawn.add_column(name, justify="right")
    for one in record.answers:
        effect = ""
        if one.effect is not None:
            effect = f"{one.effect.value:+.4f}"
            if math.isfinite(one.effect.low):
                effect += f" ({one.effect.low:+.4f} to {one.effect.high:+.4f})"
        drawn.add_row(one.label, effect, f"{one.seen:.4f}", one.decision)
    return drawn
