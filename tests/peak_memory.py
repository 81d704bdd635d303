"""What torch's allocator holds at most while something runs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that torch's allocator held at once during `work`, beyond what it held before.

    Every allocation is seen, also those inside an operator.
    """
    # What `torch.profiler.profile` is made of, which imports torch's compiler: four seconds.
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as seen:
        kept = work()
    events = seen.kineto_results.events()
    steps = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    held = peak = 0
    for _, _, size in steps:
        held += size
        peak = max(peak, held)
    del kept
    return peak
