"""Tokens that can never lead: `fullrank.theory.unargmaxable` beside scipy's linear programs, in one run.

    python -m benchmarks.argmax_peers

The peer is the method one would write: for each token the program max t with (w_i - w_j)·h >= t for all j,
|h| <= 1 in every entry and t <= 1, in `scipy.optimize.linprog` (HiGHS); the token leads somewhere if t > 0.
Ours answers for all tokens, with proofs. The peer is asked for a sample of those planted as mixtures of other
rows, which can therefore never lead, and a sample of the rest; its time for the whole matrix is the two mean
times, each by the number of its tokens. Its simplex method has one thread, our products have all. Times a
token, their ratio, and whether the answers agree.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from scipy.optimize import linprog

from fullrank.results import provenance, write_whole
from fullrank.theory.argmax import unargmaxable

SIZES = ((1000, 32), (2000, 32), (2000, 64), (4000, 64))


@dataclass(frozen=True, kw_only=True)
class Config:
    """Time the tokens that can never lead beside scipy's linprog."""

    planted: int = 100
    """Tokens inside the hull of the others."""
    sample: int = 12
    """Tokens that linprog is asked for at each size; half of them planted."""
    seed: int = 0
    out: Path = Path("results/argmax_peers.json")
    """Where the figures go."""


def matrix(vocabulary: int, width: int, planted: int, seed: int) -> np.ndarray:
    """Rows of lognormal norm and a common mean; the first `planted` are mixtures of 400 others."""
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(vocabulary, width)) * np.exp(0.25 * generator.normal(size=(vocabulary, 1)))
    rows += generator.normal(size=width)
    chosen = generator.permutation(np.arange(planted, vocabulary))[:400]
    rows[:planted] = generator.dirichlet(np.ones(400), size=planted) @ rows[chosen]
    return rows


def leads(weight: np.ndarray, token: int) -> bool:
    """Whether the token leads from some state, by one linear program."""
    V, D = weight.shape
    ahead = np.delete(weight[token] - weight, token, axis=0)
    rows = np.column_stack([-ahead, np.ones(V - 1)])
    cost = np.append(np.zeros(D), -1.0)
    found = linprog(cost, rows, np.zeros(V - 1), bounds=[(-1, 1)] * D + [(None, 1)], method="highs")
    return found.fun is not None and bool(found.fun < -1e-9)


def measure(vocabulary: int, width: int, config: Config) -> dict[str, float | int | bool]:
    weight = matrix(vocabulary, width, config.planted, config.seed)
    report = unargmaxable(weight)
    generator = np.random.default_rng(config.seed)
    half = config.sample // 2
    inside = generator.permutation(config.planted)[:half]
    outside = generator.permutation(np.arange(config.planted, vocabulary))[: config.sample - half]
    answers: dict[int, bool] = {}
    peer_seconds = 0.0
    for tokens, share in ((inside, config.planted), (outside, vocabulary - config.planted)):
        started = time.perf_counter()
        answers.update({token: leads(weight, token) for token in tokens.tolist()})
        peer_seconds += share * (time.perf_counter() - started) / len(tokens)
    decided = set(answers) - set(report.undecided)
    return {
        "vocabulary": vocabulary,
        "width": width,
        "never": len(report.never),
        "planted_found": len(set(report.never) & set(range(config.planted))),
        "undecided": len(report.undecided),
        "programs": report.programs,
        "seconds": report.seconds,
        "milliseconds_a_token": 1e3 * report.seconds / vocabulary,
        "linprog_milliseconds_a_token": 1e3 * peer_seconds / vocabulary,
        "linprog_over_fullrank": peer_seconds / report.seconds,
        "compared": len(decided),
        "agree": sum(answers[token] == (token not in report.never) for token in decided),
    }


def main(config: Config) -> None:
    load = os.getloadavg()[0]
    unargmaxable(matrix(600, 8, 10, config.seed))  # the first program also loads the solver
    found = [measure(vocabulary, width, config) for vocabulary, width in SIZES]
    table = Table(title="Which tokens can never lead: milliseconds a token")
    for header in ("V", "D", "never", "undecided", "fullrank", "linprog", "ratio", "agree"):
        table.add_column(header, justify="right")
    for one in found:
        table.add_row(
            f"{one['vocabulary']}",
            f"{one['width']}",
            f"{one['never']}",
            f"{one['undecided']}",
            f"{one['milliseconds_a_token']:.2f}",
            f"{one['linprog_milliseconds_a_token']:.0f}",
            f"{one['linprog_over_fullrank']:.0f}",
            f"{one['agree']} of {one['compared']}",
        )
    Console().print(table)
    document = {
        "kind": "argmax_peers",
        "version": 1,
        "made": dataclasses.asdict(provenance(seed=config.seed, device="cpu")),
        "data": {
            "planted": config.planted,
            "sample": config.sample,
            "threads": torch.get_num_threads(),
            "load": round(load, 2),
            "sizes": found,
        },
    }
    write_whole(config.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
