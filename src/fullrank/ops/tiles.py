"""One pass over the scores of a chunk of rows, tile by tile: statistics, and Q for the gradient products.

With m, S and d of a row as in `statistics.py`, and p its softmax,

    Q_v = f'(z_v) (p_v - 1[v = y]),        p_y - 1 = -S / (S + e^d)

For upstream gradients g_lse and g_target of a row,

    dz = g_lse Q + (g_lse + g_target) f'(z_y) 1_y

so a row's factor never touches the V-wide buffer: dH = g (Q W), dW = Q^T (g H). In a mixture g is the token's
weight times the posterior share r_k = exp(log_prior_k - nll_k + nll), known as soon as the K rows of a token
are, which is why the gradient of a `mean` or `sum` costs three products and not four. Where g_target is not
-g_lse the two terms at the target may cancel, so it is left out of the products and added apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.ops.gradients import Gradients, add_slope_gradient
from fullrank.ops.pointwise import Evaluated
from fullrank.ops.products import add_products
from fullrank.ops.statistics import Mode, Statistics
from fullrank.ops.vocabulary import Vocabulary


def local_targets(targets: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Each target's column in a block as [rows, 1], and whether it lies there; columns outside become 0."""
    column = targets - start
    inside = (column >= 0) & (column < stop - start)
    return torch.where(inside, column, 0)[:, None], inside


def statistics_of(vocabulary: Vocabulary, rows: Tensor, targets: Tensor) -> Statistics:
    """One product, no gradient: the statistics of a chunk of rows, whether or not V is cut."""
    count = rows.shape[0]
    maximum = rows.new_full((count,), -torch.inf, dtype=vocabulary.wide)
    others = torch.zeros_like(maximum)
    target = torch.full_like(maximum, -torch.inf)
    for start, stop in vocabulary.blocks():
        scores = vocabulary.score(rows, start, stop)
        for tile in vocabulary.tiles(count):
            bent = vocabulary.bend(scores[tile], start, stop, gradient=False).value
            y, inside = local_targets(targets[tile], start, stop)
            entry = bent.gather(1, y)[:, 0]
            target[tile] = torch.where(inside, entry, target[tile])
            old = maximum[tile]
            new = torch.maximum(old, bent.amax(1))
            # A block may be masked from end to end: its maximum is -inf, and exp(-inf - (-inf)) is no number.
            anchor = torch.where(torch.isneginf(new), 0.0, new)
            carried = torch.where(old == new, 1.0, torch.exp(old - anchor))
            bent.sub_(anchor[:, None]).exp_()
            # The target leaves the sum at its place, not by subtraction.
            bent.scatter_(1, y, torch.where(inside, 0.0, bent.gather(1, y)[:, 0])[:, None])
            others[tile] = others[tile] * carried + bent.sum(1)
            maximum[tile] = new
    return Statistics(maximum, others, target)


def finish_tile(
    vocabulary: Vocabulary,
    scores: Tensor,
    bent: Evaluated,
    total: Tensor,
    upstream: Tensor,
    gradients: Gradients,
    start: int,
    stop: int,
) -> None:
    """From exp(a - maximum), with -S at the target, to Q * total in the buffer; sums what W's columns sum.

    upstream [rows] is the gradient g of each row's loss.
    """
    tile = bent.value
    row = upstream / total
    if gradients.sums is not None:
        add_slope_gradient(gradients, bent, tile.to(torch.float64, copy=True).mul_(row[:, None]))
    if bent.slope is not None:
        tile.mul_(bent.slope)
    if gradients.bias is not None:
        gradients.bias[start:stop].addmv_(tile.t(), row)
    vocabulary.store(scores, tile, total)


def recompute_gradient(
    vocabulary: Vocabulary,
    rows: Tensor,
    targets: Tensor,
    statistics: Statistics,
    upstream: Tensor,
    gradients: Gradients,
    *,
    entry: Tensor,
    d_rows: Tensor | None,
    mode: Mode | None = None,
    share: Tensor | None = None,
) -> None:
    """The gradient of a chunk from its statistics: every block is scored once more.

    upstream [rows] is g_lse; d_rows takes the product with W before g times `lacking`. entry [rows] stands at
    the target in place of its exponential. `mode` collects the mixture's argmax and entropy on the way, from
    share [tokens, K] = prior / total.
    """
    total = statistics.total
    factor = upstream * vocabulary.lacking(total)
    wanted = d_rows is not None or any(
        item is not None for item in (gradients.weight, gradients.bias, gradients.sums)
    )
    if d_rows is not None and not vocabulary.kept:
        d_rows.zero_()
    for start, stop in vocabulary.blocks():
        scores = vocabulary.score(rows, start, stop)
        for tile in vocabulary.tiles(rows.shape[0]):
            bent = vocabulary.bend(scores[tile], start, stop, gradient=wanted)
            bent.value.sub_(statistics.maximum[tile, None]).exp_()
            if mode is not None and share is not None:
                tokens = slice(tile.start // vocabulary.K, tile.stop // vocabulary.K)
                mode.add(tokens, bent.value, share[tokens], start)
            if wanted:
                y, inside = local_targets(targets[tile], start, stop)
                column = torch.where(inside, entry[tile], bent.value.gather(1, y)[:, 0])
                bent.value.scatter_(1, y, column[:, None])
                finish_tile(
                    vocabulary, scores[tile], bent, total[tile], upstream[tile], gradients, start, stop
                )
        if wanted:
            add_products(vocabulary, scores, rows, factor, start, stop, gradients, d_rows)
