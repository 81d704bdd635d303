"""How many roundings a log-probability carries: what the noise floor of `theory.least_rank` allows for.

    python -m benchmarks.rounding

Logits H W^T and their log_softmax are computed in a dtype and in fp64 from the same inputs. The spectral norm
of the difference, its rows centred as `least_rank` centres them (the normaliser's own error is a constant of
the row), over that of one rounding an entry, u rms(A) / sqrt(3) (sqrt(N) + sqrt(V)), is the number of
roundings. torch may warn that a product in a half type is slow on this machine.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

from fullrank.results import provenance, write_whole
from fullrank.theory.rank import ROUNDINGS, UNIT_ROUNDOFF

WIDTHS = (3, 8, 32, 128, 512, 2048, 8192)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Count the roundings of log-probabilities over widths and dtypes."""

    contexts: int = 400
    tokens: int = 600
    seeds: int = 3
    """Random heads a width; the most roundings of them count."""
    out: Path = Path("results/rounding.json")
    """Where the figures go."""


def roundings(config: Config, width: int, dtype: torch.dtype, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    H = torch.randn(config.contexts, width, generator=generator).to(dtype)
    W = torch.randn(config.tokens, width, generator=generator).div(width**0.5).mul(3.0).to(dtype)
    truth = torch.log_softmax(H.double() @ W.double().t(), dim=1)
    made = torch.log_softmax(H @ W.t(), dim=1).double()
    one = UNIT_ROUNDOFF[dtype] * float(truth.square().mean().sqrt()) / math.sqrt(3.0)
    spread = math.sqrt(config.contexts) + math.sqrt(config.tokens)
    error = made - truth
    return float(torch.linalg.matrix_norm(error - error.mean(dim=1, keepdim=True), 2)) / (one * spread)


def main(config: Config) -> None:
    found = {
        str(dtype): {
            width: max(roundings(config, width, dtype, seed) for seed in range(config.seeds))
            for width in WIDTHS
        }
        for dtype in DTYPES
    }
    table = Table(title="Roundings in a log-probability, the most of all seeds")
    for header in ("dtype", *(f"D={width}" for width in WIDTHS), "allowed"):
        table.add_column(header, justify="left" if header == "dtype" else "right")
    for dtype in DTYPES:
        line = [f"{value:.2f}" for value in found[str(dtype)].values()]
        table.add_row(str(dtype), *line, f"{ROUNDINGS[dtype]:g}")
    Console().print(table)
    document = {
        "kind": "rounding",
        "version": 1,
        "made": dataclasses.asdict(provenance(seed=None, device="cpu")),
        "data": {
            "contexts": config.contexts,
            "tokens": config.tokens,
            "seeds": config.seeds,
            "roundings": found,
            "allowed": {str(dtype): ROUNDINGS[dtype] for dtype in DTYPES},
        },
    }
    write_whole(config.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
