"""How often the limits of a table's dimensions and curve hold what all of its eigenvalues say.

    python -m benchmarks.corpus_limits

Made-up corpora, small enough for the exact spectrum, whose tables are then measured as those of large ones
are: at the defaults, with fewer steps, and with so few that brackets decide everything. Figures of one
spectrum hang together, so spectra with any figure outside are counted beside figures.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fullrank.corpus.counts import Counts
from fullrank.corpus.curve import SHARES, Effort, Spectrum
from fullrank.corpus.spectrum import spectrum
from fullrank.corpus.table import CONSTRUCTIONS, table
from fullrank.results import provenance, write_whole

Name = Literal["defaults", "little", "least"]
EFFORTS: dict[Name, Effort] = {
    "defaults": Effort(most_exact=0),
    "little": Effort(leading=32, batches=1, steps=(32, 48), most_exact=0),
    "least": Effort(leading=16, batches=1, steps=(12,), most_exact=0),
}
LEAST = 2
"""Times a context was seen that counts for the table of frequent ones."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Count figures outside their limits, by construction and effort."""

    vocabulary: int = 2000
    """Of the made-up corpora."""
    corpora: int = 2
    """So many of them."""
    seeds: int = 20
    """Spectra of each table, with other probes."""
    efforts: tuple[Name, ...] = get_args(Name)
    """Steps and probes of a spectrum."""
    out: Path = Path("results/corpus_limits.json")
    """Where the figures go."""


def counted(contexts: np.ndarray, tokens: np.ndarray, V: int) -> Counts:
    """Counts of (context, token) pairs, contexts renumbered."""
    seen, row = np.unique(contexts, return_inverse=True)
    key, count = np.unique(row * V + tokens, return_counts=True)
    widths = np.bincount(key // V, minlength=len(seen))
    return Counts(
        indptr=np.concatenate([[0], np.cumsum(widths)]).astype(np.int64),
        next=(key % V).astype(np.int32),
        count=count.astype(np.int64),
        vocabulary=V,
        tokens=len(tokens),
    )


def made_up(V: int, seed: int, contexts: int = 12_000) -> Counts:
    """Contexts with heavy-tailed counts, each with a favourite token and a share of the unigram."""
    generator = np.random.default_rng(seed)
    share = np.cumsum(1 / np.arange(1, V + 1))
    totals = np.minimum((1 - generator.random(contexts)) ** (-1 / 1.2), 3000).astype(int)
    row = np.repeat(np.arange(contexts), totals)
    drawn = [np.searchsorted(share, generator.random(size) * share[-1]) for size in (len(row), contexts)]
    return counted(row, np.where(generator.random(len(row)) < 0.5, drawn[1][row], drawn[0]), V)


def misses(found: Spectrum, exact: Spectrum) -> tuple[int, int]:
    """How many figures lie outside their limits, of how many."""
    outside = number = 0
    for kind in ("dimensions", "beyond_first"):
        for name, one in getattr(found, kind).items():
            number += 1
            outside += not one.low <= getattr(exact, kind)[name].value <= one.high
    for low, value, high in zip(
        found.relative_error_low, exact.relative_error, found.relative_error_high, strict=True
    ):
        number += 1
        outside += not low * (1 - 1e-5) - 1e-7 <= value <= high * (1 + 1e-5) + 1e-7
    return outside, number


def measured(config: Config, construction: str) -> dict[str, dict[str, Any]]:
    """By effort: figures and spectra outside, and how wide the limits of the dimensions are."""
    counts: dict[str, list[tuple[int, int]]] = {name: [] for name in config.efforts}
    widths: dict[str, dict[str, list[float]]] = {
        name: {share: [] for share in SHARES} for name in config.efforts
    }
    for number in range(config.corpora):
        made = table(made_up(config.vocabulary, number), construction, least=LEAST)
        exact = spectrum(made)
        for name in config.efforts:
            for seed in range(config.seeds):
                found = spectrum(made, seed=seed, effort=EFFORTS[name])
                counts[name].append(misses(found, exact))
                for share, one in found.dimensions.items():
                    widths[name][share].append((one.high - one.low) / max(one.value, 1))
    return {
        name: {
            "figures": sum(of for _, of in each),
            "figures_outside": sum(outside for outside, _ in each),
            "spectra": len(each),
            "spectra_outside": sum(outside > 0 for outside, _ in each),
            "relative_width": {share: statistics.median(widths[name][share]) for share in SHARES},
        }
        for name, each in counts.items()
    }


def main(config: Config) -> None:
    console = Console()
    found = {one: measured(config, one) for one in track(CONSTRUCTIONS, console=console, transient=True)}
    drawn = Table(title="Outside limits of 99.9%")
    for header in ("table", "effort", "figures", "spectra", "width of the limits, 50 / 90 / 99%"):
        drawn.add_column(header)
    for construction, efforts in found.items():
        for name, one in efforts.items():
            drawn.add_row(
                construction,
                name,
                f"{one['figures_outside']:,} of {one['figures']:,}",
                f"{one['spectra_outside']} of {one['spectra']}",
                " / ".join(f"{width:.1%}" for width in one["relative_width"].values()),
            )
    console.print(drawn)
    document = {
        "benchmark": "corpus_limits",
        "made": dataclasses.asdict(provenance(seed=0, device="cpu")),
        "settings": {"vocabulary": config.vocabulary, "corpora": config.corpora, "seeds": config.seeds},
        "efforts": {name: dataclasses.asdict(EFFORTS[name]) for name in config.efforts},
        "tables": found,
    }
    write_whole(config.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
