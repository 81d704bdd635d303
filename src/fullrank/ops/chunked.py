"""The exact losses and gradients in a bounded workspace, on any device: loops of chunks over `tiles.py`.

    mixture_forward   loss of every token and, when its weight is known, every gradient: three products.
                      Without gradients one; with W frozen two; with rows skipped (`skipping.py`) fewer.
    rows_backward     gradients for upstream gradients that only the backward pass knows: three more products.

The target score and the normaliser of single rows are `mixture_forward` with K = 1 and its statistics.

Nothing here knows autograd; `autograd.py` makes operators of these. Ignored tokens are left out before any
product, so what their rows hold does not matter, not even NaN. On CUDA the elementwise work is one kernel
(`triton.py`) where that serves: the same loop, the same products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fullrank.ops.gradients import Gradients, Needs, add_slope_gradient, empty_gradients
from fullrank.ops.pointwise import Pointwise
from fullrank.ops.products import add_bias, add_products
from fullrank.ops.reference import compute_dtype
from fullrank.ops.scaling import scale_rows
from fullrank.ops.skipping import compact, rows_to_keep
from fullrank.ops.statistics import Mode, Statistics, posterior
from fullrank.ops.targets import Asked, capturing
from fullrank.ops.tiles import finish_tile, recompute_gradient, statistics_of
from fullrank.ops.vocabulary import Vocabulary, vocabulary_for

Index = slice | Tensor


@dataclass
class MixtureForward:
    """All that one pass over a batch of tokens makes; gradients are those of sum_i weight_i nll_i."""

    nll: Tensor
    """[N], without weights."""
    statistics: Statistics | None
    """[N, K] each, with late weights."""
    argmax: Tensor
    """[N], -1 for ignored tokens; empty where not asked for."""
    entropy: Tensor
    """[N] nats; empty where not asked for."""
    d_rows: Tensor | None
    """The gradient of the rows; with late weights Q W without the target's part and the factor."""
    d_prior: Tensor | None
    gradients: Gradients


def chunks(targets: Tensor, ignore_index: int | None, size: int) -> Iterator[Index]:
    """Index every counted token, in pieces."""
    positions = None
    if ignore_index is not None:
        counted = targets != ignore_index
        if not bool(counted.all()):
            positions = counted.nonzero()[:, 0]
    return pieces(targets.shape[0], positions, size)


def pieces(N: int, positions: Tensor | None, size: int) -> Iterator[Index]:
    """Pieces of the positions, or slices of all N tokens where none are given."""
    if positions is not None:
        # An empty tensor splits into one empty piece, not into none.
        yield from positions.split(size) if positions.numel() else ()
        return
    for start in range(0, N, size):
        yield slice(start, min(start + size, N))


def tokens_at(index: Index, within: Tensor) -> Tensor:
    """Which of all N tokens the tokens `within` a piece are."""
    return within + index.start if isinstance(index, slice) else index[within]


@dataclass
class Chunk:
    """Some whole tokens with all their rows."""

    rows: Tensor
    """[tokens * K, D]"""
    targets: Tensor
    """[tokens * K]"""
    log_prior: Tensor
    """[tokens, K]"""
    weight: Tensor | None
    """[tokens]; None is 1 for every token."""
    late: bool
    """The tokens' factors come with the backward pass: until then every row counts 1."""

    def upstream(self, tokens: slice, row_nll: Tensor) -> Tensor:
        """g of each row of some tokens: the token's weight times the row's posterior share."""
        if self.late:
            return torch.ones_like(row_nll)
        prior = self.log_prior[tokens]
        _, share = posterior(prior, row_nll.view(prior.shape))
        return self.weigh(tokens, share)

    def weigh(self, tokens: slice, share: Tensor) -> Tensor:
        """The same from posterior shares [tokens, K]."""
        if self.late:
            return torch.ones_like(share).flatten()
        return (share if self.weight is None else share * self.weight[tokens, None]).flatten()

    def entry(self, statistics: Statistics) -> Tensor:
        """What stands at the target: with late factors nothing, `add_own` brings it."""
        return torch.zeros_like(statistics.others) if self.late else statistics.deficit


def score_and_keep(
    vocabulary: Vocabulary,
    chunk: Chunk,
    gradients: Gradients,
    mode: Mode | None,
    *,
    wanted: bool,
    scored: bool = False,
) -> Statistics:
    """One product; leaves Q (up to `lacking`) in the buffer where `wanted`. Needs all V scores in it.

    `scored` says that the product is done.
    """
    if scored:
        scores = vocabulary.kept_scores(chunk.rows.shape[0])[:, : vocabulary.V]
    else:
        scores = vocabulary.score(chunk.rows, 0, vocabulary.V)
    if vocabulary.plan.kernel:
        return vocabulary.run_kernel(scores, chunk.targets, gradient=wanted, late=chunk.late)
    parts = []
    for tile in vocabulary.tiles(scores.shape[0]):
        tokens = slice(tile.start // vocabulary.K, tile.stop // vocabulary.K)
        bent = vocabulary.bend(scores[tile], 0, vocabulary.V, gradient=wanted)
        y = chunk.targets[tile, None]
        maximum = bent.value.amax(1)
        target = bent.value.gather(1, y)[:, 0]
        bent.value.sub_(maximum[:, None]).exp_()
        own = bent.value.gather(1, y)
        others = bent.value.scatter_(1, y, 0.0).sum(1)
        statistics = Statistics(maximum, others, target)
        if mode is not None:
            share = chunk.log_prior[tokens].exp() / statistics.total.view(-1, vocabulary.K)
            mode.add(tokens, bent.value.scatter_(1, y, own), share, 0)
        if wanted:
            bent.value.scatter_(1, y, chunk.entry(statistics)[:, None])
            upstream = chunk.upstream(tokens, statistics.nll)
            finish_tile(
                vocabulary, scores[tile], bent, statistics.total, upstream, gradients, 0, vocabulary.V
            )
        parts.append(statistics)
    return Statistics(*(torch.cat(column) for column in zip(*parts, strict=True)))


def mixture_forward(
    rows: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    asked: Asked,
    bias: Tensor | None,
    token_weight: Tensor | None,
    pointwise: Pointwise,
    *,
    needs: Needs,
    late: bool,
    stats: bool,
    workspace: int | None,
    impl: str = "auto",
    row_skip: float = 0.0,
) -> MixtureForward:
    """rows [N, K, D], log_prior [N, K], targets [N] that were asked about; products run in the dtype of rows.

    `late`: the upstream gradient of each token is not known yet. Then only what is linear in it row by row
    can be made now, which is Q W where all else is frozen; `rows_backward` makes the rest.

    Rows with a posterior share of at most `row_skip` may be left out of the gradient products. None are where
    that saves nothing: with late factors, with one component, in a captured graph, which cannot count them,
    and where a cut vocabulary is scored again for all rows to get statistics or the gradient of f's slopes.
    """
    N, K, D = rows.shape
    wide = compute_dtype(rows.dtype)
    if late and not needs.rows_alone:
        needs = Needs()
    skips = row_skip > 0 and K > 1 and needs.products and not late and not capturing(rows)
    vocabulary = vocabulary_for(
        rows, K, weight, bias, pointwise, workspace, impl=impl, stats=stats, skip=skips
    )
    skips = skips and (vocabulary.kept or not (stats or needs.slopes))
    deferred = skips and vocabulary.plan.kernel
    ahead = vocabulary.plan.kernel and asked.all_expected
    if ahead:
        # Before anything else: the device works on this product while the host waits for what it saw of the
        # targets.
        vocabulary.score(rows[: vocabulary.plan.tokens].reshape(-1, D), 0, vocabulary.V)
    out = MixtureForward(
        nll=rows.new_zeros(N, dtype=wide),
        statistics=Statistics(*(rows.new_zeros(N, K, dtype=wide) for _ in range(3))) if late else None,
        argmax=rows.new_full((N if stats else 0,), -1, dtype=torch.int64),
        entropy=rows.new_zeros(N if stats else 0, dtype=wide),
        d_rows=rows.new_zeros(rows.shape) if needs.rows else None,
        d_prior=rows.new_zeros(N, K, dtype=wide) if needs.prior and not late else None,
        gradients=empty_gradients(needs, weight, pointwise, wide, vocabulary.entries),
    )
    # The bias's gradient waits until it is known which rows are kept.
    in_tiles = replace(out.gradients, bias=None) if skips else out.gradients
    counted = asked.answer()
    targets = counted.targets
    for number, index in enumerate(pieces(N, counted.positions, vocabulary.plan.tokens)):
        chunk = Chunk(
            rows=rows[index].reshape(-1, D),
            targets=targets[index, None].expand(-1, K).flatten(),
            log_prior=log_prior[index].to(wide),
            weight=None if token_weight is None else token_weight[index].to(wide),
            late=late,
        )
        shape = chunk.log_prior.shape
        mode = Mode(shape[0], chunk.log_prior) if stats else None
        if vocabulary.kept:
            # Where rows are skipped the kernel makes Q when it is known of which.
            statistics = score_and_keep(
                vocabulary, chunk, in_tiles, mode, wanted=needs.products and not deferred,
                scored=ahead and number == 0 and counted.positions is None,
            )  # fmt: skip
        else:
            statistics = statistics_of(vocabulary, chunk.rows, chunk.targets)
        nll, posterior_share = vocabulary.mix(chunk.log_prior, statistics)
        upstream = chunk.weigh(slice(None), posterior_share)
        factor = upstream if vocabulary.plan.kernel else upstream * vocabulary.lacking(statistics.total)
        kept = rows_to_keep(posterior_share, row_skip, D, moving=not deferred) if skips else None
        some: Index = slice(None) if kept is None else kept
        used = chunk.rows[some]
        in_place = kept is None and vocabulary.kept and isinstance(index, slice)
        d_used: Tensor | None = None
        if out.d_rows is not None:
            d_used = out.d_rows[index].view(-1, D) if in_place else vocabulary.gradient_of_rows(used)
        if used.shape[0] == 0:
            pass
        elif not vocabulary.kept and (needs.products or stats):
            share = chunk.log_prior.exp() / statistics.total.view(shape)
            part = Statistics(*(column[some] for column in statistics))
            recompute_gradient(
                vocabulary, used, chunk.targets[some], part, upstream[some], out.gradients,
                entry=chunk.entry(part), d_rows=d_used, mode=mode, share=share,
            )  # fmt: skip
        elif deferred and kept is not None:
            add_kept(vocabulary, chunk, statistics, factor, kept, out.gradients, d_used)
        elif needs.products:
            if deferred:
                vocabulary.finish_kernel(chunk.targets, statistics)
            scores = vocabulary.kept_scores(chunk.rows.shape[0])
            if kept is not None:
                scores = compact(scores, kept, vocabulary.plan.copy_rows)
            if vocabulary.plan.kernel or skips:
                add_bias(out.gradients, scores, factor[some])
            add_products(vocabulary, scores, used, factor[some], 0, vocabulary.V, out.gradients, d_used)
        out.nll[index] = nll
        if out.statistics is not None:
            for whole, column in zip(out.statistics, statistics, strict=True):
                whole[index] = column.view(shape)
        if mode is not None:
            out.argmax[index], out.entropy[index] = mode.argmax, mode.entropy
        if out.d_prior is not None:
            out.d_prior[index] = upstream.view(shape).neg()
        if out.d_rows is not None and d_used is not None:
            scale_rows(d_used, factor[some], out=d_used)
            if kept is not None:
                out.d_rows[tokens_at(index, kept // K), kept % K] = d_used.to(rows.dtype)
            elif not in_place:
                out.d_rows[index] = d_used.view(*shape, D).to(rows.dtype)
    out.gradients = out.gradients.trimmed(vocabulary.V)
    return out


def add_kept(
    vocabulary: Vocabulary,
    chunk: Chunk,
    statistics: Statistics,
    factor: Tensor,
    kept: Tensor,
    gradients: Gradients,
    d_kept: Tensor | None,
) -> None:
    """The gradient products of the kept rows of a chunk whose scores are in the buffer, some rows at a time.

    d_kept [kept, D] takes the product with W before the factor.
    """
    step = vocabulary.plan.copy_rows
    room = vocabulary.weight.new_empty(min(step, kept.shape[0]), vocabulary.plan.stride)
    for start in range(0, kept.shape[0], step):
        some = kept[start : start + step]
        scores = vocabulary.finish_kernel(chunk.targets, statistics, kept=some, out=room[: some.shape[0]])
        add_bias(gradients, scores, factor[some])
        part = None if d_kept is None else d_kept[start : start + step]
        add_products(vocabulary, scores, chunk.rows[some], factor[some], 0, vocabulary.V, gradients, part)


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
