"""One pass over the scores of a chunk of rows, tile by tile: statistics, Q, and the gradient products.

For a row with scores z, a = f(z), y its target, m = max_v a_v:

    d = a_y - m,   S = sum_{v != y} exp(a_v - m)
    nll = log1p(S + expm1(d)) - d          lse = m + log(S + e^d)
    Q_v = f'(z_v) (p_v - 1[v = y]),        p_y - 1 = -S / (S + e^d)

S leaves the target out, so that neither nll nor p_y - 1 is a difference of nearly equal numbers: a confident
row keeps its digits. With upstream gradients g_lse and g_target of a row,

    dz = g_lse Q + (g_lse + g_target) f'(z_y) 1_y

so a row's factor never touches the V-wide buffer: dH = g (Q W), dW = Q^T (g H). In a mixture g is the token's
weight times the posterior share r_k = exp(log_prior_k - nll_k + nll), known as soon as the K rows of a token
are, which is why the gradient of a `mean` or `sum` costs three products and not four. Where g_target is not
-g_lse the two terms at the target may cancel, so it is left out of the products and added apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fullrank.ops.plan import Plan
from fullrank.ops.pointwise import Evaluated, Identity, PiecewiseLinear, Pointwise
from fullrank.ops.reference import compute_dtype
from fullrank.ops.targets import capturing


class Needs(NamedTuple):
    """Which gradients a pass makes."""

    rows: bool = False
    prior: bool = False
    weight: bool = False
    bias: bool = False
    slopes: bool = False

    @property
    def products(self) -> bool:
        """Whether the scores' gradient Q is needed at all."""
        return self.rows or self.weight or self.bias or self.slopes

    @property
    def rows_alone(self) -> bool:
        """W and everything that is summed over rows is frozen."""
        return self.rows and not (self.weight or self.bias or self.slopes)


class Statistics(NamedTuple):
    """What a row keeps of its V scores, [R] each."""

    maximum: Tensor
    others: Tensor
    """S: the sum over all but the target of exp(a - maximum)."""
    target: Tensor

    @property
    def gap(self) -> Tensor:
        return self.target - self.maximum

    @property
    def nll(self) -> Tensor:
        return torch.log1p(self.others + torch.expm1(self.gap)) - self.gap

    @property
    def deficit(self) -> Tensor:
        """total * (p_y - 1), what stands at the target in place of its exponential: -S. A masked target is no
        score of the row, so nothing falls on it."""
        return torch.where(torch.isneginf(self.target), 0.0, -self.others)

    @property
    def total(self) -> Tensor:
        return self.others + torch.exp(self.gap)

    @property
    def lse(self) -> Tensor:
        return self.maximum + torch.log(self.total)


@dataclass
class Gradients:
    """Sums over all rows, in fp32 or wider; None where not asked for.

    A bin of a piecewise-linear f takes in a share of all scores, one by one: fp32 would lose digits.
    """

    weight: Tensor | None
    bias: Tensor | None
    sums: Tensor | None
    """Piecewise linear: per bin, the sum of the gradient in f(z)."""
    moments: Tensor | None

    def trimmed(self, V: int) -> Gradients:
        """Without padding."""
        weight = None if self.weight is None else self.weight[:V]
        bias = None if self.bias is None else self.bias[:V]
        return Gradients(weight=weight, bias=bias, sums=self.sums, moments=self.moments)

    def slopes(self, pointwise: Pointwise) -> Tensor | None:
        if self.sums is None or self.moments is None or not isinstance(pointwise, PiecewiseLinear):
            return None
        return pointwise.gradient_of_slopes(self.sums, self.moments)


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
        self.buffer = self.weight.new_empty(plan.tokens * K * plan.stride)
        self.bias = None if bias is None else bias.to(self.wide)
        self.masked: Tensor | None = None
        self.kernel_bias: Tensor | None = None
        if self.bias is not None and plan.kernel:
            self.kernel_bias = functional.pad(self.bias, (0, plan.stride - self.V))
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
            torch.mm(rows, self.weight.t(), out=self.kept_scores(rows.shape[0]))
            return self.kept_scores(rows.shape[0])[:, : self.V]
        scores = self.buffer[: rows.shape[0] * (stop - start)].view(rows.shape[0], stop - start)
        return torch.mm(rows, self.weight[start:stop].t(), out=scores)

    def kept_scores(self, rows: int) -> Tensor:
        """[rows, V], and with the kernel the padding behind."""
        return self.buffer[: rows * self.plan.stride].view(rows, self.plan.stride)

    def run_kernel(self, scores: Tensor, targets: Tensor, *, gradient: bool, late: bool) -> Statistics:
        """All elementwise work of a kept chunk: its statistics and, with `gradient`, Q in the buffer."""
        # Not before it is needed: Triton takes its time to load and is not everywhere.
        from fullrank.ops import triton

        return triton.score_rows(
            scores, self.kernel_bias, targets, self.pointwise, gradient=gradient, late=late
        )

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
        """What a row's factor still has to bring to make the buffer Q."""
        unfinished = self.buffer.dtype == self.wide and not self.plan.kernel
        return 1.0 / total if unfinished else torch.ones_like(total)


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


class Mode:
    """Running argmax and entropy of a chunk's mixtures, over tiles of tokens and blocks of the vocabulary."""

    def __init__(self, tokens: int, like: Tensor) -> None:
        self.best = torch.full((tokens,), -torch.inf, dtype=like.dtype, device=like.device)
        self.argmax = torch.zeros(tokens, dtype=torch.int64, device=like.device)
        self.entropy = torch.zeros_like(self.best)

    def add(self, tokens: slice, exponentials: Tensor, share: Tensor, start: int) -> None:
        """exponentials [tokens * K, block] are exp(a - maximum); share [tokens, K] is prior / total."""
        count, K = share.shape
        # Autocast reaches into operators and would mix in bf16.
        with torch.autocast(share.device.type, enabled=False):
            mixed = torch.bmm(share[:, None, :], exponentials.view(count, K, -1))[:, 0]
        best, index = mixed.max(1)
        better = best > self.best[tokens]
        self.argmax[tokens] = torch.where(better, index + start, self.argmax[tokens])
        self.best[tokens] = torch.where(better, best, self.best[tokens])
        self.entropy[tokens] += torch.special.entr(mixed).sum(1)


def posterior(log_prior: Tensor, nll: Tensor) -> tuple[Tensor, Tensor]:
    """Token loss [N] and posterior shares [N, K] from log priors and row losses [N, K]."""
    token = -torch.logsumexp(log_prior - nll, dim=1)
    share = torch.exp(log_prior - nll + token[:, None])
    # A token that no component can emit has no posterior: its shares are 0, not inf - inf.
    return token, torch.where(torch.isposinf(token)[:, None], 0.0, share)


def add_slope_gradient(gradients: Gradients, bent: Evaluated, upstream: Tensor) -> None:
    """Histogram the gradient in f(z) over the bins of a piecewise linear f; overwrites upstream, in fp64."""
    if gradients.sums is None or gradients.moments is None or bent.bins is None or bent.offset is None:
        return
    bins = bent.bins.flatten()
    gradients.sums.index_add_(0, bins, upstream.flatten())
    gradients.moments.index_add_(0, bins, upstream.mul_(bent.offset).flatten())


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


def add_products(
    vocabulary: Vocabulary,
    scores: Tensor,
    rows: Tensor,
    factor: Tensor,
    start: int,
    stop: int,
    gradients: Gradients,
    d_rows: Tensor | None,
) -> None:
    """The two gradient products of a chunk and a block, whose scores hold Q up to `lacking`.

    With the kernel, scores, W and W's gradient have their padding here.

    factor [rows] is g times `lacking`. d_rows [rows, D] takes the product with W before the factor.
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
        scaled = torch.mul(rows, factor[:, None], out=torch.empty_like(rows))
        total = gradients.weight if vocabulary.plan.kernel else gradients.weight[start:stop]
        add_wide(total, scores.t(), scaled, step=vocabulary.plan.slice_rows)


def add_bias(gradients: Gradients, scores: Tensor, upstream: Tensor) -> None:
    """The bias's gradient of a chunk whose scores are Q: the sum over rows of g Q."""
    if gradients.bias is None:
        return
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


def add_wide(total: Tensor, left: Tensor, right: Tensor, *, step: int) -> None:
    """total += left @ right, where total is as wide as the factors or wider."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif accumulates_wide(left):
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        # Only one slice of the product, `step` rows of it, exists in the narrow dtype.
        for first in range(0, left.shape[0], step):
            part = slice(first, first + step)
            total[part].add_(torch.mm(left[part], right))


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
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):
            _accumulates[key] = False
    return _accumulates[key]


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
