"""A step of training as one CUDA graph: for small models, whose kernels end before the next is launched.

A graph repeats what was launched while it was captured, at the same addresses: weights, gradients and the
optimiser's state stay where they are, batches are copied into place, and rates are tensors that are filled.
So all batches have one shape, nothing on the way asks the device for a value, and randomness is the
generator's as it stands before a replay. A capture that fails leaves the process with a stream and a
generator that still wait for its end, so what asks the device is looked for before.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fullrank.errors import FullrankError

WARM = 3
"""Steps without a graph, in which kernels are compiled and chosen."""
SMALL = 4e12
"""Floating-point operations of a step, some ten milliseconds of a large GPU, above which launches are hidden
behind products and the memory that a graph keeps is better spent otherwise."""


def can_capture(optimiser: torch.optim.Optimizer) -> bool:
    return isinstance(optimiser, torch.optim.AdamW) and bool(optimiser.defaults.get("fused"))


@contextlib.contextmanager
def asks_the_device() -> Iterator[list[str]]:
    """Files that wait for the device within, filled at the end; transformers waits only out of captures."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [
        one.filename
        for one in said
        if "called a synchronizing" in str(one.message) and "transformers" not in Path(one.filename).parts
    ]


class CapturedStep:
    """`update` of batches of one shape, which returns what it measures."""

    def __init__(
        self,
        update: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        optimiser: torch.optim.Optimizer,
        ids: Tensor,
        targets: Tensor,
    ) -> None:
        self.ids, self.targets = ids.clone(), targets.clone()
        for group in optimiser.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]), device=ids.device)
            group["capturable"] = True
        self.graph = torch.cuda.CUDAGraph()
        try:
            # The threads that pin the next batch and write checkpoints go on beside it.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.found = update(self.ids, self.targets)
        except RuntimeError as error:
            raise FullrankError(
                f"a step of this model cannot be one CUDA graph ({str(error).splitlines()[0]}): "
                "the same command goes on with --set graph=off"
            ) from error

    def __call__(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        self.ids.copy_(ids, non_blocking=True)
        self.targets.copy_(targets, non_blocking=True)
        self.graph.replay()
        loss, norm = self.found
        return loss.clone(), norm.clone()
