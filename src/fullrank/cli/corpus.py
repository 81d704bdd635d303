"""`fullrank corpus dimension`: how many dimensions the text itself asks of an output layer."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from fullrank.cli.progress import Bar
from fullrank.errors import FullrankError

if TYPE_CHECKING:
    from rich.table import Table

    from fullrank.corpus.dimension import Measure
    from fullrank.corpus.prepare import Settings
    from fullrank.results import Corpus as Record

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Count a corpus and see how many dimensions its table of next-token distributions needs.

    Example: fullrank corpus dimension book.txt --tokenizer words
    """

    what: Annotated[Literal["dimension"], tyro.conf.Positional]
    """What to find out."""
    texts: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")] = ()
    """Text files, .json, .jsonl and .parquet, also compressed or in archives, directories, or a dataset
    NAME:CONFIG:SPLIT; together one corpus. FILE#FIELD names the field of rows."""
    each: bool = False
    """Every TEXT is a corpus of its own; all in one picture."""
    tokenizer: str = "bpe:32000"
    """bytes, words, bpe:SIZE trained on the text, a tokenizer.json, a model's directory, a .gguf file, or a
    hub name."""
    order: int = 5
    """A context is the order - 1 tokens before a token."""
    documents: Literal["file", "line", "blank"] = "file"
    """What a document is in a text file: the file, a line, or what stands between blank lines."""
    column: str = "text"
    """Field of JSON, JSON lines, parquet files and datasets that holds the text."""
    tokens: int | None = None
    """Tokens to take from the beginning; all by default."""
    constructions: tuple[Literal["probability", "weighted", "frequent", "log"], ...] = (
        "probability",
        "weighted",
        "frequent",
        "log",
    )
    """Tables to measure: plain probabilities as published, rows weighted by the root of their counts, only
    frequent contexts, or smoothed log-probabilities."""
    least: int = 5
    """Times that a context of the table of frequent ones was seen at least."""
    blocks: int = 20
    """Stretches of text that the intervals are over."""
    interval: bool = True
    """Intervals over blocks of text; they take most of the time."""
    null: bool = True
    """The same tables with next tokens shuffled."""
    engine: Literal["duckdb", "spark"] = "duckdb"
    """What counts."""
    spark: str = ""
    """Of Spark: a master such as local[4] or spark://host:7077, or sc://host of Spark Connect."""
    memory: str = "4GB"
    """That all may take, such as 4GB."""
    workers: int | None = None
    """Processes that tokenise; one a processor by default."""
    cache: Path | None = None
    """Where stages are kept for the next run; fullrank's cache directory by default."""
    out: Path = Path("runs/corpus")
    """Directory for results.json and report.html."""
    seed: int = 0
    """Seed of everything random."""


def corpus(options: Corpus) -> Path:
    from rich.console import Console

    from fullrank import results
    from fullrank.cli import outcome

    if not options.texts:
        raise FullrankError("no text was given: name files, directories or a dataset")
    settings, measure = settings_of(options), measure_of(options)
    results.check_writable(options.out)

    from fullrank.corpus.dimension import dimension

    console = Console()
    made = results.provenance(seed=options.seed, device=f"cpu, {settings.resources.threads} threads")
    records = []
    with Bar(console) as bar:
        for texts in [[text] for text in options.texts] if options.each else [list(options.texts)]:
            one = dimension(
                texts,
                settings,
                measure,
                progress=bar.update,
                warn=lambda message: console.print(message, highlight=False, markup=False, soft_wrap=True),
            )
            records.append(one)
    record = (
        results.Corpora(title="Dimensions of corpora", corpora=tuple(records), notes=())
        if options.each and len(records) > 1
        else records[0]
    )
    outcome.write(record, made, options.out)
    for one in records:
        console.print(table(one))
        for note in one.notes:
            console.print(note, highlight=False, markup=False, soft_wrap=True)
    return outcome.say_where(console, options.out)


def settings_of(options: Corpus) -> Settings:
    from fullrank.corpus.engines import Resources
    from fullrank.corpus.prepare import Settings

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if options.spark and options.engine != "spark":
        raise FullrankError("--spark was given without --engine spark: give both, or neither")
    return Settings(
        tokenizer=options.tokenizer,
        order=options.order,
        documents=options.documents,
        column=options.column,
        tokens=options.tokens,
        blocks=options.blocks,
        workers=threads if options.workers is None else options.workers,
        resources=Resources(
            engine=options.engine, memory=bytes_of(options.memory), threads=threads, address=options.spark
        ),
        cache=options.cache,
    )


def measure_of(options: Corpus) -> Measure:
    from fullrank.corpus.dimension import Measure

    return Measure(
        constructions=tuple(dict.fromkeys(options.constructions)),
        least=options.least,
        interval=options.interval,
        null=options.null,
        seed=options.seed,
    )


def bytes_of(size: str) -> int:
    """The bytes of a size such as 4GB or 512MiB."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)?\s*", size, flags=re.IGNORECASE)
    if match is None:
        raise FullrankError(f"--memory {size} is no size: expected one such as 4GB")
    return round(float(match[1]) * UNITS[(match[2] or "").upper().removeprefix("B") or ""])


def table(record: Record) -> Table:
    """Dimensions by construction."""
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(
        title=escape(
            f"{record.name}: {record.tokens:,} tokens, {record.contexts:,} contexts of {record.order - 1}, "
            f"V={record.vocabulary:,} ({record.tokenizer})"
        ),
        title_justify="left",
        caption="Smallest d whose relative error is at most 50, 10 and 1%, with 95% intervals over blocks of "
        "text; the same with next tokens shuffled.",
        caption_justify="left",
    )
    for header in ("table", "contexts", "50%", "90%", "99%", "shuffled 90%"):
        drawn.add_column(header, justify="left" if header == "table" else "right", no_wrap=header == "table")
    for curve in record.curves:
        shown = []
        for share in ("50", "90", "99"):
            text = f"{curve.dimensions[share]:,}"
            if curve.dimension_intervals is not None:
                one = curve.dimension_intervals[share]
                text += f" ± {(one.high - one.low) / 2:,.0f}"
            shown.append(text)
        shuffled = f"{curve.null.dimensions['90']:,}" if curve.null else ""
        drawn.add_row(curve.construction, f"{curve.contexts:,}", *shown, shuffled)
        if curve.construction == "log":
            # The first dimension is the unigram distribution, which a bias can hold.
            rest = [f"{curve.beyond_first[share]:,}" for share in ("50", "90", "99")]
            drawn.add_row("- beyond 1st", "", *rest, "")
    return drawn
