"""Weights and optimiser states as whole tensors on the CPU, however many processes hold parts of them.

A checkpoint knows no processes: what FSDP2 shards (DTensor) and what a vocabulary-parallel head splits is
gathered when it is written and cut again when it is read, so a run of two processes continues on one, and
back. All processes call these together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fullrank.heads.vocab_parallel import VocabParallelHead

Whole = dict[str, Tensor]


def plain_name(name: str) -> str:
    """A parameter's name in the model of one process."""
    return name.replace("lm_head.inner.", "lm_head.", 1)


def _is_shard(model: nn.Module, name: str) -> bool:
    head = getattr(model, "lm_head", None)
    return isinstance(head, VocabParallelHead) and name.startswith("lm_head.decoder.")


def whole(model: Any, name: str, tensor: Tensor) -> Tensor:
    """The whole of a parameter or of a state in its shape, as a copy on the CPU."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    elif tensor.ndim and _is_shard(model, name):
        tensor = model.lm_head.all_rows(tensor)
    return tensor.to("cpu", copy=True)


def part(model: Any, name: str, parameter: Tensor, tensor: Tensor) -> Tensor:
    """This process's part of a whole tensor, where and as the parameter is; a copy, so the whole can go."""
    if tensor.ndim and _is_shard(model, name):
        tensor = model.lm_head.own_rows(tensor)
    tensor = tensor.to(parameter.device, copy=True)
    if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    return tensor


def gather(model: nn.Module, values: dict[str, Tensor] | None = None) -> Whole:
    """All parameters, or other values under their names."""
    values = dict(model.named_parameters()) if values is None else values
    return {plain_name(name): whole(model, name, value) for name, value in values.items()}


def stored_buffers(model: nn.Module) -> Whole:
    """What a model stores beside its parameters, as mixtape its order of tokens."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {plain_name(name): value for name, value in model.state_dict().items() if name not in parameters}


def gather_model(model: nn.Module, values: dict[str, Tensor] | None = None) -> Whole:
    """All that `save_pretrained` would store, a tied matrix once; `values` are others for the parameters."""
    buffers = {name: value.to("cpu", copy=True) for name, value in stored_buffers(model).items()}
    return {**gather(model, values), **buffers}


@torch.no_grad()
def scatter(model: nn.Module, weights: Whole) -> None:
    """Put whole weights into a model; their names and shapes were checked before."""
    for name, parameter in model.named_parameters():
        parameter.copy_(part(model, name, parameter, weights[plain_name(name)]))


def gather_optimiser(model: nn.Module, optimiser: torch.optim.Optimizer) -> Whole:
    """{"name/exp_avg": ...}: every tensor that the optimiser keeps for a parameter."""
    out = {}
    for name, parameter in model.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                out[f"{plain_name(name)}/{key}"] = whole(model, name, value)
    return out


def scatter_optimiser(model: nn.Module, optimiser: torch.optim.Optimizer, states: Whole) -> None:
    for name, parameter in model.named_parameters():
        prefix = f"{plain_name(name)}/"
        own = {key.removeprefix(prefix): value for key, value in states.items() if key.startswith(prefix)}
        if own:
            optimiser.state[parameter] = {
                # A count of steps stays where the optimiser keeps it: on the CPU unless it is fused.
                key: part(model, name, parameter, value) if value.ndim or _fused(optimiser) else value.clone()
                for key, value in own.items()
            }


def _fused(optimiser: torch.optim.Optimizer) -> bool:
    return any(group.get("fused") for group in optimiser.param_groups)
