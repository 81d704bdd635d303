"""How many dimensions a corpus needs, from its text to its record.

Text is counted (`prepare.py`). Each construction of the table (`table.py`) then gets its spectrum, an
interval over blocks of text and the spectrum of its null. A finished curve is a stage like the others: kept
under a key of the counts and of all settings that matter, and used again.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.corpus import null
from fullrank.corpus.counts import Counts, load_blocks, load_counts
from fullrank.corpus.curve import LEADING, Dimension, Effort, Spectrum
from fullrank.corpus.interval import EFFORT, Interval, jackknife
from fullrank.corpus.prepare import Prepared, Progress, Settings, check, default_cache, prepare
from fullrank.corpus.quadrature import CONFIDENCE
from fullrank.corpus.spectrum import spectrum
from fullrank.corpus.table import CONSTRUCTIONS, Left, Table, spans, table
from fullrank.errors import FullrankError
from fullrank.results import Corpus, CorpusCurve, CorpusNull
from fullrank.results.files import from_plain, to_plain, write_whole
from fullrank.results.reading import read_json
from fullrank.text import stages

CURVE = "curve.json"
METHOD = 1
"""Of the curves; raised when the same settings would give other figures."""
NULL_BYTES = 24
"""That shuffling takes a window, about."""
FEW_BLOCKS = 8
"""Fewer make no interval worth the name."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What is measured on the counts."""

    constructions: tuple[str, ...] = CONSTRUCTIONS
    least: int = 5
    """A context of `frequent` was seen at least so often."""
    interval: bool = True
    null: bool = True
    seed: int = 0
    effort: Effort = field(default_factory=Effort)


def dimension(
    texts: Sequence[str | Path],
    settings: Settings | None = None,
    measure: Measure | None = None,
    *,
    name: str = "",
    progress: Progress = lambda label, share: None,
    warn: Callable[[str], None] = lambda message: None,
) -> Corpus:
    """The record of the texts as one corpus."""
    settings, measure = settings or Settings(), measure or Measure()
    check(settings)
    _check(measure)
    prepared = prepare(texts, settings, progress=progress, warn=warn)
    counts = load_counts(prepared.folder)
    notes = _notes(prepared, settings)
    curves = []
    seconds = {name: float(value) for name, value in prepared.seconds.items()}
    for construction in measure.constructions:
        begun = time.monotonic()
        found = _kept(construction, prepared, counts, settings, measure, notes, progress, warn)
        if found is not None:
            curves.append(found)
        seconds[construction] = time.monotonic() - begun
    if not curves:
        raise FullrankError(f"no table could be measured: {' '.join(notes)}")
    used, single = _facts(counts)
    corpus, facts = prepared.corpus, prepared.facts
    return Corpus(
        name=name or corpus.name,
        sources=tuple(source.name for source in corpus.sources),
        sha256=corpus.digest,
        tokenizer=prepared.tokeniser,
        order=settings.order,
        engine=settings.resources.engine,
        documents=facts["documents"],
        bytes=corpus.bytes,
        replaced=facts["replaced"],
        tokens=facts["tokens"],
        pairs=facts["windows"],
        contexts=facts["contexts"],
        entries=facts["entries"],
        vocabulary=prepared.vocabulary,
        used=used,
        single=single,
        curves=tuple(curves),
        seconds=seconds,
        notes=tuple(notes),
    )


def _check(measure: Measure) -> None:
    unknown = [name for name in measure.constructions if name not in CONSTRUCTIONS]
    if unknown or not measure.constructions:
        raise FullrankError(
            f"--constructions has {', '.join(unknown) or 'none'}: expected some of {', '.join(CONSTRUCTIONS)}"
        )
    if measure.least < 1:
        raise FullrankError(f"--least is {measure.least}, expected 1 or more")


def _notes(prepared: Prepared, settings: Settings) -> list[str]:
    corpus, facts = prepared.corpus, prepared.facts
    notes = []
    if corpus.skipped:
        notes.append(f"{len(corpus.skipped)} files are no text and were left out: {corpus.skipped[0]} ...")
    if facts["replaced"]:
        notes.append(f"{facts['replaced']:,} places were not valid Unicode and were read as U+FFFD.")
    if settings.tokens is not None and facts["tokens"] < settings.tokens:
        notes.append(f"{settings.tokens:,} tokens were asked for, the text has {facts['tokens']:,}.")
    return notes


def _kept(
    construction: str,
    prepared: Prepared,
    counts: Counts,
    settings: Settings,
    measure: Measure,
    notes: list[str],
    progress: Progress,
    warn: Callable[[str], None],
) -> CorpusCurve | None:
    """The curve of a construction, from the cache if it is there; None, and a note, where there is none."""
    key = stages.key_of(
        {
            "method": METHOD,
            "counts": prepared.key,
            "construction": construction,
            "least": measure.least if construction == "frequent" else None,
            "interval": measure.interval,
            "null": measure.null,
            "seed": measure.seed,
            "effort": dataclasses.asdict(measure.effort),
            # It decides between the exact method and the other, and whether there is room for the null.
            "memory": settings.resources.memory,
        }
    )

    def make(folder: Path) -> dict[str, Any]:
        said: list[str] = []
        curve = _curve(construction, prepared, counts, settings, measure, said, progress)
        write_whole(folder / CURVE, json.dumps({"curve": to_plain(curve), "notes": said}))
        return {}

    try:
        folder = stages.made(settings.cache or default_cache(), "curve", key, make, warn)
    except _NoTable as error:
        notes.append(str(error))
        return None
    data = read_json(folder / CURVE)
    notes += [note for note in data["notes"] if note not in notes]
    return from_plain(CorpusCurve, data["curve"])


class _NoTable(Exception):  # noqa: N818  (a signal, not an error)
    """A construction that this corpus has no table of."""


def _curve(
    construction: str,
    prepared: Prepared,
    counts: Counts,
    settings: Settings,
    measure: Measure,
    notes: list[str],
    progress: Progress,
) -> CorpusCurve:
    begun = time.monotonic()
    memory = settings.resources.memory

    def told(what: str) -> Progress:
        return lambda label, share: progress(f"{construction} {what}: {label}", share)

    def spectrum_of(one: Table, label: str, **options: Any) -> Spectrum:
        return spectrum(one, memory_bytes=memory, progress=told(label), seed=measure.seed, **options)

    progress(f"{construction} table", 0.0)
    own = table(counts, construction, least=measure.least)
    if not own.contexts:
        raise _NoTable(f"No context was seen {measure.least} times, so there is no table of frequent ones.")
    whole = spectrum_of(own, "spectrum", effort=measure.effort)
    strength = own.strength
    del own
    interval = None
    blocks = int(prepared.facts["blocks"])
    if measure.interval and blocks < FEW_BLOCKS:
        notes.append(f"The text has {blocks} blocks, too few for intervals.")
    elif measure.interval:
        interval = _interval(whole, construction, prepared, counts, measure, memory, strength, progress)
    shuffled = None
    needed = NULL_BYTES * int(prepared.facts["windows"])
    if measure.null and needed > memory:
        notes.append(
            f"The null was left out: shuffling takes about {needed / 1e9:.0f} GB, more than --memory."
        )
    elif measure.null:
        progress(f"{construction} null", 0.0)
        other = table(
            null.shuffled(counts, measure.seed), construction, least=measure.least, strength=strength
        )
        found = spectrum_of(other, "null", effort=null.EFFORT, grid=whole.grid)
        shuffled = CorpusNull(dimensions=_values(found.dimensions), relative_error=found.relative_error)
    return CorpusCurve(
        construction=construction,
        contexts=whole.contexts,
        vocabulary=whole.vocabulary,
        least=measure.least if construction == "frequent" else None,
        prior=strength,
        norm=whole.norm,
        singular_values=whole.singular_values[: max(LEADING, measure.effort.leading)],
        singular_value_error=whole.singular_value_error,
        method=whole.method,
        bound=_bound(whole),
        dimensions=_values(whole.dimensions),
        dimension_limits=_limits(whole.dimensions),
        dimension_intervals=interval.dimensions if interval else None,
        beyond_first=_values(whole.beyond_first),
        beyond_first_limits=_limits(whole.beyond_first),
        grid=whole.grid,
        relative_error=whole.relative_error,
        relative_error_limits=(whole.relative_error_low, whole.relative_error_high),
        relative_error_interval=(interval.relative_error_low, interval.relative_error_high)
        if interval
        else None,
        blocks=interval.blocks if interval else 0,
        null=shuffled,
        seconds=time.monotonic() - begun,
    )


def _interval(
    whole: Spectrum,
    construction: str,
    prepared: Prepared,
    counts: Counts,
    measure: Measure,
    memory: int,
    strength: float | None,
    progress: Progress,
) -> Interval:
    by_block = load_blocks(prepared.folder)

    def without(block: int) -> Spectrum:
        part = table(
            counts,
            construction,
            least=measure.least,
            strength=strength,
            left=Left(blocks=by_block, out=block),
        )
        return spectrum(part, memory_bytes=memory, seed=measure.seed, effort=EFFORT, grid=whole.grid)

    return jackknife(
        whole,
        without,
        by_block.blocks,
        progress=lambda share: progress(f"{construction} interval: {by_block.blocks} blocks", share),
    )


def _values(found: dict[str, Dimension]) -> dict[str, int]:
    return {name: one.value for name, one in found.items()}


def _limits(found: dict[str, Dimension]) -> dict[str, tuple[int, ...]]:
    return {name: (one.low, one.high) for name, one in found.items()}


def _bound(whole: Spectrum) -> str:
    if whole.method == "exact":
        return "All eigenvalues of the Gram matrix in fp64: exact up to rounding."
    return (
        f"Leading values by block Lanczos, off by {whole.singular_value_error:.2g} at most; the curve by "
        f"quadrature with {whole.probes} probes, each limit with a probability of {CONFIDENCE:.1%}."
    )


def _facts(counts: Counts) -> tuple[int, int]:
    """Tokens that follow some context, and contexts that one token follows."""
    used = np.zeros(counts.vocabulary, dtype=bool)
    single = 0
    for first, last in spans(counts):
        starts = counts.indptr[first : last + 1]
        single += int(np.count_nonzero(np.diff(starts) == 1))
        used[counts.next[int(starts[0]) : int(starts[-1])]] = True
    return int(np.count_nonzero(used)), single
