"""The matrix products of a pass, and the sums over all rows that they make.

    scores = H W^T        dH = g (Q W)        dW = Q^T (g H)        db = Q^T g

Products run in one dtype (`arguments.product_dtype`); W's gradient is summed in fp32 or wider. W is
multiplied as it is where it has that dtype. Where it has another, a copy is made once if that is small, else
some rows at a time, so that no copy of W leaves the workspace.

A piecewise-linear f has one slope a bin. Its gradient is a histogram over the bins of the gradient in f(z):
per bin the sum, and the sum times the place in the bin, both in fp64. The lift of a capped sigsoftmax goes
the same way, with one bin for all scores.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fullrank.ops.arguments import widest_dtype
from fullrank.ops.pointwise import Evaluated, Pointwise

COPIES = 256
"""Of a histogram on a GPU: where millions of values fall into a few hundred bins they wait for each other, so
every column adds to a copy that few others add to."""


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


def needs_of(
    rows: Tensor, log_prior: Tensor | None, weight: Tensor, bias: Tensor | None, trained: Tensor | None
) -> Needs:
    if not torch.is_grad_enabled():
        return Needs()
    tensors = (rows, log_prior, weight, bias, trained)
    return Needs(*(tensor is not None and tensor.requires_grad for tensor in tensors))


@dataclass
class Gradients:
    """Sums over all rows, in fp32 or wider unless W's is of few products; None where not asked for.

    A bin of a piecewise-linear f takes in a share of all scores, one by one: fp32 would lose digits.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    sums: Tensor | None = None
    """Per bin of f, the sum of the gradient in f(z)."""
    moments: Tensor | None = None
    unwritten: bool = False
    """W's holds nothing yet, not even zeros: the first product, of all of it, is written and not added."""

    @property
    def asked(self) -> bool:
        return any(item is not None for item in (self.weight, self.bias, self.sums))

    def trimmed(self, V: int) -> Gradients:
        """Without padding, and with zeros where no product was."""
        if self.unwritten and self.weight is not None:
            self.weight.zero_()
        weight = None if self.weight is None else self.weight[:V]
        bias = None if self.bias is None else self.bias[:V]
        return Gradients(weight=weight, bias=bias, sums=self.sums, moments=self.moments)

    def slopes(self, pointwise: Pointwise) -> Tensor | None:
        if self.sums is None or self.moments is None:
            return None
        return pointwise.gradient_of_trained(self.sums, self.moments)

    def add_slopes(self, bent: Evaluated, upstream: Tensor) -> None:
        """Histogram the gradient in f(z) over the bins of f; overwrites upstream, in fp64."""
        if self.sums is None or self.moments is None or bent.offset is None:
            return
        if bent.bins is None:
            self.moments.add_(upstream.mul_(bent.offset).sum())
            return
        own = Bins(bent.bins, len(self.sums), COPIES if upstream.is_cuda else 1)
        own.add(self.sums, upstream)
        own.add(self.moments, upstream.mul_(bent.offset))


class Bins:
    """The bins [rows, columns] of values, of B; overwritten where sums are by way of several copies."""

    def __init__(self, bins: Tensor, B: int, copies: int) -> None:
        self.shape = copies, B
        if copies > 1:
            bins.add_(torch.arange(bins.shape[1], device=bins.device).remainder_(copies).mul_(B))
        self.bins = bins.flatten()

    def add(self, sums: Tensor, values: Tensor) -> None:
        """To the sums [B] of their bins."""
        copies, B = self.shape
        if copies == 1:
            sums.index_add_(0, self.bins, values.flatten())
        else:
            found = sums.new_zeros(copies * B).index_add_(0, self.bins, values.flatten())
            sums.add_(found.view(copies, B).sum(0))


def zero_gradients(needs: Needs, weight: Tensor, pointwise: Pointwise, wide: torch.dtype) -> Gradients:
    V, trained = weight.shape[0], pointwise.trained
    bins = 0 if trained is None else len(trained)
    slopes = needs.slopes and trained is not None
    widest = widest_dtype(weight.device)
    return Gradients(
        weight=weight.new_zeros(weight.shape, dtype=wide) if needs.weight else None,
        bias=weight.new_zeros(V, dtype=wide) if needs.bias else None,
        sums=weight.new_zeros(bins, dtype=widest) if slopes else None,
        moments=weight.new_zeros(bins, dtype=widest) if slopes else None,
    )


def sums_of(sums: Gradients, pointwise: Pointwise) -> tuple[Tensor | None, ...]:
    return sums.weight, sums.bias, sums.slopes(pointwise)


def fake_sums(
    needs: Needs, weight: Tensor, slopes: Tensor | None, wide: torch.dtype
) -> tuple[Tensor | None, ...]:
    return (
        weight.new_empty(weight.shape, dtype=wide) if needs.weight else None,
        weight.new_empty(weight.shape[0], dtype=wide) if needs.bias else None,
        None
        if slopes is None or not needs.slopes
        else slopes.new_empty(slopes.shape, dtype=widest_dtype(slopes.device)),
    )


class Matrix:
    """W [V, D] as the products see it: in their dtype, all of it or `most` rows at a time."""

    def __init__(self, weight: Tensor, product: torch.dtype, *, most: int) -> None:
        self.V, self.D = weight.shape
        self.product = product
        self.most = self.V if weight.dtype == product else max(1, most)
        if self.most >= self.V:
            weight, self.most = weight.to(product), self.V
        # A matrix strided in both directions would be copied by every product, so it is copied once.
        self.weight = weight if 1 in weight.stride() or weight.numel() == 0 else weight.contiguous()

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        """(from, to, rows of W) over the rows start .. stop."""
        for first in range(start, stop, self.most):
            last = min(first + self.most, stop)
            yield first, last, self.weight[first:last].to(self.product)

    def score(self, rows: Tensor, out: Tensor, start: int) -> Tensor:
        """out [rows, block] = rows W^T for the block of W that begins at `start`."""
        for first, last, part in self.parts(start, start + out.shape[1]):
            torch.mm(rows, part.t(), out=out[:, first - start : last - start])
        return out

    def add_row_gradient(self, Q: Tensor, out: Tensor, start: int) -> None:
        """out [rows, D] += Q W for Q [rows, block], in the products' dtype or in a wider one. A Q of all
        V is written, and out need hold nothing before."""
        whole = self.most >= self.V == Q.shape[1]
        for first, last, part in self.parts(start, start + Q.shape[1]):
            some = Q[:, first - start : last - start]
            if out.dtype != self.product:
                out.add_(torch.mm(some, part))
            elif whole:
                torch.mm(some, part, out=out)
            else:
                out.addmm_(some, part)


def add_product(total: Tensor, left: Tensor, right: Tensor, *, step: int, first: bool = False) -> None:
    """total += left @ right, where total is as wide as the factors or wider; `first` says that total holds
    nothing yet. Where torch cannot add a narrow product to a wide sum, `step` rows of it exist at a time."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0 if first else 1)
    elif accumulates_wide(left.device, left.dtype):
        if first:
            torch.ops.aten.mm.dtype_out(left, right, total.dtype, out=total)
        else:
            torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        for start in range(0, left.shape[0], step):
            part = slice(start, start + step)
            product = torch.mm(left[part], right)
            total[part].copy_(product) if first else total[part].add_(product)


def add_bias(total: Tensor, Q: Tensor, upstream: Tensor | None) -> None:
    """The bias's gradient of rows Q [rows, V]: the sum over rows of g Q; g is 1 where None."""
    if upstream is None:
        upstream = torch.ones(Q.shape[0], dtype=total.dtype, device=Q.device)
    if total.dtype == Q.dtype:
        total.addmv_(Q.t(), upstream)
        return
    # g in two parts keeps its digits in the narrow dtype; eight columns are what a fast product takes.
    columns = Q.new_zeros(Q.shape[0], 8)
    columns[:, 0] = upstream
    columns[:, 1] = upstream - columns[:, 0]
    sums = torch.zeros(Q.shape[1], 8, dtype=total.dtype, device=Q.device)
    add_product(sums, Q.t(), columns, step=Q.shape[1])
    total.add_(sums[:, 0]).add_(sums[:, 1])


@functools.cache
def accumulates_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch adds a narrow product to an fp32 sum in one go on this device, tried once: not while a
    graph is captured, which needs a warm-up call anyway."""
    if device.type != "cuda":
        return False
    total, ones = (
        torch.full((16, 16), 2.0**-20, device=device),
        torch.ones(16, 16, dtype=dtype, device=device),
    )
    try:
        torch.ops.aten.addmm.dtype_out(total, ones, ones, torch.float32, out=total)
        kept = bool((total == 16.0 + 2.0**-20).all())
        torch.ops.aten.mm.dtype_out(ones, ones, torch.float32, out=total)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return kept


def scale(x: Tensor, factor: Tensor, *, out: Tensor) -> Tensor:
    """out = x * factor, rounded once, with a factor [R] for each row of x; out may be x."""
    scale_all([(x, out)], factor)
    return out


def scale_all(pairs: list[tuple[Tensor, Tensor]], numbers: Tensor, factor: Tensor | float = 1.0) -> None:
    """out = x * numbers * factor for every (x, out): numbers [] for all, or [R] for the rows of each x, which
    then have one shape."""
    tensors = [tensor for pair in pairs for tensor in pair]
    if pairs and numbers.is_cuda and numbers.dtype == torch.float32:
        # Not before it is needed: Triton takes its time to load and is not everywhere.
        from fullrank.ops import triton_base

        served = all(each.is_contiguous() and each.dtype in triton_base.DTYPES for each in tensors)
        if served and triton_base.obstacle(numbers.device, torch.float32) is None:
            # torch's own kernels for two dtypes are slow.
            if isinstance(factor, Tensor):
                numbers, factor = numbers * factor, 1.0
            return triton_base.scale_all(pairs, numbers, factor)
    for x, out in pairs:
        # One number stays a scalar: as a tensor of some axes it would widen a copy of x.
        each = numbers.view(-1, *[1] * (x.ndim - 1)) if numbers.ndim else numbers * factor
        torch.mul(x, each, out=out)
    return None
