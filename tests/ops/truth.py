"""Losses and gradients of a mixture in fp64, written out by hand, with a bound on what rounding may do.

Nothing here is shared with the package, and nothing is differentiated by autograd. With z the scores,
a = f(z)
and S, d, Q, g as in the package's equations, a path that multiplies in a dtype of precision eps knows each
score up to

    delta = eps max|z| + accumulation in fp32

so an exponential up to a factor e^(2 delta), and every gradient, a sum of terms such as g Q_v W_v, up to
(e^(c delta) - 1 + a few eps) times the sum of the terms' sizes. That holds for confident tokens too, whose
losses and gradients are tiny: a bound that is relative to the size of the terms can fail for them, where one
that is relative to what a plain path in the same dtype loses cannot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CAP = 3.0


@dataclass(kw_only=True)
class Case:
    """Arguments of a mixture loss in one dtype; gradients are asked of rows, log prior, weight and bias."""

    rows: Tensor
    log_prior: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None = None
    token_weight: Tensor | None = None
    kind: str = "identity"
    ignored: int = -100
    private: int = 0
    """Of a trunk: the entries of a row that a component owns. The others are alike in all K rows."""

    @property
    def counted(self) -> Tensor:
        return self.targets != self.ignored


@dataclass
class Bounded:
    """A value, and how far rounding may move each of its entries."""

    value: Tensor
    allowed: Tensor

    def check(self, found: Tensor, what: str) -> None:
        assert found.shape == self.value.shape, f"{what}: {tuple(found.shape)} for {tuple(self.value.shape)}"
        # Below the normal numbers of fp32 a step is 1.4e-45: losses of a hundred nats of margin lie there.
        allowed = self.allowed + (1e-44 if found.dtype == torch.float32 else 0.0)
        found = found.detach().double()
        close = (found == self.value) | ((found - self.value).abs() <= allowed)
        if not bool(close.all()):
            worst = torch.where(close, 0.0, (found - self.value).abs() / allowed.clamp_min(1e-300))
            at = int(worst.nan_to_num(torch.inf).argmax())
            raise AssertionError(
                f"{what}: {float(found.flatten()[at]):.6g} where {float(self.value.flatten()[at]):.6g} is "
                f"right and {float(self.allowed.flatten()[at]):.2g} allowed, entry {at} of "
                f"{tuple(found.shape)}"
            )


def bent(z: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """f and f' of fp64 scores."""
    if kind == "sigsoftmax":
        below = torch.minimum(z, torch.zeros_like(z)) - torch.log1p(torch.exp(-z.abs()))
        return z + below, 2.0 - torch.sigmoid(z)
    if kind == "softcap":
        tanh = torch.tanh(z / CAP)
        return CAP * tanh, 1.0 - tanh * tanh
    return z, torch.ones_like(z)


def truth(
    case: Case, reduction: str, *, eps: float, stored: float, added: bool = False
) -> dict[str, Bounded]:
    """Loss and gradients for products of precision eps and tensors stored with precision `stored`; `added`:
    the bias is added to the scores in the dtype of the products."""
    keep = case.counted
    rows, prior, W = (each.double() for each in (case.rows[keep], case.log_prior[keep], case.weight))
    y = case.targets[keep].long()
    (n, K, D), V, N = rows.shape, W.shape[0], case.rows.shape[0]
    bias = torch.zeros(V, dtype=torch.float64) if case.bias is None else case.bias.double()
    masked = torch.isneginf(bias)
    product = rows @ W.t()
    z = product + bias.masked_fill(masked, 0.0)
    a, slope = bent(z, case.kind)
    a = a.masked_fill(masked, -torch.inf)
    in_product = z if added else product
    top_size = max(float(in_product.abs().amax()) if n else 0.0, 1e-30)
    terms = float((rows.abs() @ W.abs().t()).amax()) if n else 0.0
    delta = eps * top_size + 2.0**-23 * (D * terms + 4.0 * float(z.abs().amax() if n else 0.0) + 8.0)
    fine = 2.0**-23
    if eps < 1e-12:
        fine = 2.0**-51
        delta = fine * (D * terms + 4.0 * float(z.abs().amax() if n else 0.0) + 8.0)
    growth = torch.expm1(torch.tensor(8.0 * delta, dtype=torch.float64)).item() + 16 * eps

    m = a.amax(-1, keepdim=True)
    anchor = m.masked_fill(torch.isneginf(m), 0.0)
    E = (a - anchor).exp()
    index = y[:, None, None].expand(-1, K, 1)
    own = E.gather(-1, index)[..., 0]
    S = E.scatter(-1, index, 0.0).sum(-1)
    d = (a.gather(-1, index) - m)[..., 0]
    total = S + own
    row_nll = torch.where(own == 0, torch.log(S) - d, torch.log1p(S + torch.expm1(d)) - d)
    joint = prior - row_nll
    hopeless = torch.isneginf(joint).all(1)
    nll = torch.where(hopeless, torch.inf, -torch.logsumexp(joint, 1))
    share = torch.where(hopeless[:, None], 0.0, (joint + nll[:, None]).exp())

    w = torch.ones(n, dtype=torch.float64)
    if case.token_weight is not None:
        w = case.token_weight[keep].double()
    mass = w.sum() if reduction == "mean" else torch.tensor(1.0)
    scale = torch.where(mass == 0, 0.0, 1.0 / mass)
    # A loss a token is weighed unevenly, so that a mixed-up upstream gradient shows.
    upstream = torch.ones(N, dtype=torch.float64)
    if reduction == "none":
        upstream = uneven(N)
    counts = torch.where(w == 0, 0.0, nll) * w
    # What rounding may do to a loss: a sure token's is about S / own, which is known up to a factor.
    finite = nll.abs().nan_to_num(0.0, 0.0, 0.0)
    emitted = (share * row_nll.nan_to_num(0.0, 0.0, 0.0)).sum(1).clamp(max=1.0)
    slack = growth * emitted + 4 * fine * finite
    if K > 1:
        # A logarithm of a sum over the components is known up to its own rounding, and so are the priors.
        slack = slack + 4 * fine * (1.0 + prior.abs().nan_to_num(0.0, 0.0, 0.0).amax(1))
    if reduction == "none":
        loss = torch.zeros(N, dtype=torch.float64).masked_scatter(keep, counts)
        allowed = torch.zeros(N, dtype=torch.float64).masked_scatter(keep, slack * w.abs())
    else:
        loss, allowed = counts.sum() * scale, (slack * w.abs()).sum() * scale.abs()
    allowed = allowed + 2 * fine * loss.abs().nan_to_num(0.0, 0.0, 0.0) + 1e-300

    g = share * (w * scale * upstream[keep])[:, None]
    inverse = 1.0 / torch.where(total == 0, 1.0, total)
    Q = slope * E * inverse[..., None]
    target = torch.where(torch.isneginf(a.gather(-1, index)[..., 0]), 0.0, -S * inverse)
    Q = Q.scatter(-1, index, (target * slope.gather(-1, index)[..., 0])[..., None])
    # 1 - tanh^2 of a soft cap is known up to the rounding of 1.
    steepest = slope + (1.0 if case.kind == "softcap" else 0.0)
    Qa, ga = (Q / torch.where(slope == 0, 1.0, slope)).abs() * steepest, g.abs()
    # What lies under the least number of a narrow dtype is lost: in Q where the products take it, in a
    # gradient where that is stored.
    tiny = 2.0**-24 if stored == 2.0**-10 else 1e-35

    def whole(values: Tensor, filler: tuple[int, ...]) -> Tensor:
        return torch.zeros(N, *filler, dtype=torch.float64).masked_scatter(
            keep.view(-1, *[1] * len(filler)).expand(N, *filler), values
        )

    def bounded(value: Tensor, sizes: Tensor, least: Tensor | float = 0.0) -> Bounded:
        return Bounded(value, (growth + 4 * stored) * sizes + least)

    lost = tiny * ga
    d_rows = bounded(
        whole(g[..., None] * (Q @ W), (K, D)),
        whole(ga[..., None] * (Qa @ W.abs()), (K, D)),
        whole((lost * W.abs().sum() + tiny)[..., None].expand(-1, -1, D), (K, D)),
    )
    d_weight = bounded(
        torch.einsum("nkv,nkd->vd", Q, g[..., None] * rows),
        torch.einsum("nkv,nkd->vd", Qa, ga[..., None] * rows.abs()),
        float((lost[..., None] * rows.abs()).sum() + tiny),
    )
    d_bias = bounded(
        torch.einsum("nkv,nk->v", Q, g), torch.einsum("nkv,nk->v", Qa, ga), float(lost.sum()) + tiny
    )
    d_prior = bounded(whole(-g, (K,)), whole(ga, (K,)), 1e-300)
    found = {"loss": Bounded(loss, allowed), "log_prior": d_prior, "weight": d_weight}
    if case.private:
        shared = D - case.private
        summed = Bounded(d_rows.value[..., :shared].sum(1), d_rows.allowed[..., :shared].sum(1))
        own_part = Bounded(d_rows.value[..., shared:], d_rows.allowed[..., shared:])
        found |= {"trunk": summed, "private": own_part}
    else:
        found["rows"] = d_rows
    if case.bias is not None:
        found["bias"] = Bounded(d_bias.value.masked_fill(masked, 0.0), d_bias.allowed)
    log_probs = torch.logsumexp(a.log_softmax(-1) + prior[..., None], 1)
    found["log_probs"] = Bounded(
        whole(log_probs, (V,)), whole(growth + 8 * fine * log_probs.abs().nan_to_num(0.0, 0.0, 0.0), (V,))
    )
    found["nll"] = Bounded(whole(nll, ()), whole(slack, ()))
    entropy = torch.special.entr(log_probs.exp()).sum(1)
    found["entropy"] = Bounded(whole(entropy, ()), whole(growth * (1 + entropy) * 4 + 1e-6, ()))
    return found


def uneven(count: int) -> Tensor:
    return torch.linspace(-1.0, 2.0, count, dtype=torch.float64)
