"""Random states: what a computation seeds, and what its caller gets back.

A computation on a GPU seeds the generators of the CPU and of every GPU, since a model may be spread over
several. So the states of all GPUs are saved and restored. A computation on the CPU leaves the GPUs alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def restored_randomness(device: torch.device) -> Iterator[None]:
    """Restore the random states at the end: those of all generators that `seed_generators` seeds."""
    # State and seed of a generator are held by the host: this allocates nothing on idle GPUs.
    gpus = range(torch.cuda.device_count()) if device.type == "cuda" else ()
    with torch.random.fork_rng(devices=list(gpus)):
        yield


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of the device's type.

    Without a GPU, `torch.manual_seed` records the stack for three kinds of device: half a millisecond a call.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
