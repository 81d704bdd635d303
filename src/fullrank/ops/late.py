"""Gradients of rows for upstream gradients that only the backward pass knows: three products once more."""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.ops.chunks import pieces
from fullrank.ops.gradients import Gradients, Needs, add_slope_gradient, empty_gradients
from fullrank.ops.mixture.reference import compute_dtype
from fullrank.ops.pointwise import Pointwise
from fullrank.ops.products import add_bias, add_products
from fullrank.ops.scaling import scale_rows
from fullrank.ops.statistics import Statistics
from fullrank.ops.tiles import recompute_gradient
from fullrank.ops.vocabulary import Vocabulary, vocabulary_for


def rows_backward(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    pointwise: Pointwise,
    statistics: Statistics,
    upstream: Tensor,
    at_target: Tensor,
    *,
    ready: Tensor | None,
    positions: Tensor | None,
    needs: Needs,
    workspace: int | None,
    impl: str = "auto",
) -> tuple[Tensor | None, Gradients]:
    """Gradients of rows [R, D] against targets [R]: upstream [R] is that of lse outside the target, at_target
    [R] that of the target's f(z_y).

    ready [R, D] is Q W where the forward pass made it; then no product is left to do.
    """
    wide = compute_dtype(rows.dtype)
    vocabulary = vocabulary_for(rows, 1, weight, bias, pointwise, workspace, impl=impl)
    gradients = empty_gradients(needs, weight, pointwise, wide, vocabulary.entries)
    d_rows = rows.new_zeros(rows.shape) if needs.rows else None
    for index in pieces(rows.shape[0], positions, vocabulary.plan.tokens):
        chunk, y = rows[index], targets[index]
        part = Statistics(*(column[index] for column in statistics))
        d_chunk = vocabulary.gradient_of_rows(chunk) if needs.rows else None
        if d_chunk is not None and ready is not None:
            torch.mul(ready[index], upstream[index, None], out=d_chunk)
        elif vocabulary.plan.kernel:
            vocabulary.run_kernel(vocabulary.score(chunk, 0, vocabulary.V), y, gradient=True, late=True)
            scores = vocabulary.kept_scores(chunk.shape[0])
            add_bias(gradients, scores, upstream[index])
            add_products(vocabulary, scores, chunk, upstream[index], 0, vocabulary.V, gradients, d_chunk)
            if d_chunk is not None:
                scale_rows(d_chunk, upstream[index], out=d_chunk)
        else:
            recompute_gradient(
                vocabulary, chunk, y, part, upstream[index], gradients,
                entry=torch.zeros_like(part.others), d_rows=d_chunk,
            )  # fmt: skip
            if d_chunk is not None:
                d_chunk.mul_((upstream[index] * vocabulary.lacking(part.total))[:, None])
        add_own(vocabulary, chunk, y, at_target[index], gradients, d_chunk)
        if d_rows is not None and d_chunk is not None:
            d_rows[index] = d_chunk.to(rows.dtype)
    return d_rows, gradients.trimmed(vocabulary.V)


def add_own(
    vocabulary: Vocabulary,
    rows: Tensor,
    targets: Tensor,
    upstream: Tensor,
    gradients: Gradients,
    d_rows: Tensor | None,
) -> None:
    """The target's part of the gradient, for upstream [rows] in f(z_y).

    Row y of W goes to the row's gradient, the row goes to row y of W's.
    """
    own = vocabulary.weight[targets]
    bent = vocabulary.bend_targets(rows, own, targets)
    step = upstream if bent.slope is None else upstream * bent.slope[:, 0]
    add_slope_gradient(gradients, bent, upstream.to(torch.float64, copy=True)[:, None])
    if d_rows is not None:
        d_rows.add_(own * step[:, None])
    del own
    if gradients.weight is not None:
        gradients.weight.index_add_(0, targets, rows * step[:, None])
    if gradients.bias is not None:
        gradients.bias.index_add_(0, targets, step)
