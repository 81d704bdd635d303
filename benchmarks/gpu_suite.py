"""The CUDA benchmark from end to end: its parts, one file of figures that grows as they come, tables last.

    layer    forward and backward of the output layer: every peer, whole heads                 -> "rows"
    stages   where one call of ours spends its time                                            -> "stages"
    step     whole training steps of a model of GPT-2 small's size                             -> "steps"
    decode   one token's head call                                                             -> "decoding"

The file is written anew after every case, so that what was measured before a crash stays. A part that is not
run keeps its figures from a file that the same device and versions wrote; `parts` says when each was made.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import gpu_layer
from benchmarks.gpu_decode import measure_decoding
from benchmarks.gpu_heads import measure_heads
from benchmarks.gpu_layer import Row, measure_layer, not_run
from benchmarks.gpu_settings import Settings
from benchmarks.gpu_stages import measure_stages
from benchmarks.gpu_step import measure_steps
from benchmarks.measure import Budget, quick_collections, reason, release
from fullrank.results import provenance, write_whole

KIND, VERSION = "output_layer", 4
LISTS = {"layer": "rows", "stages": "stages", "step": "steps", "decode": "decoding"}
FIGURES = ("milliseconds", "time_over_products", "alone_over_products", "extra_mib", "gradient_error")
PEERS = ("cut_cross_entropy", "liger_kernel", "quack")


def peer_versions() -> dict[str, str]:
    """Of the peers that can be imported, installed or on the path; CUDA's of torch."""
    found: dict[str, str] = {}
    for name in PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # A folder on the path has no record of its version, but may name it.
            try:
                found[name] = str(getattr(importlib.import_module(name), "__version__", "unknown"))
            except Exception:
                continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def start_document(settings: Settings) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if settings.device == "cuda" else settings.device
    made = provenance(seed=settings.seed, device=name)
    versions = {**made.versions, **peer_versions()}
    document: dict[str, Any] = {
        "kind": KIND,
        "version": VERSION,
        "made": dataclasses.asdict(made),
        "device": name,
        "versions": versions,
        "sizes": {**gpu_layer.sizes(settings), "step": dataclasses.asdict(settings.step)},
        "parts": {},
        **{each: [] for each in LISTS.values()},
    }
    if settings.out.exists():
        try:
            old = json.loads(settings.out.read_text(encoding="utf8"))
        except ValueError:
            old = {}
        alike = all(old.get(key) == document[key] for key in ("kind", "version", "device", "versions"))
        for part in LISTS:
            if alike and part not in settings.only and part in old.get("parts", {}):
                document["parts"][part] = old["parts"][part]
                document[LISTS[part]] = old[LISTS[part]]
    return document


def attempt(measure: Callable[[], list[Row]], fallback: Callable[[str], Row]) -> list[Row]:
    """The rows of one case, or one row that says why there are none."""
    try:
        return measure()
    except Exception as error:
        return [fallback(reason(error))]


def run_layer(settings: Settings, budget: Budget) -> Iterator[list[Row]]:
    rows: list[Row] = []
    measures = {"peers": measure_layer, "heads": measure_heads}
    for what, D, V, K in gpu_layer.cases(settings):

        def fallback(why: str, case: tuple[str, int, int, int] = (what, D, V, K)) -> Row:
            return not_run(*case, why)

        def measure(case: tuple[str, int, int, int] = (what, D, V, K)) -> list[Row]:
            return measures[case[0]](settings, *case[1:])

        rows += [fallback(budget.words())] if budget.over else attempt(measure, fallback)
        for row in rows:
            # A row without figures has the same fields.
            row |= {name: None for name in FIGURES if name not in row}
        release(settings.device)
        yield rows


def run_stages(settings: Settings, budget: Budget) -> Iterator[list[Row]]:
    rows: list[Row] = []
    for D, V in settings.shapes:
        for K in sorted({min(settings.components), settings.most}):
            if budget.over:
                rows.append({"components": K, "width": D, "vocab": V, "missing": budget.words()})
            else:
                rows.append(measure_stages(settings, D, V, K))
            release(settings.device)
            yield rows


def run_step(settings: Settings, budget: Budget) -> Iterator[list[Row]]:
    rows: list[Row] = []
    for kind in settings.bodies:
        latest: list[Row] = []
        try:
            for latest in measure_steps(settings, kind, budget):
                yield rows + latest
        except Exception as error:
            row = {"implementation": "all", "head": "all", "components": 0, "body": kind}
            latest = [*latest, {**row, "missing": reason(error)}]
        rows = rows + latest
        release(settings.device)
        yield rows


def run_decode(settings: Settings, budget: Budget) -> Iterator[list[Row]]:
    rows: list[Row] = []
    for D, V in settings.shapes:

        def fallback(why: str, D: int = D, V: int = V) -> Row:
            return {"implementation": "all", "head": "all", "width": D, "vocab": V, "missing": why}

        def measure(D: int = D, V: int = V) -> list[Row]:
            return measure_decoding(settings, D, V)

        rows += [fallback(budget.words())] if budget.over else attempt(measure, fallback)
        release(settings.device)
        yield rows


Run = Callable[[Settings, Budget], Iterator[list[Row]]]

RUNS: dict[str, Run] = {
    "layer": run_layer,
    "stages": run_stages,
    "step": run_step,
    "decode": run_decode,
}


def run_suite(settings: Settings, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure all parts asked for; returns the document as it was last written."""
    budget = Budget(settings.deadline)
    document = start_document(settings)
    for part, run in RUNS.items():
        if part in settings.only:
            with quick_collections():
                run_part(part, run, document, settings, budget)
            record = document["parts"][part]
            say(f"{part}: {record['seconds']:.0f} s, {budget.spent:.0f} s in all")
    return document


def run_part(part: str, run: Run, document: dict[str, Any], settings: Settings, budget: Budget) -> None:
    """Measure one part into the document, and write the document after every case."""
    began = time.monotonic()
    made = document["made"]
    record: dict[str, Any] = {name: made[name] for name in ("command", "commit", "time")}
    record |= {"seconds": 0.0, "complete": False}
    document["parts"][part] = record
    document[LISTS[part]] = []

    def write() -> None:
        record["seconds"] = time.monotonic() - began
        write_whole(settings.out, json.dumps(document, indent=1, allow_nan=False) + "\n")

    for rows in run(settings, budget):
        document[LISTS[part]] = rows
        write()
    record["complete"] = True
    write()
