"""Where one call of ours spends its time on the device, from the profiler.

    score product   products whose result is V wide, with the exponentials where they are in its epilogue
    rows product    products over V: the rows' gradient
    weight product  products whose result is V high: W's gradient
    row kernel      all other kernels of fullrank.ops written in Triton
    rest            every other kernel, copy and fill
    idle            a call behind another of the same, without profiler, less all of these

The products are told apart by the shapes of the operators that launched them. What a kernel does that no rule
knows is still in the list of the longest kernels by name.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections import defaultdict
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_layer import training_step
from benchmarks.gpu_settings import Settings
from benchmarks.measure import Step, reason, seconds_in_a_row
from benchmarks.peers import draw_inputs, make_fullrank
from fullrank.ops.mixture.product import raise_kernel

CALLS = 3
LONGEST = 10
STAGES = ("score product", "rows product", "weight product", "row kernel", "rest")


def kernel_names() -> tuple[str, ...]:
    """Names of the Triton functions in fullrank.ops, as far as a call has loaded them."""
    modules = [module for name, module in sys.modules.items() if name.startswith("fullrank.ops")]
    values = [value for module in modules for value in vars(module).values()]
    jitted = [value for value in values if type(value).__name__ in ("JITFunction", "Autotuner", "Heuristics")]
    names = {getattr(getattr(value, "fn", None), "__name__", "") for value in jitted}
    return tuple(sorted(names - {""}))


def product_stage(shapes: list[list[int]], V: int) -> str | None:
    """Which product an operator with inputs of these shapes is; None where it is none with W's V in it."""
    wide = {V, -(-V // 64) * 64}
    matrices = [shape for shape in shapes if isinstance(shape, list) and len(shape) == 2]
    for left, right in itertools.pairwise(matrices):
        if left[1] == right[0]:
            for size, stage in (
                (right[1], "score product"),
                (left[1], "rows product"),
                (left[0], "weight product"),
            ):
                if size in wide:
                    return stage
    return None


def traced(step: Step, device: str) -> Any:
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities, record_shapes=True) as trace:
        for _ in range(CALLS):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
    return trace.events()


def stages_of(events: Any, V: int, device: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Milliseconds a call of every stage, and the longest kernels."""
    cuda = device == "cuda"
    taken = dict.fromkeys(STAGES, 0.0)
    kernels: dict[str, list[float]] = defaultdict(list)
    ours, busy = kernel_names(), 0.0
    for event in events:
        on_device = event.device_type == (DeviceType.CUDA if cuda else DeviceType.CPU)
        operator = event.device_type == DeviceType.CPU
        if operator and event.name.startswith(("aten::mm", "aten::addmm")):
            stage = product_stage(event.input_shapes, V)
            if stage is not None:
                taken[stage] += event.self_device_time_total if cuda else event.self_cpu_time_total
        # Annotations that span kernels are events of the device as well.
        if on_device and not (cuda and getattr(event, "is_user_annotation", False)):
            length = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
            busy += length
            kernels[event.name].append(length)
            if cuda and event.name.startswith(ours):
                stage = "score product" if event.name.startswith(raise_kernel.__name__) else "row kernel"
                taken[stage] += length
    taken["rest"] = max(0.0, busy - sum(taken.values()))
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    return (
        {name: value / CALLS / 1e3 for name, value in taken.items()},
        [
            {"name": name[:100], "milliseconds": sum(all_) / CALLS / 1e3, "calls": len(all_) / CALLS}
            for name, all_ in longest
        ],
    )


def measure_stages(settings: Settings, D: int, V: int, K: int) -> dict[str, Any]:
    """Stages of one shape; `missing` where the profiler cannot be had."""
    row: dict[str, Any] = {"components": K, "width": D, "vocab": V, "tokens": settings.tokens}
    try:
        inputs = draw_inputs(
            N=settings.tokens, K=K, D=D, V=V, dtype=settings.dtype, device=settings.device, seed=settings.seed
        )
        step = training_step(inputs, make_fullrank(inputs, settings.compiler))
        step()
        total = 1e3 * statistics.median(
            seconds_in_a_row(step, settings.device, 2)[1] for _ in range(settings.repeats)
        )
        # The first trace pays for the profiler's own start.
        traced(step, settings.device)
        taken, longest = stages_of(traced(step, settings.device), V, settings.device)
    except Exception as error:
        return {**row, "missing": reason(error)}
    if not any(taken.values()):
        return {**row, "milliseconds": total, "missing": "the profiler saw no kernel"}
    idle = max(0.0, total - sum(taken.values()))
    return {**row, "milliseconds": total, "stages": {**taken, "idle": idle}, "kernels": longest}
