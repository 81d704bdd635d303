"""Per-token outputs of a model's own head, in place of a product of states and output embedding.

TRL (from version 1.15) gives a model a fused output layer: `add_fused_lm_head` replaces `model.forward` by
a function that multiplies the states of `model.base_model` by `get_output_embeddings().weight`. Under most
of our heads that is another distribution, and the head's own parameters would get no gradient. So
`FullrankForCausalLM` keeps its forward, stores the settings of TRL's function, and its head computes what
TRL asks for, per token [batch, time - 1], 0 where the label is -100:

    log_probs           log p(label), with a gradient
    entropy             nats; with a gradient unless `is_top1` is asked for too: then both are metrics
    is_top1             whether the label is the most probable token
    log_sum_sq_probs    log sum_v p_v^2, without a gradient
    mean_logits         the mean over the vocabulary of the log-probabilities, without a gradient

Any other code that calls `model.base_model` is refused by `StatesOnly`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from fullrank.errors import FullrankError

IGNORED = -100
TABLE_BYTES = 256 << 20
"""Bound on one table of log-probabilities."""
ENTROPY, TOP, SQUARES, MEAN = "entropy", "is_top1", "log_sum_sq_probs", "mean_logits"


@dataclass
class TokenOutputs(ModelOutput):
    """What TRL's trainers read: each field is None where it was not asked for."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class TokenSettings:
    """What `add_fused_lm_head` was called with."""

    temperature: float = 1.0
    outputs: tuple[str, ...] = ()


class StatesOnly:
    """The body as `model.base_model` gives it where the head is more than one matrix: all but its call."""

    def __init__(self, body: Any, head: str) -> None:
        self.__dict__.update(_body=body, _head=head)

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        raise FullrankError(
            f"model.base_model gives the states without the {self._head} head, whose loss is not that of "
            "states @ get_output_embeddings().weight: call the model itself (TRL does from version 1.15 on), "
            "or model.model where states are wanted"
        )

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_body"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._body, name, value)

    def __eq__(self, body: object) -> bool:
        return body is self._body or (isinstance(body, StatesOnly) and body._body is self._body)

    def __hash__(self) -> int:
        return hash(self._body)


def settings_of(forward: Any) -> TokenSettings | None:
    """The settings of TRL's fused output layer; None for any other function."""
    function = getattr(forward, "__func__", forward)
    code = getattr(function, "__code__", None)
    if code is None or "fused_lm_head" not in code.co_varnames:
        return None
    values = inspect.getclosurevars(function).nonlocals
    names = [field.name for field in dataclasses.fields(TokenSettings)]
    missing = [name for name in names if name not in values]
    if missing:
        raise FullrankError(
            f"the fused output layer of this TRL has no {' and no '.join(missing)}, expected that of "
            "versions 1.15 and 1.16: install one of them, or train with transformers' Trainer"
        )
    return TokenSettings(temperature=values["temperature"], outputs=tuple(values["outputs"]))


def token_outputs(
    head: Any,
    states: list[Tensor],
    targets: Tensor,
    settings: TokenSettings,
    *,
    context: Tensor | None,
    count: Tensor | int | None,
    drop_last: bool,
) -> TokenOutputs:
    """For targets [batch, time], -100 where a token does not count; the last one is dropped on request.

    `head` is a head or PEFT's wrapper of one. The loss is the sum over counted tokens divided by `count`, or
    by their number.
    """
    mask = targets != IGNORED
    log_probs, entropy, best = _in_one_pass(head, states, targets, settings, context)
    fields = {"log_probs": log_probs, ENTROPY: entropy}
    fields[TOP] = None if best is None else (best == targets) & mask
    if {SQUARES, MEAN}.intersection(settings.outputs):
        squares, mean = _from_table(head, states, mask, settings.temperature, context)
        fields[SQUARES] = squares if SQUARES in settings.outputs else None
        fields[MEAN] = mean if MEAN in settings.outputs else None
    total = mask.sum().clamp(min=1) if count is None else torch.as_tensor(count).to(log_probs.device)
    end = -1 if drop_last else None
    return TokenOutputs(
        loss=-log_probs.sum() / total,
        label_mask=mask[:, :end],
        **{name: None if field is None else field[:, :end] for name, field in fields.items()},
    )


def _in_one_pass(
    head: Any, states: list[Tensor], targets: Tensor, settings: TokenSettings, context: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probabilities, entropy and the most probable token [batch, time], without an N x V table."""
    temperature, mask = settings.temperature, targets != IGNORED
    wanted = {ENTROPY, TOP}.intersection(settings.outputs)
    # TRL asks for is_top1 where it logs both, and for entropy alone where it may be a part of the loss.
    metric = TOP in wanted or not torch.is_grad_enabled()
    rows = hasattr(head, "token_logprobs")
    if temperature == 1.0:
        if not wanted or (rows and not metric):
            log_probs = -head(states, targets, context=context, reduction="none")
            return log_probs, _entropy(head, states, mask, temperature) if wanted else None, None
        nll, stats = head(states, targets, context=context, reduction="none", return_stats=True)
        entropy = _WithoutGradient.apply(stats.entropy, nll, head.name)
        return -nll, entropy if ENTROPY in wanted else None, stats.argmax
    if not rows:
        raise FullrankError(
            f"{head.name} has no log-probabilities at temperature {temperature:g}: pass temperature=1.0 to "
            "the trainer, or take a head that is rows over one matrix, such as mos"
        )
    log_probs = head.token_logprobs(states, targets[..., None], temperature=temperature)[..., 0]
    entropy = _entropy(head, states, mask, temperature) if ENTROPY in wanted else None
    return log_probs, entropy, head.top(states, 1)[1][..., 0] if TOP in wanted else None


def _entropy(head: Any, states: list[Tensor], mask: Tensor, temperature: float) -> Tensor:
    weight = mask.float()
    return cast(Tensor, head.entropy(states, temperature=temperature, reduction="none", token_weight=weight))


class _WithoutGradient(torch.autograd.Function):
    """An entropy that is only logged; a loss that depends on it is refused."""

    @staticmethod
    def forward(ctx: Any, entropy: Tensor, nll: Tensor, head: str) -> Tensor:
        ctx.head = head
        return entropy.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        raise FullrankError(
            f"the entropy that a trainer gets from the {ctx.head} head here is a metric without a gradient: "
            "pass entropy_coef=0.0, or train a head that is rows over one matrix, such as mos"
        )


@torch.no_grad()
def _from_table(
    head: Any, states: list[Tensor], mask: Tensor, temperature: float, context: Tensor | None
) -> tuple[Tensor, Tensor]:
    """log sum_v p_v^2 and the mean of log p / temperature, [batch, time], from a table of a few texts."""
    squares, mean = torch.zeros(mask.shape, device=mask.device), torch.zeros(mask.shape, device=mask.device)
    for place, table in _tables(head, states, mask, context):
        scores = table / temperature
        log_p = scores.log_softmax(-1)
        squares[place], mean[place] = (2 * log_p).logsumexp(-1), scores.mean(-1)
    return squares.masked_fill(~mask, 0.0), mean.masked_fill(~mask, 0.0)


def _tables(
    head: Any, states: list[Tensor], mask: Tensor, context: Tensor | None
) -> Iterator[tuple[Any, Tensor]]:
    """Log-probabilities and where they stand: of some counted tokens, or of a text at a time."""
    if not head.reads_time:
        for places in mask.nonzero().split(max(1, TABLE_BYTES // (4 * head.vocab))):
            place = places.unbind(1)
            yield place, head([state[place] for state in states])
        return
    for text in range(len(mask)):
        row = slice(text, text + 1)
        yield row, head([state[row] for state in states], context=None if context is None else context[row])
