"""Forward and backward of the output layer alone: time over its own products, extra memory, gradient error.

Nothing exact that takes no shortcut is faster than the products themselves: scores, the rows' gradient and
W's gradient over all N K rows. They run in the same rounds into preallocated buffers, cut into chunks of
several sizes, and the best cut counts. Where V is no multiple of 64 W is padded for them: bare products at an
odd V take several times as long, and no implementation is measured by that.

    time            of a call behind another of the same, as in training; `alone_...`: of one that begins on
                    an idle device, over products that do
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
from torch.nn import functional

from benchmarks.exact import Gradients, exact_gradients, relative_error
from benchmarks.gpu_settings import Settings
from benchmarks.measure import MIB, Step, Times, finite, in_rounds, peak_bytes, reason
from benchmarks.peers import (
    IMPLEMENTATIONS,
    LayerInputs,
    Loss,
    draw_inputs,
    implementations,
)

Row = dict[str, Any]

CHUNKS = (2048, 4096, 8192, 16384)
"""Rows a product, of which the fastest is taken."""
WHOLE = 64

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


def bare_products(inputs: LayerInputs) -> dict[str, Step]:
    """All 3 K products, by the rows of a chunk."""
    rows, weight = inputs.rows.detach().flatten(0, 1), inputs.weight.detach()
    R, V = rows.shape[0], -(-weight.shape[0] // WHOLE) * WHOLE
    weight = functional.pad(weight, (0, 0, 0, V - weight.shape[0]))
    d_rows, d_weight = torch.empty_like(rows), torch.empty_like(weight)
    sizes = sorted({min(chunk, R) for chunk in CHUNKS})
    scores = rows.new_empty(sizes[-1], V)

    def products(chunk: int) -> None:
        for start in range(0, R, chunk):
            part = rows[start : start + chunk]
            buffer = torch.mm(part, weight.t(), out=scores[: part.shape[0]])
            torch.mm(buffer, weight, out=d_rows[start : start + chunk])
            torch.mm(buffer.t(), part, out=d_weight)

    return {f"products, {chunk} rows": partial(products, chunk) for chunk in sizes}


def fill(row: Row, ready: Ready, times: Times, products: list[Times]) -> None:
    """`products` are those of every cut, the best of which counts."""
    alone, behind = statistics.median(times.alone), statistics.median(times.behind)
    bare_alone = min(statistics.median(cut.alone) for cut in products)
    bare = min(statistics.median(cut.behind) for cut in products)
    known = [error for error in (ready.errors.get("rows"), ready.errors.get("weight")) if error is not None]
    row |= {
        "milliseconds": 1e3 * behind,
        "all_milliseconds": [1e3 * each for each in times.behind],
        "alone_milliseconds": 1e3 * alone,
        "all_alone_milliseconds": [1e3 * each for each in times.alone],
        "products_milliseconds": 1e3 * bare,
        "time_over_products": behind / bare,
        "alone_over_products": alone / bare_alone,
        "extra_mib": ready.extra,
        "gradient_error": max(known) if known else None,
        "gradient_errors": ready.errors,
    }


def measure_together(
    rows: list[Row], ready: list[Ready | str], products: list[dict[str, Step]], settings: Settings
) -> None:
    """Time all that is ready in common rounds, with the products of each, and fill the rows in."""
    steps: dict[str, Step] = {}
    for cuts in products:
        # Rows that have the same products share them.
        steps |= {f"{name} of {id(cuts)}": step for name, step in cuts.items()}
    steps |= {str(place): each.step for place, each in enumerate(ready) if isinstance(each, Ready)}
    times, failed = in_rounds(steps, settings.device, settings.repeats)
    for place, (row, each, cuts) in enumerate(zip(rows, ready, products, strict=True)):
        bare = [times[name] for name in (f"{name} of {id(cuts)}" for name in cuts) if name in times]
        if isinstance(each, str):
            row["missing"] = each
        elif str(place) in failed or not bare:
            row["missing"] = failed.get(str(place)) or f"its products: {next(iter(failed.values()))}"
        else:
            fill(row, each, times[str(place)], bare)


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
    measure_together(rows, ready, [bare_products(inputs)] * len(rows), settings)
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
