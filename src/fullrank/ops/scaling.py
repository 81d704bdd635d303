"""out = x * factor, a factor a row or one for all, rounded once: torch's own kernels for two dtypes are slow.

x [R, ...] and out alike, factor [R] or [] in fp32 or wider; out may be x.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scale_rows(x: Tensor, factor: Tensor, *, out: Tensor) -> Tensor:
    if x.is_cuda and x.is_contiguous() and out.is_contiguous() and factor.dtype == torch.float32:
        # Not before it is needed: Triton takes its time to load and is not everywhere.
        from fullrank.ops import row_kernels, triton

        if triton.obstacle(x.device, x.dtype) is None and out.dtype in triton.DTYPES:
            return row_kernels.scale_rows(x, factor, out)
    return torch.mul(x, factor.view(-1, *[1] * (x.ndim - 1)) if factor.ndim else factor, out=out)
