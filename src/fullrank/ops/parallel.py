"""The mixture loss with W split over the vocabulary between the processes of a group.

Process p holds rows [start, stop) of W. Rows [N, K, D], log prior and targets are the same everywhere. Over
its shard a process keeps of every row what `tiles.py` keeps of a block,

    m_p = max_v a_v,   S_p = sum_{v != y} exp(a_v - m_p),   t_p = a_y, or -inf where y lies elsewhere

and two reductions of N x K numbers join them, with the target still outside the sum:

    m = max_p m_p,   t = max_p t_p,   S = sum_p S_p exp(m_p - m)

so nll = log1p(S + expm1(t - m)) - (t - m), the posterior shares and the loss are known everywhere, and a
confident row keeps its digits as on one process. In the backward pass each process makes the gradient of its
rows of W and b. That of the K rows of a token is a sum over the shards: one reduction of N x K x D numbers,
in fp32 or wider, which no split over the vocabulary can avoid. The log prior's gradient needs none.

Four products for forward and backward: the scores are made once for the statistics and again for the
gradient. Three would do if a chunk's scores were kept until the statistics are joined, at the price of two
reductions a chunk, in step on all processes whatever the sizes of their shards; one product more, split
between the processes, is cheaper than that. The elementwise work runs in tiles on every device: the kernel
of `score_kernels.py` makes statistics and gradient in one go, and here the reduction lies between them.

All processes of the group call these functions together, with the same arguments but for `start`, `weight`
and `bias`. Without a group a lone process holds all of W. The gradients are those of the loss that every
process returns, not of the sum of these equal losses.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from fullrank.errors import FullrankError
from fullrank.ops.arguments import check_mixture, check_reduction, product_dtype
from fullrank.ops.chunks import chunks
from fullrank.ops.decode import operator as log_probs_module
from fullrank.ops.gradients import Gradients, Needs, empty_gradients
from fullrank.ops.mixture.operator import TokenStats
from fullrank.ops.mixture.reference import compute_dtype
from fullrank.ops.pointwise import IDENTITY, Pointwise, from_parts
from fullrank.ops.statistics import Mode, Statistics, posterior
from fullrank.ops.tiles import recompute_gradient, statistics_of
from fullrank.ops.vocabulary import Vocabulary, vocabulary_for
from fullrank.ops.workspace import default_workspace


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
    rows: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    start: int,
    bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY,
    reduction: str = "mean",
    token_weight: Tensor | None = None,
    ignore_index: int = -100,
    group: ProcessGroup | None = None,
    workspace: int | None = None,
) -> Tensor:
    """`ops.mixture_nll` with weight [V_local, D] and bias [V_local] the entries from `start` on.

    targets [N] are ids of the whole vocabulary. The loss is the same on every process.
    """
    rows = _checked(rows, log_prior, weight, targets, bias)
    check_reduction(targets, reduction, token_weight)
    nll = _TokenLoss.apply(
        rows, log_prior, weight, bias, pointwise.trained, targets.long(),
        pointwise.kind, pointwise.constant, start, ignore_index, group, _workspace(workspace, rows),
    )  # fmt: skip
    share = torch.ones_like(nll) if token_weight is None else token_weight.to(nll.dtype)
    share = torch.where(targets != ignore_index, share, 0.0)
    # A token that is given no weight counts nothing, even at an infinite loss.
    weighted = torch.where(share == 0, 0.0, nll) * share
    if reduction == "none":
        return weighted
    if reduction == "sum":
        return weighted.sum()
    # Nothing counted, nothing lost: loss 0 and gradient 0, not 0/0.
    mass = share.sum()
    return weighted.sum() * torch.where(mass == 0, 0.0, 1.0 / mass)


@torch.no_grad()
def token_stats(
    rows: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    start: int,
    bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY,
    ignore_index: int = -100,
    group: ProcessGroup | None = None,
    workspace: int | None = None,
) -> TokenStats:
    """Loss, most probable entry and entropy of every token's mixture, [N] each: two products."""
    rows = _checked(rows, log_prior, weight, targets, bias)
    targets, (N, K, D) = targets.long(), rows.shape
    with torch.autocast(rows.device.type, enabled=False):
        vocabulary = vocabulary_for(rows, K, weight, bias, pointwise, _workspace(workspace, rows))
        local = _shard_statistics(vocabulary, rows, targets, start, ignore_index)
        joint = _join(local, targets, start, weight.shape[0], ignore_index, group)
        nll = posterior(log_prior.to(vocabulary.wide), joint.nll)[0]
        best, entropy = torch.zeros_like(nll), torch.zeros_like(nll)
        argmax = torch.full_like(targets, -1)
        for index in chunks(targets, ignore_index, vocabulary.plan.tokens):
            part = Statistics(*(column[index].flatten() for column in joint))
            prior = log_prior[index].to(vocabulary.wide)
            mode = Mode(prior.shape[0], prior)
            recompute_gradient(
                vocabulary, rows[index].reshape(-1, D), targets[index].repeat_interleave(K), part,
                torch.zeros_like(part.others), Gradients(None, None, None, None), entry=part.others,
                d_rows=None, mode=mode, share=prior.exp() / part.total.view(prior.shape),
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
    rows: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    *,
    start: int,
    bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY,
    group: ProcessGroup | None = None,
    workspace: int | None = None,
) -> Tensor:
    """Log-probabilities [N, V] on every process, without gradients, for evaluation of few tokens.

    This materialises N x V numbers and sends them to every process. Two products.
    """
    rows = _checked(rows, log_prior, weight, None, bias)
    N, K, _ = rows.shape
    with torch.autocast(rows.device.type, enabled=False):
        vocabulary = vocabulary_for(rows, K, weight, bias, pointwise, _workspace(workspace, rows))
        # No target: the sum takes in the whole shard.
        nowhere = torch.full((N,), -1, dtype=torch.int64, device=rows.device)
        local = _shard_statistics(vocabulary, rows, nowhere, 0, None)
        joint = _join(local, nowhere, 0, weight.shape[0], -1, group)
        if bias is not None and bool(torch.isneginf(bias).all()):
            own = rows.new_full((N, weight.shape[0]), -torch.inf, dtype=vocabulary.wide)
        else:
            # Each component's share of the probability that falls into this shard.
            inside = log_prior.to(vocabulary.wide) + local.lse - joint.lse
            own = log_probs_module.mixture_log_probs(
                rows, inside, weight.to(rows.dtype), bias=bias, pointwise=pointwise, workspace=workspace
            )
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
) -> Tensor:
    """The rows in the dtype of the products."""
    check_mixture(rows, log_prior, weight, targets, bias)
    return rows.to(product_dtype(rows, weight))


def _workspace(workspace: int | None, rows: Tensor) -> int:
    return default_workspace(rows.device) if workspace is None else workspace


def _shard_statistics(
    vocabulary: Vocabulary, rows: Tensor, targets: Tensor, start: int, ignore_index: int | None
) -> Statistics:
    """What every row keeps of this shard's scores, [N, K] each; one product."""
    N, K, D = rows.shape
    out = Statistics(*(rows.new_zeros(N, K, dtype=vocabulary.wide) for _ in range(3)))
    # Ignored tokens are found before the shift: a shifted target may well equal ignore_index.
    for index in chunks(targets, ignore_index, vocabulary.plan.tokens):
        column = (targets[index] - start).repeat_interleave(K)
        part = statistics_of(vocabulary, rows[index].reshape(-1, D), column)
        for whole, piece in zip(out, part, strict=True):
            whole[index] = piece.view(-1, K)
    return out


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
        ctx: Any,
        rows: Tensor,
        log_prior: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        slopes: Tensor | None,
        targets: Tensor,
        *options: Any,
    ) -> Tensor:
        kind, constant, start, ignore_index, group, workspace = options
        with torch.autocast(rows.device.type, enabled=False):
            pointwise = from_parts(kind, constant, slopes)
            vocabulary = vocabulary_for(rows, rows.shape[1], weight, bias, pointwise, workspace)
            local = _shard_statistics(vocabulary, rows, targets, start, ignore_index)
            joint = _join(local, targets, start, weight.shape[0], ignore_index, group)
            nll = posterior(log_prior.to(vocabulary.wide), joint.nll)[0]
        ctx.save_for_backward(rows, log_prior, weight, bias, slopes, targets, *joint)
        ctx.options = options
        return torch.where(targets != ignore_index, nll, 0.0)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise FullrankError(
                "the vocabulary-parallel loss is differentiable once, got backward(create_graph=True): "
                "use fullrank.mixture_nll(impl='reference') on one process for second derivatives"
            )
        rows, log_prior, weight, bias, slopes, targets, *columns = ctx.saved_tensors
        kind, constant, start, ignore_index, group, workspace = ctx.options
        wants = ctx.needs_input_grad
        needs = Needs(rows=wants[0], prior=wants[1], weight=wants[2], bias=wants[3], slopes=wants[4])
        pointwise = from_parts(kind, constant, slopes)
        joint, wide, (_, K, D) = Statistics(*columns), compute_dtype(rows.dtype), rows.shape
        # As on one process, made for factors of at most 1 and scaled at the end: in fp16 a row times 1/N
        # would be a subnormal number.
        factor = upstream[0]
        largest = factor.abs().amax() if factor.numel() else factor.new_ones(())
        largest = torch.where(largest == 0, 1.0, largest)
        share = posterior(log_prior.to(wide), joint.nll)[1] * (factor / largest)[:, None]
        share = torch.where((targets != ignore_index)[:, None], share, 0.0)
        gradients = empty_gradients(needs, weight, pointwise, wide)
        d_rows = rows.new_zeros(rows.shape, dtype=wide) if needs.rows else None
        if needs.products:
            with torch.autocast(rows.device.type, enabled=False):
                vocabulary = vocabulary_for(rows, K, weight, bias, pointwise, workspace)
                for index in chunks(targets, ignore_index, vocabulary.plan.tokens):
                    chunk = rows[index].reshape(-1, D)
                    part = Statistics(*(column[index].flatten() for column in joint))
                    d_chunk = vocabulary.gradient_of_rows(chunk) if needs.rows else None
                    each = share[index].flatten()
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
