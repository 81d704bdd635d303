"""What training minimises: a model's mean nats per token, and penalties on its states and priors.

    loss = nll + activation · mean(h²) + temporal · mean((r_t - r_{t-1})²) + balance · K Σ_k (u_k - 1/K)²
               + z_loss · mean(Σ_k prior_k l_k²) + penalties on the shape of W and h (`penalty.py`)

h [batch, time, H] are the last layer's states as the head reads them and r the same before dropout: the
penalties of AWD-LSTM (Merity et al. 2017, 1708.02182). u [K] is the mean of a mixture's prior over the tokens
of a step. The balance term is the squared coefficient of variation of u: DOC's penalty (Takase et al. 2018,
1808.10143), whose released code takes it over time alone and multiplies it by K - 1. l_k is the logsumexp of
component k's scores, which nothing else holds near zero: the auxiliary loss of PaLM (Chowdhery et al. 2022,
2204.02311), there with a weight of 1e-4. The model stays a plain one of transformers; only a training step
has penalties.

The balance term is not a mean over tokens. Where a forward pass sees only a part of a step's tokens, with the
mean prior v, u is a constant and the term is

    K Σ_k ((u_k - 1/K)² + 2 (u_k - 1/K) (v_k - [v_k]))      [v_k] is v_k as a constant

The mean of these terms over equal parts has the value and the gradient of the term of all tokens. `usage` in
`forward` is u; without it, u is the mean of v over the processes.

Targets [batch, time] are the next tokens, shifted by whoever cut the text: a part of a text ends with a
target that it does not hold. `carried` is the state of a recurrent body after a part, empty for others.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.models import FullrankForCausalLM
from fullrank.ops.arguments import compute_dtype
from fullrank.ops.parallel import gather
from fullrank.train.penalty import Penalties

Carried = tuple[Tensor, ...]
"""What a recurrent body hands to the next part of the same texts: tensors [batch, ...]. Empty for others."""


class Prediction(NamedTuple):
    value: Tensor
    """The loss to differentiate, penalties included."""
    nll: Tensor
    """Mean nats per token without penalties; detached."""
    carried: Carried
    usage: Tensor | None = None
    """[K], the mean prior u over the components that was balanced; detached. None where none is."""


class TokenLosses(NamedTuple):
    """Of a model without penalties."""

    nll: Tensor
    """[batch, time] nats; 0 where a target does not count."""
    carried: Carried
    state: Tensor
    """[batch, time, H], the last layer's, as the head reads it."""


class Objective(nn.Module):
    """Call it only through forward, so that wrappers that shard or average its weights see every call."""

    def __init__(
        self,
        model: FullrankForCausalLM,
        *,
        activation: float = 0.0,
        temporal: float = 0.0,
        balance: float = 0.0,
        z_loss: float = 0.0,
        penalties: Penalties | None = None,
    ) -> None:
        super().__init__()
        if balance and not model.lm_head.mixture:
            raise FullrankError(
                f"{model.lm_head.name} has no prior over components to balance: set head.balance=0"
            )
        self.model = model
        self.activation, self.temporal, self.balance, self.z_loss = activation, temporal, balance, z_loss
        self.penalties = penalties

    def forward(
        self, ids: Tensor, targets: Tensor, carried: Carried = (), usage: Tensor | None = None
    ) -> Prediction:
        states, _, output = self.model.head_inputs(ids, state=carried or None)
        asked = {"return_prior": self.balance > 0.0, "return_normaliser": self.z_loss > 0.0}
        found = self.model.lm_head(states, targets, context=ids, **asked)
        loss, *more = found if any(asked.values()) else (cast(Tensor, found),)
        log_prior = more.pop(0) if self.balance else None
        nll = loss.detach()
        if self.z_loss:
            loss = loss + self.z_loss * more[0]
        if self.activation:
            loss = loss + self.activation * _widened(states[0]).square().mean()
        if self.temporal and ids.shape[1] > 1:
            before = getattr(output, "undropped", None)
            before = output.last_hidden_state if before is None else before
            loss = loss + self.temporal * _widened(before).diff(dim=1).square().mean()
        if log_prior is not None:
            part = log_prior.exp().mean(0)
            usage = gather(part.detach()).mean(0) if usage is None else usage
            excess = usage - 1 / len(usage)
            terms = excess.square() + 2 * excess * (part - part.detach())
            loss = loss + self.balance * len(usage) * terms.sum()
        if self.penalties is not None:
            loss = loss + self.penalties(self.model.lm_head.decoder.weight, states[0])
        return Prediction(loss, nll, _carried(output), usage)


def token_losses(
    model: FullrankForCausalLM, ids: Tensor, targets: Tensor, carried: Carried = ()
) -> TokenLosses:
    """The loss of every target, differentiable."""
    states, _, output = model.head_inputs(ids, state=carried or None)
    nll = cast(Tensor, model.lm_head(states, targets, context=ids, reduction="none"))
    return TokenLosses(nll, _carried(output), states[0])


def _carried(output: object) -> Carried:
    return tuple(getattr(output, "state", None) or ())


def _widened(values: Tensor) -> Tensor:
    return values.to(compute_dtype(values.dtype))


__all__ = ["Carried", "Objective", "Prediction", "TokenLosses", "token_losses"]
