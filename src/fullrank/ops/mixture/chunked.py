"""The exact losses and gradients in a bounded workspace, on any device: loops of chunks over `tiles.py`.

    mixture_forward   loss of every token and, when its weight is known, every gradient: three products.
                      Without gradients one; with W frozen two; with rows skipped (`skipping.py`) fewer.
    rows_backward     gradients for upstream gradients that only the backward pass knows: three more products.

The target score and the normaliser of single rows are `mixture_forward` with K = 1 and its statistics.

Nothing here knows autograd; `autograd.py` makes operators of these. Ignored tokens are left out before any
product, so what their rows hold does not matter, not even NaN. On CUDA the elementwise work is one kernel
(`score_kernels.py`) where that serves: the same loop, the same products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from fullrank.ops.chunks import Chunk, Index, at, pieces, rows_at
from fullrank.ops.gradients import Gradients, Needs, empty_gradients
from fullrank.ops.pointwise import Pointwise
from fullrank.ops.products import add_bias, add_products, add_rows
from fullrank.ops.scaling import scale_rows
from fullrank.ops.skipping import Kept, compact, rows_to_keep
from fullrank.ops.statistics import Mode, Statistics
from fullrank.ops.targets import Asked, Counted, capturing
from fullrank.ops.tiles import finish_tile, recompute_gradient, statistics_of
from fullrank.ops.vocabulary import Vocabulary, vocabulary_for

# A sum of so many products is rounded to bf16 along with each of them: one rounding more than a sum in fp32,
# for half the memory of W's gradient. fp16 could not hold a sum over tokens.
NARROW_CHUNKS = 2


@dataclass
class MixtureForward:
    """All that one pass over a batch of tokens makes; gradients are those of sum_i weight_i nll_i."""

    nll: Tensor
    """[N], without weights."""
    statistics: Statistics | None
    """[N, K] each, with late weights."""
    argmax: Tensor | None
    """[N], -1 for ignored tokens; None where not asked for."""
    entropy: Tensor | None
    """[N] nats; None where not asked for."""
    d_rows: Tensor | None
    """The gradient of the rows; with late weights Q W without the target's part and the factor."""
    d_prior: Tensor | None
    gradients: Gradients


def score_and_keep(
    vocabulary: Vocabulary,
    chunk: Chunk,
    scores: Tensor,
    gradients: Gradients,
    mode: Mode | None,
    *,
    wanted: bool,
    lacking: bool,
) -> Statistics:
    """Of all V scores in the buffer; leaves Q (up to `lacking`) there where `wanted`. `lacking` says that the
    kernel may leave 1 / total to the factor."""
    if vocabulary.plan.kernel:
        return vocabulary.run_kernel(scores, chunk.targets, gradient=wanted, late=chunk.late, lacking=lacking)
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
    narrow: bool = False,
) -> MixtureForward:
    """rows [N, K, D], log_prior [N, K], targets [N] that were asked about; products run in the dtype of rows.

    `late`: the upstream gradient of each token is not known yet. Then only what is linear in it row by row
    can be made now, which is Q W where all else is frozen; `rows_backward` makes the rest.

    Rows with a posterior share of at most `row_skip` may be left out of the gradient products. None are where
    that saves nothing: with late factors, with one component, in a captured graph, which cannot count them,
    and where a cut vocabulary is scored again for all rows to get statistics or the gradient of f's slopes.

    `narrow`: W's gradient may be in bf16 where W is and `NARROW_CHUNKS` products make all of it.
    """
    K = rows.shape[1]
    if late and not needs.rows_alone:
        needs = Needs()
    skips = row_skip > 0 and K > 1 and needs.products and not late and not capturing(rows)
    vocabulary = vocabulary_for(
        rows, K, weight, bias, pointwise, workspace, impl=impl, stats=stats, skip=skips
    )
    work = Pass(
        vocabulary=vocabulary, needs=needs, late=late, stats=stats, narrow=narrow,
        row_skip=row_skip if skips and (vocabulary.kept or not (stats or needs.slopes)) else 0.0,
    )  # fmt: skip

    def run(counted: Counted) -> MixtureForward:
        return work.run(rows, log_prior, weight, token_weight, counted, asked)

    if not (vocabulary.plan.kernel and asked.all_expected):
        return run(asked.answer())
    # As if no token were ignored, before the host has looked: the device need not wait for that.
    out = run(asked.expected())
    if asked.answer().positions is None:
        return out
    del out, work.out
    return run(asked.answer())


@dataclass(kw_only=True)
class Scored:
    """A chunk whose losses are known and whose gradients are to be made."""

    chunk: Chunk
    statistics: Statistics | None
    """None where the losses are all that is asked of them."""
    slot: int
    """Of the buffer that holds its scores."""
    share: Tensor | None
    """[tokens, K], the rows' posterior shares; None where they are 1 or already in Q."""
    factor: Tensor | None
    """The same with what a kernel left lacking."""
    mode: Mode | None
    kept: Kept | None
    """Asked which rows are kept; Q is not made yet. None: all are, or torch finds them."""

    @property
    def known(self) -> Statistics:
        assert self.statistics is not None
        return self.statistics


@dataclass(kw_only=True)
class Pass:
    """One pass over the tokens, a chunk at a time."""

    vocabulary: Vocabulary
    needs: Needs
    late: bool
    stats: bool
    row_skip: float
    """0 where no row is skipped."""
    narrow: bool
    out: MixtureForward = field(init=False)

    def run(
        self,
        rows: Tensor,
        log_prior: Tensor,
        weight: Tensor,
        token_weight: Tensor | None,
        counted: Counted,
        asked: Asked,
    ) -> MixtureForward:
        """Over the tokens that count; `out` is made anew."""
        started = self.started(rows, log_prior, token_weight, counted)
        # Before anything else, so that a device has something to do.
        first = next(started, None)
        asked.fetch()
        self.out = self.empty_out(rows, weight, counted)
        waiting: Scored | None = None
        for chunk, scores in chain(() if first is None else (first,), started):
            scored = self.score(chunk, scores)
            if scored.kept is None:
                self.finish(scored)
                continue
            if waiting is not None:
                self.finish(waiting)
            waiting = scored
        if waiting is not None:
            self.finish(waiting)
        self.out.gradients = self.out.gradients.trimmed(self.vocabulary.V)
        return self.out

    def started(
        self, rows: Tensor, log_prior: Tensor, token_weight: Tensor | None, counted: Counted
    ) -> Iterator[tuple[Chunk, Tensor | None]]:
        """Each chunk with its scores in the buffer, where they are kept."""
        (N, K, D), vocabulary, wide = rows.shape, self.vocabulary, self.vocabulary.wide
        for number, index in enumerate(pieces(N, counted.positions, vocabulary.plan.tokens)):
            some = at(rows, index).reshape(-1, D)
            vocabulary.slot = number % vocabulary.plan.buffers
            scores = vocabulary.score(some, 0, vocabulary.V) if vocabulary.kept else None
            targets = at(counted.targets, index)
            chunk = Chunk(
                index=index,
                rows=some,
                targets=targets if K == 1 else targets[:, None].expand(-1, K).flatten(),
                log_prior=at(log_prior, index).to(wide),
                weight=None if token_weight is None else at(token_weight, index).to(wide),
                late=self.late,
            )
            yield chunk, scores

    def empty_out(self, rows: Tensor, weight: Tensor, counted: Counted) -> MixtureForward:
        (N, K, _), vocabulary, wide = rows.shape, self.vocabulary, self.vocabulary.wide
        needs, late, plan = self.needs, self.late, self.vocabulary.plan
        # Where every token goes through the products all is written, and nothing need be zero before.
        fill = rows.new_empty if counted.positions is None else rows.new_zeros
        few = plan.kernel and NARROW_CHUNKS * plan.tokens >= N and self.row_skip == 0
        narrow = self.narrow and few and rows.dtype == weight.dtype == torch.bfloat16
        return MixtureForward(
            nll=fill(N, dtype=wide),
            statistics=Statistics(*(fill(N, K, dtype=wide) for _ in range(3))) if late else None,
            argmax=rows.new_full((N,), -1, dtype=torch.int64) if self.stats else None,
            entropy=rows.new_zeros(N, dtype=wide) if self.stats else None,
            d_rows=(rows.new_zeros if self.row_skip > 0 else fill)(rows.shape) if needs.rows else None,
            d_prior=fill(N, K, dtype=wide) if needs.prior and not late else None,
            gradients=empty_gradients(
                needs, weight, vocabulary.pointwise, wide, vocabulary.entries,
                unwritten=plan.kernel, weight_dtype=torch.bfloat16 if narrow else wide,
            ),
        )  # fmt: skip

    def score(self, chunk: Chunk, scores: Tensor | None) -> Scored:
        """Losses, and Q in the buffer unless rows are to be left out of it."""
        vocabulary, out, skips = self.vocabulary, self.out, self.row_skip > 0
        kernel = vocabulary.plan.kernel
        wanted = self.needs.products and not (skips and kernel)
        mode = Mode(chunk.log_prior.shape[0], chunk.log_prior) if self.stats else None
        nll = at(out.nll, chunk.index) if chunk.in_place else out.nll.new_empty(chunk.log_prior.shape[0])
        # fp16 cannot hold Q * total.
        lacking = kernel and not (skips or self.late) and chunk.rows.dtype != torch.float16
        statistics: Statistics | None = None
        share: Tensor | None = None
        factor: Tensor | None = None
        if scores is None:
            statistics = statistics_of(vocabulary, chunk.rows, chunk.targets)
        elif kernel and vocabulary.K == 1 and not self.late and chunk.weight is None and out.d_prior is None:
            # A softmax with equal weights: its kernel does all, and its factors are 1.
            vocabulary.run_kernel_alone(scores, chunk.targets, chunk.log_prior, nll, gradient=wanted)
        else:
            gradients = replace(out.gradients, bias=None) if skips else out.gradients
            statistics = score_and_keep(
                vocabulary, chunk, scores, gradients, mode, wanted=wanted, lacking=lacking
            )
        if statistics is not None:
            share, factor = vocabulary.mix(chunk.log_prior, statistics, nll, lacking=lacking)
        if not chunk.in_place:
            out.nll[chunk.index] = nll
        if out.statistics is not None and statistics is not None:
            for whole, column in zip(out.statistics, statistics, strict=True):
                whole[chunk.index] = column.view(chunk.log_prior.shape)
        return Scored(
            chunk=chunk, statistics=statistics, slot=vocabulary.slot, share=share, factor=factor, mode=mode,
            kept=Kept(share, self.row_skip) if kernel and skips and share is not None else None,
        )  # fmt: skip

    def finish(self, scored: Scored) -> None:
        """The gradients of a chunk."""
        vocabulary, out, chunk = self.vocabulary, self.out, scored.chunk
        kernel = vocabulary.plan.kernel
        upstream: Tensor | None = None
        factor: Tensor | None = None
        if scored.share is not None and scored.factor is not None and not (self.late and kernel):
            upstream, factor = (chunk.weigh(slice(None), each) for each in (scored.share, scored.factor))
            if not kernel:
                factor = factor * vocabulary.lacking(scored.known.total)
        if out.d_prior is not None and upstream is not None:
            out.d_prior[chunk.index] = upstream.view(chunk.log_prior.shape).neg()
        kept = None if scored.kept is None else scored.kept.read()
        if kept is not None and factor is not None:
            self.finish_kept(scored, factor, kept)
            return
        if self.row_skip > 0 and scored.kept is None and scored.share is not None:
            kept = rows_to_keep(scored.share, self.row_skip, vocabulary.D)
        some: Index = slice(None) if kept is None else kept
        used, scale = chunk.rows, factor
        if kept is not None:
            used, scale = chunk.rows[kept], None if factor is None else factor[kept]
        in_place = kept is None and vocabulary.kept and chunk.in_place
        d_used: Tensor | None = None
        if out.d_rows is not None:
            d_used = (
                at(out.d_rows, chunk.index).view(used.shape)
                if in_place
                else vocabulary.gradient_of_rows(used)
            )
        if used.shape[0] == 0:
            pass
        elif not vocabulary.kept and (self.needs.products or self.stats):
            assert upstream is not None
            part = Statistics(*(column[some] for column in scored.known))
            recompute_gradient(
                vocabulary, used, chunk.targets[some], part, upstream[some], out.gradients,
                entry=chunk.entry(part), d_rows=d_used, mode=scored.mode,
                share=chunk.log_prior.exp() / scored.known.total.view(chunk.log_prior.shape),
            )  # fmt: skip
        elif self.needs.products:
            if scored.kept is not None:
                vocabulary.finish_kernel(chunk.targets, scored.known, scored.slot)
            scores = vocabulary.kept_scores(chunk.rows.shape[0], scored.slot)
            if kept is not None:
                scores = compact(scores, kept, vocabulary.plan.copy_rows)
            if kernel or self.row_skip > 0:
                add_bias(out.gradients, scores, scale)
            add_products(vocabulary, scores, used, scale, 0, vocabulary.V, out.gradients, d_used)
        if scored.mode is not None and out.argmax is not None and out.entropy is not None:
            out.argmax[chunk.index], out.entropy[chunk.index] = scored.mode.argmax, scored.mode.entropy
        if out.d_rows is not None and d_used is not None:
            if scale is not None:
                scale_rows(d_used, scale, out=d_used)
            if kept is not None:
                out.d_rows[rows_at(chunk, kept)] = d_used.to(out.d_rows.dtype)
            elif not in_place:
                out.d_rows[chunk.index] = d_used.view(*chunk.log_prior.shape, -1).to(out.d_rows.dtype)

    def finish_kept(self, scored: Scored, factor: Tensor, kept: Tensor) -> None:
        """The same with kernels for the rows `kept`: their Q is made beside the buffer, some rows at a
        time."""
        from fullrank.ops import row_kernels

        vocabulary, out, chunk = self.vocabulary, self.out, scored.chunk
        step, gradients = vocabulary.plan.copy_rows, out.gradients
        rows = chunk.rows.contiguous()
        room = rows.new_empty(min(step, kept.shape[0]), vocabulary.plan.stride)
        d_kept = rows.new_empty(kept.shape[0], rows.shape[1]) if out.d_rows is not None else None
        for start in range(0, kept.shape[0], step):
            some = kept[start : start + step]
            scores = vocabulary.finish_kernel(
                chunk.targets, scored.known, scored.slot, kept=some, out=room[: some.shape[0]]
            )
            if gradients.bias is not None:
                add_bias(gradients, scores, factor[some])
            if d_kept is not None:
                torch.mm(scores, vocabulary.weight, out=d_kept[start : start + step])
            if gradients.weight is not None:
                add_rows(vocabulary, scores, row_kernels.gather_rows(rows, factor, some), gradients)
        if out.d_rows is not None and d_kept is not None:
            if chunk.in_place:
                place = out.d_rows[chunk.index].view(rows.shape)
                row_kernels.scatter_rows(d_kept, factor, kept, place)
            else:
                out.d_rows[rows_at(chunk, kept)] = scale_rows(d_kept, factor[kept], out=d_kept)
