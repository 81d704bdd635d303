"""`fullrank study width | heads | ...`: grids of trainings within a budget; `pythia`: public curves."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from fullrank.errors import FullrankError

if TYPE_CHECKING:
    from rich.table import Table

    from fullrank.results import Grid
    from fullrank.studies.grid_plan import Text


@dataclass(frozen=True, kw_only=True)
class _Extent:
    small: bool = False
    """Tiny models and short runs, minutes on two cores: to see that it works."""
    seeds: int = 3
    scale: float = 1.0
    """Of the length of all runs."""
    settings: Annotated[
        tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE"), tyro.conf.UseAppendAction
    ] = ()
    """A setting of all runs, as `fullrank train` has them; what the study varies stays its own."""
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
class _Grid(_Extent):
    data: tuple[Path, ...] = ()
    """A directory with train, valid and test text, or any files and directories, which are split by lines."""
    tokens: tuple[Path, ...] = ()
    """A directory of tokens made elsewhere, in place of --data."""


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

    widths: tuple[int, ...] = ()
    """Of bodies; 64 and 128 by default."""
    heads: tuple[str, ...] = ()
    """Which to train, softmax among them; all by default: softmax, sigsoftmax, mos2, mos4, mos16, trunk10,
    doc4, plif."""


@dataclass(frozen=True, kw_only=True)
class Optimiser(_Grid):
    """How much of a late rise is rate, batch, weight decay or schedule?

    Example: fullrank study optimiser --data wikitext-2 --small
    """


@dataclass(frozen=True, kw_only=True)
class Bodies(_Grid):
    """Where a head of high rank pays: NeoX or Llama, deep or wide, 2k to 64k tokens.

    Example: fullrank study bodies --data wikitext-2 --small
    """

    tokens: tuple[Path, ...] = ()
    """Directories of tokens of one text with several vocabularies, in place of --data."""


@dataclass(frozen=True, kw_only=True)
class Cause(_Grid):
    """Which brings the other: the spectrum of the head's matrix, or the spread of the states?

    Example: fullrank study cause --data wikitext-2 --small
    """


@dataclass(frozen=True, kw_only=True)
class Domains(_Grid):
    """Do narrow bodies lose more on texts whose tables need more dimensions?

    Example: fullrank study domains --data en.txt de.txt code/ --corpus runs/corpora/results.json --small
    """

    data: tuple[Path, ...] = ()
    """Texts, each a file or directory and a domain of its own."""
    tokens: tuple[Path, ...] = ()
    """Directories of tokens made elsewhere, each a domain, in place of --data."""
    corpus: tuple[Path, ...] = ()
    """results.json of `fullrank corpus dimension`, of one corpus or several, in the order of the domains."""


@dataclass(frozen=True, kw_only=True)
class Attention(_Grid):
    """Does a low temperature of attention hurt training, and do other normalisers bear it better?

    Example: fullrank study attention --data wikitext-2 --temperatures 0.25 0.5 1 2 --small
    """

    normalisers: tuple[str, ...] = ()
    """Which to train, softmax among them; all six by default: softmax, sparsemax, entmax15, sink, log_length,
    sigmoid."""
    temperatures: tuple[float, ...] = ()
    """What attention scores are divided by, 1 among them; 0.25, 0.5, 1 and 2 by default."""


@dataclass(frozen=True, kw_only=True)
class Spam(_Extent):
    """A language of one repeated symbol, V up to 131,072: which heads learn it, and how fast?

    Example: fullrank study spam --small
    """

    heads: tuple[str, ...] = ()
    """Which to train, softmax among them; softmax, softmax_short, sigsoftmax, plif, mos4 and trunk10
    by default."""


@dataclass(frozen=True, kw_only=True)
class Published(_Grid):
    """How near do softmax and a mixture come to their published perplexities in 25 minutes of one GPU?

    Example: fullrank study published --data wikitext-2 --seeds 1
    """

    reference: Literal["wikitext-2", "ptb"] = "wikitext-2"
    """Text whose published sizes and perplexities are taken; --data may be any."""
    rates: tuple[float, ...] = ()
    """Factors of the study's learning rate, tried on a sixteenth of a run: 0.5, 1 and 2 by default; one alone
    is taken untried."""


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


def pythia_study(options: Pythia) -> Path:
    from rich.console import Console

    from fullrank import results
    from fullrank.cli import outcome
    from fullrank.cli.progress import Bar
    from fullrank.cli.series import findings
    from fullrank.cli.series import table as series_table
    from fullrank.studies import pythia_curves

    results.check_writable(options.out)
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
    return outcome.say_where(console, options.out)


def grid_study(options: _Extent) -> Path:
    from rich.console import Console

    from fullrank import results
    from fullrank.cli import outcome
    from fullrank.cli.progress import Bar, device_name, device_of
    from fullrank.studies import grid
    from fullrank.studies.grid_plan import Extent
    from fullrank.studies.grid_workers import Place, Stopped

    study = _study(options)
    data, tokens = (options.data, options.tokens) if isinstance(options, _Grid) else ((), ())
    if isinstance(options, _Grid) and bool(data) == bool(tokens):
        raise FullrankError("nothing to train on, or two things: pass --data with text, or --tokens")
    if len(tokens) > 1 and not isinstance(options, Bodies | Domains):
        raise FullrankError(f"--tokens got {len(tokens)} directories: this study trains on one")
    if options.seeds < 1 or options.processes < 1 or not options.scale > 0 or not options.seconds > 0:
        raise FullrankError(
            f"--seeds {options.seeds}, --processes {options.processes}, --scale {options.scale:g} and "
            f"--seconds {options.seconds:g}: expected all of them above 0"
        )
    out = options.out or Path("runs") / study.name
    results.check_writable(out)
    device = device_of(options.device)
    console = Console()
    made = results.provenance(seed=None, device=device_name(device))
    cache = results.cache_directory() / "tokens"
    place = Place(
        out=out, cache=cache, data=data, tokens=tokens[0] if tokens else None, device=device,
        processes=options.processes, seconds=options.seconds,
    )  # fmt: skip
    texts = _texts(options, cache)
    extent = Extent(
        small=options.small, seeds=options.seeds, scale=options.scale, texts=texts, settings=options.settings
    )
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
        missing = len(record.missing)
        console.print(f"runs still missing: {missing}; the same command goes on", highlight=False)
    return outcome.say_where(console, out)


def _study(options: _Extent) -> Any:
    if isinstance(options, Attention):
        from fullrank.studies import attention_grid

        return attention_grid.study(options.normalisers, options.temperatures)
    if isinstance(options, Heads):
        from fullrank.studies import head_grid

        return head_grid.study(options.widths, options.heads)
    if isinstance(options, Spam):
        from fullrank.studies import spam_grid

        return spam_grid.study(options.heads)
    if isinstance(options, Published):
        from fullrank.studies import published_grid

        return published_grid.study(options.reference, options.rates)
    from fullrank.studies.body_grid import BODIES
    from fullrank.studies.cause_grid import CAUSE
    from fullrank.studies.domain_grid import DOMAINS
    from fullrank.studies.optimiser_grid import OPTIMISER
    from fullrank.studies.width_grid import WIDTH

    others: dict[type[_Extent], Any] = {
        Width: WIDTH, Optimiser: OPTIMISER, Bodies: BODIES, Cause: CAUSE, Domains: DOMAINS,
    }  # fmt: skip
    return others[type(options)]


def _texts(options: _Extent, cache: Path) -> tuple[Text, ...]:
    """Those of a study over several."""
    from fullrank.studies.domain_grid import domains
    from fullrank.studies.grid_plan import Text
    from fullrank.text import elsewhere
    from fullrank.text.settings import DataConfig

    if isinstance(options, Domains):
        return domains(options.data, options.tokens, options.corpus)
    if not isinstance(options, Bodies):
        return ()
    sizes = {elsewhere.prepare(place, DataConfig(), cache).vocabulary.size: place for place in options.tokens}
    if len(sizes) < len(options.tokens):
        raise FullrankError(
            f"--tokens got {len(options.tokens)} directories with {len(sizes)} sizes of vocabulary: expected "
            "one text cut with vocabularies of different sizes"
        )
    return tuple(
        Text(name=f"v{size}", tokens=place, facts={"vocabulary": str(size)}) for size, place in sizes.items()
    )


def table(record: Grid) -> Table:
    """What the rule decides."""
    from rich.table import Table

    small = ", small: decides nothing" if record.small else ""
    drawn = Table(title=f"{record.name}{small}: {len(record.runs)} runs", title_justify="left")
    drawn.add_column("comparison")
    for name in ("effect", "would have been seen", "unit", "decision"):
        drawn.add_column(name, justify="right")
    for one in record.answers:
        effect = ""
        if one.effect is not None:
            effect = f"{one.effect.value:+.4f}"
            if math.isfinite(one.effect.low):
                effect += f" ({one.effect.low:+.4f} to {one.effect.high:+.4f})"
        seen = f"{one.seen:.4f}" if math.isfinite(one.seen) else "unknown"
        drawn.add_row(one.label, effect, seen, one.unit, one.decision)
    return drawn
