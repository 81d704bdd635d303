"""What a token costs in training, in floating-point operations, and what a device can do.

    6 P + 12 L A T + head      P weights of the body that are multiplied, L layers of attention over T tokens
                               with A = heads x their width (Chowdhery et al. 2022, 2204.02311, appendix B),
                               and what the head says of itself (`Head.flops`)

The embedding is looked up, not multiplied. Attention is counted whole, as is customary, though half of it is
masked. A body without attention is its weights.
"""

from __future__ import annotations

from typing import Any

import torch

from fullrank.models.sizes import by_layer

PEAKS = {
    "B200": 2250e12, "B100": 1800e12, "H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12,
    "A800": 312e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip
"""Dense bf16 products with fp32 sums, operations a second, by a part of the device's name."""


def training_flops(model: Any, length: int) -> int:
    """Of one token of texts of this length: forward and backward."""
    body = model.model
    # Looked up, not multiplied: tokens, and positions or a layer's own tokens where there are such.
    tables = [module for module in body.modules() if isinstance(module, torch.nn.Embedding)]
    embedded = {weight for table in (body.get_input_embeddings(), *tables) for weight in table.parameters()}
    weights = sum(
        parameter.numel()
        for parameter in body.parameters()
        if parameter.ndim > 1 and parameter not in embedded
    )
    config = body.config
    layers = by_layer(config)
    widths = 0
    for layer in layers:
        heads = getattr(layer, "num_attention_heads", 0) or 0
        widths += heads * (getattr(layer, "head_dim", None) or (config.hidden_size // heads if heads else 0))
    attention = 12 * config.num_hidden_layers * widths * length // len(layers)
    return 6 * weights + attention + model.lm_head.flops(length)


def peak_flops(device: torch.device) -> float | None:
    """Operations a second that the device is sold with; None where that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    # The longest first: an L40S is no L4.
    return next((PEAKS[part] for part in sorted(PEAKS, key=len, reverse=True) if part in name), None)
