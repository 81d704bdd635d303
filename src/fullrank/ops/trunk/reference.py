"""The definition: K rows that share all but their last r entries, row_k = [trunk (D - r); private_k (r)]."""

from __future__ import annotations

import torch
from torch import Tensor


def whole_rows(trunk: Tensor, private: Tensor) -> Tensor:
    """trunk [N, D - r], private [N, K, r] -> the rows [N, K, D] of `mixture/reference.py`."""
    return torch.cat([trunk[:, None].expand(-1, private.shape[1], -1), private], dim=2)
