"""Attention of a model in training, at a handful of queries of the texts that monitors look at.

A text of L tokens is looked at from QUERIES positions in its second half, the last among them, in every layer
and head, while its states are made for the other monitors anyway (`models.glimpse`). Of the weights w of a
query over the positions that it sees:

    effective tokens   exp H of w as shares of their sum
    first              the weight of the first position
    sensitivity        the spectral norm of the Jacobian of w in the scores before temperature T; of softmax
                       at most 1 / (2 T) (docs/attention_theory.md)
    sum, zeros         of normalisers that need not sum to 1, or may give a weight of exactly 0

all as means over layers, heads, texts and queries.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fullrank.models.attention import no_attention
from fullrank.models.glimpse import Glimpse, glimpses
from fullrank.models.normalisers import normaliser_called, sensitivity
from fullrank.ops.arguments import widest_dtype
from fullrank.theory.attention import entropy

TEXTS, QUERIES = 4, 4
"""Looked at, and queries of each."""


@contextmanager
def watching(model: nn.Module, ids: Tensor, seen: Tensor | None = None) -> Iterator[dict[str, float]]:
    """What the one forward pass inside, of ids [batch, time], says of attention is there when this ends.

    `seen` [batch, time] is False where there is padding, which is at the right. Nothing is said of a model
    without attention that can be looked at.
    """
    found: dict[str, float] = {}
    if no_attention(model):
        yield found
        return
    lengths = torch.full((len(ids),), ids.shape[1]) if seen is None else seen.sum(1).cpu()
    with glimpses(model, positions(lengths[:TEXTS])) as looked:
        yield found
    found |= summary(looked)


def positions(lengths: Tensor) -> Tensor:
    """The queries [texts, QUERIES] of texts of these lengths [texts]."""
    first, last = lengths // 2, (lengths - 1).clamp(min=0)
    shares = torch.linspace(0, 1, QUERIES, dtype=torch.float64)
    return (first[:, None] + (last - first)[:, None] * shares).round().long()


@torch.no_grad()
def summary(looked: Sequence[Glimpse]) -> dict[str, float]:
    """Means over all that was looked at; nan where a weight is no number."""
    kinds = dict.fromkeys(one.normaliser for one in looked)
    totals: dict[str, list[Tensor]] = {}
    for kind in kinds:
        for name, values in _rows([one for one in looked if one.normaliser == kind]).items():
            totals.setdefault(name, []).append(values)
    means = {name: torch.cat(values).mean() for name, values in totals.items()}
    # One look at the device for all of them.
    numbers = torch.stack(list(means.values())).tolist() if means else []
    return {f"attention_{name}": value for name, value in zip(means, numbers, strict=True)}


def _rows(looked: Sequence[Glimpse]) -> dict[str, Tensor]:
    """One number a query, of layers with one normaliser."""
    if widest_dtype(looked[0].weights.device) != torch.float64:
        looked = [_on_cpu(layer) for layer in looked]
    length = looked[0].weights.shape[-1]
    weights = torch.cat([one.weights.reshape(-1, length) for one in looked]).double()
    visible = torch.cat([one.visible.reshape(-1, length) for one in looked])
    kind = normaliser_called(looked[0].normaliser)
    parameter = torch.cat([_column(one, kind.start) for one in looked])
    temperature = torch.cat(
        [weights.new_full((one.weights[..., 0].numel(),), one.temperature) for one in looked]
    )
    finite = bool(torch.isfinite(weights).all())
    moved = (
        sensitivity(weights, visible, name=kind.name, temperature=temperature, parameter=parameter)
        if finite
        else weights.new_full((len(weights),), math.nan)
    )
    found = {
        # A query whose weights are all zero, as sigmoid may have, attends to nothing.
        "effective_tokens": entropy(weights).exp().nan_to_num(0.0 if finite else math.nan),
        "first": weights[:, 0],
        "sensitivity": moved,
    }
    if not kind.sums_to_one:
        found["sum"] = weights.sum(-1)
    if kind.sparse:
        found["zeros"] = ((weights == 0) & visible).sum(-1) / visible.sum(-1).clamp(min=1).double()
    return found


def _on_cpu(layer: Glimpse) -> Glimpse:
    parameter = layer.parameter.cpu() if isinstance(layer.parameter, Tensor) else layer.parameter
    return dataclasses.replace(
        layer, weights=layer.weights.cpu(), visible=layer.visible.cpu(), parameter=parameter
    )


def _column(one: Glimpse, start: float) -> Tensor:
    """The parameter of a layer's normaliser, a row a query."""
    value = start if one.parameter is None else one.parameter
    shape = one.weights.shape[:-1]
    whole = torch.as_tensor(value, dtype=torch.float64, device=one.weights.device)
    return whole.expand(*shape, 1).reshape(-1, 1)
