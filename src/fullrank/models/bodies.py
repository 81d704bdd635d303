"""The bodies that recipes train, as configurations of transformers, and how their weights start.

    awd_lstm   Merity et al. 2017 (1708.02182), see `awd_lstm.py`
    neox       GPT-NeoX as Pythia has it (Biderman et al. 2023, 2304.01373): rotary positions on a quarter of
               each attention head, attention and feed-forward layer in parallel on one residual, layer norms
               and biases
    llama      RMSNorm, SwiGLU, rotary positions on whole heads, no biases (Touvron et al. 2023, 2302.13971)

Spreads follow the width d and the depth L, as EleutherAI/gpt-neox, megatron/model/init_functions.py has them
and every models/*/*.yml of EleutherAI/pythia asks for them. All are normal:

    small_init   sqrt(2 / (5 d))        all matrices and embeddings, the output matrix too (Nguyen and Salazar
                                        2019, 1910.05895); 0.02 at d = 1000
    wang_init    2 / (L sqrt(d))        neox: the output matrices of attention and feed-forward layers
    scaled       small_init / sqrt(2 L) llama: the same matrices, as GPT-2 scales them (Radford et al. 2019)

Biases start at zero, gains at one. An LSTM and a head draw their own (`awd_lstm.py`, `heads/`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads.base import require_positive
from fullrank.models.configuration import AwdLstmConfig

OUTPUTS = {
    "gpt_neox": ("attention.dense.weight", "mlp.dense_4h_to_h.weight"),
    "llama": ("self_attn.o_proj.weight", "mlp.down_proj.weight"),
}
"""Ends of the names of matrices that write to the residual, by model type."""


def transformer(
    kind: str,
    *,
    vocab: int,
    hidden: int,
    layers: int,
    heads: int,
    inner: int,
    context: int,
    dropout: float = 0.0,
) -> Any:
    """The configuration of a transformer; `inner` 0 is four times the width, of llama 8/3 of it in
    multiples of 16.
    """
    require_positive(**{"body.hidden": hidden, "body.layers": layers, "body.heads": heads, "length": context})
    if hidden % heads or hidden // heads % 2:
        raise FullrankError(
            f"body.hidden={hidden} cannot be cut into body.heads={heads} attention heads of one even width, "
            "which rotary positions turn in pairs: choose a multiple"
        )
    if not 0.0 <= dropout < 1.0:
        raise FullrankError(f"body.dropout={dropout} is impossible: expected 0 <= dropout < 1")
    from transformers import GPTNeoXConfig, LlamaConfig

    common: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        "attention_dropout": dropout,
        "initializer_range": small_init(hidden),
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        # It is read from the keywords.
        "attn_implementation": "sdpa",
    }
    if kind == "neox":
        return GPTNeoXConfig(intermediate_size=inner or 4 * hidden, hidden_dropout=dropout, **common)
    if kind == "llama":
        return LlamaConfig(intermediate_size=inner or 16 * math.ceil(hidden / 6), pad_token_id=None, **common)
    raise FullrankError(f"no body is called {kind!r}: expected awd_lstm, neox or llama")


def small_init(width: int) -> float:
    return math.sqrt(2 / (5 * width))


def output_init(kind: str, width: int, layers: int) -> float:
    """The spread of a matrix that writes to the residual."""
    if kind == "gpt_neox":
        return 2 / (layers * math.sqrt(width))
    return small_init(width) / math.sqrt(2 * layers)


@torch.no_grad()
def draw(model: Any, seed: int) -> None:
    """Draw a fresh model's matrices anew, those of a transformer and an output matrix of its own.

    From a generator of their own: one seed gives the same body under every head.
    """
    config = model.config.body
    if config.model_type not in OUTPUTS:
        return
    generator = torch.Generator().manual_seed(seed)

    def fill(weight: Tensor, spread: float) -> None:
        weight.normal_(std=spread, generator=generator)

    width, kind = config.hidden_size, config.model_type
    for name, weight in model.model.named_parameters():
        if weight.ndim < 2:
            continue
        outward = name.endswith(OUTPUTS[kind])
        fill(weight, output_init(kind, width, config.num_hidden_layers) if outward else small_init(width))
    if not model.config.tie_word_embeddings:
        fill(model.lm_head.decoder.weight, small_init(model.lm_head.width))


__all__ = ["AwdLstmConfig", "draw", "output_init", "small_init", "transformer"]
