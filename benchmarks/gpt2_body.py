"""A transformer of GPT-2's form without a head: learned positions, layer norm first, GELU, no dropout.

    x = E[ids] + P;   x += attention(norm(x));   x += mlp(norm(x));   states = norm(x)

Attention is torch's scaled_dot_product_attention. Plain modules, so that torch.compile takes it in one graph.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

SPREAD = 0.02


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, states: Tensor) -> Tensor:
        batch, time, width = states.shape
        joint = self.queries_keys_values(self.before_attention(states))
        query, key, value = joint.view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.attended(mixed.transpose(1, 2).reshape(batch, time, width))
        inner = functional.gelu(self.up(self.before_mlp(states)), approximate="tanh")
        return states + self.down(inner)


class Gpt2Body(nn.Module):
    """ids [batch, time] -> states [batch, time, width]; a head may be tied to `embedding`."""

    def __init__(self, *, vocab: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=SPREAD)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embedding(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            states = block(states)
        return self.norm(states)
