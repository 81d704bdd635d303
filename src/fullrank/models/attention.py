"""Another normaliser in place of softmax in the attention of a transformers model.

transformers lets an attention layer call a function by name (`AttentionInterface`). Ours is `IMPLEMENTATION`:

    scores = cap tanh(q k^T scaling / cap) + mask,    weights = normalise(scores),    output = weights v

with keys and values repeated for grouped queries, and the mask that eager attention gets, with sliding
windows and padding in it. What a layer does differently from that cannot be replaced: at its first call a
layer's own eager attention runs beside ours with softmax, and where both differ an error says so. One
difference is meant: a query that sees nothing, which only padding has, gets zeros here and a mean over all
positions there.

A temperature T that stays, 1 by default, is no part of that function: 1 / T goes into the scaling that a
layer gives to whatever attention function it calls, so that every normaliser, fused kernel and cache sees
scores over T, at no cost.

Shapes: q [batch, heads, queries, width], k and v [batch, groups, keys, width], scores, visible and weights
[batch, heads, queries, keys]. A learnt parameter is one number a head, [heads].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.models.normalisers import check_available, check_temperature, normalise, normaliser_called
from fullrank.models.sizes import largest

IMPLEMENTATION = "fullrank_normaliser"
"""The name of our function among transformers' attention implementations."""
SETTING = "normaliser_setting"
LEARNT, LEARNT_FOR = "normaliser_parameter", "normaliser_learnt"
"""Attributes of an attention layer: what it does, the parameter that it learns, and for which normaliser."""

TEMPERATURE = "attention_temperature"
"""Attribute of an attention layer: the temperature that its scaling holds, where that is not 1."""

Observer = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor], None]
"""Is called with (layer, scores, visible, weights before dropout, values repeated for grouped queries)."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What an attention layer does in place of its own attention."""

    name: str
    temperature: float = 1.0
    parameter: float | None = None
    observe: Observer | None = None
    own: Callable[..., tuple[Tensor, Any]] | None = None
    """The layer's eager attention, to be compared with at the first call; None compares nothing."""


@contextmanager
def replace_normaliser(
    model: nn.Module,
    name: str,
    *,
    temperature: float = 1.0,
    parameter: float | None = None,
    observe: Observer | None = None,
    check: bool = True,
) -> Iterator[None]:
    """Within the context every attention layer of `model` normalises its scores with `name`.

    `name="softmax"` is what eager attention computes. Raises FullrankError for a model without attention, or
    whose attention cannot be exchanged; with `check`, its first forward pass raises where attention has terms
    that ours has not. After the context the model is as it was.
    """
    check_available(name)
    if parameter is not None and normaliser_called(name).parameter is None:
        raise FullrankError(f"{name} has no parameter and got {parameter}: leave it out")
    layers = attention_layers(model)
    configs = model_configs(model, layers)
    before = [(layer, layer.__dict__.get(SETTING)) for layer in layers.values()]
    implementations = [config._attn_implementation for config in configs]
    _register()
    try:
        for layer in layers.values():
            own = own_attention(layer) if check else None
            setting = Setting(
                name=name, temperature=temperature, parameter=parameter, observe=observe, own=own
            )
            setattr(layer, SETTING, setting)
        for config in configs:
            config._attn_implementation = IMPLEMENTATION
        yield
    finally:
        # The outer configs first: setting one sets those inside it too.
        for config, implementation in zip(configs, implementations, strict=True):
            config._attn_implementation = implementation
        for layer, earlier in before:
            if earlier is None:
                layer.__dict__.pop(SETTING, None)
            else:
                setattr(layer, SETTING, earlier)


def install_normaliser(model: nn.Module, name: str, *, start: float | None = None) -> None:
    """Give every attention layer of `model` a normaliser for good; its parameter, if any, is learnt.

    One number a head, which begins at `start` or where the normaliser says, is added to each layer.
    """
    check_available(name)
    layers = attention_layers(model)
    normaliser = normaliser_called(name)
    _register()
    for layer in layers.values():
        setattr(layer, SETTING, Setting(name=name))
        if normaliser.parameter is not None:
            heads: int = layer.config.num_attention_heads  # type: ignore[union-attr, assignment]
            value = normaliser.start if start is None else start
            layer.register_parameter(LEARNT, nn.Parameter(torch.full((heads,), value)))
            setattr(layer, LEARNT_FOR, name)
    for config in model_configs(model, layers):
        config._attn_implementation = IMPLEMENTATION


def install_temperature(model: nn.Module, temperature: float) -> None:
    """Divide the scores of every attention layer of `model` by a temperature for good.

    A second call sets it anew. Raises FullrankError for a model without attention, and for one that does more
    to its scores than scale them: what a soft cap or a bias of positions makes of them cannot be divided so.
    """
    check_temperature(temperature, TEMPERATURE)
    layers = attention_layers(model)
    for layer in layers.values():
        code = _forward(layer).__code__
        given = {word for constant in code.co_consts if isinstance(constant, tuple) for word in constant}
        bent = getattr(layer.config, "attn_logit_softcapping", None) is not None or "position_bias" in given
        if bent or "scaling" not in code.co_names or not isinstance(getattr(layer, "scaling", None), float):
            raise FullrankError(
                f"{type(layer).__name__} does more to its scores than multiply them by one number, so none "
                f"can hold a temperature of {temperature:g}: leave {TEMPERATURE}=1"
            )
    for layer in layers.values():
        before: float = getattr(layer, TEMPERATURE, 1.0)
        if before != temperature:
            layer.scaling = layer.scaling * before / temperature  # type: ignore[operator, assignment]
            setattr(layer, TEMPERATURE, temperature)


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers whose attention function can be exchanged, by name; raises FullrankError where none can."""
    found = _found(model)
    if found:
        return found
    if getattr(model, "config", None) is None:
        raise FullrankError(f"{no_attention(model)}: pass one that transformers loads")
    if getattr(model.config, "num_attention_heads", None):
        raise FullrankError(
            f"{no_attention(model)}: choose a model that goes through transformers' AttentionInterface, such "
            "as a Llama, GPT-2, GPT-NeoX or Gemma"
        )
    raise FullrankError(
        f"{no_attention(model)}, so there is no softmax in it to replace: choose a transformer"
    )


def no_attention(model: nn.Module) -> str:
    """Why no attention function of `model` can be exchanged; "" where one can."""
    if _found(model):
        return ""
    kind, config = type(model).__name__, getattr(model, "config", None)
    if config is None:
        return f"{kind} is no transformers model"
    if largest(config, "num_attention_heads"):
        return f"{kind} computes its attention itself and does not let it be exchanged"
    return f"{kind} has no attention"


def _found(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: layer
        for name, layer in model.named_modules()
        if "ALL_ATTENTION_FUNCTIONS" in _names(layer) and hasattr(layer, "config")
    }


def attention_scores(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scores [batch, heads, queries, keys] as eager attention has them, and which are visible."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, repeated(key, query.shape[1]).transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        return scores, None
    if mask.dtype == torch.bool:
        return scores, mask.expand(scores.shape)
    # A mask hides with the least number of its dtype; what lies above is a bias that is added.
    visible = mask > torch.finfo(mask.dtype).min / 2
    return scores + mask, visible.expand(scores.shape)


def repeated(states: Tensor, heads: int) -> Tensor:
    """Keys or values of grouped queries [batch, groups, keys, width], one for each of `heads` heads."""
    return states.repeat_interleave(heads // states.shape[1], dim=1) if states.shape[1] != heads else states


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """What an attention layer calls: output [batch, queries, heads, width] and weights."""
    setting: Setting | None = getattr(module, SETTING, None)
    if setting is None:
        raise FullrankError(
            f"{type(module).__name__} was given no normaliser: use replace_normaliser or install_normaliser "
            f"rather than attn_implementation={IMPLEMENTATION!r}"
        )
    if options.get("s_aux") is not None:
        raise FullrankError(
            f"{type(module).__name__} already has a learnt sink beside its softmax, which another normaliser "
            "would drop: choose a model without one"
        )
    scores, mask = attention_scores(query, key, attention_mask, scaling=scaling, softcap=softcap)
    values = repeated(value, query.shape[1])
    if setting.own is not None:
        given = {"scaling": scaling, "softcap": softcap}
        options |= {name: option for name, option in given.items() if option is not None}
        with torch.no_grad():
            theirs = setting.own(module, query, key, value, attention_mask, dropout=0.0, **options)[0]
            _require_same(module, scores, mask, values, theirs)
        setattr(module, SETTING, replace(setting, own=None))
    weights = normalise(
        scores, mask=mask, name=setting.name, temperature=setting.temperature,
        parameter=parameter_of(module, setting),
    ).to(query.dtype)  # fmt: skip
    if setting.observe is not None:
        visible = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
        setting.observe(module, scores, visible, weights, values)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, values).transpose(1, 2).contiguous(), weights


def parameter_of(module: nn.Module, setting: Setting) -> Tensor | float | None:
    """What was given, else what the layer has learnt for this very normaliser, else its default."""
    learnt: Any = getattr(module, LEARNT, None)
    if setting.parameter is not None or learnt is None or setting.name != getattr(module, LEARNT_FOR):
        return setting.parameter
    return learnt[:, None, None]


def _require_same(
    module: nn.Module, scores: Tensor, mask: Tensor | None, values: Tensor, theirs: Tensor
) -> None:
    """Raise where softmax of our scores is not the layer's own eager attention."""
    weights = normalise(scores, mask=mask, name="softmax").to(values.dtype)
    ours = torch.matmul(weights, values).transpose(1, 2)
    theirs = theirs.reshape(ours.shape)
    if mask is not None:
        sees = mask.any(-1).transpose(1, 2)[..., None]
        ours, theirs = ours.masked_fill(~sees, 0.0), theirs.masked_fill(~sees, 0.0)
    # A layer may take its softmax in fp32 whatever its dtype, or in bf16 where ours is in fp32.
    error = float((ours - theirs).abs().max())
    size = max(float(theirs.abs().max()), torch.finfo(torch.float32).tiny)
    allowed = 16 * max(torch.finfo(values.dtype).eps, torch.finfo(torch.float32).eps)
    if not error <= allowed * size:
        raise FullrankError(
            f"{type(module).__name__} computes more than a softmax of its scores (it differs by {error:.1e} "
            f"in values of {size:.1e}), so its normaliser cannot be replaced: choose another model"
        )


def own_attention(layer: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """The eager attention of the file that a layer is written in."""
    own = _forward(layer).__globals__.get("eager_attention_forward")
    if own is None:
        raise FullrankError(
            f"{type(layer).__name__} has no eager attention to compare with: pass check=False to trust that "
            "it is a softmax of scaled scores"
        )
    return own


def _forward(layer: nn.Module) -> Any:
    return inspect.unwrap(type(layer).forward)


def _names(layer: nn.Module) -> tuple[str, ...]:
    """Global names that a layer's forward method uses."""
    code = getattr(_forward(layer), "__code__", None)
    return () if code is None else code.co_names


def model_configs(model: nn.Module, layers: dict[str, nn.Module]) -> list[Any]:
    """Configs of the layers and of the models around them, which make the masks; the outermost first."""
    found: dict[int, Any] = {}
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        inside = any(layer == name or layer.startswith(f"{name}." if name else "") for layer in layers)
        if inside and hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), config)
    return list(found.values())


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)
