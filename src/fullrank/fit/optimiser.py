"""Updates: AdamW, Adam, Muon, and SGD that turns into averaged SGD (NT-ASGD, Merity et al. 2017, 1708.02182).

Muon (Jordan et al. 2024; torch's own) orthogonalises the update of hidden matrices; everything else, the
embedding and the head among it, goes with AdamW at the same rate, which Muon's updates are scaled to.

NT-ASGD: plain SGD until validation is worse than the best of all but the last n evaluations, then the weights
that are evaluated and kept are the average of the iterates from there on:

    w <- w - lr (g + decay w),    mean <- mean + (w - mean) / t,    t = 1, 2, ... since the switch

Evaluation swaps the mean in and the live weights back; checkpoints hold both.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fullrank.fit import schedule
from fullrank.heads.base import Head


@dataclass(frozen=True, kw_only=True)
class OptimiserConfig:
    """How weights are updated."""

    name: Literal["adamw", "adam", "muon", "nt-asgd"] = "adamw"
    """adam: decay as a part of the gradient, so that what has small gradients, such as rare words, decays
    most; muon: hidden matrices by Muon, the rest by AdamW; nt-asgd: SGD that turns into averaged SGD once
    validation stops improving."""
    lr: float = 2e-3
    lr_head: float = 1.0
    """Factor on the rate of what a head has besides its matrix: gates and contexts."""
    weight_decay: float = 1.2e-6
    beta1: float = 0.9
    beta2: float = 0.99
    clip: float = 0.25
    """Largest norm of the whole gradient; 0 clips nothing."""
    schedule: schedule.Schedule = "cosine"
    warmup: float = 0.02
    """Share of the run over which the rate rises."""
    decay: float = 0.2
    """Share of the run over which wsd falls at its end."""
    final: float = 0.01
    """Share of the rate that cosine and wsd end at."""
    nonmonotone: int = 5
    """nt-asgd averages once validation is worse than the best but this many evaluations ago."""
    finetune_epochs: int = 0
    """A second stage of at most so many epochs, averaged from its start, from the best weights."""
    finetune_lr: float = 0.0


def first_half_product() -> None:
    """On a processor without bf16 products the first one says so, with a page of text, and from then on torch
    makes all products in another way, those of fp32 too. Before a run begins: one that goes on after a stop
    would differ from one that never stopped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = torch.zeros(64, 64, dtype=torch.bfloat16)
        torch.addmm(first.T, first, first.T)


class MuonWithAdamW(torch.optim.Optimizer):
    """Two of torch's optimisers as one: groups that say `muon` go to Muon."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], fused: bool):
        super().__init__(groups, {"lr": lr})
        matrices, others = self._groups(muon=True), self._groups(muon=False)
        first_half_product()
        # Each adds to the groups what it needs to find in them.
        self.muon = torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw") if matrices else None
        self.adamw = torch.optim.AdamW(others, lr=lr, betas=betas, fused=fused) if others else None

    def _groups(self, *, muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["muon"] is muon]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for part, muon in ((self.muon, True), (self.adamw, False)):
            if part is not None:
                # One state and one list of groups, at every step: whoever loads a state puts others there.
                part.state, part.param_groups = self.state, self._groups(muon=muon)
                part.step()
        return loss


def own_parameters(model: nn.Module) -> set[str]:
    """Names of what a head has besides its matrix: gates, contexts, projections."""
    heads = [module for module in model.modules() if isinstance(module, Head)]
    own = {parameter for head in heads for _, parameter in head.own_parameters()}
    return {name for name, parameter in model.named_parameters() if parameter in own}


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the matrices between the embedding and the head, which Muon takes."""
    outside = {
        parameter
        for module in model.modules()
        if isinstance(module, Head | nn.Embedding)
        for parameter in module.parameters()
    }
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and parameter not in outside
    }


def make(
    model: nn.Module,
    config: OptimiserConfig,
    device: torch.device,
    *,
    factors: Mapping[nn.Parameter, float] = MappingProxyType({}),
) -> torch.optim.Optimizer:
    """The optimiser; every group remembers the factor on its rate, for which a caller may have its own.
    Muon's updates are scaled by the shapes of the matrices already and take none.
    """
    special = own_parameters(model)
    matrices = hidden_matrices(model) if config.name == "muon" else set()
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        factor = config.lr_head if name in special else 1.0
        if name not in matrices:
            factor *= factors.get(parameter, 1.0)
        # A bias or a norm's gain has no direction to decay along; SGD as published decays everything.
        decay = config.weight_decay if parameter.ndim > 1 or config.name == "nt-asgd" else 0.0
        groups.setdefault((factor, decay, name in matrices), []).append(parameter)
    options = [
        {"params": parameters, "weight_decay": decay, "factor": factor, "muon": muon}
        for (factor, decay, muon), parameters in groups.items()
    ]
    # One kernel for all parameters; the CPU's loops are the same either way.
    fused = device.type == "cuda"
    betas = (config.beta1, config.beta2)
    if config.name == "muon":
        return MuonWithAdamW(options, lr=config.lr, betas=betas, fused=fused)
    for group in options:
        del group["muon"]
    if config.name in ("adamw", "adam"):
        kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
        return kind(options, lr=config.lr, betas=betas, fused=fused)
    return torch.optim.SGD(options, lr=config.lr)


def rate(config: OptimiserConfig, step: float, steps: float, *, finetune: bool = False) -> float:
    """The learning rate of the step that follows `step` done ones."""
    base = config.finetune_lr if finetune else config.lr
    return base * schedule.factor(
        config.schedule, step, steps, warmup=config.warmup, decay=config.decay, final=config.final
    )


def settling(config: OptimiserConfig) -> int:
    """Steps over which the rate of an optimiser that starts anew in the middle of a run rises: twice as many
    as Adam's mean of squares looks back on (Ma and Yarats 2019, 1910.04209). Until it has seen those its
    steps are several times as long as later ones."""
    return 1 if config.name == "nt-asgd" else max(1, round(2 / (1 - config.beta2)))


def set_rate(optimiser: torch.optim.Optimizer, value: float) -> None:
    for group in optimiser.param_groups:
        rate = value * group.get("factor", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


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
