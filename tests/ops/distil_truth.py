"""Outputs beside the loss in fp64, written out by hand, with a bound on what rounding may do.

As in `truth.py` nothing is shared with the package or differentiated by autograd. Over outcomes o, which are
the V tokens or m of them and the rest, with P and Q the student's and the teacher's probabilities,

    value, C_o = d value / d x_o,  sum_o C_o = 0,     x the logarithms of P / T before they are normalised

and every bound is growth times the sizes of the terms, where what is near 1 at the student's top has the size
of what is left over: a bound that a lost digit of a sure token breaks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ops.truth import Bounded, Case, bent


@dataclass(kw_only=True)
class Teaching:
    """What an output is asked with."""

    name: str
    """ids, entropy, forward, reverse or jensen_shannon."""
    temperature: float = 1.0
    ids: Tensor | None = None
    """[N, M]"""
    upstream: Tensor | None = None
    """[N], or [N, M] for ids."""
    rows: Tensor | None = None
    """[N, K, D] of a teacher, with its log prior and weight."""
    log_prior: Tensor | None = None
    weight: Tensor | None = None
    log_probs: Tensor | None = None
    """[N, m] of a teacher's top tokens, which are `ids`."""


@dataclass
class Scored:
    """Of a student's rows: scores bent, their slope, and how far rounding may move an exponential."""

    a: Tensor
    slope: Tensor
    growth: float


def scored(rows: Tensor, W: Tensor, bias: Tensor | None, kind: str, *, eps: float) -> Scored:
    rows, W = rows.double(), W.double()
    bias = torch.zeros(W.shape[0], dtype=torch.float64) if bias is None else bias.double()
    masked = torch.isneginf(bias)
    product = rows @ W.t()
    z = product + bias.masked_fill(masked, 0.0)
    a, slope = bent(z, kind)
    terms = float((rows.abs() @ W.abs().t()).amax()) if rows.numel() else 0.0
    largest = float(z.abs().amax()) if rows.numel() else 0.0
    fine = 2.0**-51 if eps < 1e-12 else 2.0**-23
    delta = fine * (rows.shape[-1] * terms + 4.0 * largest + 8.0)
    if eps > fine and rows.numel():
        # The product is stored in the dtype that it was made in.
        delta += eps * float(product.abs().amax())
    return Scored(
        a.masked_fill(masked, -torch.inf), slope, 12.0 * float(torch.tensor(delta).double().expm1())
    )


def log_probs(a: Tensor, prior: Tensor) -> Tensor:
    return torch.logsumexp(a.log_softmax(-1) + prior.double().log_softmax(-1)[..., None], 1)


def sure(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log P, P and where the top is, of x [n, O]: the top's from what is left over."""
    top = x.argmax(1, keepdim=True)
    above = x - x.gather(1, top)
    left = above.exp().scatter(1, top, 0.0).sum(1, keepdim=True)
    log_P = above - torch.log1p(left)
    return log_P, log_P.exp(), torch.zeros_like(x, dtype=torch.bool).scatter(1, top, True)


def by_hand(name: str, x: Tensor, y: Tensor | None, G: Tensor | None) -> tuple[Tensor, ...]:
    """value [n], its size [n], C [n, O], its sizes: of x [n, O], a teacher's y, or upstream G of each."""
    log_P, P, top = sure(x)
    far = P == 0
    log_P = log_P.masked_fill(far, -1e4)
    left = torch.where(top, 0.0, P).sum(1, keepdim=True)
    if name == "ids":
        assert G is not None
        elsewhere = torch.where(top, 0.0, G)
        # At the top 1 - P is what is left over.
        C = torch.where(top, G * left - P * elsewhere.sum(1, keepdim=True), G - P * G.sum(1, keepdim=True))
        small = G.abs() * left + elsewhere.abs().sum(1, keepdim=True)
        sizes = torch.where(top, small, G.abs() + P * G.abs().sum(1, keepdim=True))
        return log_P, torch.where(top, left, 1.0 + log_P.abs()), C, sizes
    if name == "entropy":
        u = -log_P
        value = (P * u).sum(1)
        size = (torch.where(top, u + left, P * (u + 1.0))).sum(1)
    else:
        assert y is not None
        log_Q, Q, their_top = sure(y)
        log_Q = log_Q.masked_fill(Q == 0, -1e4)
        gap = log_Q - log_P
        left = left + torch.where(their_top, 0.0, Q).sum(1, keepdim=True)
        same = top & their_top
        if name == "forward":
            value = (Q * gap).sum(1)
            size = torch.where(same, left, Q * (gap.abs() + 1.0)).sum(1)
            C = torch.where(top, 0.0, P - Q)
            C = torch.where(top, -C.sum(1, keepdim=True), C)
            sizes = torch.where(top, torch.where(top, 0.0, P + Q).sum(1, keepdim=True), P + Q)
            return value, size, C, sizes
        if name == "reverse":
            u = -gap
            value = (P * u).sum(1)
            size = torch.where(same, left, P * (u.abs() + 1.0)).sum(1)
        else:
            low = torch.log1p(torch.expm1(-gap.abs()) / 2)
            u = -0.5 * (low + gap.clamp_min(0.0))
            value = (P * u - 0.5 * Q * (low + (-gap).clamp_min(0.0))).sum(1)
            size = torch.where(same, left, (P + Q) * (1.0 + gap.abs().clamp_max(1.0))).sum(1)
            size = size + (P * gap.clamp_min(0.0) + Q * (-gap).clamp_min(0.0)).sum(1)
    v = (u - torch.where(top, u, 0.0).sum(1, keepdim=True)).masked_fill(far, 0.0)
    mean = (P * v).sum(1, keepdim=True)
    mean_size = torch.where(top, 0.0, P * (v.abs() + 1.0)).sum(1, keepdim=True)
    return value, size, P * (v - mean), torch.where(top, mean_size, P * (v.abs() + mean_size + 1.0))


def outputs_truth(case: Case, asked: Teaching, *, eps: float, stored: float) -> dict[str, Bounded]:
    """The output of every token, or at every id, and the gradients for the upstream numbers. Tokens whose
    target is ignored do not count."""
    keep, T = case.counted, asked.temperature
    N, K, _ = case.rows.shape
    double = case.rows.dtype == torch.float64
    prior, W = case.log_prior[keep].double(), case.weight.double()
    found = scored(case.rows[keep], W, case.bias, case.kind, eps=eps)
    x, growth = log_probs(found.a, prior) / T, found.growth
    assert asked.upstream is not None
    g = asked.upstream[keep].double()
    y, G = None, None
    if asked.rows is not None:
        taught = scored(asked.rows[keep], asked.weight, None, "identity", eps=eps)
        y, growth = log_probs(taught.a, asked.log_prior[keep]) / T, growth + taught.growth
    if asked.name == "ids":
        # What has no probability is constant.
        able = ~torch.isneginf(x.gather(1, asked.ids[keep]))
        G = torch.zeros_like(x).scatter_add(1, asked.ids[keep], torch.where(able, g, 0.0))
        g = torch.ones(x.shape[0], dtype=torch.float64)
    # The m tokens of a teacher and the rest.
    spread = None
    if asked.log_probs is not None:
        ids = asked.ids[keep]
        hit = torch.zeros_like(x, dtype=torch.bool).scatter(1, ids, True)
        rest = torch.logsumexp(x.masked_fill(hit, -torch.inf), 1, keepdim=True)
        spread = (x - rest).exp().masked_fill(hit, 0.0)
        taught_log = asked.log_probs[keep].double()
        left_over = torch.log1p(-taught_log.exp().sum(1, keepdim=True))
        x, y = torch.cat([x.gather(1, ids), rest], 1), torch.cat([taught_log, left_over], 1)
    value, size, C, sizes = by_hand(asked.name, x, y, G)
    if asked.name == "ids":
        value, size = value.gather(1, asked.ids[keep]), size.gather(1, asked.ids[keep])
        value = value.masked_fill(~able, -torch.inf)
    if spread is not None:
        C, sizes = ((spread * each[:, -1:]).scatter(1, asked.ids[keep], each[:, :-1]) for each in (C, sizes))
    if asked.name == "forward":
        # The teacher says what the student cannot.
        cannot = torch.isneginf(x).any(1)
        value = value.masked_fill(cannot, torch.inf)
        C, sizes = (each.masked_fill(cannot[:, None], 0.0) for each in (C, sizes))
    fine = 2.0**-50 if double else 2.0**-22
    step = (g / T)[:, None]
    log_s = found.a.log_softmax(-1)
    joint = log_s + prior.log_softmax(-1)[..., None]
    share = (joint - torch.logsumexp(joint, 1, keepdim=True)).exp().nan_to_num(0.0)
    s = log_s.exp()
    B = (share * (C * step)[:, None]).sum(-1)
    Ba = (share * (sizes * step.abs())[:, None]).sum(-1)
    Q = share * (C * step)[:, None] - s * B[..., None]
    Qa = share * (sizes * step.abs())[:, None] + s * Ba[..., None]
    if K == 1 and T == 1.0:
        Q, Qa = (C * step)[:, None], (sizes * step.abs())[:, None]
    steepest = found.slope + (1.0 if case.kind == "softcap" else 0.0)
    Q, Qa = Q * found.slope, Qa * steepest
    tiny = 2.0**-24 if stored == 2.0**-10 else 1e-30

    def whole(values: Tensor) -> Tensor:
        out = torch.zeros(N, *values.shape[1:], dtype=torch.float64)
        out[keep] = values
        return out

    rows = case.rows[keep].double()
    # What lies under the least number of fp16 is lost in Q where products take that.
    lost = tiny * float(asked.upstream.view(N, -1).abs().sum(1).max()) if eps == 2.0**-10 else 0.0

    def bounded(value: Tensor, sizes: Tensor, through: Tensor) -> Bounded:
        """`through` are the numbers that Q is multiplied with."""
        least = lost * float(through.abs().sum()) + tiny
        return Bounded(value, (growth + 16 * fine + 4 * stored + 4 * eps) * sizes + least)

    d_prior = B - prior.exp() * B.sum(1, keepdim=True)
    results = {
        "value": Bounded(
            whole(value), whole((growth + 16 * fine) * size + fine * value.abs().nan_to_num(0.0, 0.0, 0.0))
        ),
        "rows": bounded(whole(Q @ W), whole(Qa @ W.abs()), W),
        "weight": bounded(
            torch.einsum("nkv,nkd->vd", Q, rows), torch.einsum("nkv,nkd->vd", Qa, rows.abs()), rows
        ),
        "log_prior": bounded(whole(d_prior), whole(Ba + prior.exp() * Ba.sum(1, keepdim=True)), prior),
    }
    if case.bias is not None:
        masked = torch.isneginf(case.bias)
        results["bias"] = bounded(
            Q.sum((0, 1)).masked_fill(masked, 0.0), Qa.sum((0, 1)), torch.ones_like(prior)
        )
    return results
