"""A step of training as one CUDA graph: for small models, whose kernels end before the next is launched.

A graph repeats what was launched while it was captured, at the same addresses: weights, gradients and the
optimiser's state stay where they are, batches are copied into place, and rates are tensors that are filled.
So its batches have one shape, nothing on the way asks the device for a value, and randomness is the
generator's as it stands before a replay. A capture that fails leaves the process with a stream and a
generator that still wait for its end, so what asks the device is looked for before. Nor may anything hold on
to what an earlier step has made of the weights: its gradients would wait for a stream that is not captured.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fullrank.errors import FullrankError

Update = Callable[..., tuple[Tensor, ...]]

WARM = 3
"""Steps without a graph, in which kernels are compiled and chosen."""
SMALL = 4e12
"""Floating-point operations of a step, some ten milliseconds of a large GPU, above which launches are hidden
behind products and the memory that a graph keeps is better spent otherwise."""


def can_capture(optimiser: torch.optim.Optimizer) -> bool:
    """A fused Adam, of which AdamW is one: its kernel reads on the device whether to step, and how far."""
    return isinstance(optimiser, torch.optim.Adam) and bool(optimiser.defaults.get("fused"))


@contextlib.contextmanager
def asks_the_device() -> Iterator[list[str]]:
    """List the files that synchronise with the device inside the block; the list is filled at its end.

    Files of transformers are left out, because they do not synchronise while a graph is captured. The
    synchronisation debug mode is restored at the end.
    """
    files: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield files
        finally:
            torch.cuda.set_sync_debug_mode(before)
    files += [
        warning.filename
        for warning in caught
        if "called a synchronizing" in str(warning.message)
        and "transformers" not in Path(warning.filename).parts
    ]


class Step:
    """`update`, which returns what it measures: as one graph, where it `captures`, once kernels are compiled
    and chosen, two batches had one shape, and unless something in it asks the device. There are graphs for
    as many shapes as `graphs`; batches of others, as the last of a text, go without. An optimiser is one
    whose rates change."""

    def __init__(
        self,
        update: Update,
        optimiser: torch.optim.Optimizer | None,
        *,
        captures: bool,
        remedy: str,
        graphs: int = 1,
    ) -> None:
        self.update, self.optimiser, self.remedy, self.graphs = update, optimiser, remedy, graphs
        self.captures = captures
        """May be set later: a graph takes a while to capture."""
        self.renew()

    def renew(self) -> None:
        """What a graph works on is no longer where it was."""
        self._warm = 0
        self.asked: list[str] | None = None
        """Files that asked the device in the step that was looked at; None before it."""
        self._met: set[tuple[torch.Size, ...]] = set()
        """Shapes of inputs since kernels were chosen."""
        self._captured: dict[tuple[torch.Size, ...], CapturedStep] = {}

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self._warm += 1
        if not self.captures or self._warm < WARM:
            return self.update(*inputs)
        shapes = tuple(one.shape for one in inputs)
        if self.asked is None:
            self._met.add(shapes)
            with asks_the_device() as self.asked:
                found = self.update(*inputs)
            self.captures = not self.asked
            return found
        if shapes not in self._captured:
            if shapes not in self._met or len(self._captured) >= self.graphs:
                self._met.add(shapes)
                return self.update(*inputs)
            self._captured[shapes] = CapturedStep(self.update, self.optimiser, inputs, self.remedy)
        return self._captured[shapes](*inputs)


class CapturedStep:
    """An update whose graph is captured."""

    def __init__(
        self, update: Update, optimiser: torch.optim.Optimizer | None, inputs: Sequence[Tensor], remedy: str
    ) -> None:
        self.inputs = tuple(one.clone() for one in inputs)
        for group in [] if optimiser is None else optimiser.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(float(group["lr"]), device=inputs[0].device)
            group["capturable"] = True
        self.graph = torch.cuda.CUDAGraph()
        try:
            # The threads that pin the next batch and write checkpoints go on beside it.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.found = update(*self.inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise FullrankError(
                f"a step of this model cannot be one CUDA graph ({str(error).splitlines()[0]}): {remedy}"
            ) from error

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for mine, one in zip(self.inputs, inputs, strict=True):
            mine.copy_(one, non_blocking=True)
        self.graph.replay()
        return tuple(one.clone() for one in self.found)
