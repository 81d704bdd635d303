"""The output layer of a model of transformers, as an upgrade needs it.

    logits = f(W (scale h) + b),   h the last state of the body, f the identity or a soft cap

The probe of `models.anatomy` finds W, b, f and the scale inside the model and checks them against its
logits; what it says of the state that enters W is held against the body's own last state here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads import Start
from fullrank.models import anatomy, head_anatomy, loading

PROBE = 24
"""Tokens in each of the two texts of the probe."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """The output layer of the original, as the upgrade needs it."""

    start: Start
    """Of the scaled states: what a head needs to start as this layer. The bias has the scale in it."""
    scale: float
    """logits = f(W (scale h) + bias), h the body's last state."""
    tied: bool


def probe_ids(model: Any) -> Tensor:
    """Two texts of random tokens."""
    generator = torch.Generator().manual_seed(1)
    rows = model.get_input_embeddings().weight.shape[0]
    length = min(PROBE, anatomy.longest(model) or PROBE)
    return torch.randint(rows, (2, length), generator=generator).to(model.device)


class EveryRow:
    """In place of a tokenizer: every row of the matrix is a token."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def get_vocab(self) -> dict[str, int]:
        return {str(row): row for row in range(self.rows)}


@torch.no_grad()
def read(model: Any, body: Any, ids: Tensor) -> tuple[Layer, Tensor]:
    """What the original does after its last state, and its log-probabilities [batch, time, V]."""
    rows = model.get_input_embeddings().weight.shape[0]
    found = anatomy.examine(
        loading.Loaded(
            model=model, tokenizer=cast(Any, EveryRow(rows)), name="", source="object", storage="float32",
            fingerprint="", notes=(),
        )
    )  # fmt: skip
    facts, output, original = found.facts, found.output, model.get_output_embeddings()
    weight = getattr(original, "weight", None)
    kept = facts.vocabulary
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2 or not weight.is_floating_point():
        raise FullrankError(
            f"the output layer of {type(model).__name__} is a {type(original).__name__} whose matrix cannot "
            "be read: load it in float"
        )
    if kept < len(weight):
        if facts.tied:
            raise FullrankError(
                f"{type(model).__name__} cuts its logits to {kept} of {len(weight)} rows of a tied matrix, "
                f"which no head here does: call resize_token_embeddings({kept}) first"
            )
        weight = nn.Parameter(weight[:kept].clone(), requires_grad=weight.requires_grad)
    with loading.quiet():
        logits = model(input_ids=ids, use_cache=False).logits
        # By itself, because some models call a part of their body and not the whole.
        last = body(input_ids=ids, use_cache=False).last_hidden_state
    entered = anatomy.states(model, ids)
    between = _factor(entered, last, type(model).__name__)
    states = entered.float()
    # The layer that was read is in fp32 and has the scale in it.
    scores = states @ output.weight.T
    if output.bias is not None:
        scores += output.bias
    # The states that enter a head of ours have its scale already, and `between` is that scale.
    scale = 1.0 if head_anatomy.has_own_head(model) else facts.logit_scale
    bias = output.bias
    if bias is not None and scale == 1.0 and len(original.bias) == kept:
        bias = original.bias
    start = Start(
        weight=weight,
        bias=bias,
        softcap=facts.softcap,
        size=float(states.square().mean().sqrt()) * abs(scale),
        low=float(scores.min()),
        high=float(scores.max()),
        # Of the layers below only the width is told, not how many there are.
        widths=(weight.shape[1], body.config.get_text_config().hidden_size),
    )
    layer = Layer(start=start, scale=scale * between, tied=facts.tied)
    return layer, torch.log_softmax(logits.double(), dim=-1)


def _factor(entered: Tensor, given: Tensor, kind: str) -> float:
    """What the model multiplies its body's last state by on the way to the output matrix, most often 1."""
    if entered.shape == given.shape:
        above, below = entered.double(), given.double()
        factor = float((above * below).sum() / below.square().sum())
        rounding = 1e-5 if entered.dtype in (torch.float32, torch.float64) else 0.02
        if float((above - factor * below).norm()) <= rounding * float(above.norm()):
            return 1.0 if abs(factor - 1.0) < rounding else factor
    raise FullrankError(
        f"{kind} changes its body's last state before the output matrix, which an upgrade cannot keep: give "
        "a model whose head is one matrix"
    )
