"""Scores that leave their product as exponentials, against cuBLAS's alone and with the pass behind them.

    python -m benchmarks.score_product --out results/score_product.json

For every tile of `ops/mixture/product.py`, so that the list there can be chosen anew for another chip.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from benchmarks.gpu_settings import SHAPES
from benchmarks.measure import Step, in_rounds, release
from fullrank.ops.mixture.product import candidates
from fullrank.results import provenance, write_whole


@dataclass(frozen=True, kw_only=True)
class Config:
    """Time every way to the exponentials of a chunk."""

    out: Path
    rows: int = 8192
    repeats: int = 7


def measured(config: Config, D: int, V: int) -> dict[str, object]:
    device = torch.device("cuda")
    rows, weight = (torch.randn(size, D, device=device).bfloat16() for size in (config.rows, V))
    scores = rows.new_empty(config.rows, V)
    steps: dict[str, Step] = {"product": lambda: torch.mm(rows, weight.t(), out=scores)}
    for tile, step in candidates(device, config.rows, V, D).items():
        steps["product and pass" if tile is None else str(tile)] = step
    times, failed = in_rounds(steps, "cuda", config.repeats)
    found = {name: 1e3 * statistics.median(taken.behind) for name, taken in times.items()}
    print(f"D {D}, V {V}, {config.rows} rows")
    for name in sorted(found, key=found.__getitem__):
        print(f"  {name:76s} {found[name]:8.3f} ms, over the product {found[name] / found['product']:.3f}")
    return {"width": D, "vocab": V, "rows": config.rows, "milliseconds": found, "failed": failed}


def main(config: Config) -> None:
    rows = []
    for D, V in SHAPES:
        if V % 64 == 0:
            rows.append(measured(config, D, V))
            release("cuda")
    made = provenance(seed=None, device=torch.cuda.get_device_name())
    document = {"kind": "score_product", "version": 1, "made": dataclasses.asdict(made), "rows": rows}
    write_whole(config.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
