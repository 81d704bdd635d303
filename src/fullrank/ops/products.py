"""The gradient products of a chunk whose scores hold Q: dH = g (Q W), dW = Q^T (g H), db = Q^T g.

Q is in the dtype of the products, W's gradient is summed over the chunks in fp32 or wider, but for the few
chunks of `chunked.NARROW_CHUNKS`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.ops.gradients import Gradients
from fullrank.ops.scaling import scale_rows
from fullrank.ops.targets import capturing
from fullrank.ops.vocabulary import Vocabulary


def add_products(
    vocabulary: Vocabulary,
    scores: Tensor,
    rows: Tensor,
    factor: Tensor | None,
    start: int,
    stop: int,
    gradients: Gradients,
    d_rows: Tensor | None,
) -> None:
    """The two gradient products of a chunk and a block, whose scores hold Q up to `lacking`.

    With the kernel, scores, W and W's gradient have their padding here.

    factor [rows] is g times `lacking`, None where it is 1. d_rows [rows, D] takes the product with W before
    the factor.
    """
    if d_rows is not None:
        weight = vocabulary.weight if vocabulary.plan.kernel else vocabulary.weight[start:stop]
        if vocabulary.kept:
            torch.mm(scores, weight, out=d_rows)
        elif d_rows.dtype == scores.dtype:
            d_rows.addmm_(scores, weight)
        else:
            d_rows.add_(torch.mm(scores, weight))
    if gradients.weight is not None:
        scaled = rows if factor is None else scale_rows(rows, factor, out=torch.empty_like(rows))
        add_rows(vocabulary, scores, scaled, gradients, start, stop)


def add_rows(
    vocabulary: Vocabulary,
    scores: Tensor,
    scaled: Tensor,
    gradients: Gradients,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """W's gradient of a chunk and a block: Q^T (g H), from rows that have their factor."""
    assert gradients.weight is not None
    total = gradients.weight if vocabulary.plan.kernel else gradients.weight[start:stop]
    add_wide(total, scores.t(), scaled, step=vocabulary.plan.slice_rows, first=gradients.unwritten)
    gradients.unwritten = False


def add_bias(gradients: Gradients, scores: Tensor, upstream: Tensor | None) -> None:
    """The bias's gradient of a chunk whose scores are Q: the sum over rows of g Q; g is 1 where None."""
    if gradients.bias is None:
        return
    if upstream is None:
        upstream = torch.ones(scores.shape[0], dtype=gradients.bias.dtype, device=scores.device)
    if gradients.bias.dtype == scores.dtype:
        gradients.bias.addmv_(scores.t(), upstream)
        return
    # g in two parts keeps its digits in the narrow dtype; eight columns are what a fast product takes.
    columns = scores.new_zeros(scores.shape[0], 8)
    columns[:, 0] = upstream
    columns[:, 1] = upstream - columns[:, 0]
    sums = torch.zeros(scores.shape[1], 8, dtype=gradients.bias.dtype, device=scores.device)
    add_wide(sums, scores.t(), columns, step=scores.shape[1])
    gradients.bias.add_(sums[:, 0]).add_(sums[:, 1])


def add_wide(total: Tensor, left: Tensor, right: Tensor, *, step: int, first: bool = False) -> None:
    """total += left @ right, where total is as wide as the factors or wider; `first` says that total holds
    nothing yet, not even zeros."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0 if first else 1)
    elif accumulates_wide(left):
        if first:
            torch.ops.aten.mm.dtype_out(left, right, total.dtype, out=total)
        else:
            torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        # Only one slice of the product, `step` rows of it, exists in the narrow dtype.
        for start in range(0, left.shape[0], step):
            part = slice(start, start + step)
            product = torch.mm(left[part], right)
            total[part].copy_(product) if first else total[part].add_(product)


_accumulates: dict[tuple[torch.device, torch.dtype], bool] = {}


def accumulates_wide(factor: Tensor) -> bool:
    """Whether torch adds a narrow product to an fp32 sum in one go on the factor's device, tried once."""
    key = (factor.device, factor.dtype)
    if factor.device.type != "cuda" or (key not in _accumulates and capturing(factor)):
        return False
    if key not in _accumulates:
        total = torch.full((16, 16), 2.0**-20, device=factor.device)
        ones = torch.ones(16, 16, dtype=factor.dtype, device=factor.device)
        try:
            torch.ops.aten.addmm.dtype_out(total, ones, ones, torch.float32, out=total)
            _accumulates[key] = bool((total == 16.0 + 2.0**-20).all())
            torch.ops.aten.mm.dtype_out(ones, ones, torch.float32, out=total)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):
            _accumulates[key] = False
    return _accumulates[key]
