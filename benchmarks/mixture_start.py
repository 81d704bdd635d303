"""Our start of a mixture against the published one, under one AdamW recipe: where does each end?

    python -m benchmarks.mixture_start

The rank ladder's language (256 contexts, 128 tokens, least rank 24), width 6, K = 4, several seeds; every
seed is another language. Softmax of the same width is the yardstick. KL(truth || model) in nats per token at
the end of training; nothing is tuned for either form.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fullrank.results import provenance, write_whole
from fullrank.studies import ladder

MIXTURES = ("moc", "mos", "moss", "trunk")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Train every mixture from both starts and write where they end."""

    seeds: int = 3
    """Languages, each with its own draws."""
    steps: int = 500
    """Training steps of every head."""
    out: Path = Path("results/mixture_start.json")
    """Where the figures go."""


def final_kl(config: ladder.Config, name: str, as_published: bool | None) -> float:
    options = {} if as_published is None else {"components": config.components, "as_published": as_published}
    truth = ladder.language(config)
    return ladder.climb(truth, name, config.width, options, config, math.nan, lambda share: None).kl


def main(config: Config) -> None:
    base = ladder.Config(
        contexts=256, vocabulary=128, rank=24, width=6, components=4, steps=config.steps, seed=0, heads=()
    )
    forms: list[tuple[str, bool | None]] = [("softmax", None)]
    forms += [(name, published) for name in MIXTURES for published in (False, True)]
    found: dict[str, list[float]] = {}
    for name, published in track(forms, description="training", transient=True):
        label = name if published is None else f"{name}, {'published' if published else 'ours'}"
        found[label] = [
            final_kl(dataclasses.replace(base, seed=seed), name, published) for seed in range(config.seeds)
        ]
    drawn = Table(title=f"KL to the truth, nats per token, {config.seeds} languages, {config.steps} steps")
    for header in ("head", "mean", "least", "most"):
        drawn.add_column(header, justify="left" if header == "head" else "right")
    for label, values in found.items():
        drawn.add_row(
            label, *(f"{value:.4f}" for value in (statistics.mean(values), min(values), max(values)))
        )
    Console().print(drawn)
    document = {
        "kind": "mixture_start",
        "version": 1,
        "made": dataclasses.asdict(provenance(seed=None, device="cpu")),
        "data": {"config": dataclasses.asdict(base) | {"seed": list(range(config.seeds))}, "kl": found},
    }
    write_whole(config.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
