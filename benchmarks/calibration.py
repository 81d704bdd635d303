"""What does `fullrank diagnose` find, at its default settings, of bottlenecks whose size is known?

    python -m benchmarks.calibration --out results/calibration.json

Every case of `planted` is made for every seed and given to the command as a user gives it a model and a text.
Per case: the true gain, the gain that was reported, its interval and verdict, and the smallest gain that the
diagnosis says it would have seen. A planted model is judged by the range between what a mixture gains over a
softmax with bent rows of equal size and over the model as it is, because a diagnosis holds heads against
controls that may bend theirs; of a healthy one nothing may be found. The loss that the command measures is
written beside the one computed, as a check of the suite itself.

What stands in the file for the same commit is not run again; where the tree has changes, everything is. Every
row has its commit, and rows of other commits stay until their case is run anew.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.planted import CASES, Planted, plant
from fullrank.results import provenance, write_whole

NEAR = 0.3
"""How far a reported gain may lie from the true range, as a share."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Diagnose planted and healthy models and compare with what is true of them."""

    cases: tuple[str, ...] = tuple(CASES)
    """Names of cases of `planted`."""
    seeds: int = 1
    """Models and texts a case."""
    out: Path = Path("results/calibration.json")
    """Where the figures go."""
    keep: Path | None = None
    """A directory to keep models, texts and diagnoses in; else they are removed."""
    limit: float = 3600.0
    """Seconds after which a diagnosis is stopped and counted as failed."""
    processes: int = 1
    """Cases at once, each with its share of the cores."""
    first_seed: int = 0
    device: str = "cpu"
    """As `fullrank diagnose --device` has it; figures of other devices stay in the file."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a diagnosis says, whatever its record calls it."""

    gain: float | None
    low: float | None
    high: float | None
    """None where there is no upper end."""
    verdict: str
    """held back, not held back or undecided."""
    smallest: float | None
    """Nats that it would have seen."""
    loss: float | None
    """Of the model as it came, on the text that was used."""
    standard_error: float | None


def reading(record: dict[str, Any]) -> Reading:
    """The one place that knows the fields of results.json."""
    verdict = record.get("verdict") or {}
    loss = record.get("loss") or {}
    gain = verdict.get("gain") or (record.get("better_head") or {}).get("best_gain") or {}
    if not isinstance(gain, dict):
        gain = {"value": gain}
    value, low, high = (_number(gain.get(name)) for name in ("value", "low", "high"))
    outcome = verdict.get("outcome")
    if outcome is None:
        # A record without a verdict: what its interval says, which cannot tell "no" from "not seen".
        outcome = "held back" if low is not None and low > 0 else "undecided"
    smallest = verdict.get("smallest")
    return Reading(
        gain=value,
        low=low,
        high=high,
        verdict=str(outcome),
        smallest=_number(smallest.get("value") if isinstance(smallest, dict) else smallest),
        loss=_number((loss.get("nats_per_token") or {}).get("value")),
        standard_error=_number(loss.get("standard_error")),
    )


def _number(value: Any) -> float | None:
    # Records write what JSON has no word for as strings.
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A reading against the truth."""

    covers: bool | None
    """The interval meets the true range; of a healthy model, it holds zero."""
    near: bool | None
    """The gain lies in the true range or within 30% of it; not asked of a healthy model."""
    right: bool | None
    """The verdict is the true one; None where it is undecided."""


def judged(planted: Planted, found: Reading) -> Judged:
    least, most = planted.gain_over_equal, planted.gain
    covers = None
    if found.low is not None:
        covers = found.low <= most and (found.high is None or found.high >= least)
    near = None
    if planted.gain > 0 and found.gain is not None:
        near = (1 - NEAR) * least <= found.gain <= (1 + NEAR) * most
    right = None if found.verdict == "undecided" else (found.verdict == "held back") == (planted.gain > 0)
    return Judged(covers=covers, near=near, right=right)


def run_case(name: str, seed: int, config: Config) -> dict[str, Any]:
    """Make a case, diagnose it as a user does, and compare."""
    with tempfile.TemporaryDirectory() as passing:
        keep = config.keep
        return _run_case(name, seed, Path(passing) if keep is None else keep / f"{name}-{seed}", config)


def _run_case(name: str, seed: int, directory: Path, config: Config) -> dict[str, Any]:
    planted = plant(directory, CASES[name], seed=seed)
    truth = {
        field: value for field, value in dataclasses.asdict(planted).items() if field not in ("model", "text")
    }
    out = directory / "diagnosis"
    command = [sys.executable, "-m", "fullrank.cli.main", "diagnose", str(planted.model)]
    command += ["--text", str(planted.text), "--out", str(out), "--device", config.device]
    started, limit = time.monotonic(), config.limit
    row = {"case": name, "seed": seed, "device": config.device, "truth": truth}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return row | {"failed": f"took more than {limit:.0f} s", "seconds": limit}
    row["seconds"] = time.monotonic() - started
    if done.returncode:
        return row | {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    found = reading(json.loads((out / "results.json").read_text(encoding="utf8")))
    return row | {
        "found": dataclasses.asdict(found), "judged": dataclasses.asdict(judged(planted, found))
    }  # fmt: skip


def run_all(cases: Sequence[tuple[str, int]], config: Config) -> Iterator[dict[str, Any]]:
    """Rows, as they are done."""
    if config.processes == 1:
        yield from (run_case(name, seed, config) for name, seed in cases)
        return
    # Read by processes that are started from now on.
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // config.processes))
    with ProcessPoolExecutor(config.processes, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(run_case, name, seed, config) for name, seed in cases]
        yield from (done.result() for done in as_completed(waiting))


def earlier(path: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    """Rows that stand in the file, by case, seed and device."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf8"))["data"]["rows"]
    return {(row["case"], row["seed"], row["device"]): row for row in rows}


def table(rows: list[dict[str, Any]]) -> Table:
    drawn = Table(
        title="The gain of a better head, nats per token: true and as diagnosed", title_justify="left"
    )
    for header in (
        "case",
        "seed",
        "true",
        "found",
        "95%",
        "covers",
        "near",
        "would see",
        "verdict",
        "seconds",
    ):
        drawn.add_column(header, justify="left" if header in ("case", "verdict") else "right")
    for row in rows:
        truth, found, verdicts = row["truth"], row.get("found"), row.get("judged", {})
        true = f"{truth['gain_over_equal']:.3f} to {truth['gain']:.3f}" if truth["gain"] else "0"
        if found is None:
            drawn.add_row(
                row["case"], str(row["seed"]), true, *[""] * 5, row["failed"], f"{row['seconds']:.0f}"
            )
            continue
        drawn.add_row(
            row["case"],
            str(row["seed"]),
            true,
            _signed(found["gain"]),
            _signed(found["low"])
            + (f" to {_signed(found['high'])}" if found["high"] is not None else " or more"),
            _word(verdicts["covers"]),
            _word(verdicts["near"]),
            _signed(found["smallest"]),
            found["verdict"] + ("" if verdicts["right"] in (True, None) else " (wrong)"),
            f"{row['seconds']:.0f}",
        )
    return drawn


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3f}"


def _word(value: bool | None) -> str:
    return {True: "yes", False: "no", None: ""}[value]


def main(config: Config) -> None:
    unknown = [name for name in config.cases if name not in CASES]
    if unknown:
        raise SystemExit(f"no case {', '.join(unknown)}: expected some of {', '.join(CASES)}")
    made = provenance(seed=None, device=config.device)
    rows = earlier(config.out)
    console = Console()
    if not console.is_terminal:
        # In a file the table keeps its lines.
        console = Console(width=140)
    seeds = range(config.first_seed, config.first_seed + config.seeds)
    wanted = [(name, seed, config.device) for seed in seeds for name in config.cases]
    # A tree with changes is no commit that could be found again.
    fixed = bool(made.commit) and not made.commit.endswith("+changes")
    missing = [key for key in wanted if not (fixed and rows.get(key, {}).get("commit") == made.commit)]
    for row in run_all([(name, seed) for name, seed, _ in missing], config):
        rows[row["case"], row["seed"], row["device"]] = row | {"commit": made.commit}
        console.print(f"{row['case']}, seed {row['seed']}", style="dim")
        ordered = sorted(
            rows.values(), key=lambda row: (list(CASES).index(row["case"]), row["device"], row["seed"])
        )
        document = {
            "kind": "calibration", "version": 1, "made": dataclasses.asdict(made), "data": {"rows": ordered}
        }  # fmt: skip
        write_whole(config.out, json.dumps(document, indent=1) + "\n")
    console.print(table([rows[key] for key in wanted]))


if __name__ == "__main__":
    main(tyro.cli(Config))
