"""What a model will take in memory, from its configuration alone, before anything of it is made.

A configuration is a few numbers, and a slip or an attack in one of them asks for any amount of memory or for
years of building layers. The estimate knows the widths by the names that transformers gives them:

    parameters ~ layers · (4 D² + 3 D · inner · experts) + 2 V D + positions · D + components · D²

and of an LSTM 8 inner² a layer.

Attention with few key heads, layers without gates and tied embeddings have less, by up to about half: so only
what is SLACK times too large is refused here. A checkpoint is also held against its files: every layer
has a tensor of its own, and what it stores is known exactly.
"""

from __future__ import annotations

from typing import Any

from fullrank.errors import FullrankError
from fullrank.heads import registry
from fullrank.heads.registry import SLACK
from fullrank.results.reading import memory

MOST_LAYERS = 10_000
UNLIKE = 64
"""Times what its files hold beyond which a configuration is of another model: packed and shared weights are
stored with less than they make."""
NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "d_inner"),
    "recurrent": ("inner_size",),
    "vocabulary": ("vocab_size",),
    "positions": ("n_positions",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_inner": ("moe_intermediate_size", "expert_intermediate_size"),
    "head_width": ("head_dim",),
    "attention_heads": ("num_attention_heads", "n_head", "n_heads"),
}


def parameters(config: Any) -> int:
    """About how many a model of this configuration of transformers has."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = {size: largest(text, *names) for size, names in NAMES.items()}
    layers, width = found["layers"], found["width"]
    if layers > MOST_LAYERS:
        raise FullrankError(
            f"the configuration asks for {layers:,} layers, expected {MOST_LAYERS:,} at most: correct it"
        )
    attention = max(width, found["head_width"] * found["attention_heads"])
    inner = found["inner"] or 4 * width
    if found["experts"]:
        inner = max(inner, found["experts"] * (found["expert_inner"] or inner))
    entries = max(found["vocabulary"], largest(config, *NAMES["vocabulary"])) + found["positions"]
    own = getattr(config, "head", None)
    head = registry.parameters(**own) if isinstance(own, dict) and "hidden" in own else 0
    body = layers * (width * (4 * attention + 3 * inner) + 8 * found["recurrent"] ** 2)
    return body + 2 * entries * width + head


def require_room(config: Any, what: str, *, itemsize: int = 4) -> None:
    """Raise where a model of this configuration cannot fit into the memory of this machine by far."""
    count = parameters(config)
    if count * itemsize > SLACK * memory():
        raise FullrankError(
            f"{what} would have about {count:.1e} parameters, {_gib(count * itemsize)} where this machine "
            f"has {_gib(memory())}: make it smaller, or correct a width or a number of layers"
        )


def require_stored(config: Any, directory: Any, tensors: int, stored: int, *, itemsize: int) -> None:
    """Raise for a checkpoint whose `tensors` of `stored` entries in all do not fit, or whose configuration
    asks for far more than they hold."""
    count = parameters(config)
    layers = largest(config.get_text_config(), *NAMES["layers"])
    if layers > max(tensors, 1):
        raise FullrankError(
            f"config.json in {directory} asks for {layers:,} layers, its files hold {tensors:,} tensors: "
            "configuration and weights are of different models, save them together"
        )
    if stored * itemsize > memory():
        raise FullrankError(
            f"the {stored:,} weights in {directory} take {_gib(stored * itemsize)} where this machine has "
            f"{_gib(memory())}: give --dtype bfloat16, --device-map auto, or a smaller model"
        )
    if count * itemsize > SLACK * memory() and count > UNLIKE * stored:
        raise FullrankError(
            f"config.json in {directory} makes about {count:.1e} parameters, its files hold {stored:,}: "
            "configuration and weights are of different models, save them together"
        )


def by_layer(config: Any) -> list[Any]:
    """A configuration for every layer where layers differ in it, as Gemma 4's do in `head_dim`, which this
    one then refuses to say; else this one alone."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def largest(config: Any, *names: str) -> int:
    """What the configuration has by the first of these names, in the largest of its layers; 0 is not said."""
    layers = by_layer(config)
    for name in names:
        values = [getattr(layer, name, None) for layer in layers]
        if found := [value for value in values if isinstance(value, int) and value > 0]:
            return max(found)
    return 0


def _gib(count: int) -> str:
    return f"{count / (1 << 30):,.1f} GiB"
