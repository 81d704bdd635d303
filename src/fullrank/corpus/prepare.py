"""From names of texts to a table of counts on disk: find, tokenise, count, each stage cached under its key.

    tokeniser-<key>   made from the text or loaded, kept for the processes that tokenise
    windows-<key>     every token with its context; removed when it is counted
    counts-<key>      the table (`counts.py`)

A key covers the content of the texts and all settings that matter to the stage, so nothing stale is ever
used. The engine, the memory and the number of processes do not matter to the counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullrank.corpus import count, engines, tokenise
from fullrank.corpus import plan as planning
from fullrank.corpus.engines import Resources
from fullrank.corpus.windows import Packing
from fullrank.errors import FullrankError
from fullrank.results import cache_directory
from fullrank.text import sources, stages, tokenisers
from fullrank.text.documents import Documents
from fullrank.text.sources import Texts

Progress = Callable[[str, float], None]
"""Hears what is done and the share of it that is done."""

LEAST_MEMORY = 1 << 29
COUNT_BYTES = 34
"""Of the arrays a window, at most: where no two windows are alike."""
SPILLED_BYTES = 8
"""Of what an engine writes on the way, a window."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is counted, and with what."""

    tokenizer: str = "bpe:32000"
    order: int = 5
    documents: Documents = "file"
    column: str = "text"
    tokens: int | None = None
    """Of the text, from its beginning; all of it by default."""
    blocks: int = 20
    """Stretches of text for resampling."""
    workers: int = 2
    """Processes that tokenise."""
    resources: Resources = field(default_factory=Resources)
    cache: Path | None = None
    keep_windows: bool = False


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A corpus, counted."""

    folder: Path
    """Of the counts, for `load_counts` and `load_blocks`."""
    corpus: Texts
    tokeniser: str
    vocabulary: int
    key: str
    """Of the counts: two corpora with one key have the same table."""
    seconds: dict[str, float]
    """That stages took when they were made."""
    facts: dict[str, Any]
    """Tokens, documents, windows, contexts, entries, blocks, and places that were not UTF-8."""


def default_cache() -> Path:
    return cache_directory() / "corpus"


def prepare(
    texts: Sequence[str | Path],
    settings: Settings,
    *,
    progress: Progress = lambda label, share: None,
    warn: Callable[[str], None] = lambda message: None,
) -> Prepared:
    """The counts of texts, made as far as they are not there."""
    check(settings)
    cache = settings.cache or default_cache()
    found = sources.find(texts, documents=settings.documents, field=settings.column)
    # Before any of it is read.
    _check_room(cache, min(found.bytes, 8 * (settings.tokens or found.bytes)) // 8, settings.order)
    corpus = sources.hashed(found, lambda share: progress("reading", share))
    tokeniser_folder, tokeniser_key = _tokeniser(corpus, settings, cache, progress, warn)
    tokeniser = tokenisers.load(tokeniser_folder)
    packing = Packing(order=settings.order, vocabulary=tokeniser.size)
    key = stages.key_of(
        {
            "corpus": corpus.digest,
            "tokeniser": tokeniser_key,
            "order": settings.order,
            "tokens": settings.tokens,
            "blocks": settings.blocks,
        }
    )

    def counts(folder: Path) -> dict[str, Any]:
        windows = stages.made(cache, "windows", key, lambda place: made_windows(place), warn)
        manifest = stages.read_manifest(windows)
        begun = time.monotonic()
        made = count.count(folder, windows, packing, manifest, settings.resources, progress)
        made["seconds"] = {**manifest["seconds"], "counting": time.monotonic() - begun}
        return made

    def made_windows(folder: Path) -> dict[str, Any]:
        plan = planning.plan(
            corpus,
            tokeniser,
            blocks=settings.blocks,
            limit=settings.tokens,
            memory=settings.resources.memory,
            workers=settings.workers,
        )
        _check_room(cache, plan.tokens, settings.order, tokeniser.size, held=_held(folder))
        begun = time.monotonic()
        made = tokenise.tokenise(
            folder,
            corpus,
            tokeniser_folder,
            packing,
            plan,
            limit=settings.tokens,
            workers=settings.workers,
            progress=progress,
        )
        return {**made, "seconds": {"tokenising": time.monotonic() - begun}}

    folder = stages.made(cache, "counts", key, counts, warn)
    if not settings.keep_windows:
        stages.discard(cache, "windows", key)
    manifest = stages.read_manifest(folder)
    names = ("tokens", "documents", "windows", "contexts", "entries", "blocks", "replaced")
    return Prepared(
        folder=folder,
        corpus=corpus,
        tokeniser=tokeniser.name,
        vocabulary=tokeniser.size,
        key=key,
        seconds=dict(manifest["seconds"]),
        facts={name: manifest[name] for name in names},
    )


def check(settings: Settings) -> None:
    """Raise for settings that cannot work, before any text is read."""
    Packing(order=settings.order, vocabulary=2)
    tokenisers.check(settings.tokenizer)
    engines.check_engine(settings.resources)
    limits = {"tokens": settings.tokens, "workers": settings.workers, "blocks": settings.blocks}
    for name, value in limits.items():
        if value is not None and value < 1:
            raise FullrankError(f"--{name} is {value}, expected 1 or more")
    if settings.blocks > 32767:
        raise FullrankError(f"--blocks is {settings.blocks}, expected 32767 or fewer")
    if settings.resources.memory < LEAST_MEMORY:
        raise FullrankError(
            f"--memory is {settings.resources.memory / 2**20:.0f} MiB, expected {LEAST_MEMORY >> 20} MiB or "
            "more"
        )


def _tokeniser(
    corpus: Texts, settings: Settings, cache: Path, progress: Progress, warn: Callable[[str], None]
) -> tuple[Path, str]:
    name = settings.tokenizer
    built: list[tokenisers.Tokeniser] = []
    if tokenisers.from_text(name):
        what = {"words": "collecting words"}.get(name, "training BPE")
        key = stages.key_of({"tokeniser": name, "corpus": corpus.digest, "text": tokenisers.TRAINING_TEXT})
    else:
        progress("loading the tokenizer", 0.0)
        built.append(tokenisers.build(name, list, 0))
        key = stages.key_of({"tokeniser": built[0].name, "digest": built[0].vocabulary.digest()})

    def make(folder: Path) -> dict[str, Any]:
        made = (
            built[0]
            if built
            else tokenisers.build(
                name,
                lambda: (fragment.text for fragment in sources.fragments(corpus)),
                corpus.bytes,
                lambda share: progress(what, share),
            )
        )
        made.save(folder)
        return {"vocabulary": made.size}

    return stages.made(cache, "tokeniser", key, make, warn), key


def _check_room(cache: Path, tokens: int, order: int, vocabulary: int = 1 << 15, held: int = 0) -> None:
    """Raise if the disk has no room for the stages of so many tokens; `held` bytes of them are there."""
    columns = len(Packing(order=order, vocabulary=vocabulary).columns)
    needed = tokens * (8 * columns + 5 + COUNT_BYTES + SPILLED_BYTES) - held
    free = stages.free_bytes(cache)
    if needed > free:
        raise FullrankError(
            f"{tokens:,} tokens need {needed / 1e9:.1f} GB on the disk of {cache}, which has "
            f"{free / 1e9:.1f} GB free: choose a directory on a larger disk with --cache, or take fewer "
            "--tokens"
        )


def _held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
