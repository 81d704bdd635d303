"""Attention weights at a few queries of a model that runs as it always does.

Every layer goes on calling the attention function that it has, fused or not, so states are the same to the
last bit. Beside that call, at queries i of some texts, the weights are made again from what the layer hands
over:

    l = cap(scaling q_i k^T) + mask,    w = normalise(l) over what query i may see

with the normaliser and the temperature that the layer has. A mask that a kernel leaves out is causal, within
the layer's window where there is one. A learnt sink of the model's own (GPT-OSS) is a sink; a layer that adds
something else to its scores is passed by.

Shapes: queries [texts, R] positions, weights and visible [texts, heads, R, L].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.models.attention import (
    SETTING,
    TEMPERATURE,
    Setting,
    attention_layers,
    attention_scores,
    model_configs,
    own_attention,
    parameter_of,
)
from fullrank.models.normalisers import normalise

NAME = "fullrank_glimpse"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Glimpse:
    """One layer's attention at the chosen queries."""

    weights: Tensor
    visible: Tensor
    normaliser: str
    parameter: Tensor | float | None
    """Of the normaliser, where it has one: a number, or [heads, 1, 1]."""
    temperature: float


@contextmanager
def glimpses(model: nn.Module, queries: Tensor) -> Iterator[list[Glimpse]]:
    """While this lasts, every forward pass adds a glimpse a layer to the list, of its first texts.

    What is compiled runs as it is written meanwhile. Raises FullrankError for a model without attention that
    can be exchanged.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    layers = attention_layers(model)
    configs = model_configs(model, layers)
    before = [config._attn_implementation for config in configs]
    # The innermost: the one that layers and masks are made by.
    name = before[-1]
    found: list[Glimpse] = []

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        own: Callable[..., Any] = own_attention(module) if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        one = _look(module, query, key, mask, queries, options)
        if one is not None:
            found.append(one)
        return own(module, query, key, value, mask, **options)

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[name])
    try:
        for config in configs:
            config._attn_implementation = NAME
        with as_written(model):
            yield found
    finally:
        # The outer configs first: setting one sets those inside it too.
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation


def as_written(model: nn.Module) -> Any:
    """Runs what is compiled as Python: another function in it, or another shape, would be compiled anew."""
    if all(part._compiled_call_impl is None for part in model.modules()):
        # To ask for it is to import the compiler, which takes seconds.
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


@torch.no_grad()
def _look(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    queries: Tensor,
    options: dict[str, Any],
) -> Glimpse | None:
    if isinstance(options.get("position_bias"), Tensor):
        return None
    texts = len(queries)
    places = queries.to(query.device)
    chosen = query[:texts].gather(2, places[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[-1]))
    keys = key[:texts]
    shown = _visible(mask, places, keys.shape[2], options.get("sliding_window"))
    known = {name: options.get(name) for name in ("scaling", "softcap")}
    scores, visible = attention_scores(chosen.float(), keys.float(), shown, **known)
    assert visible is not None
    setting: Setting | None = getattr(module, SETTING, None)
    sink = options.get("s_aux")
    name, parameter = "softmax", None
    if setting is not None:
        name, parameter = setting.name, parameter_of(module, setting)
    elif isinstance(sink, Tensor):
        name, parameter = "sink", sink.float()[:, None, None]
    given = 1.0 if setting is None else setting.temperature
    weights = normalise(scores, mask=visible, name=name, temperature=given, parameter=parameter)
    return Glimpse(
        weights=weights, visible=visible, normaliser=name, parameter=parameter,
        temperature=given * getattr(module, TEMPERATURE, 1.0),
    )  # fmt: skip


def _visible(mask: Tensor | None, places: Tensor, length: int, window: int | None) -> Tensor:
    """The rows [texts, 1, R, L] of a mask, additive or True where a query may look; or the causal ones."""
    if mask is not None and mask.ndim == 4:
        rows = mask[: len(places), ..., :length].expand(len(places), -1, -1, -1)
        return rows.gather(2, places[:, None, :, None].expand(-1, rows.shape[1], -1, length))
    keys = torch.arange(length, device=places.device)
    seen = keys <= places[:, :, None]
    if window is not None:
        seen &= keys > places[:, :, None] - window
    if mask is not None:
        # Of a kernel that takes which tokens are there.
        seen &= mask[: len(places), None, :length].bool()
    return seen[:, None]
