"""Steps of AdamW on a model's upper layers and on what a head adds to W, which stays as it is.

The rate rises over a tenth of the steps and falls to 0. On a GPU a step is one CUDA graph for each shape of
its inputs: two layers of a small model end before their kernels are launched one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.fit.captured import Step, can_capture
from fullrank.fit.optimiser import set_rate
from fullrank.heads import Head
from fullrank.studies.upper_layers import UpperLayers

WARM_UP = 0.1
"""Share of the steps."""
MEMORY_RATE = 500.0
"""Rate of the memory's log weight, which is in nats, in units of the layers'."""
GRAPHS = 16
"""Shapes of inputs, at most, that are graphs."""

Losses = Callable[..., tuple[Tensor, ...]]


class DivergedError(FullrankError):
    """A training whose loss is no number."""

    def __init__(self, method: str, rate: float) -> None:
        super().__init__(f"training {method} with rate {rate:g} diverged: choose smaller --rates")


def added(head: Head) -> dict[str, nn.Parameter]:
    """What a head has beside W."""
    return {name: value for name, value in head.named_parameters() if not name.startswith("decoder.")}


@contextlib.contextmanager
def training(
    upper: UpperLayers, head: Head, losses: Losses, *, rate: float, steps: int, weighs: bool = True
) -> Iterator[Losses]:
    """A step on inputs of `losses`, which gives the loss to train on, and what is measured beside it.

    Returns them all, detached. Without `weighs` the memory's weight stays where it is.
    """
    own = added(head)
    weight = own.pop("memory_weight", None)
    trained = [*upper.parameters().values(), *own.values()]
    groups = [{"params": list(trained), "factor": rate}]
    if weight is not None and weighs:
        groups.append({"params": [weight], "factor": MEMORY_RATE * rate})
        trained.append(weight)
    fused = upper.model.device.type == "cuda"
    optimiser = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.99), weight_decay=0.0, fused=fused)

    def update(*inputs: Tensor) -> tuple[Tensor, ...]:
        optimiser.zero_grad()
        with upper.mixed():
            found = losses(*inputs)
        found[0].backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        return tuple(one.detach() for one in found)

    once = Step(
        update,
        optimiser,
        captures=fused and can_capture(optimiser),
        remedy="run it with --device cpu",
        graphs=GRAPHS,
    )
    done = 0

    def step(*inputs: Tensor) -> tuple[Tensor, ...]:
        nonlocal done
        rising = min(1.0, (done + 1) / max(1.0, WARM_UP * steps))
        set_rate(optimiser, rising * (1 - done / steps))
        done += 1
        return once(*inputs)

    head.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    try:
        yield step
    finally:
        for parameter in trained:
            parameter.requires_grad_(False)
            parameter.grad = None
