"""Updates: AdamW with a schedule, and SGD that turns into averaged SGD (NT-ASGD, Merity et al. 2017).

NT-ASGD: plain SGD until validation is worse than the best of all but the last n evaluations, then the weights
that are evaluated and kept are the average of the iterates from there on:

    w <- w - lr (g + decay w),    mean <- mean + (w - mean) / t,    t = 1, 2, ... since the switch

Evaluation swaps the mean in and the live weights back; checkpoints hold both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fullrank.heads.base import Head
from fullrank.train.config import Config, OptimiserConfig


def own_parameters(model: nn.Module) -> set[str]:
    """Names of what a head has besides its matrix: gates, contexts, projections."""
    heads = [module for module in model.modules() if isinstance(module, Head)]
    own = {parameter for head in heads for _, parameter in head.own_parameters()}
    return {name for name, parameter in model.named_parameters() if parameter in own}


def make(model: nn.Module, config: OptimiserConfig, device: torch.device) -> torch.optim.Optimizer:
    """The optimiser; every group remembers the factor on its rate."""
    special = own_parameters(model)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        factor = config.lr_head if name in special else 1.0
        # A bias or a norm's gain has no direction to decay along; SGD as published decays everything.
        decay = config.weight_decay if parameter.ndim > 1 or config.name != "adamw" else 0.0
        groups.setdefault((factor, decay), []).append(parameter)
    options = [
        {"params": parameters, "weight_decay": decay, "factor": factor}
        for (factor, decay), parameters in groups.items()
    ]
    if config.name == "adamw":
        return torch.optim.AdamW(
            options,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            # One kernel for all parameters; the CPU's loops are the same either way.
            fused=device.type == "cuda",
        )
    return torch.optim.SGD(options, lr=config.lr)


def rate(config: Config, step: int, steps: int, *, length_scale: float, finetune: bool) -> float:
    """The learning rate of the step that follows `step` done ones."""
    optimiser = config.optimiser
    base = optimiser.finetune_lr if finetune else optimiser.lr
    if optimiser.schedule == "cosine":
        warmup = max(1, round(optimiser.warmup * steps))
        if step < warmup:
            base *= (step + 1) / warmup
        else:
            progress = min(1.0, (step - warmup) / max(1, steps - warmup))
            base *= optimiser.final + (1 - optimiser.final) * (1 + math.cos(math.pi * progress)) / 2
    # A short sequence has fewer terms in its mean and a noisier gradient.
    return base * length_scale if config.jitter else base


def set_rate(optimiser: torch.optim.Optimizer, value: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = value * group.get("factor", 1.0)


def stopped_improving(history: list[float], patience: int) -> bool:
    """NT-ASGD's trigger: the newest is worse than the best of all but the last `patience` before it."""
    return len(history) > patience + 1 and history[-1] > min(history[: -patience - 1])


class Average:
    """The running mean of the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        self.mean = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.count += 1
        share = 1.0 / self.count
        names, live = zip(*model.named_parameters(), strict=True)
        torch._foreach_lerp_([self.mean[name] for name in names], [one.detach() for one in live], share)

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """The mean in place of the live weights, which come back unchanged."""
        live = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        _copy(model, self.mean)
        try:
            yield
        finally:
            _copy(model, live)


@torch.no_grad()
def _copy(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])
