"""Whole training steps of a model of GPT-2 small's size under each head: forward, backward, AdamW.

Parameters in fp32, bf16 autocast, fused AdamW, W tied to the embedding, random tokens. The body is one module
for all variants, once as it is and once through torch.compile, and so is our head with its loss; head and
optimiser are built anew for each variant.
Softmax runs through every implementation that can be had (`peers.py`, K = 1; their W is cast to bf16 once a
step), the mixtures through ours. Each variant is timed in two sweeps over all of them, the second in reverse
order, so that a slow drift meets all alike; the figure is the median of all steps.

`time_over_softmax` and `memory_over_softmax` are over the fastest softmax under the same body, ours among
them, `time_over_peer` and `memory_over_peer` over the fastest of the others. Peak memory is that of a whole
step with parameters and optimiser.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from benchmarks.gpt2_body import Gpt2Body
from benchmarks.gpu_heads import spread_components
from benchmarks.gpu_layer import Row
from benchmarks.gpu_settings import Settings
from benchmarks.measure import MIB, Budget, Step, reason, release, seconds
from benchmarks.peers import cce_function, compiled_by, compiled_softmax, liger_function, torch_function
from fullrank.heads import Head, build

HeadLoss = Callable[[Tensor, Tensor], Tensor]
"""(states [tokens, width], targets [tokens]) -> mean loss"""

NARROW = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Variant:
    implementation: str
    head: str = "softmax"
    components: int = 1


def variants(settings: Settings) -> list[Variant]:
    softmax = ("fullrank", "compiled", "eager", "cce", "cce exact", "liger", "liger 16x", "torch")
    found = [Variant(implementation=name) for name in softmax if name not in settings.without]
    several = [K for K in settings.components if K > 1]
    found += [Variant(implementation="fullrank", head="mos", components=K) for K in several]
    found.append(Variant(implementation="fullrank", head="trunk", components=settings.most))
    return found


def build_head(variant: Variant, body: Gpt2Body, settings: Settings) -> Head:
    sizes = settings.step
    options: dict[str, Any] = {} if variant.components == 1 else {"components": variant.components}
    if variant.head == "trunk":
        options["private"] = sizes.private
    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        head = build(variant.head, hidden=sizes.width, vocab=sizes.vocab, **options)
        spread_components(head)
    head.tie(body.embedding)
    return head


def softmax_loss(name: str, weight: Tensor, settings: Settings) -> HeadLoss:
    """Softmax through a peer."""
    if name == "eager":
        return lambda states, targets: compiled_softmax(states, weight, targets)
    if name == "compiled":
        compiled = compiled_by(settings.compiler, compiled_softmax)
        return lambda states, targets: compiled(states, weight, targets)
    makers: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "cce": lambda: cce_function(filtered=True),
        "cce exact": lambda: cce_function(filtered=False),
        "liger": liger_function,
        "liger 16x": lambda: liger_function(chunks=16),
        "torch": torch_function,
    }
    function = makers[name]()
    return lambda states, targets: function(states.to(NARROW), weight.to(NARROW), targets, "mean")


def make_step(
    variant: Variant,
    body: Gpt2Body,
    run_body: Callable[[Tensor], Tensor],
    settings: Settings,
    *,
    compiled: bool,
) -> Step:
    """One step on fixed random tokens; the optimiser lives as long as the step."""
    sizes, device = settings.step, settings.device
    draw = torch.Generator(device).manual_seed(settings.seed)
    shape = (sizes.batch, sizes.context)
    ids = torch.randint(sizes.vocab, shape, generator=draw, device=device)
    targets = torch.randint(sizes.vocab, shape, generator=draw, device=device).flatten()
    parameters = list(body.parameters())
    if variant.head == "softmax" and variant.implementation != "fullrank":
        loss_of = softmax_loss(variant.implementation, body.embedding.weight, settings)
    else:
        head = build_head(variant, body, settings)
        parameters += [each for each in head.parameters() if each is not body.embedding.weight]
        loss_of = compiled_by(settings.compiler, head) if compiled else head

    # At rate 0 the work is the same and every variant sees the same weights.
    optimiser = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.1, fused=True)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(device, NARROW):
            loss = loss_of(run_body(ids).flatten(0, 1), targets)
        loss.backward()
        optimiser.step()

    return step


def measure_variant(
    variant: Variant,
    body: Gpt2Body,
    run_body: Callable[[Tensor], Tensor],
    settings: Settings,
    *,
    compiled: bool,
) -> tuple[list[float], float | None]:
    """Seconds of the timed steps, and the peak in MiB."""
    cuda = settings.device == "cuda"
    step = make_step(variant, body, run_body, settings, compiled=compiled)
    for _ in range(settings.step.warm_up):
        step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = [seconds(step, settings.device) for _ in range(settings.step.repeats)]
    peak = torch.cuda.max_memory_allocated() / MIB if cuda else None
    return times, peak


def measure_steps(settings: Settings, kind: str, budget: Budget) -> Iterator[list[Row]]:
    """All variants under one body, eager or compiled; yields the rows after each sweep."""
    sizes = settings.step
    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        body = Gpt2Body(
            vocab=sizes.vocab,
            width=sizes.width,
            layers=sizes.layers,
            heads=sizes.heads,
            context=sizes.context,
        )
    run_body: Callable[[Tensor], Tensor] = body
    if kind == "compiled":
        # Every head is compiled anew; beyond the usual limit it would run as it is, in silence.
        torch._dynamo.config.recompile_limit = 64
        run_body = compiled_by(settings.compiler, body)
    found = variants(settings)
    rows: list[Row] = [
        {
            "implementation": each.implementation, "head": each.head, "components": each.components,
            "width": sizes.width, "vocab": sizes.vocab, "body": kind, "tokens": sizes.batch * sizes.context,
        }
        for each in found
    ]  # fmt: skip
    times: list[list[float]] = [[] for _ in found]
    for order in (range(len(found)), reversed(range(len(found)))):
        for place in order:
            row = rows[place]
            if "missing" in row or budget.over:
                if not times[place]:
                    row.setdefault("missing", budget.words())
                continue
            # What a compiler cannot take runs without it, and says so.
            for compiled in (True, False) if kind == "compiled" else (False,):
                try:
                    taken, peak = measure_variant(found[place], body, run_body, settings, compiled=compiled)
                    times[place] += taken
                    row["peak_mib"] = peak
                    break
                except Exception as error:
                    row["not_compiled" if compiled else "missing"] = reason(error)
                    clear(body, settings.device)
            # The optimiser of the last variant goes before the next one is built. No reset of the compiler:
            # the body stays compiled.
            clear(body, settings.device)
        for row, taken in zip(rows, times, strict=True):
            if taken and "missing" not in row:
                row |= {"milliseconds": 1e3 * statistics.median(taken)}
                row |= {"all_milliseconds": [1e3 * each for each in taken]}
        compare(rows)
        yield rows
    del body, run_body
    release(settings.device)


def clear(body: nn.Module, device: str) -> None:
    body.zero_grad(set_to_none=True)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def compare(rows: list[Row]) -> None:
    """Ratios to the fastest softmax among the rows, and to the fastest that is not ours."""
    timed = [row for row in rows if "missing" not in row]
    softmax = [row for row in timed if row["head"] == "softmax"]
    peers = [row for row in softmax if row["implementation"] != "fullrank"]
    for name, plain in (("softmax", softmax), ("peer", peers)):
        if not plain:
            continue
        fastest = min(plain, key=lambda row: row["milliseconds"])
        for row in timed:
            row[f"time_over_{name}"] = row["milliseconds"] / fastest["milliseconds"]
            if row["peak_mib"] is not None:
                row[f"memory_over_{name}"] = row["peak_mib"] / fastest["peak_mib"]
