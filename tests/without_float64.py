"""A device without fp64, as Apple's is: the CPU under its name, where every fp64 tensor is an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

MPS = torch.device("mps")


class OnMps(Tensor):
    """A tensor of that device; `cpu()` gives a plain one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return MPS
        if func is Tensor.cpu:
            return _plain(args[0])
        if func is Tensor.__deepcopy__:
            copied = args[0].detach().clone()
            return (
                nn.Parameter(copied, args[0].requires_grad) if isinstance(args[0], nn.Parameter) else copied
            )
        if func is Tensor.to:
            devices = [
                value for value in (*args[1:], *kwargs.values()) if isinstance(value, str | torch.device)
            ]
            if devices and torch.device(devices[0]).type == "cpu":
                return _plain(args[0])
        return _refusing(super().__torch_function__(func, types, args, _on_the_cpu(kwargs)))


class _Factories(TorchFunctionMode):
    """Tensors that are made on, or moved to, the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        moved = func is Tensor.to and MPS in args[1:]
        asked = str(kwargs.get("device", "")) == "mps"
        if not moved and not asked:
            return func(*args, **kwargs)
        if moved:
            args = (args[0], *(torch.device("cpu") if value == MPS else value for value in args[1:]))
        return _refusing(func(*args, **_on_the_cpu(kwargs)).as_subclass(OnMps))


def _on_the_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": "cpu"} if str(kwargs.get("device", "")) == "mps" else kwargs


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _refusing(result: Any) -> Any:
    for item in result if isinstance(result, tuple | list) else (result,):
        if isinstance(item, OnMps):
            with torch._C.DisableTorchFunctionSubclass():
                wide = item.dtype == torch.float64
            if wide:
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
    return result


@contextmanager
def without_float64() -> Iterator[None]:
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with _Factories():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def on_mps(model: nn.Module) -> nn.Module:
    """Every parameter and buffer on that device; shared ones stay shared."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    moved[id(parameter)] = nn.Parameter(parameter.detach().as_subclass(OnMps))
                module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.as_subclass(OnMps)
    return model
