"""`fullrank study`: published questions, run again. One class a study; its options are its fields."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from fullrank.cli.progress import Bar
from fullrank.cli.study_grid import (
    Attention,
    Bodies,
    Cause,
    Domains,
    Heads,
    Optimiser,
    Published,
    Pythia,
    Spam,
    Width,
    grid_study,
    pythia_study,
)
from fullrank.cli.study_histalign import Histalign, histalign
from fullrank.errors import FullrankError

if TYPE_CHECKING:
    from rich.table import Table

    from fullrank.results import Corpora


@dataclass(frozen=True, kw_only=True)
class Languages:
    """How the dimensions of text vary over languages, vocabularies and amounts of text.

    Example: fullrank study languages pages/en-us pages/de pages/fr --out runs/languages
    """

    pages: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PAGES")] = ()
    """Folders with the help pages of LibreOffice, one a language and named after it, en-us among them:
    mkdir pages; apt-get download libreoffice-help-de; dpkg-deb -x libreoffice-help-de_*.deb pages/de"""
    vocabularies: tuple[int, ...] = (1024, 4096, 16384)
    """Sizes of the BPE vocabularies, each trained on the text that it cuts."""
    halvings: int = 3
    """How often the English text is halved, for the effect of its length."""
    tokens: int | None = None
    """Of every corpus; the most that all have by default."""
    order: int = 5
    """A context is the order - 1 tokens before a token."""
    constructions: tuple[Literal["probability", "weighted", "frequent", "log"], ...] = (
        "probability",
        "weighted",
        "frequent",
        "log",
    )
    """Tables to measure, as in `fullrank corpus dimension`."""
    memory: str = "4GB"
    """That all may take."""
    cache: Path | None = None
    """Where stages are kept for the next run; fullrank's cache directory by default."""
    out: Path = Path("runs/languages")
    """Directory for results.json and report.html."""
    seed: int = 0
    """Seed of everything random."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Run a question of the field: pythia, width, heads, optimiser, bodies, cause, domains, spam, published,
    languages, attention or histalign."""

    what: (
        Annotated[Pythia, tyro.conf.subcommand("pythia")]
        | Annotated[Width, tyro.conf.subcommand("width")]
        | Annotated[Heads, tyro.conf.subcommand("heads")]
        | Annotated[Optimiser, tyro.conf.subcommand("optimiser")]
        | Annotated[Bodies, tyro.conf.subcommand("bodies")]
        | Annotated[Cause, tyro.conf.subcommand("cause")]
        | Annotated[Domains, tyro.conf.subcommand("domains")]
        | Annotated[Spam, tyro.conf.subcommand("spam")]
        | Annotated[Published, tyro.conf.subcommand("published")]
        | Annotated[Languages, tyro.conf.subcommand("languages")]
        | Annotated[Attention, tyro.conf.subcommand("attention")]
        | Annotated[Histalign, tyro.conf.subcommand("histalign")]
    )


def study(options: Study) -> Path:
    run: Any = {
        Pythia: pythia_study,
        Width: grid_study,
        Heads: grid_study,
        Optimiser: grid_study,
        Bodies: grid_study,
        Cause: grid_study,
        Domains: grid_study,
        Spam: grid_study,
        Published: grid_study,
        Languages: languages_study,
        Attention: grid_study,
        Histalign: histalign,
    }[type(options.what)]
    found: Path = run(options.what)
    return found


def languages_study(options: Languages) -> Path:
    from rich.console import Console

    from fullrank import results
    from fullrank.cli import corpus, outcome
    from fullrank.studies.help_pages import ORIGINAL

    settings = corpus.settings_of(
        corpus.Corpus(
            what="dimension", order=options.order, memory=options.memory, cache=options.cache,
            seed=options.seed,
        )
    )  # fmt: skip
    names = [folder.name for folder in options.pages]
    if ORIGINAL not in names or len(set(names)) < len(names) or len(names) < 2:
        raise FullrankError(
            f"the pages are named {', '.join(names) or 'nothing'}: expected folders of different names, "
            f"{ORIGINAL} among them, such as pages/{ORIGINAL} pages/de"
        )
    results.check_writable(options.out)

    from fullrank.corpus.dimension import Measure
    from fullrank.studies import languages

    config = languages.Config(
        vocabularies=options.vocabularies, halvings=options.halvings, tokens=options.tokens
    )
    console = Console()
    made = results.provenance(seed=options.seed, device=f"cpu, {settings.resources.threads} threads")
    first = sorted(options.pages, key=lambda folder: folder.name != ORIGINAL)
    with Bar(console) as bar, tempfile.TemporaryDirectory(prefix="fullrank-") as folder:
        found = languages.texts({one.name: one for one in first}, Path(folder), bar.update)
        record = languages.run(
            found,
            config,
            settings,
            Measure(constructions=tuple(dict.fromkeys(options.constructions)), seed=options.seed),
            progress=bar.update,
            warn=lambda message: console.print(message, highlight=False, markup=False, soft_wrap=True),
        )
    outcome.write(record, made, options.out)
    console.print(table(record))
    return outcome.say_where(console, options.out)


def table(record: Corpora) -> Table:
    """Dimensions for 90%, one row a corpus and one column a construction."""
    from rich.table import Table

    constructions = list(dict.fromkeys(curve.construction for one in record.corpora for curve in one.curves))
    drawn = Table(title=f"{record.title}: smallest d with a relative error of 10%", title_justify="left")
    drawn.add_column("corpus")
    drawn.add_column("tokens", justify="right")
    for construction in constructions:
        drawn.add_column(construction, justify="right")
    for one in record.corpora:
        by_name = {curve.construction: curve for curve in one.curves}
        cells = []
        for construction in constructions:
            curve = by_name.get(construction)
            text = "" if curve is None else f"{curve.dimensions['90']:,}"
            if curve is not None and curve.dimension_intervals is not None:
                interval = curve.dimension_intervals["90"]
                text += f" ± {(interval.high - interval.low) / 2:,.0f}"
            cells.append(text)
        drawn.add_row(one.name, f"{one.tokens:,}", *cells)
    return drawn
