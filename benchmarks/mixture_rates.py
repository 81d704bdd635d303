"""Are mixtures safe by default? Heads under one learning rate for all, at rates around softmax's best.

    python -m benchmarks.mixture_rates --tokens DIR --device cuda --processes 8

Every run is the engine's own (`fullrank train`'s loop, a recipe's settings, all of them alike for all heads):
a 14m transformer and an LSTM, each over rates a factor of two apart and several seeds. A seed is the body's
start and the order of the text, the same for all heads. A head is safe where its mean loss on held-out text
is at most softmax's plus `MARGIN` at every rate within a factor of four of softmax's best.

`DIR` holds tokens as `fullrank train --tokens` reads them. What stands in the file for the same settings is
not run again, so that a table can be made in several sittings; `--seconds` ends one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from fullrank.results import provenance, write_whole

MARGIN = 0.005
"""Nats per token."""
WITHIN = 4.0
HEADS = {"softmax": 1, "mos": 4, "moss": 4, "trunk": 10, "doc": 4}
"""With their components."""


@dataclass(frozen=True, kw_only=True)
class Body:
    recipe: str
    rates: tuple[float, ...]
    settings: tuple[str, ...]


BODIES = {
    "transformer": Body(
        recipe="transformer-14m",
        rates=(0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064),
        settings=("batch=16", "length=512", "steps=500"),
    ),
    # The heads' own default, which the recipe changes. A fifth of an epoch: so few steps need a longer rise,
    # since with the recipe's 24 heads collapse now and then.
    "lstm": Body(
        recipe="awd-lstm",
        rates=(0.004, 0.008, 0.016, 0.032, 0.064),
        settings=(
            "batch=64", "length=70", "steps=800", "body.hidden=512", "body.last=256", "head.width=256",
            "body.dropout=0.1", "body.dropout_input=0.1", "body.dropout_hidden=0.1", "body.weight_drop=0.1",
            "optimiser.warmup=0.2", "head.centred=true",
        ),
    ),
    "tiny": Body(
        recipe="transformer-tiny",
        rates=(0.002, 0.004),
        settings=("batch=2", "length=16", "steps=4", "body.hidden=16", "body.heads=2", "body.rate_width=0"),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Train heads on two bodies over rates and seeds."""

    tokens: Path
    """A directory of tokens."""
    out: Path = Path("results/mixture_rates.json")
    device: str = "cuda"
    bodies: tuple[Literal["transformer", "lstm", "tiny"], ...] = ("transformer", "lstm")
    """`tiny` has no meaning: it shows anywhere that this runs."""
    heads: tuple[str, ...] = tuple(HEADS)
    rates: tuple[float, ...] = ()
    """In place of those of the body."""
    seeds: int = 3
    processes: int = 8
    """Runs at once."""
    seconds: float = math.inf
    """After which no run is begun."""


def run(body: str, head: str, rate: float, seed: int, settings: Settings) -> dict[str, Any]:
    """One training and its loss on held-out text."""
    import torch

    from fullrank.errors import FullrankError
    from fullrank.results.training_log import read_log
    from fullrank.train.config import override
    from fullrank.train.loop import Options, train
    from fullrank.train.recipes import recipe

    torch.set_num_threads(1)
    kind = BODIES[body]
    changes = [
        *kind.settings, f"optimiser.lr={rate}", f"seed={seed}", f"head.components={HEADS[head]}",
        # Compiling takes longer than so few steps.
        "compile=off", "evaluate_every=1000000", "evaluate_tokens=8192", "final_tokens=0",
    ]  # fmt: skip
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        options = Options(
            data=(), tokens=settings.tokens, out=Path(folder) / "run", cache=Path(folder) / "cache",
            device=settings.device, trackers=(), monitors=False,
        )  # fmt: skip
        failed, loss = "", None
        try:
            train(override(recipe(kind.recipe, head), changes), options)
            loss = read_log(options.out).evaluations[-1].loss
        except FullrankError as error:
            failed = str(error)
    return {
        "body": body, "head": head, "components": HEADS[head], "rate": rate, "seed": seed,
        "test_nats_per_token": loss, "failed": failed, "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip


def table(rows: list[dict[str, Any]], body: str) -> Table:
    """Mean over seeds minus softmax's, and the spread of softmax."""
    mine = [row for row in rows if row["body"] == body]
    plain = {rate: _losses(mine, "softmax", rate) for rate in sorted({row["rate"] for row in mine})}
    plain = {rate: losses for rate, losses in plain.items() if losses}
    best = min(plain, key=lambda rate: statistics.mean(plain[rate].values()))
    drawn = Table(
        title=f"{body}: test nats per token over softmax of the same rate, mean (least to most over seeds)",
        title_justify="left",
    )
    for header in ("rate", "softmax", *(head for head in HEADS if head != "softmax")):
        drawn.add_column(header, justify="right")
    for rate, losses in plain.items():
        inside = best / WITHIN * 0.99 <= rate <= best * WITHIN * 1.01
        cells = [f"{rate:g}" + ("" if inside else " (outside)"), _spread(list(losses.values()), ".4f")]
        for head in HEADS:
            if head == "softmax":
                continue
            other = _losses(mine, head, rate)
            over = [other[seed] - losses[seed] for seed in other if seed in losses]
            mark = " >" if over and statistics.mean(over) > MARGIN else ""
            cells.append(_spread(over, "+.4f") + mark if over else "")
        drawn.add_row(*cells)
    return drawn


def _losses(rows: list[dict[str, Any]], head: str, rate: float) -> dict[int, float]:
    return {
        row["seed"]: math.inf if row["test_nats_per_token"] is None else row["test_nats_per_token"]
        for row in rows
        if (row["head"], row["rate"]) == (head, rate)
    }


def _spread(values: list[float], digits: str) -> str:
    if len(values) == 1:
        return f"{values[0]:{digits}}"
    return f"{statistics.mean(values):{digits}} ({min(values):{digits}} to {max(values):{digits}})"


def main(settings: Settings) -> None:
    begun = time.monotonic()
    made = dataclasses.asdict(provenance(seed=None, device=settings.device))
    wanted = {body: list(BODIES[body].settings) for body in settings.bodies}
    rows: list[dict[str, Any]] = []
    if settings.out.exists():
        before = json.loads(settings.out.read_text(encoding="utf8"))
        known = before.get("settings", {})
        rows = [row for row in before["rows"] if known.get(row["body"]) == list(BODIES[row["body"]].settings)]
        wanted = known | wanted
    have = {(row["body"], row["head"], row["rate"], row["seed"]) for row in rows}
    # Seed by seed, so that a sitting that ends early has whole tables of fewer seeds.
    jobs = [
        (body, head, rate, seed)
        for seed in range(settings.seeds)
        for body in settings.bodies
        for rate in settings.rates or BODIES[body].rates
        for head in settings.heads
    ]
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(settings.processes, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(run, *job, settings): job for job in jobs if job not in have}
        for done in as_completed(waiting):
            if done.cancelled():
                continue
            rows.append(done.result())
            document = {
                "kind": "mixture_rates", "version": 2, "made": made, "settings": wanted,
                "rows": sorted(rows, key=lambda row: (row["body"], row["head"], row["rate"], row["seed"])),
            }  # fmt: skip
            write_whole(settings.out, json.dumps(document, indent=1) + "\n")
            if time.monotonic() - begun > settings.seconds:
                for later in waiting:
                    later.cancel()
    console = Console() if Console().is_terminal else Console(width=180)
    for body in settings.bodies:
        console.print(table(rows, body))


if __name__ == "__main__":
    main(tyro.cli(Settings))
