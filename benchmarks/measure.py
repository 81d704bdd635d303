"""Seconds and memory of single calls, on a processor or a CUDA device, with failures as words.

On CUDA a call is timed between two events of its stream: what the device did, and where it waited for the
host. Variants are timed in rounds, every variant once a round in an order drawn anew, so that a clock that
falls, a busy machine and what ran just before meet all alike. Its turn is two calls without a pause: the
first begins on an idle device and may ask the driver for memory that another variant had, the second lies
behind it, as in training. Round 0 is not counted: there the allocator settles.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

MIB = 1 << 20

Step = Callable[[], Any]


def seconds(step: Step, device: str) -> float:
    return seconds_in_a_row(step, device, 1)[0]


def seconds_in_a_row(step: Step, device: str, calls: int) -> list[float]:
    """Of each of some calls without a pause."""
    if device == "cpu":
        times = [time.perf_counter()]
        for _ in range(calls):
            step()
            times.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(times)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [float(before.elapsed_time(after)) / 1e3 for before, after in itertools.pairwise(events)]


def quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


class Times(NamedTuple):
    """Seconds of a call, one a counted round."""

    alone: list[float]
    """From an idle device."""
    behind: list[float]
    """Behind another call of the same."""


def in_rounds(steps: dict[str, Step], device: str, repeats: int) -> tuple[dict[str, Times], dict[str, str]]:
    """Times of every step, and why a step that failed on the way has none."""
    steps, times = dict(steps), {name: Times([], []) for name in steps}
    failed: dict[str, str] = {}
    order = random.Random(0)
    gc.disable()
    try:
        for turn in range(repeats + 1):
            # Between rounds, not within a timed call.
            gc.collect()
            for name in order.sample(list(steps), len(steps)):
                try:
                    taken = seconds_in_a_row(steps[name], device, 2)
                except Exception as error:
                    failed[name] = reason(error)
                    del steps[name], times[name]
                    continue
                if turn:
                    for whole, one in zip(times[name], taken, strict=True):
                        whole.append(one)
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
