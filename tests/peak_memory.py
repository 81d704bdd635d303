"""What torch's allocator holds at most while something runs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that torch's allocator held at once during `work`, beyond what it held before.

    Every allocation is seen, also those inside an operator.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        kept = work()
    events = seen.profiler.kineto_results.events()
    steps = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    held = peak = 0
    for _, _, size in steps:
        held += size
        peak = max(peak, held)
    del kept
    return peak
