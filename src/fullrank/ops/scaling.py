"""out = x * factor, rounded once: torch's own kernels for two dtypes are slow. out may be x."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_rows(x: Tensor, factor: Tensor, *, out: Tensor) -> Tensor:
    """x [R, ...] and out alike, factor [R] in fp32 or wider."""
    if x.is_cuda and x.is_contiguous() and out.is_contiguous() and factor.dtype == torch.float32:
        # Not before it is needed: Triton takes its time to load and is not everywhere.
        from fullrank.ops import row_kernels
        from fullrank.ops import triton_base as triton

        if triton.obstacle(x.device, x.dtype) is None and out.dtype in triton.DTYPES:
            return row_kernels.scale_rows(x, factor, out)
    return torch.mul(x, factor.view(-1, *[1] * (x.ndim - 1)), out=out)


def scale_all(pairs: list[tuple[Tensor, Tensor]], number: Tensor, factor: Tensor | float) -> None:
    """out = x * number * factor for every (x, out), with numbers [] in fp32 or wider; on CUDA two in a launch
    where that serves."""
    if pairs and number.is_cuda and number.dtype == torch.float32:
        from fullrank.ops import row_kernels
        from fullrank.ops import triton_base as triton

        tensors = [tensor for pair in pairs for tensor in pair]
        if triton.obstacle(number.device, torch.float32) is None and all(
            tensor.is_contiguous() and tensor.dtype in triton.DTYPES for tensor in tensors
        ):
            if isinstance(factor, Tensor):
                number, factor = number * factor, 1.0
            row_kernels.scale_all(pairs, number, factor)
            return
    scale = number * factor
    for x, out in pairs:
        torch.mul(x, scale, out=out)
