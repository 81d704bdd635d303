"""The mixture loss with W split over the vocabulary between the processes of a group.

Process p holds rows [start, stop) of W. Rows [N, K, D], log prior and targets are the same everywhere. Over
its shard a process keeps of every row what `mixture/chunked.py` keeps of a block,

    m_p = max_v a_v,   S_p = sum_{v != y} exp(a_v - m_p),   t_p = a_y, or -inf where y lies elsewhere

and two reductions of N x K numbers join them, with the target still outside the sum:

    m = max_p m_p,   t = max_p t_p,   S = sum_p S_p exp(m_p - m)

so nll = log1p(S + expm1(t - m)) - (t - m), the posterior shares and the loss are known everywhere, and a
confident row keeps its digits as on one process. In the backward pass each process makes the gradient of its
rows of W and b. That of the K rows of a token is a sum over the shards: one reduction of N x K x D numbers,
in fp32 or wider, which no split over the vocabulary can avoid. The log prior's gradient needs none.

Four products for forward and backward: the scores are made once for the statistics and again for the
gradient. Three would take two reductions a chunk, in step on all processes; one product more, split between
the processes, is cheaper. The elementwise work runs in tiles on every device: the kernel makes statistics and
gradient in one go, and here the reduction lies between them.

All processes of the group call these functions together, with the same arguments but for `start`, `weight`
and `bias`. Without a group a lone process holds all of W. The gradients are those of the loss that every
process returns, not of the sum of these equal losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from fullrank.errors import FullrankError
from fullrank.ops.arguments import check_mixture, check_reduction, compute_dtype, product_dtype
from fullrank.ops.autograd import refuse_second_derivative, without_autocast
from fullrank.ops.decode.operator import mixture_log_probs
from fullrank.ops.mixture.chunked import recompute_gradient, statistics_of, vocabulary_for
from fullrank.ops.mixture.operator import TokenStats
from fullrank.ops.pointwise import IDENTITY, Pointwise, from_parts
from fullrank.ops.products import Gradients, Needs, zero_gradients
from fullrank.ops.reduce import Mode, Statistics, posterior, reduce_losses, zero_statistics
from fullrank.ops.workspace import Index, pieces


def split(V: int, processes: int) -> list[tuple[int, int]]:
    """(start, stop) of each process's vocabulary entries: as even as can be, the longer shards first."""
    if processes < 1 or processes > V:
        raise FullrankError(
            f"V={V} vocabulary entries cannot be split over {processes} processes: "
            "expected at least one process and at least one entry for each; start fewer processes"
        )
    size, longer = divmod(V, processes)
    starts = [index * size + min(index, longer) for index in range(processes + 1)]
    return list(pairwise(starts))


def place(group: ProcessGroup | None) -> tuple[int, int]:
    """Rank in the group and its size; a process on its own is a group of one."""
    if not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    rank = distributed.get_rank(group)
    if rank < 0:
        raise FullrankError("this process is not in the group: call only on the processes that share W")
    return rank, distributed.get_world_size(group)


def mixture_nll(
    rows: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor, *, start: int,
    bias: Tensor | None = None, pointwise: Pointwise = IDENTITY, reduction: str = "mean",
    token_weight: Tensor | None = None, ignore_index: int = -100, group: ProcessGroup | None = None,
    workspace: int | None = None,
) -> Tensor:  # fmt: skip
    """`ops.mixture_nll` with weight [V_local, D] and bias [V_local] the entries from `start` on.

    targets [N] are ids of the whole vocabulary. The loss is the same on every process.
    """
    product = _checked(rows, log_prior, weight, targets, bias)
    check_reduction(targets, reduction, token_weight)
    nll = _TokenLoss.apply(
        rows, log_prior, weight, bias, pointwise.trained, targets.long(),
        pointwise.kind, pointwise.constant, start, ignore_index, group, product, workspace,
    )  # fmt: skip
    weight_of = torch.ones_like(nll) if token_weight is None else token_weight.to(nll.dtype)
    return reduce_losses(nll, torch.where(targets != ignore_index, weight_of, 0.0), reduction)


@torch.no_grad()
def token_stats(
    rows: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor, *, start: int,
    bias: Tensor | None = None, pointwise: Pointwise = IDENTITY, ignore_index: int = -100,
    group: ProcessGroup | None = None, workspace: int | None = None,
) -> TokenStats:  # fmt: skip
    """Loss, most probable entry and entropy of every token's mixture, [N] each: two products."""
    product = _checked(rows, log_prior, weight, targets, bias)
    targets, (N, K, _) = targets.long(), rows.shape
    with without_autocast(rows.device):
        shard = Shard(rows, weight, bias, pointwise, product, workspace)
        joint = shard.join(targets, start, ignore_index, group)
        nll = posterior(log_prior.to(shard.vocabulary.wide), joint.nll)[0]
        best, entropy = torch.zeros_like(nll), torch.zeros_like(nll)
        argmax = torch.full_like(targets, -1)
        for index in shard.counted(targets, ignore_index):
            part = joint.at(index)
            prior = log_prior[index].to(nll.dtype)
            mode = Mode(prior.shape[0], prior)
            flat = Statistics(*(column.flatten() for column in part))
            recompute_gradient(
                shard.vocabulary, shard.chunk_rows(index), targets[index].repeat_interleave(K), flat,
                torch.zeros_like(flat.others), Gradients(), entry=flat.others, d_rows=None, mode=mode,
                share=prior.exp() / part.total,
            )  # fmt: skip
            best[index], entropy[index], argmax[index] = mode.best, mode.entropy, mode.argmax + start
    if place(group)[1] > 1 and N:
        own = best.clone()
        distributed.all_reduce(best, ReduceOp.MAX, group=group)
        distributed.all_reduce(entropy, ReduceOp.SUM, group=group)
        # Of equally probable entries the first, as on one process.
        argmax = torch.where(own == best, argmax, torch.iinfo(torch.int64).max)
        distributed.all_reduce(argmax, ReduceOp.MIN, group=group)
    return TokenStats(torch.where(targets == ignore_index, 0.0, nll), argmax, entropy)


@torch.no_grad()
def log_probs(
    rows: Tensor, log_prior: Tensor, weight: Tensor, *, start: int, bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY, group: ProcessGroup | None = None, workspace: int | None = None,
) -> Tensor:  # fmt: skip
    """Log-probabilities [N, V] on every process, without gradients, for evaluation of few tokens.

    This materialises N x V numbers and sends them to every process. Two products.
    """
    product = _checked(rows, log_prior, weight, None, bias)
    N = rows.shape[0]
    with without_autocast(rows.device):
        shard = Shard(rows, weight, bias, pointwise, product, workspace)
        # No target: the sum takes in the whole shard.
        nowhere = torch.full((N,), -1, dtype=torch.int64, device=rows.device)
        local = shard.statistics(nowhere, 0, None)
        joint = _join(local, nowhere, 0, weight.shape[0], -1, group)
        if bias is not None and bool(torch.isneginf(bias).all()):
            own = rows.new_full((N, weight.shape[0]), -torch.inf, dtype=shard.vocabulary.wide)
        else:
            # Each component's share of the probability that falls into this shard.
            inside = log_prior.to(shard.vocabulary.wide) + local.lse - joint.lse
            own = mixture_log_probs(
                rows.to(product), inside, weight.to(product), bias=bias, pointwise=pointwise,
                workspace=workspace,
            )  # fmt: skip
    return gather_shards(own.t(), start=start, group=group).t().contiguous()


@torch.no_grad()
def gather(own: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """A tensor of one shape on every process -> [processes, ...], the same everywhere; no gradients."""
    _, size = place(group)
    every = own.new_empty(size, *own.shape)
    if size == 1:
        every[0] = own
    elif own.numel():
        distributed.all_gather(list(every), own.contiguous(), group=group)
    return every


@torch.no_grad()
def gather_shards(shard: Tensor, *, start: int, group: ProcessGroup | None = None) -> Tensor:
    """[V_local, ...], a part of something with one row a vocabulary entry -> [V, ...] on every process."""
    _, size = place(group)
    if size == 1:
        return shard.contiguous()
    own = torch.tensor([start, shard.shape[0]], device=shard.device)
    starts, counts = gather(own, group).t().tolist()
    expected = [sum(counts[:index]) for index in range(size)]
    if starts != expected:
        raise FullrankError(
            f"the shards start at {starts} and have {counts} entries, expected starts {expected}: "
            "split the vocabulary with fullrank.ops.parallel.split"
        )
    # Shards differ by an entry, a collective wants equal ones.
    most = max(counts)
    padded = shard.new_zeros(most, *shard.shape[1:])
    padded[: shard.shape[0]] = shard
    every = gather(padded, group)
    return torch.cat([part[:count] for part, count in zip(every, counts, strict=True)])


def _checked(
    rows: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor | None, bias: Tensor | None
) -> torch.dtype:
    """The dtype of the products."""
    check_mixture(rows, log_prior, weight, targets, bias)
    return product_dtype(rows, weight)


class Shard:
    """Rows [N, K, D] against the entries of W that this process holds."""

    def __init__(self, rows: Tensor, *of_vocabulary: Any) -> None:
        """The other arguments are those of `vocabulary_for`."""
        self.rows, self.vocabulary = rows, vocabulary_for(rows, *of_vocabulary)

    def counted(self, targets: Tensor, ignore_index: int | None) -> Iterator[Index]:
        """Chunks of the tokens that count."""
        keep = torch.ones_like(targets, dtype=torch.bool) if ignore_index is None else targets != ignore_index
        positions = None if bool(keep.all()) else keep.nonzero()[:, 0]
        return pieces(targets.shape[0], positions, self.vocabulary.plan.tokens)

    def chunk_rows(self, index: Index) -> Tensor:
        return self.rows[index].flatten(0, 1).to(self.vocabulary.product)

    def statistics(self, targets: Tensor, start: int, ignore_index: int | None) -> Statistics:
        """What every row keeps of this shard's scores, [N, K] each; one product."""
        N, K, _ = self.rows.shape
        found = zero_statistics(self.rows, self.vocabulary.wide, N, K)
        # Ignored tokens are found before the shift: a shifted target may well equal ignore_index.
        for index in self.counted(targets, ignore_index):
            column = (targets[index] - start).repeat_interleave(K)
            found.put(index, statistics_of(self.vocabulary, self.chunk_rows(index), column))
        return found

    def join(self, targets: Tensor, start: int, ignore_index: int, group: ProcessGroup | None) -> Statistics:
        """The statistics of whole rows, the same on every process."""
        local = self.statistics(targets, start, ignore_index)
        return _join(local, targets, start, self.vocabulary.V, ignore_index, group)


def _join(
    local: Statistics, targets: Tensor, start: int, V: int, ignore_index: int, group: ProcessGroup | None
) -> Statistics:
    """The statistics of whole rows, the same on every process; raises for a target that no shard holds."""
    inside = (targets >= start) & (targets < start + V)
    others, owners = local.others, inside.to(local.others.dtype)
    maximum, target = local.maximum, local.target
    if place(group)[1] > 1 and targets.numel():
        peaks = torch.stack([maximum, target])
        distributed.all_reduce(peaks, ReduceOp.MAX, group=group)
        maximum, target = peaks.unbind()
        # A shard may be masked from end to end, and so may all of them.
        anchor = torch.where(torch.isneginf(maximum), 0.0, maximum)
        sums = torch.cat([others * torch.exp(local.maximum - anchor), owners[:, None]], dim=1)
        distributed.all_reduce(sums, ReduceOp.SUM, group=group)
        others, owners = sums[:, :-1], sums[:, -1]
    wrong = (owners != 1) & (targets != ignore_index)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0, 0])
        raise FullrankError(
            f"target {int(targets[first])} lies in {int(owners[first])} shards of W, expected exactly one: "
            "check the tokeniser against the head, and each process's start against "
            "fullrank.ops.parallel.split"
        )
    return Statistics(maximum, others, target)


class _TokenLoss(torch.autograd.Function):
    """Rows [N, K, D] to nll [N], 0 where ignored."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, log_prior: Tensor, weight: Tensor, bias: Tensor | None,
        slopes: Tensor | None, targets: Tensor, *options: Any,
    ) -> Tensor:  # fmt: skip
        kind, constant, start, ignore_index, group, product, workspace = options
        with without_autocast(rows.device):
            shard = Shard(rows, weight, bias, from_parts(kind, constant, slopes), product, workspace)
            joint = shard.join(targets, start, ignore_index, group)
            nll = posterior(log_prior.to(shard.vocabulary.wide), joint.nll)[0]
        ctx.save_for_backward(rows, log_prior, weight, bias, slopes, targets, *joint)
        ctx.options = options
        return torch.where(targets != ignore_index, nll, 0.0)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        rows, log_prior, weight, bias, slopes, targets, *columns = ctx.saved_tensors
        kind, constant, start, ignore_index, group, product, workspace = ctx.options
        wants = ctx.needs_input_grad
        needs = Needs(rows=wants[0], prior=wants[1], weight=wants[2], bias=wants[3], slopes=wants[4])
        pointwise = from_parts(kind, constant, slopes)
        joint, wide, (_, K, D) = Statistics(*columns), compute_dtype(product), rows.shape
        # As on one process, made for factors of at most 1 and scaled at the end: in fp16 a row times 1/N
        # would be a subnormal number.
        factor = upstream[0]
        largest = factor.abs().amax() if factor.numel() else factor.new_ones(())
        largest = torch.where(largest == 0, 1.0, largest)
        share = posterior(log_prior.to(wide), joint.nll)[1] * (factor / largest)[:, None]
        share = torch.where((targets != ignore_index)[:, None], share, 0.0)
        gradients = zero_gradients(needs, weight, pointwise, wide)
        d_rows = rows.new_zeros(rows.shape, dtype=wide) if needs.rows else None
        if needs.products:
            with without_autocast(rows.device):
                shard = Shard(rows, weight, bias, pointwise, product, workspace)
                vocabulary = shard.vocabulary
                for index in shard.counted(targets, ignore_index):
                    part = Statistics(*(column[index].flatten() for column in joint))
                    chunk, each = shard.chunk_rows(index), share[index].flatten()
                    d_chunk = vocabulary.row_gradient(chunk) if needs.rows else None
                    recompute_gradient(
                        vocabulary, chunk, (targets[index] - start).repeat_interleave(K), part, each,
                        gradients, entry=part.deficit, d_rows=d_chunk,
                    )  # fmt: skip
                    if d_rows is not None and d_chunk is not None:
                        scaled = d_chunk * (each * vocabulary.lacking(part.total))[:, None]
                        d_rows[index] = scaled.view(-1, K, D)
        d_slopes = gradients.slopes(pointwise)
        if place(group)[1] > 1:
            for shared in (d_rows, d_slopes):
                if shared is not None and shared.numel():
                    distributed.all_reduce(shared, ReduceOp.SUM, group=group)
        d_prior = -share if needs.prior else None
        made = (d_rows, d_prior, gradients.weight, gradients.bias, d_slopes)
        inputs = (rows, log_prior, weight, bias, slopes)
        return (
            *(
                None if gradient is None else gradient.mul_(largest).to(tensor.dtype)
                for gradient, tensor in zip(made, inputs, strict=True)
            ),
            *[None] * (1 + len(ctx.options)),
        )
