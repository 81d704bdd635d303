"""What every public operation asks of its arguments, and what it works in."""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.errors import FullrankError

IMPLEMENTATIONS = ("auto", "triton", "chunked", "reference")
REDUCTIONS = ("mean", "sum", "none")


def check_reduction(targets: Tensor, reduction: str, token_weight: Tensor | None) -> None:
    """Raise for a reduction or for token weights that no loss here can take."""
    if reduction not in REDUCTIONS:
        raise FullrankError(f"reduction={reduction!r} is unknown: expected one of {', '.join(REDUCTIONS)}")
    if token_weight is not None:
        if token_weight.shape != targets.shape:
            raise FullrankError(
                f"token_weight has shape {shape_of(token_weight)}, expected that of targets, "
                f"{shape_of(targets)}"
            )
        if token_weight.requires_grad and torch.is_grad_enabled():
            raise FullrankError(
                "token_weight requires a gradient, which the loss does not give: "
                "pass token_weight.detach(), or weigh the result of reduction='none'"
            )


WITHOUT_FLOAT64 = ("mps",)
"""Kinds of device that have no fp64."""


def widest_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums over many tokens or steps on a device: fp64 where it has that."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of everything after the product, and of all that is summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(rows: Tensor, weight: Tensor, impl: str = "auto") -> torch.dtype:
    """The dtype that rows and weight are multiplied in: theirs, or autocast's.

    On a processor half precision is multiplied in fp32. Without instructions for it torch's own half products
    took 4 to 170 times as long, and copied to fp32 what the workspace was to bound; with them (AMX) they took
    half as long. `impl="triton"` there is the interpreter, which does as a GPU does.
    """
    kind = rows.device.type
    # Asked by name: torch 2.11 cannot trace its own question whether a device has autocast.
    autocast = kind in ("cpu", "cuda", "mps", "xpu") and torch.is_autocast_enabled(kind)
    if autocast and rows.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    elif rows.dtype != weight.dtype:
        raise FullrankError(
            f"rows are {rows.dtype} and weight is {weight.dtype}, expected one dtype: "
            "cast one of them, or run under torch.autocast"
        )
    else:
        dtype = rows.dtype
    return compute_dtype(dtype) if kind == "cpu" and impl != "triton" else dtype


def check_implementation(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise FullrankError(f"impl={impl!r} is unknown: expected one of {', '.join(IMPLEMENTATIONS)}")


def shape_of(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def check_rows(rows: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    if rows.ndim != 2:
        raise FullrankError(
            f"rows have shape {shape_of(rows)}, expected [R, D]: flatten what leads the width"
        )
    check_shapes(rows, weight, targets, bias)


def check_mixture(
    rows: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor | None, bias: Tensor | None
) -> None:
    if rows.ndim != 3:
        raise FullrankError(
            f"rows have shape {shape_of(rows)}, expected [N, K, D]: for one component pass rows[:, None, :]"
        )
    if rows.shape[1] == 0:
        raise FullrankError(f"rows have shape {shape_of(rows)}, expected [N, K, D] with K >= 1 components")
    check_shapes(rows, weight, targets, bias)
    if log_prior.shape != rows.shape[:2]:
        raise FullrankError(
            f"log_prior has shape {shape_of(log_prior)}, expected [N, K] = {list(rows.shape[:2])} as in rows"
        )
    check_float("log_prior", log_prior)
    check_device(rows, log_prior=log_prior)


def check_shapes(rows: Tensor, weight: Tensor, targets: Tensor | None, bias: Tensor | None) -> None:
    if weight.ndim != 2 or weight.shape[0] == 0 or weight.shape[1] != rows.shape[-1]:
        raise FullrankError(
            f"weight has shape {shape_of(weight)}, expected [V, D] with V >= 1 and D={rows.shape[-1]} as in "
            f"rows {shape_of(rows)}: transpose it or project the rows"
        )
    check_float("rows", rows)
    check_float("weight", weight)
    check_device(rows, weight=weight)
    if targets is not None:
        if targets.shape != rows.shape[:1]:
            raise FullrankError(
                f"targets have shape {shape_of(targets)}, expected {list(rows.shape[:1])} as in "
                f"rows {shape_of(rows)}: flatten both alike"
            )
        if targets.dtype not in (torch.int32, torch.int64):
            raise FullrankError(f"targets are {targets.dtype}, expected int64 or int32 token ids")
        check_device(rows, targets=targets)
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise FullrankError(
                f"bias has shape {shape_of(bias)}, expected [V] = [{weight.shape[0]}] as weight"
            )
        check_float("bias", bias)
        check_device(rows, bias=bias)


def check_float(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise FullrankError(f"{name} has dtype {tensor.dtype}, expected a floating-point one: use .float()")


def check_device(rows: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != rows.device:
            raise FullrankError(
                f"{name} is on {tensor.device} and rows are on {rows.device}: move one with .to(device)"
            )
