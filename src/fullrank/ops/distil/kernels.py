"""The kernel between the products of entropies and divergences: scores become Q in place.

One program a token goes over its K rows of scores, and its teacher's one, three times. First every row's
normaliser l_k = logsumexp_v a_kv. Then, with

    log p_v = logsumexp_k (log prior_k + a_kv - l_k),    r_kv = prior_k exp(a_kv - l_k) / p_v

the output and what it says of each entry, c_v = p_v dF/dp_v up to a multiple of p_v,

    entropy            F = -sum p log p                     c = -p log p
    reverse            F = sum p (log p - log q)            c = p (log p - log q)
    forward            F = sum q (log q - log p)            c = -q
    jensen_shannon     F = KL(p || m) / 2 + KL(q || m) / 2  c = p (log p - log m) / 2,  m = (p + q) / 2

are summed, F and B_k = sum_v r_kv c_v; and last, in place,

    Q_kv = f'(z_kv) (r_kv c_v - exp(a_kv - l_k) B_k) / T

A multiple of p_v in c cancels there, and in the log prior's gradient B_k too, for what it adds is a multiple
of the prior. T is the temperature of one row, a = f(z) / T; several rows have none. All arithmetic is fp32.

One row needs no second look for all but Jensen-Shannon. With the peaks m of a and n of the teacher's b, the
sums of e^(a - m), of e^(b - n) and of one of them times (a - m) - (b - n), or times (a - m) for the entropy,
give F; they are kept while the peaks rise. B is F for the entropy and the reverse divergence, -1 for the
forward one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.ops.mixture.kernels import GROUP_BYTES, PROGRAMS, join
from fullrank.ops.pointwise import IDENTITY, Pointwise
from fullrank.ops.triton_base import KINDS, jit, on_device, power, properties, take, tl, triton

OUTPUTS = {"entropy": 0, "reverse": 1, "forward": 2, "jensen_shannon": 3}
LANES = 512


@jit
def normaliser(  # type: ignore[no-untyped-def]
    line, bias, constant, inverse, V: tl.constexpr, stride: tl.constexpr, KIND: tl.constexpr,
    BIASED: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """logsumexp of a row of f(z) / T."""
    BLOCK: tl.constexpr = LANES * GROUP
    FULL: tl.constexpr = V // BLOCK * BLOCK
    within = tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    peaks = tl.full([LANES], float("-inf"), tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    for start in range(0, FULL, BLOCK):
        column = start + within
        value, _slope = take(line, bias, column, V, stride, constant, KIND, BIASED, False)
        peaks, sums = join(value * inverse, peaks, sums, column, 0, True)
    if V > FULL:
        column = FULL + within
        value, _slope = take(line, bias, column, V, stride, constant, KIND, BIASED, True)
        peaks, sums = join(value * inverse, peaks, sums, column, 0, True)
    top = tl.max(peaks, axis=0)
    return top + tl.log(tl.sum(sums * tl.exp(peaks - top), axis=0))


@jit
def half(d):  # type: ignore[no-untyped-def]
    """log((1 + e^d) / 2), by its series near 0."""
    square = d * d
    near = d * 0.5 + square * (0.125 - square * (1.0 / 192.0 - square * (1.0 / 2880.0)))
    far = tl.maximum(d, 0.0) + tl.log(1.0 + power(-tl.abs(d))) - 0.6931471805599453
    return tl.where(tl.abs(d) < 0.5, near, far)


@jit
def risen(value, peaks):  # type: ignore[no-untyped-def]
    """Lanes with some more columns: their peaks, how far the old ones lie below, and how far the columns do;
    both are 0 where there is nothing."""
    higher = tl.maximum(peaks, tl.max(value, axis=1))
    fall = tl.where(peaks == float("-inf"), 0.0, peaks - higher)
    below = value - tl.where(higher == float("-inf"), 0.0, higher)[:, None]
    return higher, fall, tl.where(below == float("-inf"), 0.0, below)


@jit
def follow(  # type: ignore[no-untyped-def]
    peaks, sums, theirs, their_sums, moments, line, bias, other_line, other_bias, column, constant,
    other_constant, inverse, V: tl.constexpr, stride: tl.constexpr, other_stride: tl.constexpr,
    WHAT: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr, OTHER_KIND: tl.constexpr,
    OTHER_BIASED: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """What some columns of one row, and of its teacher's, add to peaks, sums and moments [lanes]."""
    value, _slope = take(line, bias, column, V, stride, constant, KIND, BIASED, TAIL)
    peaks, fall, below = risen(value * inverse, peaks)
    weight = power(below)
    if TAIL:
        weight = tl.where(column < V, weight, 0.0)
    gap, drift, scale, before = below, fall, fall, sums
    sums = sums * power(fall) + tl.sum(weight, axis=1)
    if WHAT != 0:
        other, _slope = take(
            other_line, other_bias, column, V, other_stride, other_constant, OTHER_KIND, OTHER_BIASED, TAIL
        )
        theirs, their_fall, their_below = risen(other * inverse, theirs)
        their_weight = power(their_below)
        if TAIL:
            their_weight = tl.where(column < V, their_weight, 0.0)
        gap -= their_below
        drift -= their_fall
        if WHAT == 2:
            weight, scale, before = their_weight, their_fall, their_sums
        their_sums = their_sums * power(their_fall) + tl.sum(their_weight, axis=1)
    moments = (moments + before * drift) * power(scale) + tl.sum(weight * gap, axis=1)
    return peaks, sums, theirs, their_sums, moments


@jit
def gathered(peaks):  # type: ignore[no-untyped-def]
    """The peak of all lanes, and how far each lane's lies below it; 0 for a lane without columns."""
    top = tl.max(peaks, axis=0)
    return top, tl.where(peaks == float("-inf"), 0.0, peaks - top)


@jit
def one_look(  # type: ignore[no-untyped-def]
    line, bias, other_line, other_bias, constant, other_constant, inverse, V: tl.constexpr,
    stride: tl.constexpr, other_stride: tl.constexpr, WHAT: tl.constexpr, KIND: tl.constexpr,
    BIASED: tl.constexpr, OTHER_KIND: tl.constexpr, OTHER_BIASED: tl.constexpr, LANES: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """F, B and both normalisers of one row."""
    BLOCK: tl.constexpr = LANES * GROUP
    FULL: tl.constexpr = V // BLOCK * BLOCK
    within = tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    peaks = tl.full([LANES], float("-inf"), tl.float32)
    theirs = tl.full([LANES], float("-inf"), tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    their_sums = tl.zeros([LANES], tl.float32)
    moments = tl.zeros([LANES], tl.float32)
    for start in range(0, FULL, BLOCK):
        peaks, sums, theirs, their_sums, moments = follow(
            peaks, sums, theirs, their_sums, moments, line, bias, other_line, other_bias, start + within,
            constant, other_constant, inverse, V, stride, other_stride, WHAT, KIND, BIASED, OTHER_KIND,
            OTHER_BIASED, False,
        )  # fmt: skip
    if V > FULL:
        peaks, sums, theirs, their_sums, moments = follow(
            peaks, sums, theirs, their_sums, moments, line, bias, other_line, other_bias, FULL + within,
            constant, other_constant, inverse, V, stride, other_stride, WHAT, KIND, BIASED, OTHER_KIND,
            OTHER_BIASED, True,
        )  # fmt: skip
    top, fall = gathered(peaks)
    total = tl.sum(sums * power(fall), axis=0)
    share = tl.log(total)
    their_normaliser = 0.0
    if WHAT == 0:
        value = share - tl.sum((moments + sums * fall) * power(fall), axis=0) / total
        sum_of_c = value
    else:
        their_top, their_fall = gathered(theirs)
        their_total = tl.sum(their_sums * power(their_fall), axis=0)
        their_share = tl.log(their_total)
        their_normaliser = their_top + their_share
        drift = fall - their_fall
        if WHAT == 1:
            value = tl.sum((moments + sums * drift) * power(fall), axis=0) / total - share + their_share
            sum_of_c = value
        else:
            moment = tl.sum((moments + their_sums * drift) * power(their_fall), axis=0)
            value = share - their_share - moment / their_total
            sum_of_c = -1.0
    return value, sum_of_c, top + share, their_normaliser


@jit
def mixed(  # type: ignore[no-untyped-def]
    lines, bias, column, priors, normalisers, constant, inverse, V: tl.constexpr, stride: tl.constexpr,
    K: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """log p at some columns of a token; -inf beyond V."""
    value, _slope = take(lines, bias, column, V, stride, constant, KIND, BIASED, TAIL)
    peak = value * inverse - tl.load(normalisers)
    if K > 1:
        peak += tl.load(priors)
        total = tl.where(peak == float("-inf"), 0.0, 1.0)
        for k in range(1, K):
            value, _slope = take(lines + k * stride, bias, column, V, stride, constant, KIND, BIASED, TAIL)
            joint = value - tl.load(normalisers + k) + tl.load(priors + k)
            higher = tl.maximum(peak, joint)
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * power(peak - anchor) + power(joint - anchor)
            peak = higher
        peak += tl.log(tl.where(total == 0.0, 1.0, total))
    return peak


@jit
def entries(  # type: ignore[no-untyped-def]
    lines, bias, line, other_bias, column, priors, normalisers, theirs, constant, other_constant, inverse,
    V: tl.constexpr, stride: tl.constexpr, other_stride: tl.constexpr, K: tl.constexpr, WHAT: tl.constexpr,
    KIND: tl.constexpr, BIASED: tl.constexpr, OTHER_KIND: tl.constexpr, OTHER_BIASED: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """log p, c and what each entry adds to F at some columns; all are 0 beyond V."""
    log_p = mixed(
        lines, bias, column, priors, normalisers, constant, inverse, V, stride, K, KIND, BIASED, TAIL
    )
    if TAIL:
        # Finite where nothing counts.
        log_p = tl.where(column < V, log_p, 0.0)
    p = power(log_p)
    if WHAT == 0:
        c = -p * log_p
        adds = c
    else:
        other, _slope = take(
            line, other_bias, column, V, other_stride, other_constant, OTHER_KIND, OTHER_BIASED, TAIL
        )
        log_q = other * inverse - theirs
        if TAIL:
            log_q = tl.where(column < V, log_q, 0.0)
        q = power(log_q)
        if WHAT == 1:
            c = p * (log_p - log_q)
            adds = c
        elif WHAT == 2:
            c = -q
            adds = q * (log_q - log_p)
        else:
            d = log_q - log_p
            c = -0.5 * p * half(d)
            adds = c - 0.5 * q * half(-d)
    if TAIL:
        inside = column < V
        c = tl.where(inside, c, 0.0)
        adds = tl.where(inside, adds, 0.0)
    return log_p, c, adds


@jit
def sum_block(  # type: ignore[no-untyped-def]
    value, sums, lines, bias, line, other_bias, column, priors, normalisers, theirs, constant, other_constant,
    inverse, V: tl.constexpr, stride: tl.constexpr, other_stride: tl.constexpr, K: tl.constexpr,
    PLACES: tl.constexpr, WHAT: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr,
    OTHER_KIND: tl.constexpr, OTHER_BIASED: tl.constexpr, GRADIENT: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """What some columns add to F [lanes], and to B [lanes, K]."""
    log_p, c, adds = entries(
        lines, bias, line, other_bias, column, priors, normalisers, theirs, constant, other_constant, inverse,
        V, stride, other_stride, K, WHAT, KIND, BIASED, OTHER_KIND, OTHER_BIASED, TAIL,
    )  # fmt: skip
    value += tl.sum(adds, axis=1)
    if GRADIENT:
        if K == 1:
            sums += tl.sum(c, axis=1)[:, None]
        else:
            place = tl.arange(0, PLACES)[None, :]
            for k in range(K):
                score, _slope = take(
                    lines + k * stride, bias, column, V, stride, constant, KIND, BIASED, TAIL
                )
                share = score - tl.load(normalisers + k) + tl.load(priors + k) - log_p
                part = tl.sum(power(share) * c, axis=1)
                sums += tl.where(place == k, part[:, None], 0.0)
    return value, sums


@jit
def write_block(  # type: ignore[no-untyped-def]
    lines, bias, column, log_p, c, priors, normalisers, shares, constant, inverse, V: tl.constexpr,
    stride: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Q in place of the scores at some columns."""
    for k in range(K):
        line = lines + k * stride
        value, slope = take(line, bias, column, V, stride, constant, KIND, BIASED, TAIL)
        own = value * inverse - tl.load(normalisers + k)
        gradient = c - power(own) * tl.load(shares + k)
        if K > 1:
            gradient += c * (power(own + tl.load(priors + k) - log_p) - 1.0)
        gradient *= inverse
        if KIND != 0:
            gradient *= slope
        if TAIL:
            # Beyond V lies padding, which the products read.
            gradient = tl.where(column < V, gradient, 0.0)
            tl.store(line + column, gradient.to(line.dtype.element_ty), mask=column < stride)
        else:
            tl.store(line + column, gradient.to(line.dtype.element_ty))


@jit
def distil_kernel(  # type: ignore[no-untyped-def]
    scores, bias, log_prior, taught, other_bias, values, shares, normalisers, constant, other_constant,
    inverse, tokens, V: tl.constexpr, stride: tl.constexpr, other_stride: tl.constexpr, K: tl.constexpr,
    PLACES: tl.constexpr, WHAT: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr,
    OTHER_KIND: tl.constexpr, OTHER_BIASED: tl.constexpr, GRADIENT: tl.constexpr, LANES: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = LANES * GROUP
    FULL: tl.constexpr = V // BLOCK * BLOCK
    within = tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    token = tl.program_id(0)
    while token < tokens:
        # Rows times stride may pass 2^31.
        lines = scores + token.to(tl.int64) * K * stride
        line = taught + token.to(tl.int64) * other_stride
        own = normalisers + token * K
        prior = log_prior + token * K
        share = shares + token * K
        theirs = 0.0
        if K == 1 and WHAT != 3:
            found, sum_of_c, mine, theirs = one_look(
                lines, bias, line, other_bias, constant, other_constant, inverse, V, stride, other_stride,
                WHAT, KIND, BIASED, OTHER_KIND, OTHER_BIASED, LANES, GROUP,
            )  # fmt: skip
            tl.store(values + token, found)
            tl.store(own, mine)
            tl.store(share, sum_of_c)
        else:
            for k in range(K):
                found = normaliser(
                    lines + k * stride, bias, constant, inverse, V, stride, KIND, BIASED, LANES, GROUP
                )
                tl.store(own + k, found)
            if WHAT != 0:
                theirs = normaliser(
                    line, other_bias, other_constant, inverse, V, other_stride, OTHER_KIND, OTHER_BIASED,
                    LANES, GROUP,
                )  # fmt: skip
            # Every lane reads what one has written.
            tl.debug_barrier()
            value = tl.zeros([LANES], tl.float32)
            sums = tl.zeros([LANES, PLACES], tl.float32)
            for start in range(0, FULL, BLOCK):
                value, sums = sum_block(
                    value, sums, lines, bias, line, other_bias, start + within, prior, own, theirs, constant,
                    other_constant, inverse, V, stride, other_stride, K, PLACES, WHAT, KIND, BIASED,
                    OTHER_KIND, OTHER_BIASED, GRADIENT, False,
                )  # fmt: skip
            if V > FULL:
                value, sums = sum_block(
                    value, sums, lines, bias, line, other_bias, FULL + within, prior, own, theirs, constant,
                    other_constant, inverse, V, stride, other_stride, K, PLACES, WHAT, KIND, BIASED,
                    OTHER_KIND, OTHER_BIASED, GRADIENT, True,
                )  # fmt: skip
            tl.store(values + token, tl.sum(value, axis=0))
            if GRADIENT:
                place = tl.arange(0, PLACES)
                tl.store(share + place, tl.sum(sums, axis=0), mask=place < K)
        if GRADIENT:
            tl.debug_barrier()
            for start in range(0, FULL, BLOCK):
                column = start + within
                log_p, c, _adds = entries(
                    lines, bias, line, other_bias, column, prior, own, theirs, constant, other_constant,
                    inverse, V, stride, other_stride, K, WHAT, KIND, BIASED, OTHER_KIND, OTHER_BIASED, False,
                )  # fmt: skip
                write_block(
                    lines, bias, column, log_p, c, prior, own, share, constant, inverse, V, stride, K, KIND,
                    BIASED, False,
                )  # fmt: skip
            if stride > FULL:
                column = FULL + within
                log_p, c, _adds = entries(
                    lines, bias, line, other_bias, column, prior, own, theirs, constant, other_constant,
                    inverse, V, stride, other_stride, K, WHAT, KIND, BIASED, OTHER_KIND, OTHER_BIASED, True,
                )  # fmt: skip
                write_block(
                    lines, bias, column, log_p, c, prior, own, share, constant, inverse, V, stride, K, KIND,
                    BIASED, True,
                )  # fmt: skip
        token += tl.num_programs(0)


def distil_rows(
    name: str, scores: Tensor, bias: Tensor | None, log_prior: Tensor, pointwise: Pointwise,
    taught: Tensor | None = None, other_bias: Tensor | None = None, other: Pointwise = IDENTITY, *,
    temperature: float, gradient: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Values [tokens] of an output of scores [tokens K, V], with log prior [tokens, K] and a teacher's scores
    [tokens, V], and the log prior's gradient [tokens, K]. With `gradient` the scores become Q.

    Scores may have padded rows, whose padding is overwritten; a bias is fp32, as long as the stride and -inf
    beyond V, and finite before.
    """
    tokens, K = log_prior.shape
    V = scores.shape[1]
    values = log_prior.new_empty(tokens)
    shares, normalisers = torch.empty_like(log_prior), torch.empty_like(log_prior)
    if tokens == 0:
        return values, shares
    group = GROUP_BYTES // scores.itemsize
    lanes = max(32, min(LANES, triton.next_power_of_2(-(-V // group))))
    # How many programs share the tokens; outside CUDA two, so that a program goes through several.
    programs = PROGRAMS * int(properties(scores.device).multi_processor_count) if scores.is_cuda else 2
    lines = scores if taught is None else taught
    with on_device(scores):
        distil_kernel[(min(tokens, programs),)](
            scores, scores if bias is None else bias, log_prior, lines,
            lines if other_bias is None else other_bias, values, shares, normalisers, pointwise.constant,
            other.constant, 1.0 / temperature, tokens, V=V, stride=scores.stride(0),
            other_stride=lines.stride(0), K=K, PLACES=triton.next_power_of_2(K), WHAT=OUTPUTS[name],
            KIND=KINDS[pointwise.kind], BIASED=bias is not None, OTHER_KIND=KINDS[other.kind],
            OTHER_BIASED=other_bias is not None, GRADIENT=gradient, LANES=lanes, GROUP=group,
            num_warps=lanes // 32,
        )  # fmt: skip
    return values, shares
