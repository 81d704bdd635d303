"""Seconds and memory of single calls, on a processor or a CUDA device, with failures as words.

On CUDA a call is timed between two events of its stream: what the device did, and where it waited for the
host. Variants are timed in rounds, every variant once a round in an order drawn anew, so that a clock that
falls, a busy machine and what ran just before meet all alike. Round 0 is not counted: there the allocator
settles.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

MIB = 1 << 20

Step = Callable[[], Any]


def seconds(step: Step, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def in_rounds(
    steps: dict[str, Step], device: str, repeats: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of every step and counted round, and why a step that failed on the way has none."""
    steps, times = dict(steps), {name: list[float]() for name in steps}
    failed: dict[str, str] = {}
    order = random.Random(0)
    gc.disable()
    try:
        for turn in range(repeats + 1):
            # Between rounds, not within a timed call.
            gc.collect()
            for name in order.sample(list(steps), len(steps)):
                try:
                    taken = seconds(steps[name], device)
                except Exception as error:
                    failed[name] = reason(error)
                    del steps[name], times[name]
                    continue
                if turn:
                    times[name].append(taken)
    finally:
        gc.enable()
    return times, failed


def reason(error: BaseException) -> str:
    """An error in a line of a table."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0] if words else 'no message'}"[:160]


def peak_bytes(step: Step, device: str) -> int | None:
    """The most memory that one call holds beyond what is held before it; not known on a processor."""
    if device != "cuda":
        step()
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def release(device: str) -> None:
    """Give back what the last case held, the compiler's graphs included."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def finite(value: float | None) -> float | None:
    """A number as JSON can hold it."""
    return value if value is not None and math.isfinite(value) else None


@contextmanager
def quick_collections() -> Iterator[None]:
    """What lives now is left out of every garbage collection inside: modules by the thousand, no tensors."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Budget:
    """Seconds that a run may still take; what does not fit is left out and says so."""

    def __init__(self, seconds: float) -> None:
        self.started, self.seconds = time.monotonic(), seconds

    @property
    def spent(self) -> float:
        return time.monotonic() - self.started

    @property
    def over(self) -> bool:
        return self.spent > self.seconds

    def words(self) -> str:
        return f"not run: {self.spent:.0f} of {self.seconds:.0f} s were spent"
