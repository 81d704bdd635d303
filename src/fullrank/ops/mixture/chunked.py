"""The mixture's losses and gradients in a bounded workspace with torch's operations, on any device.

With m, S and d of a row as in `reduce.py`, and p its softmax,

    Q_v = f'(z_v) (p_v - 1[v = y]),        p_y - 1 = -S / (S + e^d)

For upstream gradients g_lse and g_target of a row,

    dz = g_lse Q + (g_lse + g_target) f'(z_y) 1_y

so a row's factor never touches the V-wide buffer: dH = g (Q W), dW = Q^T (g H). In a mixture g is the token's
weight times the posterior share r_k = exp(log_prior_k - nll_k + nll), known as soon as the K rows of a token
are, which is why the gradient of a `mean` or `sum` costs three products and not four. Where g_target is not
-g_lse the two terms at the target may cancel, so it is left out of the products and added apart.

May assume checked arguments and no autocast. Ignored tokens never come here. `kernels.py` does the same with
one kernel between the products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullrank.ops.arguments import compute_dtype, widest_dtype
from fullrank.ops.pointwise import Evaluated, Identity, Pointwise
from fullrank.ops.products import (
    Gradients,
    Matrix,
    Needs,
    add_product,
    scale,
    zero_gradients,
)
from fullrank.ops.reduce import Mode, Statistics, capturing, posterior
from fullrank.ops.workspace import Chunk, Plan, at, make_plan, workspace_of


class Vocabulary:
    """W, b and f, with the one buffer in which the scores of a chunk lie."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, pointwise: Pointwise, *, product: torch.dtype,
        plan: Plan, K: int,
    ) -> None:  # fmt: skip
        self.plan, self.K, self.pointwise, self.product = plan, K, pointwise, product
        self.wide = compute_dtype(product)
        self.matrix = Matrix(weight, product, most=plan.matrix_rows)
        self.V = weight.shape[0]
        self._buffer = weight.new_empty(plan.tokens * K * plan.block, dtype=product)
        self.bias = None if bias is None else bias.to(self.wide)
        self.masked: Tensor | None = None
        if self.bias is not None and not isinstance(pointwise, Identity):
            # Masked entries: f must see a finite score, and the mask goes on after f.
            masked = torch.isneginf(self.bias)
            if capturing(masked) or bool(masked.any()):
                self.masked, self.bias = masked, self.bias.masked_fill(masked, 0.0)

    @property
    def kept(self) -> bool:
        """Whether a chunk's scores stay in the buffer, so that the gradient needs no second product."""
        return self.plan.block >= self.V

    def blocks(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.V, self.plan.block):
            yield start, min(start + self.plan.block, self.V)

    def tiles(self, rows: int) -> Iterator[slice]:
        step = self.plan.tile_tokens * self.K
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))

    def tokens_of(self, tile: slice) -> slice:
        return slice(tile.start // self.K, tile.stop // self.K)

    def score(self, rows: Tensor, start: int, stop: int) -> Tensor:
        """The product alone, [rows, stop - start], in the buffer."""
        scores = self._buffer[: rows.shape[0] * (stop - start)].view(rows.shape[0], stop - start)
        return self.matrix.score(rows, scores, start)

    def bend(self, scores: Tensor, start: int, stop: int, *, gradient: bool) -> Evaluated:
        """Bias, f and mask on one tile. In fp32 and fp64 the tile is the buffer itself, changed in place."""
        tile = scores.to(self.wide)
        if self.bias is not None:
            tile.add_(self.bias[start:stop])
        bent = self.pointwise.evaluate_(tile, gradient=gradient)
        if self.masked is not None:
            bent.value.masked_fill_(self.masked[start:stop], -torch.inf)
        return bent

    def finish(
        self, scores: Tensor, bent: Evaluated, total: Tensor, upstream: Tensor, gradients: Gradients,
        start: int, stop: int,
    ) -> None:  # fmt: skip
        """From exp(a - maximum), with -S at the target, to Q * total in the buffer; sums what is a column's.

        upstream [rows] is the gradient g of each row's loss. In fp32 and fp64 the tile is the buffer, and
        dividing by `total` is left to the row's factor: one pass saved. In a narrow dtype it is normalised on
        the way, because fp16 could not hold S itself.
        """
        tile = bent.value
        row = upstream / total
        if gradients.sums is not None:
            widest = widest_dtype(tile.device)
            gradients.add_slopes(bent, tile.to(widest, copy=True).mul_(row[:, None]))
        if bent.slope is not None:
            tile.mul_(bent.slope)
        if gradients.bias is not None:
            gradients.bias[start:stop].addmv_(tile.t(), row)
        if scores.dtype != self.wide:
            scores.copy_(tile.div_(total[:, None]))

    def lacking(self, total: Tensor) -> Tensor:
        """What a row's factor still has to bring to make the buffer Q."""
        return 1.0 / total if self.product == self.wide else torch.ones_like(total)

    def row_gradient(self, rows: Tensor) -> Tensor:
        """Room for Q W of a chunk: a sum over parts of the vocabulary is kept in the wide dtype."""
        one = self.kept and self.matrix.most >= self.V
        return torch.zeros_like(rows, dtype=self.product if one else self.wide)

    def add_products(
        self, Q: Tensor, rows: Tensor, factor: Tensor, start: int, gradients: Gradients,
        d_rows: Tensor | None,
    ) -> None:  # fmt: skip
        """The two gradient products of a block that begins at `start`; Q W is without the factor [rows]."""
        if d_rows is not None:
            self.matrix.add_row_gradient(Q, d_rows, start)
        if gradients.weight is not None:
            scaled = scale(rows, factor, out=torch.empty_like(rows))
            total = gradients.weight[start : start + Q.shape[1]]
            add_product(total, Q.t(), scaled, step=self.plan.matrix_rows)


def vocabulary_for(
    rows: Tensor, weight: Tensor, bias: Tensor | None, pointwise: Pointwise, product: torch.dtype,
    workspace: int | None,
) -> Vocabulary:  # fmt: skip
    """With a plan for rows [N, K, D]."""
    N, K, D = rows.shape
    plan = make_plan(
        N=N, K=K, D=D, V=weight.shape[0], product=product, given=weight.dtype, device=rows.device,
        tile_buffers=pointwise.tile_buffers, workspace=workspace_of(workspace, rows.device),
    )  # fmt: skip
    return Vocabulary(weight, bias, pointwise, product=product, plan=plan, K=K)


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


def recompute_gradient(
    vocabulary: Vocabulary, rows: Tensor, targets: Tensor, statistics: Statistics, upstream: Tensor,
    gradients: Gradients, *, entry: Tensor, d_rows: Tensor | None, mode: Mode | None = None,
    share: Tensor | None = None,
) -> None:  # fmt: skip
    """The gradient of a chunk from its statistics: every block is scored once more.

    upstream [rows] is g_lse; d_rows takes the product with W before g times `lacking`. entry [rows] stands at
    the target in place of its exponential. `mode` collects the mixture's argmax and entropy on the way, from
    share [tokens, K] = prior / total.
    """
    total = statistics.total
    factor = upstream * vocabulary.lacking(total)
    wanted = d_rows is not None or gradients.asked
    for start, stop in vocabulary.blocks():
        scores = vocabulary.score(rows, start, stop)
        for tile in vocabulary.tiles(rows.shape[0]):
            bent = vocabulary.bend(scores[tile], start, stop, gradient=wanted)
            bent.value.sub_(statistics.maximum[tile, None]).exp_()
            if mode is not None and share is not None:
                tokens = vocabulary.tokens_of(tile)
                mode.add(tokens, bent.value, share[tokens], start)
            if wanted:
                y, inside = local_targets(targets[tile], start, stop)
                column = torch.where(inside, entry[tile], bent.value.gather(1, y)[:, 0])
                bent.value.scatter_(1, y, column[:, None])
                vocabulary.finish(scores[tile], bent, total[tile], upstream[tile], gradients, start, stop)
        if wanted:
            vocabulary.add_products(scores, rows, factor, start, gradients, d_rows)


@dataclass
class ChunkState:
    """What the gradients of a chunk need of its losses."""

    rows: Tensor
    """[T K, D] in the dtype of the products."""
    statistics: Statistics
    Q: Tensor | None
    """Q up to `lacking` in the buffer; None where the scores must be made again."""
    mode: Mode | None


class TorchMixture:
    """The pass over rows [N, K, D] with torch's operations: a `workspace.Work`.

    Gradients are those of sum_i weight_i nll_i, None where not asked for.
    """

    def __init__(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, pointwise: Pointwise, *, needs: Needs,
        product: torch.dtype, workspace: int | None, stats: bool = False,
    ) -> None:  # fmt: skip
        N = rows.shape[0]
        self.vocabulary = vocabulary_for(rows, weight, bias, pointwise, product, workspace)
        self.rows, self.needs, self.size = rows, needs, self.vocabulary.plan.tokens
        self.weight, self.sums = weight, Gradients()
        self.d_rows: Tensor | None = None
        self.argmax = rows.new_full((N,), -1, dtype=torch.int64) if stats else None
        self.entropy = rows.new_zeros(N, dtype=self.vocabulary.wide) if stats else None
        self._state: ChunkState | None = None

    def score_ahead(self, targets: Tensor) -> None:
        """No device waits here for the host: only room for the gradients is made."""
        self.make_room()

    def make_room(self) -> None:
        """As `fused.KernelMixture.make_room`."""
        self.sums = zero_gradients(self.needs, self.weight, self.vocabulary.pointwise, self.vocabulary.wide)
        if self.needs.rows:
            self.d_rows = torch.empty_like(self.rows, memory_format=torch.contiguous_format)

    def summed(self) -> Gradients:
        return self.sums

    def chunk_rows(self, index: slice | Tensor) -> Tensor:
        return at(self.rows, index).flatten(0, 1).to(self.vocabulary.product)

    def statistics(self, rows: Tensor, targets: Tensor) -> Statistics:
        return statistics_of(self.vocabulary, rows, targets)

    def losses(self, chunk: Chunk, nll: Tensor) -> Tensor | None:
        rows = self.chunk_rows(chunk.index)
        mode = None if self.argmax is None else Mode(chunk.targets.shape[0], chunk.log_prior)
        Q = None
        if self.vocabulary.kept:
            Q = self.vocabulary.score(rows, 0, self.vocabulary.V)
            statistics = self._over_tiles(chunk, Q, mode)
        else:
            statistics = statistics_of(self.vocabulary, rows, chunk.row_targets)
        loss, share = posterior(chunk.log_prior, statistics.nll.view(chunk.log_prior.shape))
        nll.copy_(loss)
        self._state = ChunkState(rows, statistics, Q, mode)
        return share

    def _over_tiles(self, chunk: Chunk, scores: Tensor, mode: Mode | None) -> Statistics:
        """Statistics of all V scores in the buffer; leaves Q up to `lacking` where a gradient is wanted."""
        vocabulary, targets, wanted = self.vocabulary, chunk.row_targets, self.needs.products
        parts = []
        for tile in vocabulary.tiles(scores.shape[0]):
            tokens = vocabulary.tokens_of(tile)
            bent = vocabulary.bend(scores[tile], 0, vocabulary.V, gradient=wanted)
            y = targets[tile, None]
            maximum = bent.value.amax(1)
            target = bent.value.gather(1, y)[:, 0]
            bent.value.sub_(maximum[:, None]).exp_()
            own = bent.value.gather(1, y)
            others = bent.value.scatter_(1, y, 0.0).sum(1)
            statistics = Statistics(maximum, others, target)
            prior = chunk.log_prior[tokens]
            if mode is not None:
                share = prior.exp() / statistics.total.view(prior.shape)
                mode.add(tokens, bent.value.scatter_(1, y, own), share, 0)
            if wanted:
                bent.value.scatter_(1, y, statistics.deficit[:, None])
                _, share = posterior(prior, statistics.nll.view(prior.shape))
                vocabulary.finish(
                    scores[tile], bent, statistics.total, chunk.upstream(share, tokens), self.sums,
                    0, vocabulary.V,
                )  # fmt: skip
            parts.append(statistics)
        return Statistics(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def gradients(self, chunk: Chunk, upstream: Tensor | None) -> None:
        assert self._state is not None
        assert upstream is not None
        state, self._state, vocabulary = self._state, None, self.vocabulary
        d_rows = vocabulary.row_gradient(state.rows) if self.d_rows is not None else None
        statistics = state.statistics
        factor = upstream * vocabulary.lacking(statistics.total)
        if state.Q is not None:
            if self.needs.products:
                vocabulary.add_products(state.Q, state.rows, factor, 0, self.sums, d_rows)
        elif self.needs.products or state.mode is not None:
            share = chunk.log_prior.exp() / statistics.total.view(chunk.log_prior.shape)
            recompute_gradient(
                vocabulary, state.rows, chunk.row_targets, statistics, upstream, self.sums,
                entry=statistics.deficit, d_rows=d_rows, mode=state.mode, share=share,
            )  # fmt: skip
        if state.mode is not None and self.argmax is not None and self.entropy is not None:
            self.argmax[chunk.index], self.entropy[chunk.index] = state.mode.argmax, state.mode.entropy
        if self.d_rows is not None and d_rows is not None:
            scale(d_rows, factor, out=d_rows)
            self.d_rows[chunk.index] = d_rows.view(*chunk.log_prior.shape, -1).to(self.d_rows.dtype)

    def late_gradients(
        self, rows: Tensor, targets: Tensor, statistics: Statistics, upstream: Tensor,
        d_rows: Tensor | None,
    ) -> None:  # fmt: skip
        """The gradients of some rows but for the target's own part, for an upstream gradient of their
        normalisers [rows] that only the backward pass knows."""
        recompute_gradient(
            self.vocabulary, rows, targets, statistics, upstream, self.sums,
            entry=torch.zeros_like(statistics.others), d_rows=d_rows,
        )  # fmt: skip
        if d_rows is not None:
            d_rows.mul_((upstream * self.vocabulary.lacking(statistics.total))[:, None])

    def row_gradient(self, rows: Tensor) -> Tensor:
        return self.vocabulary.row_gradient(rows)


def mixture_pass(
    rows: Tensor, weight: Tensor, bias: Tensor | None, pointwise: Pointwise, *, needs: Needs,
    product: torch.dtype, workspace: int | None, impl: str, stats: bool = False,
    narrow: bool = False,
) -> Any:  # fmt: skip
    """Rows [N, K, D] against W in the hands of torch, or of the kernels where they serve."""
    arguments: dict[str, Any] = {"needs": needs, "product": product}
    if impl == "triton" or (impl == "auto" and rows.is_cuda):
        from fullrank.ops import triton_base

        obstacle = triton_base.obstacle(rows.device, product, pointwise)
        if obstacle is None and stats:
            obstacle = "it makes no argmax and no entropy for return_stats=True"
        if triton_base.refuse_or_say(impl, obstacle, quiet=stats):
            from fullrank.ops.mixture import fused

            bytes_ = workspace_of(workspace, rows.device)
            N, K, D = rows.shape
            size = fused.chunk_tokens(N=N, K=K, D=D, V=weight.shape[0], product=product, workspace=bytes_)
            small = (
                f"a workspace of {bytes_} bytes does not hold all V={weight.shape[0]} scores of enough rows"
            )
            if triton_base.refuse_or_say(impl, None if size else small):
                return fused.KernelMixture(
                    rows, weight, bias, pointwise, size=size, narrow=narrow, **arguments
                )
    return TorchMixture(rows, weight, bias, pointwise, workspace=workspace, stats=stats, **arguments)
