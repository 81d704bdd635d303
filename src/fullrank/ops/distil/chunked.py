"""Entropy, divergences and masses at ids in a bounded workspace with torch's operations, on any device.

A chunk of whole tokens is one product for its scores, one for its teacher's, work on tiles in the cache, and
two products for its gradients. On a tile, with x the scores over T of one component, or log sum_k prior_k s_k
over T of several,

    x_v - max x = log p_v - log p_top,   total = sum_v exp(x_v - max x),   log p_top = -log1p(sum over others)

every output gives its value and C, its derivative in x, and up to a factor of the token these are

    entropy            H = log(total) - sum p x                 C = -p (x + H - log(total))
    reverse            KL(p || q)                               C = p (y - sum p y),  y = x - log q - its top
    forward            KL(q || p)                               C = p - q,  C_top = -sum over others
    jensen_shannon     see `reference.py`                       C = p (y - sum p y),  y = (log p - log m) / 2
    masses             x_i at M ids, logsumexp of all others    C = g_i at ids, g_rest p_v / p_rest elsewhere

With y = 0 at the top all terms of a sure token are small by themselves, and no difference loses their digits.
Through the mixture, with r_kv = prior_k s_kv / p_v the share of a component,

    d a_kv = r_kv C_v - s_kv B_k,    d log_prior_k = B_k = sum_v r_kv C_v

which is C itself for one component. A gradient for upstream numbers that are known beforehand takes three
products of the student's size and one of the teacher's, otherwise one more of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fullrank.ops.arguments import compute_dtype
from fullrank.ops.distil.reference import FAR, half_softplus
from fullrank.ops.distil.teacher import Mixture
from fullrank.ops.mixture.chunked import Vocabulary
from fullrank.ops.products import Gradients, Needs, scale, sums_of, zero_gradients
from fullrank.ops.workspace import (
    DEVICE_TILE_BYTES,
    TILE_BYTES,
    Index,
    Plan,
    at,
    most_rows,
    pieces,
    too_small,
    workspace_of,
)

TOKEN_TABLES = 6
"""Tables [tokens, V] of a tile beside those of its rows that are alive at once, at worst."""

NEAR = 60.0
"""Nats below the largest score of a row at which probabilities, 1 / V of that, are still normal in fp32."""


class Table(NamedTuple):
    """Log-probabilities [t, V] of some tokens: log p_v = log_v - log_total, with log_v = 0 at the top."""

    log: Tensor
    mass: Tensor
    """exp(log)"""
    top: Tensor
    """[t, 1], the most probable entry."""
    others: Tensor
    """[t, 1], the sum of mass without the top."""

    @property
    def total(self) -> Tensor:
        return 1.0 + self.others

    @property
    def log_total(self) -> Tensor:
        return torch.log1p(self.others)

    def mean(self, values: Tensor) -> Tensor:
        """sum_v p_v values_v, [t, 1]."""
        return torch.bmm(self.mass[:, None], values[:, :, None])[:, :, 0] / self.total


def normalised(scores: Tensor, masked: bool) -> Table:
    """Overwrites scores [t, V]."""
    highest, top = scores.max(1, keepdim=True)
    log = scores.sub_(highest)
    if masked:
        log.clamp_(min=FAR)
    mass = log.exp()
    others = mass.scatter_(1, top, 0.0).sum(1, keepdim=True)
    return Table(log, mass.scatter_(1, top, 1.0), top, others)


# Each gives [t, 1] values and leaves C times the total in p.log, where that is wanted; all may overwrite
# both tables.


def entropy(p: Table, q: Table | None, gradient: bool) -> Tensor:
    mean = p.mean(p.log)
    value = p.log_total - mean
    if gradient:
        p.log.neg_().add_(mean).mul_(p.mass)
    return value


def reverse(p: Table, q: Table | None, gradient: bool) -> Tensor:
    assert q is not None
    theirs = q.log.gather(1, p.top)
    y = p.log.sub_(q.log).add_(theirs)
    mean = p.mean(y)
    if gradient:
        y.sub_(mean).mul_(p.mass)
    return mean - p.log_total - theirs + q.log_total


def forward(p: Table, q: Table | None, gradient: bool) -> Tensor:
    assert q is not None
    value = q.mean(q.log.sub_(p.log)) + p.log_total - q.log_total
    if gradient:
        C = torch.mul(q.mass, -p.total / q.total, out=p.log).add_(p.mass).scatter_(1, p.top, 0.0)
        C.scatter_(1, p.top, -C.sum(1, keepdim=True))
    return value


def jensen_shannon(p: Table, q: Table | None, gradient: bool) -> Tensor:
    assert q is not None
    x = q.log.sub_(p.log).add_(p.log_total - q.log_total)
    # What is lost to the rounding of log 2 would be missed at the top alone: only there may p or q be near 1
    # where all the divergence is small.
    both = x.abs().neg_().exp_().log1p_().sub_(math.log(2.0))
    for top in (p.top, q.top):
        both.scatter_(1, top, half_softplus(x.gather(1, top)))
    rising = p.log.copy_(x).clamp_(min=0.0).add_(both)
    falling = x.neg_().clamp_(min=0.0).add_(both)
    value = -0.5 * (p.mean(rising) + q.mean(falling))
    if gradient:
        y = rising.mul_(-0.5)
        y.sub_(y.gather(1, p.top))
        y.sub_(p.mean(y)).mul_(p.mass)
    return value


FUNCTIONS: dict[str, Callable[[Table, Table | None, bool], Tensor]] = {
    "entropy": entropy,
    "reverse": reverse,
    "forward": forward,
    "jensen_shannon": jensen_shannon,
}


class Mixed(NamedTuple):
    """K components of some tokens as one distribution: prior_k s_kv / p_v = scale_k parts_kv / sums_v."""

    parts: Tensor
    """[t, K, V], in the memory of the scores."""
    scale: Tensor
    """[t, K]"""
    sums: Tensor
    """[t, V]"""
    log_p: Tensor
    """[t, V]"""
    prior: Tensor
    """[t, K]"""
    near: bool
    """Whether the sums are p itself."""

    def gradient_(self, C: Tensor) -> Tensor:
        """From C [t, V] in log_p to that in the scores, in place of the parts; B [t, K]."""
        B, C = torch.empty_like(self.prior), C.div_(self.sums)
        p = None if self.near else self.log_p.exp().div_(self.sums)
        for k in range(B.shape[1]):
            part, scale = self.parts[:, k], self.scale[:, k]
            B[:, k] = torch.bmm(part[:, None], C[:, :, None])[:, 0, 0] * scale
            # s_k B_k = share p (B_k / prior_k); a component that is switched off has no share.
            each = torch.where(self.prior[:, k] == 0, 0.0, B[:, k] / self.prior[:, k])[:, None]
            left = C - each if p is None else torch.addcmul(C, p, each, value=-1.0)
            part.mul_(left.mul_(scale[:, None]))
        return B


def mix(scores: Tensor, log_prior: Tensor, masked: bool) -> Mixed:
    """Overwrites scores [t K, V]; log_prior [t, K]."""
    joint, prior = scores.view(*log_prior.shape, -1), log_prior.exp()
    highest = joint.amax(2, keepdim=True)
    if not masked and bool((highest[..., 0] - joint.amin(2) < NEAR).all()):
        # No exponential of any component underflows: one for each score is enough.
        parts = joint.sub_(highest).exp_()
        scale = prior / parts.sum(2)
        sums = torch.bmm(scale[:, None], parts)[:, 0]
        return Mixed(parts, scale, sums, sums.log(), prior, True)
    joint.sub_((torch.logsumexp(joint, 2) - log_prior)[:, :, None])
    # Relative to the largest of an entry's own: far below the top no component may underflow.
    above = joint.amax(1)
    if masked:
        above.clamp_(min=FAR)
    sums = joint.sub_(above[:, None]).exp_().sum(1)
    if masked:
        sums.masked_fill_(sums == 0, 1.0)
    return Mixed(joint, torch.ones_like(prior), sums, above.add_(sums.log()), prior, False)


Derive = Callable[[Tensor, Table | None, Index], tuple[Tensor, Tensor] | None]
"""Of x [t, V], the teacher and which tokens these are: leaves C times the total in x and gives the upstream
numbers [t] and the total [t]; None where no gradient is wanted."""


class Pass:
    """All outputs of a student, with a teacher or without; what they add to the gradients is in
    `gradients`."""

    def __init__(
        self, student: Mixture, teacher: Mixture | None, *, needs: Needs, product: torch.dtype,
        teacher_product: torch.dtype | None, temperature: float, masked: bool, workspace: int | None,
    ) -> None:  # fmt: skip
        self.student, self.teacher, self.needs, self.temperature = student, teacher, needs, temperature
        self.masked, self.wide, self.V = masked, compute_dtype(product), student.weight.shape[0]
        both = [(student, product)]
        if teacher is not None and teacher_product is not None:
            both.append((teacher, teacher_product))
        plans = plan_chunks(both, workspace_of(workspace, student.rows.device))
        self.own, *other = (
            Vocabulary(each.weight, each.bias, each.pointwise, product=dtype, plan=plan, K=each.rows.shape[1])
            for (each, dtype), plan in zip(both, plans, strict=True)
        )
        self.theirs = other[0] if other else None
        bias = student.bias
        self.absent = None if bias is None or not masked else torch.isneginf(bias)
        self.largest: Tensor | float = 1.0
        """What upstream numbers were divided by."""
        self.sums = Gradients()
        self.d_rows: Tensor | None = None
        self.d_prior: Tensor | None = None
        if any(needs):
            self.sums = zero_gradients(needs, student.weight, student.pointwise, self.wide)
        if needs.rows:
            self.d_rows = torch.zeros_like(student.rows, memory_format=torch.contiguous_format)
        if needs.prior:
            self.d_prior = student.log_prior.new_zeros(student.log_prior.shape, dtype=self.wide)

    def values(self, name: str, positions: Tensor | None, upstream: Tensor | None) -> Tensor:
        """An output [N] of `FUNCTIONS`, 0 at tokens that are not among the positions; adds the gradients for
        upstream [N], where given."""
        function = FUNCTIONS[name]
        found = self.student.rows.new_zeros(self.student.rows.shape[0], dtype=self.wide)

        def derive(x: Tensor, q: Table | None, tokens: Index) -> tuple[Tensor, Tensor] | None:
            p = normalised(x, self.masked)
            found[tokens] = function(p, q, upstream is not None)[:, 0]
            return None if upstream is None else (upstream[tokens], p.total[:, 0])

        self._over_chunks(positions, derive, gradient=upstream is not None)
        return found

    def masses(self, ids: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [N, M] at ids [N, M] and the logsumexp [N] of all others, up to a constant of the token."""
        N, M = ids.shape
        at_ids = self.student.rows.new_zeros(N, M, dtype=self.wide)
        rest = at_ids.new_zeros(N)

        def derive(x: Tensor, q: Table | None, tokens: Index) -> None:
            some = ids[tokens]
            at_ids[tokens] = x.gather(1, some)
            rest[tokens] = torch.logsumexp(x.scatter_(1, some, -torch.inf), 1)

        self._over_chunks(positions, derive, gradient=False)
        return at_ids, rest

    def mass_gradients(
        self, ids: Tensor, rest: Tensor, positions: Tensor | None, g_ids: Tensor, g_rest: Tensor
    ) -> None:
        """Add the gradients of `masses` for upstream numbers [N, M] and [N]."""
        # Where nothing is left its logarithm is no number to subtract.
        rest = rest.masked_fill(torch.isneginf(rest), 0.0)

        def derive(x: Tensor, q: Table | None, tokens: Index) -> tuple[Tensor, Tensor]:
            some = ids[tokens]
            x.sub_(rest[tokens, None]).exp_().mul_(g_rest[tokens, None])
            # Ids may be there twice.
            x.scatter_(1, some, 0.0).scatter_add_(1, some, g_ids[tokens])
            ones = torch.ones_like(rest[tokens])
            return ones, ones

        self._over_chunks(positions, derive, gradient=True)

    def _over_chunks(self, positions: Tensor | None, derive: Derive, *, gradient: bool) -> None:
        own, V, K = self.own, self.V, self.student.rows.shape[1]
        for index in pieces(self.student.rows.shape[0], positions, own.plan.tokens):
            rows = at(self.student.rows, index).flatten(0, 1).to(own.product)
            scores = own.score(rows, 0, V)
            if self.teacher is not None and self.theirs is not None:
                states = at(self.teacher.rows, index).flatten(0, 1).to(self.theirs.product)
                taught = self.theirs.score(states, 0, V)
            prior = at(self.student.log_prior, index).to(self.wide)
            factor = rows.new_empty(rows.shape[0], dtype=self.wide)
            for tile in own.tiles(rows.shape[0]):
                some = own.tokens_of(tile)
                tokens = slice(index.start + some.start, index.start + some.stop) if isinstance(
                    index, slice
                ) else index[some]  # fmt: skip
                q = None if self.theirs is None else self._teacher_table(taught, some, tokens)
                bent = own.bend(scores[tile], 0, V, gradient=gradient)
                mixed = None if K == 1 else mix(bent.value, prior[some], self.masked)
                x = bent.value if mixed is None else mixed.log_p.clone()
                if mixed is not None and self.absent is not None:
                    x.masked_fill_(self.absent, -torch.inf)
                found = derive(x if self.temperature == 1.0 else x.div_(self.temperature), q, tokens)
                if found is None:
                    continue
                upstream, total = found[0] / self.temperature, found[1]
                if mixed is not None:
                    B = mixed.gradient_(x)
                    if self.d_prior is not None:
                        self.d_prior[tokens] = B * (upstream / total)[:, None]
                    upstream, total = upstream.repeat_interleave(K), total.repeat_interleave(K)
                own.finish(scores[tile], bent, total, upstream, self.sums, 0, V)
                factor[tile] = upstream * own.lacking(total)
            if gradient:
                self._add_products(index, rows, scores, factor)

    def _teacher_table(self, scores: Tensor, some: slice, tokens: Index) -> Table:
        """Of some tokens of a chunk; `tokens` are the same among all."""
        assert self.teacher is not None
        assert self.theirs is not None
        K = self.theirs.K
        x = self.theirs.bend(scores[some.start * K : some.stop * K], 0, self.V, gradient=False).value
        if K > 1:
            x = mix(x, self.teacher.log_prior[tokens].to(x.dtype), self.masked).log_p
        x = x.to(self.wide)
        return normalised(x if self.temperature == 1.0 else x.div_(self.temperature), self.masked)

    def _add_products(self, index: Index, rows: Tensor, Q: Tensor, factor: Tensor) -> None:
        d_rows = None if self.d_rows is None else self.own.row_gradient(rows)
        self.own.add_products(Q, rows, factor, 0, self.sums, d_rows)
        if self.d_rows is not None and d_rows is not None:
            scale(d_rows, factor * self.largest, out=d_rows)
            self.d_rows[index] = d_rows.view(-1, *self.d_rows.shape[1:]).to(self.d_rows.dtype)

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Of rows, log prior, weight, bias and what f trains; `largest` is in those of the rows alone."""
        return self.d_rows, self.d_prior, *sums_of(self.sums, self.student.pointwise)


def plan_chunks(both: list[tuple[Mixture, torch.dtype]], workspace: int) -> list[Plan]:
    """One cut of the tokens for a student and its teacher, each with the dtype of its products: all V scores
    of a chunk lie in their buffers. Raises where one token cannot fit."""
    student = both[0][0]
    N, V, device = student.rows.shape[0], student.weight.shape[0], student.rows.device
    wide = max(compute_dtype(product).itemsize for _, product in both)
    # What a token takes in a tile, and in a chunk outside of tiles; then what is cast of each W at a time.
    in_tile = V * wide * TOKEN_TABLES
    in_chunk, components, matrix_rows, cast = 0, 1, [], 0
    for each, product in both:
        (_, K, D), narrow = each.rows.shape, product.itemsize
        in_tile += K * V * wide * each.pointwise.tile_buffers
        in_chunk += K * (V * narrow + D * (2 * narrow + 2 * wide))
        components = max(components, K)
        moved = product != each.weight.dtype or narrow < wide
        each_row = D * (narrow + wide)
        matrix_rows.append(max(1, min(V, workspace // 8 // each_row)) if moved else V)
        cast += matrix_rows[-1] * each_row if moved else 0
    if in_tile + in_chunk + cast > workspace:
        raise too_small(
            workspace, f"one token of {components} rows with V={V}", 2 * (in_tile + in_chunk + cast)
        )
    best = TILE_BYTES.get(device.type, DEVICE_TILE_BYTES) // (components * V * wide)
    tile_tokens = max(1, min(best, workspace // 4 // in_tile))
    fitting = (workspace - cast - tile_tokens * in_tile) // in_chunk
    tokens = max(1, min(N, fitting, most_rows(device) // components))
    return [
        Plan(tokens=tokens, block=V, tile_tokens=min(tokens, tile_tokens), matrix_rows=r) for r in matrix_rows
    ]
