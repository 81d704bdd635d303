"""Cost of `fullrank corpus dimension` against the size of the corpus, and of counting beside a bare group-by.

    python -m benchmarks.corpus_scale --model-text path/to/wikitext-2/train.txt

The text is synthetic (`corpus_text.py`): words of a trigram model of a real text, V as asked for. Each size
runs in a process of its own, whose resident memory, that of its children added, is read 20 times a second.
Pages of files that are mapped count too.

Counting is timed on the same parquet files, in the same process and with the same threads and memory, as

    bare           select context, next, count(*) group by context, next; the result is summed, not kept
    bare_written   the same, the result written as parquet
    counting       our stage: the group-by with blocks, contexts numbered, arrays sorted, written and synced

The ratio is counting / bare, of the best of three runs of each where they are short. Libraries are loaded
before.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import corpus_text
from fullrank.results import provenance, write_whole

if TYPE_CHECKING:
    from fullrank.corpus.prepare import Settings

LONG = 20_000_000
"""Tokens from which on nothing is timed more than once."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Measure time and memory of the corpus commands at several sizes."""

    model_text: Path = Path("train.txt")
    """Text that the synthetic ones are sampled from, such as WikiText-2's training text."""
    tokens: tuple[int, ...] = (1_000_000, 10_000_000, 100_000_000)
    vocabulary: int = 32_000
    order: int = 5
    memory: str = "4GB"
    threads: int = 2
    constructions: tuple[str, ...] = ("probability",)
    """Tables whose curves are finished; none to count only."""
    interval: bool = False
    null: bool = False
    work: Path = Path("runs/corpus_scale")
    """For texts and stages; a hundred million tokens take about 6 GB."""
    seed: int = 0
    out: Path = Path("results/corpus_scale.json")
    child: str = ""
    """Of the process that is measured; not for you."""


def main(config: Config) -> None:
    if config.child:
        _child(config)
        return
    console = Console()
    config.work.mkdir(parents=True, exist_ok=True)
    # Before the work, which may change the tree.
    made = provenance(seed=config.seed, device=f"cpu, {config.threads} threads")
    sizes = []
    for tokens in config.tokens:
        text = config.work / f"synthetic-{tokens}.txt"
        if not text.is_file():
            corpus_text.make(
                text, config.model_text, tokens=tokens, vocabulary=config.vocabulary, seed=config.seed
            )
        said = config.work / f"measured-{tokens}.json"
        said.unlink(missing_ok=True)
        options = dataclasses.replace(config, tokens=(tokens,), child=str(said))
        peak = _run(options)
        found = json.loads(said.read_text())
        sizes.append({**found, "peak_resident_bytes": peak})
        console.print(sizes[-1])
        document = {
            "benchmark": "corpus_scale",
            "made": dataclasses.asdict(made),
            "text": "synthetic, from a trigram model of " + config.model_text.name,
            "settings": {
                "order": config.order,
                "vocabulary": config.vocabulary,
                "memory": config.memory,
                "threads": config.threads,
                "constructions": list(config.constructions),
            },
            "sizes": sizes,
        }
        write_whole(config.out, json.dumps(document, indent=1) + "\n")
    console.print(_table(sizes))


def _run(config: Config) -> int:
    """Run this file for one size; the most memory that its processes had together."""
    command = [sys.executable, "-m", "benchmarks.corpus_scale"]
    for name in ("model_text", "vocabulary", "order", "memory", "threads", "work", "seed", "child"):
        command += [f"--{name.replace('_', '-')}", str(getattr(config, name))]
    command += ["--tokens", str(config.tokens[0])]
    command += ["--constructions", *config.constructions] if config.constructions else ["--constructions"]
    command += [
        "--interval" if config.interval else "--no-interval",
        "--null" if config.null else "--no-null",
    ]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": str(config.threads)})
    peak = 0
    while process.poll() is None:
        peak = max(peak, _resident(process.pid))
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"the measured process ended with {process.returncode}")
    return peak


def _resident(root: int) -> int:
    """Bytes that a process and its descendants have in memory."""
    total, waiting = 0, [root]
    page = os.sysconf("SC_PAGE_SIZE")
    while waiting:
        process = waiting.pop()
        try:
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * page
            for task in Path(f"/proc/{process}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (OSError, ValueError, IndexError):
            continue
    return total


class _Peaks:
    """The most memory of this process and its children, by stage."""

    def __init__(self) -> None:
        self.stage, self.peaks = "start", {}  # type: ignore[var-annotated]
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.peaks[self.stage] = max(self.peaks.get(self.stage, 0), _resident(os.getpid()))

    def close(self) -> None:
        self._over.set()


def _child(config: Config) -> None:
    # Loading libraries is no part of counting, for either side.
    import duckdb  # noqa: F401
    import ibis  # noqa: F401

    from fullrank.cli.corpus import bytes_of
    from fullrank.corpus.dimension import Measure, dimension
    from fullrank.corpus.engines import Resources
    from fullrank.corpus.prepare import Settings, prepare

    tokens = config.tokens[0]
    text, cache = config.work / f"synthetic-{tokens}.txt", config.work / f"cache-{tokens}"
    shutil.rmtree(cache, ignore_errors=True)
    memory = bytes_of(config.memory)
    settings = Settings(
        tokenizer="words",
        order=config.order,
        workers=config.threads,
        resources=Resources(memory=memory, threads=config.threads),
        cache=cache,
        keep_windows=True,
    )
    peaks = _Peaks()

    def progress(label: str, share: float) -> None:
        peaks.stage = label.split(":")[0]

    begun = time.monotonic()
    prepared = prepare([text], settings, progress=progress)
    prepared_seconds = time.monotonic() - begun
    peaks.stage = "bare group-by"
    (windows,) = cache.glob("windows-*")
    timed = _timed(windows, prepared.vocabulary, settings, cache, repeats=3 if tokens <= LONG else 1)
    found: dict[str, Any] = {
        **{name: prepared.facts[name] for name in ("tokens", "contexts", "entries")},
        "vocabulary": prepared.vocabulary,
        "text_bytes": text.stat().st_size,
        "windows_bytes": sum(path.stat().st_size for path in windows.iterdir()),
        "counts_bytes": sum(path.stat().st_size for path in prepared.folder.iterdir()),
        "seconds": {
            "vocabulary": prepared_seconds - sum(prepared.seconds.values()),
            **prepared.seconds,
            **timed,
        },
        "ratio": timed["counting"] / timed["bare"],
    }
    if config.constructions:
        begun = time.monotonic()
        record = dimension(
            [text],
            settings,
            Measure(
                constructions=config.constructions,
                interval=config.interval,
                null=config.null,
                seed=config.seed,
            ),
            progress=progress,
        )
        found["seconds"]["curves"] = time.monotonic() - begun
        found["curves"] = {
            curve.construction: {
                "seconds": curve.seconds,
                "method": curve.method,
                "dimensions": curve.dimensions,
                "limits": curve.dimension_limits,
            }
            for curve in record.curves
        }
    peaks.close()
    found["stage_peaks"] = peaks.peaks
    write_whole(Path(config.child), json.dumps(found))
    shutil.rmtree(cache, ignore_errors=True)


def _timed(
    windows: Path, vocabulary: int, settings: Settings, cache: Path, *, repeats: int
) -> dict[str, float]:
    """Seconds of our stage, of DuckDB's own group-by and of one whose result is written; the best of each."""
    import duckdb

    from fullrank.corpus import count
    from fullrank.corpus.engines import engine_memory
    from fullrank.corpus.windows import Packing
    from fullrank.text import stages

    resources = settings.resources
    packing = Packing(order=settings.order, vocabulary=vocabulary)
    manifest = stages.read_manifest(windows)
    scratch = cache / "timed"
    columns = ", ".join((*packing.columns, "next"))
    query = f"select {columns}, count(*) as n from read_parquet('{windows}/*.parquet') group by {columns}"

    def ours() -> None:
        count.count(scratch, windows, packing, manifest, resources)

    def bare(statement: str) -> None:
        options: dict[str, Any] = {
            "threads": resources.threads,
            # As much as the engine of our stage gets.
            "memory_limit": f"{engine_memory(resources.memory) >> 20}MiB",
            "temp_directory": str(scratch / "temporary"),
            "preserve_insertion_order": False,
        }
        with duckdb.connect(config=options) as connection:
            connection.execute(statement).fetchall()

    ways: dict[str, Callable[[], None]] = {
        "counting": ours,
        "bare": lambda: bare(f"select count(*), sum(n) from ({query})"),
        "bare_written": lambda: bare(f"copy ({query}) to '{scratch}/bare.parquet'"),
    }
    best: dict[str, float] = {}
    # One after the other, again and again: whatever else the machine does meets all of them.
    for _ in range(repeats):
        for name, way in ways.items():
            scratch.mkdir()
            begun = time.monotonic()
            way()
            best[name] = min(best.get(name, math.inf), time.monotonic() - begun)
            shutil.rmtree(scratch)
    return best


def _table(sizes: list[dict[str, Any]]) -> Table:
    drawn = Table(title="Cost of the dimension of a corpus")
    for header in ("tokens", "tokenise", "count", "bare", "ratio", "curves", "peak"):
        drawn.add_column(header, justify="right")
    for one in sizes:
        seconds = one["seconds"]
        drawn.add_row(
            f"{one['tokens']:,}",
            f"{seconds['vocabulary'] + seconds['tokenising']:.1f} s",
            f"{seconds['counting']:.1f} s",
            f"{seconds['bare']:.1f} s",
            f"{one['ratio']:.2f}",
            f"{seconds.get('curves', 0):.1f} s",
            f"{one['peak_resident_bytes'] / 1e9:.2f} GB",
        )
    return drawn


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
