"""Three forms of a mixture's contexts under one AdamW recipe: where does each end?

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
from typing import Any

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fullrank.results import provenance, write_whole
from fullrank.studies import ladder

MIXTURES = ("moc", "mos", "moss", "trunk")
FORMS = {"centred": {"centred": True}, "free": {"centred": False}, "published": {"as_published": True}}
"""Of `heads/contexts.py`; moc knows no centred one."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Train every mixture in every form and write where they end."""

    seeds: int = 3
    """Languages, each with its own draws."""
    steps: int = 500
    """Training steps of every head."""
    out: Path = Path("results/mixture_start.json")
    """Where the figures go."""


def final_kl(config: ladder.Config, name: str, form: str | None) -> float:
    options: dict[str, Any] = {} if form is None else {"components": config.components, **FORMS[form]}
    if name == "moc":
        options.pop("centred", None)
    truth = ladder.language(config)
    return ladder.climb(truth, name, config.width, options, config, math.nan, lambda share: None).kl


def main(config: Config) -> None:
    base = ladder.Config(
        contexts=256, vocabulary=128, rank=24, width=6, components=4, steps=config.steps, seed=0, heads=()
    )
    forms: list[tuple[str, str | None]] = [("softmax", None)]
    forms += [(name, form) for name in MIXTURES for form in FORMS if (name, form) != ("moc", "centred")]
    found: dict[str, list[float]] = {}
    for name, form in track(forms, description="training", transient=True):
        label = name if form is None else f"{name}, {form}"
        found[label] = [
            final_kl(dataclasses.replace(base, seed=seed), name, form) for seed in range(config.seeds)
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
