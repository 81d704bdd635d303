"""Forward and backward of the output layer alone: time over the floor, extra memory, gradient error.

The floor of K components is 3 K products of N rows of width D with W, each at the speed that one such product
reached in the same rounds: three products torch.mm(rows [N, D], W^T) into one preallocated [N, V] are timed
in a row once a round, and the floor is K times the median of these triples. Three in a row, so that the gap
before the first launch weighs a third.

    products        all three kinds of product over the N K rows (scores, rows' gradient, W's gradient) in
                    chunks of 16384 rows into preallocated buffers: how far the other two kinds run from the
                    first, and how far many in a row run from three
    extra memory    the most that is allocated during a call beyond what was before it, less the gradients
    gradient error  |g - exact| / |exact| against fp64 on the same inputs, all N tokens; the larger of rows'
                    and W's

Rows of the table are dictionaries: `implementation`, `head`, `components`, `width`, `vocab`, then the
figures, or `missing` with the reason.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.exact import Gradients, exact_gradients, relative_error
from benchmarks.gpu_settings import Settings
from benchmarks.measure import MIB, Step, finite, in_rounds, peak_bytes, reason
from benchmarks.peers import (
    IMPLEMENTATIONS,
    LayerInputs,
    Loss,
    draw_inputs,
    implementations,
)

Row = dict[str, Any]

PRODUCT_ROWS = 16384
FLOOR = "floor"

GRAPHED = ("fullrank", "compiled")
"""What is measured as a captured CUDA graph as well, for one component."""


@dataclass
class Ready:
    """An implementation that ran once: its step, and what one call showed."""

    step: Step
    errors: dict[str, float | None]
    extra: float | None
    """MiB"""


def training_step(inputs: LayerInputs, loss: Loss) -> Step:
    """Forward and backward; gradients are dropped first, as a training step does."""

    def run() -> None:
        inputs.drop_gradients()
        loss().backward()

    return run


def captured(step: Step) -> Step:
    """The step as a CUDA graph, so that no launch waits for Python."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def prepare(
    make: Callable[[], Loss],
    inputs: LayerInputs,
    exact: Gradients | None,
    settings: Settings,
    *,
    graph: bool = False,
) -> Ready | str:
    """Compile, check and measure the memory of one implementation; a string says why it cannot be had."""
    try:
        step = training_step(inputs, make())
        if graph:
            step = captured(step)
        step()
        errors: dict[str, float | None] = {}
        if exact is not None:
            errors = {
                "rows": relative_error(inputs.rows.grad, exact.rows),
                "weight": relative_error(inputs.weight.grad, exact.weight),
            }
            if inputs.log_prior.requires_grad:
                errors["log_prior"] = relative_error(inputs.log_prior.grad, exact.log_prior)
        inputs.drop_gradients()
        # The second call: what a compiler and a first launch need is spent once. A graph has its own memory.
        peak = None if graph else peak_bytes(step, settings.device)
    # A peer may fail in ways of its own: no memory, no such shape, not installed.
    except Exception as error:
        return reason(error)
    finally:
        inputs.drop_gradients()
    extra = None if peak is None else (peak - inputs.gradient_bytes) / MIB
    return Ready(step, {name: finite(value) for name, value in errors.items()}, extra)


def bare_products(inputs: LayerInputs) -> tuple[Step, Step]:
    """(three products of N rows for the floor, all 3 K products); both write one buffer of scores."""
    rows, weight = inputs.rows.detach().flatten(0, 1), inputs.weight.detach()
    R, N, V = rows.shape[0], inputs.rows.shape[0], weight.shape[0]
    chunk = max(N, min(PRODUCT_ROWS, R))
    scores = rows.new_empty(chunk, V)
    d_rows, d_weight = torch.empty_like(rows), torch.empty_like(weight)

    def floor() -> None:
        for _ in range(3):
            torch.mm(rows[:N], weight.t(), out=scores[:N])

    def products() -> None:
        for start in range(0, R, chunk):
            part = rows[start : start + chunk]
            buffer = torch.mm(part, weight.t(), out=scores[: part.shape[0]])
            torch.mm(buffer, weight, out=d_rows[start : start + chunk])
            torch.mm(buffer.t(), part, out=d_weight)

    return floor, products


def fill(row: Row, ready: Ready, times: list[float], floor: float) -> None:
    taken = statistics.median(times)
    known = [error for error in (ready.errors.get("rows"), ready.errors.get("weight")) if error is not None]
    row |= {
        "milliseconds": 1e3 * taken,
        "all_milliseconds": [1e3 * each for each in times],
        "floor_milliseconds": 1e3 * floor,
        "time_over_floor": taken / floor,
        "extra_mib": ready.extra,
        "gradient_error": max(known) if known else None,
        "gradient_errors": ready.errors,
    }


def measure_together(
    rows: list[Row], ready: list[Ready | str], floors: list[float], floor_step: Step, settings: Settings
) -> None:
    """Time all that is ready in common rounds and fill the rows in; floors are numbers of triples."""
    steps: dict[str, Step] = {FLOOR: floor_step}
    steps |= {str(place): each.step for place, each in enumerate(ready) if isinstance(each, Ready)}
    times, failed = in_rounds(steps, settings.device, settings.repeats)
    for place, (row, each, floor) in enumerate(zip(rows, ready, floors, strict=True)):
        if isinstance(each, str):
            row["missing"] = each
        elif str(place) in failed or FLOOR in failed:
            row["missing"] = failed.get(str(place)) or f"the floor: {failed[FLOOR]}"
        else:
            fill(row, each, times[str(place)], floor * statistics.median(times[FLOOR]))


def measure_layer(settings: Settings, D: int, V: int, K: int) -> list[Row]:
    """Every implementation of K components of width D over V entries."""
    base = {"head": "softmax" if K == 1 else "mos", "components": K, "width": D, "vocab": V}
    base |= {"tokens": settings.tokens, "part": "peers"}
    inputs = draw_inputs(
        N=settings.tokens, K=K, D=D, V=V, dtype=settings.dtype, device=settings.device, seed=settings.seed
    )
    exact = exact_gradients(inputs.rows, inputs.log_prior, inputs.weight, inputs.targets)
    names = implementations(K, settings.without)
    ready = [
        prepare(partial(IMPLEMENTATIONS[name], inputs, settings.compiler), inputs, exact, settings)
        for name in names
    ]
    rows = [{"implementation": name, **base} for name in names]
    if K == 1 and settings.device == "cuda":
        for name in (name for name in GRAPHED if name in names):
            make = partial(IMPLEMENTATIONS[name], inputs, settings.compiler)
            rows.append({"implementation": f"{name}, graph", **base, "part": "graphs"})
            ready.append(prepare(make, inputs, exact, settings, graph=True))
    # Gone before the rounds: its memory belongs to whoever needs it.
    del exact
    floor_step, products = bare_products(inputs)
    rows.append({"implementation": "products", **base})
    ready.append(Ready(products, {}, None))
    measure_together(rows, ready, [float(K)] * len(rows), floor_step, settings)
    return rows


def cases(settings: Settings) -> Iterator[tuple[str, int, int, int]]:
    """(what, D, V, K): what only we have, then the peers, least and most components first: if time runs out,
    what lies between is missing."""
    for D, V in settings.shapes:
        yield "heads", D, V, settings.most
    ends = [min(settings.components), settings.most]
    for several in (ends, [K for K in settings.components if K not in ends]):
        for D, V in settings.shapes:
            for K in several:
                yield "peers", D, V, K


def not_run(what: str, D: int, V: int, K: int, why: str) -> Row:
    head = "softmax" if K == 1 else "mos"
    return {
        "implementation": "all", "head": head, "components": K, "width": D, "vocab": V, "part": what,
        "missing": why,
    }  # fmt: skip


def sizes(settings: Settings) -> dict[str, Any]:
    kept = ("tokens", "repeats", "seed", "compiler", "components", "shapes")
    return {"dtype": str(settings.dtype).removeprefix("torch.")} | {
        name: value for name, value in dataclasses.asdict(settings).items() if name in kept
    }
