"""Where the time of an AWD-LSTM's step goes, at its published widths and at the multiples above them.

python -m benchmarks.lstm_step --device cuda --out results/lstm_step_cuda.json
python -m benchmarks.lstm_step --device cuda --only segment --out results/lstm_segment_cuda.json

recurrence   torch.lstm of one layer, forward and backward, by width and dtype
step         a step of `fullrank study published` through the engine, milliseconds with and without a CUDA
             graph, and what its kernels are: those with products, cells, and the rest
segment      of dynamic evaluation, with and without a graph, likewise; and a batch of its statistics
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import tyro
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.train_speed import random_tokens
from fullrank.fit.captured import Step
from fullrank.models.checks import device_name
from fullrank.results import provenance, write_whole
from fullrank.studies.published_grid import HEADS, SMALL, ours, rounded
from fullrank.train import dynamic
from fullrank.train.config import override
from fullrank.train.dynamic import Dynamic
from fullrank.train.learner import Learner
from fullrank.train.loop import Options, train
from fullrank.train.model import build
from fullrank.train.recipes import recipe

KINDS = (
    ("scores and losses", r"score_rows|score_tiles|raise_kernel|mixture|trunk|logsumexp"),
    ("products", r"gemm|cutlass|cublas|nvjet|xmma"),
    ("cells", r"lstm|rnn|elementwise_bp"),
    ("optimiser", r"multi_tensor|foreach|adam"),
    ("copies", r"memcpy|memset|copy|cat"),
    ("others", ""),
)
"""The first pattern that a kernel's name has."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Profile a step of the published study."""

    device: str = "cuda"
    out: Path = Path("results/lstm_step_cuda.json")
    vocabulary: int = 33278
    """WikiText-2's."""
    steps: int = 40
    small: bool = False
    """Tiny widths: to see that it runs."""
    only: tuple[Literal["recurrence", "step", "segment"], ...] = ("recurrence", "step", "segment")
    """Parts to measure."""


def recurrence(width: int, dtype: torch.dtype, device: str, *, time_steps: int = 70, batch: int = 80) -> Any:
    """Milliseconds of a layer, or why there are none."""
    shapes = ((4 * width, width), (4 * width, width), (4 * width,), (4 * width,))
    chunk = (torch.randn(sum(map(np.prod, shapes)), device=device) * width**-0.5).to(dtype)
    pieces = chunk.requires_grad_().split([int(np.prod(shape)) for shape in shapes])
    weights = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    inputs = torch.randn(time_steps, batch, width, device=device).to(dtype).requires_grad_()
    state = torch.zeros(1, batch, width, device=device, dtype=dtype)

    def once() -> Tensor:
        outputs, *_ = torch.lstm(inputs, (state, state), weights, True, 1, 0.0, True, False, False)
        return torch.autograd.grad(outputs.sum(), [chunk])[0]

    try:
        once()
        times = []
        for _ in range(5):
            begun = _now(device)
            once()
            times.append((_now(device) - begun) * 1e3)
        return statistics.median(times)
    except RuntimeError as error:
        return str(error).splitlines()[0]


def step(head: str, widths: tuple[str, ...], graph: str, place: Path, settings: Settings) -> dict[str, Any]:
    """Of the engine: milliseconds, and without a graph the device's by kind of kernel."""
    found: dict[str, Any] = {}
    count, begun, seen = 0, 0.0, None
    first, last = settings.steps // 2, settings.steps - 5
    original = Learner.step

    def timed(learner: Learner, *given: Any) -> Any:
        nonlocal count, begun, seen
        count += 1
        if count == first:
            begun = _now(settings.device)
        if count == last:
            found["milliseconds"] = (_now(settings.device) - begun) / (last - first) * 1e3
            if graph == "off" and settings.device == "cuda":
                seen = profile(activities=[ProfilerActivity.CUDA])
                seen.__enter__()
        result = original(learner, *given)
        if count == settings.steps and seen is not None:
            _now(settings.device)
            seen.__exit__(None, None, None)
            found.update(_by_kind(seen, settings.steps - last + 1))
        return result

    with mock.patch.object(Learner, "step", timed):
        given = (
            *ours(head), *widths, f"graph={graph}", f"steps={settings.steps + 1}",
            # None before the last step: an evaluation's checkpoint would be most of what is timed.
            f"evaluate_every={settings.steps + 2}",
            "evaluate_tokens=1024", "final_tokens=1024",
        )  # fmt: skip
        out = Path(tempfile.mkdtemp(dir=place, prefix="run-"))
        options = Options(
            data=(), tokens=place / "tokens", out=out, cache=place / "cache", device=settings.device,
            trackers=(), monitors=False,
        )  # fmt: skip
        train(override(recipe("awd-lstm-wt2", head), given), options)
    return found


def segment(head: str, widths: tuple[str, ...], graph: str, settings: Settings) -> dict[str, Any]:
    """Of a model that is not trained, on random tokens: its time does not depend on them."""
    config = override(recipe("awd-lstm-wt2", head), (*ours(head), *widths))
    model = build(config, settings.vocabulary)
    torch.nn.Module.to(model, settings.device)
    draw, of = np.random.default_rng(0), Dynamic()
    few, many = (5, 10) if settings.small else (40, 240)
    steps: list[Step] = []
    captured = dynamic._captured

    def kept(*given: Any) -> Step:
        steps.append(captured(*given))
        steps[-1].captures &= graph == "on"
        return steps[-1]

    def timed(count: int, length: int, run: Callable[..., Any], *given: Any) -> tuple[float, Any]:
        tokens = draw.integers(0, settings.vocabulary, count * length).astype(np.uint16)
        begun = _now(settings.device)
        found = run(model, tokens, *given, eos=0, settings=of, device=settings.device)
        return (_now(settings.device) - begun) * 1e3, found

    with mock.patch.object(dynamic, "_captured", kept):
        batch = of.batch * of.length
        # Kernels are compiled in it.
        timed(few, batch, dynamic.gradient_rms)
        first, trained = timed(few, batch, dynamic.gradient_rms)
        batches = timed(many, batch, dynamic.gradient_rms)[0] - first
        losses = (of.length, dynamic.dynamic_losses, trained)
        timed(few, *losses)
        # A graph is captured in every call: what it costs is in both.
        segments = timed(many, *losses)[0] - timed(few, *losses)[0]
        found: dict[str, Any] = {
            "milliseconds": segments / (many - few), "batch_milliseconds": batches / (many - few),
            "captured": all(step.captures for step in steps),
            "asked": sorted({Path(file).name for step in steps for file in step.asked or ()}),
        }  # fmt: skip
        if settings.device == "cuda":
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                timed(few, *losses)
            found.update(_by_kind(seen, few))
    return found


def _by_kind(seen: profile, steps: int) -> dict[str, Any]:
    total: collections.Counter[str] = collections.Counter()
    names: collections.Counter[str] = collections.Counter()
    launches = 0
    for event in seen.key_averages():
        spent = event.self_device_time_total / 1e3 / steps
        if spent <= 0:
            continue
        kind = next(kind for kind, pattern in KINDS if re.search(pattern, event.key, re.IGNORECASE))
        total[kind] += spent
        names[event.key[:100]] += spent
        launches += event.count
    return {
        "device_milliseconds": dict(total.most_common()), "kernels": launches / steps,
        "largest": dict(names.most_common(10)),
    }  # fmt: skip


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main(settings: Settings) -> None:
    if settings.device == "cuda":
        torch.set_float32_matmul_precision("high")
    rows = [
        {"width": width, "dtype": str(dtype).removeprefix("torch."), "milliseconds": found}
        for width in ((24, 32) if settings.small else (1150, 1152))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        if "recurrence" in settings.only
        for found in [recurrence(width, dtype, settings.device)]
    ]
    steps: list[dict[str, Any]] = []
    segments: list[dict[str, Any]] = []
    graphs = ("off", "on") if settings.device == "cuda" else ("off",)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        random_tokens(place, settings.vocabulary, train=1 << 20, valid=1 << 16)
        for head in HEADS if "step" in settings.only else ():
            every = {"published": (), "rounded": rounded("awd-lstm-wt2", head)}
            for label, widths in {"small": SMALL}.items() if settings.small else every.items():
                for graph in graphs:
                    found = step(head, widths, graph, place, settings)
                    steps.append({"head": head, "widths": label, "graph": graph, **found})
                    print(head, label, graph, f"{found['milliseconds']:.1f} ms")
    for head in HEADS if "segment" in settings.only else ():
        for graph in graphs:
            found = segment(head, SMALL if settings.small else rounded("awd-lstm-wt2", head), graph, settings)
            segments.append({"head": head, "graph": graph, **found})
            print(head, "segment", graph, f"{found['milliseconds']:.2f} ms", found)
    made = dataclasses.asdict(provenance(seed=0, device=device_name(settings.device)))
    document = {
        "kind": "lstm_step", "version": 2, "made": made, "recurrence": rows, "steps": steps,
        "segments": segments,
    }  # fmt: skip
    write_whole(settings.out, json.dumps(document, indent=1) + "\n")
    print(json.dumps(rows))


if __name__ == "__main__":
    main(tyro.cli(Settings))
