"""The closest plain softmax head to another head.

Over the states h of a text, with p the upgraded head's distribution, find W' and a square map M that minimise

    KL( p || softmax f( W' (h + M h) + b ) )

with f the soft cap where the original has one, and b where the original has a bias. That is the original's
own layer, trained as any head is (`fit.training`) with the upgraded head for its teacher (`fit.teacher`). It
starts with the upgraded head's own matrix, or with that times the map that is nearest to the mixture's mean
row, whichever is closer to p. The KL that is reported is exact, on text that nothing was fitted or chosen on.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fullrank.fit import comparison as fit
from fullrank.fit import estimates, states, training
from fullrank.fit.controls import plain_layer
from fullrank.fit.teacher import Teacher
from fullrank.fit.trainee import Trainee
from fullrank.heads import Head
from fullrank.heads.rows import RowHead
from fullrank.models.output_layer import OutputLayer
from fullrank.ops import IDENTITY, Pointwise
from fullrank.results import Estimate


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Closest:
    """A softmax head near another one."""

    weight: Tensor
    """[V, D]"""
    bias: Tensor | None
    rows: int
    start: Estimate
    cost: Estimate
    upgraded_loss: Estimate
    plain_loss: Estimate
    steps: int


def closest(
    head: Head,
    parts: states.Parts,
    *,
    pointwise: Pointwise = IDENTITY,
    bias: bool = False,
    settings: fit.Settings,
    progress: fit.Progress = lambda stage, share: None,
) -> Closest:
    """Fit W, and a bias if there is to be one, to what the head says of the states."""
    teacher = Teacher(head=head.eval(), parts=parts, vocab=head.vocab)
    progress("asking the upgraded head", 0.0)
    judging = dataclasses.replace(settings, matrix=False, exact=True)
    starts = []
    for start in _starts(head, parts.fit):
        plain = _plain(head, pointwise, bias, start)
        starts.append(Trainee(plain, fit.setting_for([plain], plain, parts, judging, teacher), 0))
    own = starts[0].exact_divergences()
    plain = (starts[0] if len(starts) == 1 else min(starts, key=Trainee.choose_loss)).head
    del starts
    progress("asking the upgraded head", 0.5)
    setting = fit.setting_for([plain], plain, parts, dataclasses.replace(settings, matrix=True), teacher)
    fitted, weights = training.train(
        setting, plain, fit.plan_for(setting, plain, settings), seed=settings.seed,
        progress=lambda share: progress("fitting softmax", share),
    )  # fmt: skip
    layer = fit.rebased_setting(setting, weights, fitted.rate).plain.decoder
    assert own is not None
    assert fitted.divergences is not None
    blocks = parts.held_out.blocks.flatten()
    return Closest(
        weight=layer.weight.detach(),
        bias=None if layer.bias is None else layer.bias.detach(),
        rows=setting.rows,
        start=estimates.mean(own, blocks),
        cost=estimates.mean(fitted.divergences, blocks),
        upgraded_loss=estimates.mean(teacher.losses(parts.held_out, settings.memory // 8), blocks),
        plain_loss=estimates.mean(fitted.losses, blocks),
        steps=fitted.steps,
    )


@torch.no_grad()
def _starts(head: Head, part: states.Part) -> list[Tensor | None]:
    """Maps to begin with: none, and the one that is nearest to the mean row of a mixture."""
    if not isinstance(head, RowHead) or head.components < 2 or head.hidden != head.width:
        return [None]
    flat = [state.flatten(0, 1) for state in part.states[: head.states]]
    rows, log_prior = head.rows(flat)
    if log_prior is None:
        return [None]
    mean = (log_prior.exp().to(rows.dtype)[..., None] * rows).sum(dim=-2).double()
    hidden = flat[0].double()
    square = hidden.T @ hidden
    ridge = 1e-3 * square.diagonal().mean() * torch.eye(len(square), device=square.device)
    return [None, torch.linalg.solve(square + ridge, hidden.T @ (mean - hidden)).T.float()]


@torch.no_grad()
def _plain(head: Head, pointwise: Pointwise, bias: bool, start: Tensor | None) -> Head:
    """The upgraded head's matrix, times a map, as a softmax."""
    weight, own = head.decoder.weight.detach().float(), head.decoder.bias
    offset: Tensor | None = None
    if bias:
        # Softmax does not see a constant, which sigsoftmax has in its bias.
        offset = weight.new_zeros(len(weight)) if own is None else (own - own.mean()).float()
    weight = weight if start is None else weight + weight @ start
    return plain_layer(OutputLayer(weight=weight, bias=offset, pointwise=pointwise, tokens=len(weight)))


def softmax_log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, pointwise: Pointwise) -> Tensor:
    scores = hidden @ weight.T
    return torch.log_softmax(pointwise(scores if bias is None else scores + bias), dim=-1)
