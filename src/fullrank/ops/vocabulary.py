"""W, b and f as a pass over the scores sees them, with the one buffer in which the scores of a chunk lie.

The buffer holds the scores of a chunk of rows against all V entries, or against a block of them where the
workspace is too small. Elementwise work goes over it in tiles, or with the kernel of `score_kernels.py` all
at once; then W and the buffer's rows are padded to the plan's stride.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from fullrank.errors import FullrankError
from fullrank.ops.mixture.reference import compute_dtype
from fullrank.ops.pointwise import Evaluated, Identity, Pointwise
from fullrank.ops.statistics import Statistics, posterior
from fullrank.ops.targets import capturing
from fullrank.ops.workspace import Plan, default_workspace, make_plan

log = logging.getLogger(__name__)


class Vocabulary:
    """W, b and f, with the one buffer in which the scores of a chunk lie."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        pointwise: Pointwise,
        *,
        product: torch.dtype,
        plan: Plan,
        K: int,
    ) -> None:
        # Under autocast the product runs in a narrower dtype than the parameter has. A matrix strided in both
        # directions would be copied by every product, so it is copied once.
        self.V, self.D = weight.shape
        if plan.kernel and plan.stride != self.V:
            # Fast products want sizes that are multiples of 8: W goes on with rows of zeros, whose scores the
            # kernel leaves out and whose Q is 0.
            self.weight = weight.new_zeros(plan.stride, self.D, dtype=product)
            self.weight[: self.V].copy_(weight)
        else:
            weight = weight.to(product)
            self.weight = weight if 1 in weight.stride() or weight.numel() == 0 else weight.contiguous()
        self.K = K
        self.pointwise = pointwise
        self.plan = plan
        self.wide = compute_dtype(product)
        self.slot = 0
        self._buffers = [self.weight.new_empty(plan.tokens * K, plan.stride) for _ in range(plan.buffers)]
        self.bias = None if bias is None else bias.to(self.wide)
        self.masked: Tensor | None = None
        self.kernel_bias: Tensor | None = None
        if self.bias is not None and plan.kernel:
            self.kernel_bias = functional.pad(self.bias, (0, plan.stride - self.V), value=-torch.inf)
        if self.bias is not None and not isinstance(pointwise, Identity):
            # Masked entries: f must see a finite score, and the mask goes on after f.
            masked = torch.isneginf(self.bias)
            # The kernel masks by itself, and nobody needs to wait for an answer.
            if plan.kernel or capturing(masked) or bool(masked.any()):
                self.masked, self.bias = masked, self.bias.masked_fill(masked, 0.0)

    @property
    def entries(self) -> int:
        """Rows of W as the products see it."""
        return self.plan.stride if self.plan.kernel else self.V

    def blocks(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.V, self.plan.block):
            yield start, min(start + self.plan.block, self.V)

    @property
    def kept(self) -> bool:
        """Whether a chunk's scores stay in the buffer, so that the gradient needs no second product."""
        return self.plan.block >= self.V

    def score(self, rows: Tensor, start: int, stop: int) -> Tensor:
        """The product alone, [rows, stop - start], in the buffer."""
        if self.plan.kernel:
            scores = torch.mm(rows, self.weight.t(), out=self.kept_scores(rows.shape[0]))
            return scores if self.plan.stride == self.V else scores[:, : self.V]
        flat = self._buffers[0].view(-1)[: rows.shape[0] * (stop - start)]
        scores = flat.view(rows.shape[0], stop - start)
        return torch.mm(rows, self.weight[start:stop].t(), out=scores)

    def kept_scores(self, rows: int, slot: int | None = None) -> Tensor:
        """[rows, V], and with the kernel the padding behind; of the chunk that is at work, or of another
        slot's."""
        lines = self._buffers[self.slot if slot is None else slot]
        return lines if rows == lines.shape[0] else lines[:rows]

    def run_kernel(
        self,
        scores: Tensor,
        targets: Tensor,
        *,
        gradient: bool,
        late: bool,
        lacking: bool = False,
    ) -> Statistics:
        """All elementwise work of a kept chunk: its statistics and, with `gradient`, Q in the buffer, times
        `total` where that may be `lacking`."""
        # Not before it is needed: Triton takes its time to load and is not everywhere.
        from fullrank.ops.mixture import kernels as score_kernels

        if gradient and lacking:
            return score_kernels.raise_rows(scores, self.kernel_bias, targets, self.pointwise)
        return score_kernels.score_rows(
            scores, self.kernel_bias, targets, self.pointwise, gradient=gradient, late=late
        )

    def run_kernel_alone(
        self, scores: Tensor, targets: Tensor, log_prior: Tensor, nll: Tensor, *, gradient: bool
    ) -> None:
        """The same for rows that are tokens by themselves: their losses into nll."""
        from fullrank.ops.mixture import kernels as score_kernels

        score_kernels.score_tokens(
            scores, self.kernel_bias, targets, self.pointwise, log_prior, nll, gradient=gradient
        )

    def finish_kernel(
        self,
        targets: Tensor,
        statistics: Statistics,
        slot: int,
        *,
        kept: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Q of a chunk whose scores and statistics are known: in its buffer, or of kept rows in `out`."""
        from fullrank.ops.mixture import kernels as score_kernels

        scores = self.kept_scores(targets.shape[0], slot)[:, : self.V]
        return score_kernels.gradient_rows(
            scores, self.kernel_bias, targets, self.pointwise, statistics, kept=kept, out=out
        )

    def mix(
        self, log_prior: Tensor, statistics: Statistics, nll: Tensor, *, lacking: bool
    ) -> tuple[Tensor, Tensor]:
        """Losses into nll [tokens]; posterior shares [tokens, K] of a chunk's rows, and the same with what a
        kernel left lacking."""
        if not self.plan.kernel:
            loss, share = posterior(log_prior, statistics.nll.view(log_prior.shape))
            nll.copy_(loss)
            return share, share
        from fullrank.ops import row_kernels

        return row_kernels.mix_rows(statistics, log_prior, nll, lacking=lacking)

    def gradient_of_rows(self, rows: Tensor) -> Tensor:
        """Room for Q W of a chunk: summed over blocks of the vocabulary it is kept in the wide dtype."""
        return torch.empty_like(
            rows, dtype=rows.dtype if self.kept else self.wide, memory_format=torch.contiguous_format
        )

    def bend_targets(self, rows: Tensor, own: Tensor, targets: Tensor) -> Evaluated:
        """f and f' at the targets' scores alone, [rows, 1]; own [rows, D] is W at the targets."""
        scores = torch.linalg.vecdot(rows, own).to(self.wide)[:, None]
        if self.bias is not None:
            scores.add_(self.bias[targets, None])
        return self.pointwise.evaluate_(scores, gradient=True)

    def tiles(self, rows: int) -> Iterator[slice]:
        step = self.plan.tile_tokens * self.K
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))

    def bend(self, scores: Tensor, start: int, stop: int, *, gradient: bool) -> Evaluated:
        """Bias, f and mask on one tile. In fp32 and fp64 the tile is the buffer itself, changed in place."""
        tile = scores.to(self.wide)
        if self.bias is not None:
            tile.add_(self.bias[start:stop])
        bent = self.pointwise.evaluate_(tile, gradient=gradient)
        if self.masked is not None:
            bent.value.masked_fill_(self.masked[start:stop], -torch.inf)
        return bent

    def store(self, scores: Tensor, tile: Tensor, total: Tensor) -> None:
        """Put a finished tile of Q * total back for the products.

        In fp32 and fp64 the tile is the buffer, and dividing by `total` is left to the row's factor: one pass
        saved. In a narrow dtype it is normalised on the way, because fp16 could not hold S itself.
        """
        if scores.dtype != self.wide:
            scores.copy_(tile.div_(total[:, None]))

    def lacking(self, total: Tensor) -> Tensor:
        """What a row's factor still has to bring to make the buffer Q, where tiles filled it."""
        return 1.0 / total if self.weight.dtype == self.wide else torch.ones_like(total)


def vocabulary_for(
    rows: Tensor,
    K: int,
    weight: Tensor,
    bias: Tensor | None,
    pointwise: Pointwise,
    workspace: int | None,
    *,
    impl: str = "chunked",
    stats: bool = False,
    skip: bool = False,
) -> Vocabulary:
    """W, b and f with a plan for rows [N, ..., D] of K a token."""
    V, D = weight.shape
    bytes_ = default_workspace(rows.device) if workspace is None else workspace
    kernel = kernel_serves(impl, rows, pointwise, stats=stats)
    plan = make_plan(
        N=rows.shape[0], K=K, D=D, V=V, product=rows.dtype, device=rows.device,
        tile_buffers=pointwise.tile_buffers, workspace=bytes_, kernel=kernel, skip=skip,
    )  # fmt: skip
    if kernel and not plan.kernel:
        small = f"a workspace of {bytes_} bytes does not hold all V={V} scores of enough rows"
        if impl == "triton":
            raise FullrankError(
                f"impl='triton' cannot serve here: {small}; pass a larger workspace or impl='auto'"
            )
        say_slower(small)
    return Vocabulary(weight, bias, pointwise, product=rows.dtype, plan=plan, K=K)


def kernel_serves(impl: str, rows: Tensor, pointwise: Pointwise, *, stats: bool = False) -> bool:
    """Whether the elementwise work goes to the kernel; impl="triton" raises where it cannot."""
    if impl == "chunked" or (impl == "auto" and rows.device.type != "cuda"):
        return False
    from fullrank.ops import triton_base as triton

    obstacle = triton.obstacle(rows.device, rows.dtype, pointwise)
    if obstacle is None and stats:
        obstacle = "it makes no argmax and no entropy for return_stats=True"
    if obstacle is not None and impl == "triton":
        raise FullrankError(
            f"impl='triton' cannot serve here: {obstacle}; pass impl='auto' for any path that can"
        )
    if obstacle is not None and not stats:
        say_slower(obstacle)
    return obstacle is None


@functools.cache
def say_slower(obstacle: str) -> None:
    """Once for every reason."""
    log.warning("on CUDA without its kernels, slower with the same results: %s", obstacle)
