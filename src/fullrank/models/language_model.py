"""A body and a head as one module.

Call it only through forward, so that wrappers that shard or average its weights see every call.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads.base import Head
from fullrank.models.body import Body, Carried
from fullrank.ops.arguments import compute_dtype


class Prediction(NamedTuple):
    value: Tensor
    """The loss to differentiate, penalties included while training; without targets log-probabilities."""
    nll: Tensor
    """Mean nats per token without penalties, or one a token with reduction="none"; detached. Empty without
    targets."""
    carried: Carried


class LanguageModel(nn.Module):
    """ids [batch, time] and targets [batch, time], the next tokens, to a loss.

    activation and temporal are the weights of AWD-LSTM's penalties on the last layer (Merity et al. 2017,
    1708.02182): activation * mean(dropped^2) + temporal * mean((raw_t - raw_{t-1})^2). balance is the weight
    of DOC's penalty (Takase et al. 2018, 1808.10143), the squared coefficient of variation of the K priors
    summed over the batch. DOC's released code sums over time alone and multiplies by K - 1.
    """

    def __init__(
        self,
        body: Body,
        head: Head,
        *,
        tie: bool = True,
        activation: float = 0.0,
        temporal: float = 0.0,
        balance: float = 0.0,
    ) -> None:
        super().__init__()
        if head.state_widths != body.widths[: head.states]:
            raise FullrankError(
                f"{head.name} reads states of widths {list(head.state_widths)}, the body gives "
                f"{list(body.widths)}, the last layer first: build the head for the body's widths"
            )
        if balance and not head.mixture:
            raise FullrankError(f"{head.name} has no prior over components to balance: set balance=0")
        self.body, self.head = body, head
        self.activation, self.temporal, self.balance = activation, temporal, balance
        self.tied = tie
        if tie:
            head.tie(body.embedding)

    def forward(
        self, ids: Tensor, targets: Tensor | None = None, carried: Carried = (), *, reduction: str = "mean"
    ) -> Prediction:
        output = self.body(ids, carried)
        states = output.states[: self.head.states]
        if targets is None:
            log_probs = self.head(states, context=ids)
            return Prediction(log_probs, ids.new_empty(0, dtype=torch.float32), output.carried)
        penalised = self.training and reduction == "mean"
        balanced = penalised and self.balance > 0.0
        found = self.head(states, targets, context=ids, reduction=reduction, return_prior=balanced)
        loss, log_prior = found if balanced else (cast(Tensor, found), None)
        nll = loss.detach()
        if penalised:
            if self.activation:
                loss = loss + self.activation * _widened(output.states[0]).square().mean()
            if self.temporal and ids.shape[1] > 1:
                loss = loss + self.temporal * _widened(output.raw).diff(dim=1).square().mean()
            if log_prior is not None:
                mass = log_prior.exp().sum(0)
                loss = loss + self.balance * mass.var(correction=0) / mass.mean().square()
        return Prediction(loss, nll, output.carried)


def _widened(values: Tensor) -> Tensor:
    return values.to(compute_dtype(values.dtype))
