"""Which tokens lead, at the size of a real vocabulary: time of the screen, what it leaves, what is decided.

Two output layers of 50,000 tokens and width 64. `gaussian`: independent normal rows. `spread`: rows of
lognormal norm (deviation 0.25), a power-law spectrum and a common mean, as trained output layers have, and
300 tokens planted as mixtures of 400 other rows, which can therefore never lead. Beside them the top-m
capacity of Gaussian rows. Seconds are wall time; `cpu_seconds` counts all threads, and `load` (runnable
processes in the minute before) says whether the machine was shared: then wall time is not the program's own.

    python -m benchmarks.argmax_screen
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from fullrank.results import provenance, write_whole
from fullrank.theory.argmax import unargmaxable
from fullrank.theory.capacity import top_m_capacity

PLANTED = 300


def gaussian(vocabulary: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(vocabulary, width))


def spread(vocabulary: int, width: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(vocabulary, width))
    rows *= np.exp(0.25 * generator.normal(size=(vocabulary, 1)))
    rows = rows * np.arange(1, width + 1) ** -0.5 + generator.normal(size=width)
    mixtures = generator.dirichlet(np.ones(400), size=PLANTED)
    rows[:PLANTED] = mixtures @ rows[generator.permutation(np.arange(PLANTED, vocabulary))[:400]]
    return rows


def measure(weight: np.ndarray, planted: int) -> dict[str, Any]:
    load, cpu = os.getloadavg()[0], time.process_time()
    ticks: dict[str, float] = {}

    def note(stage: str, done: int, total: int) -> None:
        ticks.setdefault(stage, time.process_time() - cpu)

    report = unargmaxable(weight, progress=note)
    cpu_seconds = time.process_time() - cpu
    never = set(report.never)
    return {
        "vocabulary": report.vocabulary,
        "width": weight.shape[1],
        "planted": planted,
        "planted_found": len(never & set(range(planted))),
        "undecided_after_screen": report.after_screen,
        "argmaxable": report.argmaxable,
        "never": len(report.never),
        "undecided": len(report.undecided),
        "largest_residual": max((one.residual for one in report.certificates), default=0.0),
        "least_depth": min((one.depth for one in report.certificates), default=0.0),
        "margin": report.margin,
        "screen_seconds": round(report.screen_seconds, 1),
        "seconds": round(report.seconds, 1),
        "screen_cpu_seconds": round(ticks.get("programs", cpu_seconds), 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "load": round(load, 2),
    }


def capacity(vocabulary: int, width: int, samples: int, seed: int) -> dict[str, Any]:
    load = os.getloadavg()[0]
    report = top_m_capacity(gaussian(vocabulary, width, seed), samples=samples, seed=seed)
    return {
        "vocabulary": vocabulary,
        "width": width,
        "samples": samples,
        "capacity": report.capacity,
        "interval": list(report.interval),
        "over_width": round(report.capacity / width, 3),
        "sizes": list(report.sizes),
        "undecided": report.undecided,
        "seconds": round(report.seconds, 1),
        "load": round(load, 2),
    }


def main(
    out: Path = Path("results/argmax_screen.json"), vocabulary: int = 50_000, width: int = 64, seed: int = 0
) -> None:
    """Run the cases and write the figures.

    Args:
        out: file to write.
        vocabulary: tokens of the two output layers.
        width: their width.
        seed: of the matrices and of the sampled sets.
    """
    data: dict[str, Any] = {"threads": torch.get_num_threads(), "argmax": {}, "capacity": []}
    for name, make, planted in (("gaussian", gaussian, 0), ("spread", spread, PLANTED)):
        data["argmax"][name] = measure(make(vocabulary, width, seed), planted)
        print(name, json.dumps(data["argmax"][name]), flush=True)
    for tokens, dimensions, samples in ((200, 100, 32), (vocabulary, width, 32), (vocabulary, 3 * width, 8)):
        data["capacity"].append(capacity(tokens, dimensions, samples, seed))
        print("capacity", json.dumps(data["capacity"][-1]), flush=True)
    made = dataclasses.asdict(provenance(seed=seed, device="cpu"))
    write_whole(out, json.dumps({"made": made, "data": data}, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
