"""The definitions, materialised: the specification that the chunked path is tested against.

    log p_v = log softmax_v (log sum_k prior_k s_kv / T)        s_k the softmax of row k, T the temperature
    at ids      log p_i, for M ids a token
    entropy     H(p) = -sum_v p_v log p_v
    forward     KL(q || p) = sum_v q_v (log q_v - log p_v)                 q the teacher
    reverse     KL(p || q)
    jensen_shannon     (KL(q || m) + KL(p || m)) / 2,  m = (p + q) / 2
    lumped      the same over m + 1 outcomes: the teacher's m tokens, and all others as one

**Temperature** is that of the distribution: p^(1/T), normalised, whatever made p. So it is what transformers'
`generate` samples from at that temperature, two heads that say the same still do at any T, and with one
component it is the scores over T. Scores over T inside each component of a mixture would be another
distribution. Losses are not multiplied by T^2.

Log-probabilities leave the largest out of the sum that they are compared with, log p_top = -log(1 + S): a
sure token keeps its digits, and so do its gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fullrank.ops.distil.teacher import Mixture
from fullrank.ops.mixture.reference import mixture_log_probs

FAR = -1e4
"""The log-probability of what cannot be: e^FAR is 0 in every dtype, and 0 times it no NaN."""
KINDS = ("forward", "reverse", "jensen_shannon")


def log_probs(mixture: Mixture, temperature: float = 1.0) -> Tensor:
    """[N, V] of rows [N, K, D]."""
    rows, log_prior, weight, bias, pointwise = mixture
    return normalise(mixture_log_probs(rows, log_prior, weight, bias=bias, pointwise=pointwise) / temperature)


def normalise(scores: Tensor, counted: Tensor | None = None) -> Tensor:
    """log_softmax of scores [N, V], of which some may be -inf, with the digits of a sure one. Those that are
    not counted are no part of the sum, but are compared with it."""
    able = ~torch.isneginf(scores)
    summed = able if counted is None else able & counted
    top = scores.detach().masked_fill(~summed, -torch.inf).argmax(1, keepdim=True)
    above = torch.where(able.scatter(1, top, False), scores - scores.gather(1, top), 0.0)
    others = torch.where(summed.scatter(1, top, False), above.exp(), 0.0).sum(1, keepdim=True)
    return torch.where(able, above - torch.log1p(others), -torch.inf)


def at_ids(log_p: Tensor, ids: Tensor, ignore_index: int) -> Tensor:
    """log p [N, M] at ids [N, M]; 0 where ignored."""
    counted = ids != ignore_index
    return torch.where(counted, log_p.gather(1, ids.masked_fill(~counted, 0)), 0.0)


def entropy(log_p: Tensor) -> Tensor:
    """[N] nats of log-probabilities [N, V]."""
    return -(log_p.exp() * log_p.clamp_min(FAR)).sum(1)


def divergence(log_p: Tensor, log_q: Tensor, kind: str) -> Tensor:
    """[N] nats between a student's log-probabilities [N, V] and a teacher's; inf, without gradient, where one
    must be able to say what the other can and is not."""
    wanted, can = (log_q, log_p) if kind == "forward" else (log_p, log_q)
    impossible = (~torch.isneginf(wanted) & torch.isneginf(can)).any(1) & (kind != "jensen_shannon")
    p, q, log_p, log_q = log_p.exp(), log_q.exp(), log_p.clamp_min(FAR), log_q.clamp_min(FAR)
    if kind == "forward":
        terms = q * (log_q - log_p)
    elif kind == "reverse":
        terms = p * (log_p - log_q)
    else:
        # log m - log p = log((1 + e^x) / 2), without a sum of near numbers where x is small.
        x = log_q - log_p
        both = half_softplus(x)
        terms = -0.5 * ((p + q) * both + p * x.clamp_min(0.0) + q * (-x).clamp_min(0.0))
    total = torch.where(impossible[:, None], 0.0, terms).sum(1)
    return torch.where(impossible, torch.inf, total)


def half_softplus(x: Tensor) -> Tensor:
    """log((1 + e^-|x|) / 2), near 0 and far from it without a difference of near numbers."""
    size = x.abs()
    near = torch.log1p(torch.expm1(-size) / 2)
    return torch.where(size < 1.0, near, torch.log1p(torch.exp(-size)) - math.log(2.0))


def lump(log_p: Tensor, ids: Tensor, counted: Tensor) -> Tensor:
    """Log-probabilities [N, m + 1] of the ids [N, m] that are counted, -inf at others, and of all else."""
    N, V = log_p.shape
    column = torch.where(counted, ids, V)
    named = torch.zeros(N, V + 1, dtype=torch.bool, device=log_p.device).scatter(1, column, True)[:, :V]
    at = torch.where(counted, log_p.gather(1, column.clamp_max(V - 1)), -torch.inf)
    # They sum to 1 already: a rest that is sure has its digits from what is left over.
    return normalise(torch.cat([at, logsumexp_where(log_p, ~named)], 1))


def logsumexp_where(scores: Tensor, wanted: Tensor) -> Tensor:
    """[N, 1], over the wanted of scores [N, V]; -inf, without gradient, where nothing is wanted or can be."""
    wanted = wanted & ~torch.isneginf(scores)
    some = wanted.any(1, keepdim=True)
    found = torch.logsumexp(torch.where(wanted, scores, torch.where(some, -torch.inf, 0.0)), 1, keepdim=True)
    return torch.where(some, found, -torch.inf)


def teacher_outcomes(log_probs: Tensor, counted: Tensor, V: int) -> Tensor:
    """Log-probabilities [N, m + 1] of a teacher's top tokens and of the rest: log(1 - sum), from whichever
    side keeps the digits. What sums to 1 or, by rounding, to more leaves no rest, and neither do V tokens."""
    named = log_probs.masked_fill(~counted, -torch.inf)
    log_sum = torch.logsumexp(named, 1, keepdim=True).clamp_max(0.0)
    small = log_sum < -math.log(2.0)
    rest = torch.where(small, torch.log1p(-log_sum.exp()), torch.log(-torch.expm1(log_sum)))
    return torch.cat([named, rest.masked_fill(counted.sum(1, keepdim=True) == V, -torch.inf)], 1)


def first_places(ids: Tensor) -> Tensor:
    """Where in its line each of ids [N, M] stands first, [N, M]: an outcome counts once."""
    ordered, place = ids.sort(dim=1, stable=True)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    columns = torch.arange(ids.shape[1], device=ids.device)
    start = torch.where(starts, columns, 0).cummax(1).values
    return torch.empty_like(place).scatter_(1, place, place.gather(1, start))
