"""A cache head's memory beside what the body carries on, so that it lives, grows and is reordered with it.

In transformers' own cache it is one more layer behind the body's: its keys are the head's keys
[batch, 1, M, D], its values the input ids [batch, 1, M, 1]. Whatever transformers does to a cache (reorder
for beams, repeat, select, crop) it does to all layers, and so to the memory. The state of a recurrent body is
tensors with the batch first, and the memory goes with them in a `StateWithMemory`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from fullrank.errors import FullrankError
from fullrank.heads import Memory


@dataclass(frozen=True, kw_only=True, eq=False)
class StateWithMemory:
    """What a recurrent body carries on, and what its head remembers of the same tokens."""

    state: Any
    """The body's own: tensors with the batch first."""
    memory: Memory

    def select(self, rows: Tensor) -> StateWithMemory:
        return StateWithMemory(state=select(self.state, rows), memory=self.memory.select(rows))


def select(state: Any, rows: Tensor) -> Any:
    """These rows of a recurrent body's state, with or without a memory."""
    if isinstance(state, StateWithMemory):
        return state.select(rows)
    return type(state)(tensor[rows] for tensor in state)


def split(state: Any) -> tuple[Any, Memory | None]:
    """The body's state and the memory; None and None at the beginning of a text."""
    if state is None:
        return None, None
    if not isinstance(state, StateWithMemory):
        raise FullrankError(
            "the state has read tokens that the head knows nothing of: pass the whole text, or a state that "
            "this model has returned"
        )
    return state.state, state.memory


class MemoryLayer(DynamicLayer):
    """Keys and ids of all positions so far."""

    supports_early_init = False

    def lazy_initialization(self, *like: Tensor) -> None:
        """Nothing is allocated before it is known."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *rest: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        if self.keys is not None and self.values is not None:
            key_states = torch.cat([self.keys, key_states], dim=-2)
            value_states = torch.cat([self.values, value_states], dim=-2)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False


def find(cache: Any) -> MemoryLayer | None:
    layers = getattr(cache, "layers", None) or ()
    return next((layer for layer in layers if isinstance(layer, MemoryLayer)), None)


def seen(cache: Any) -> int:
    """Tokens that the body has put into a cache; a purely recurrent state does not count them."""
    layers = getattr(cache, "layers", None) or ()
    body = [layer for layer in layers if not isinstance(layer, MemoryLayer)]
    lengths = [layer.get_seq_length() for layer in body if hasattr(layer, "get_seq_length")]
    states = [
        any(layer.has_previous_state.values()) for layer in body if hasattr(layer, "has_previous_state")
    ]
    return max([0, *lengths, *map(int, states)])


def read(cache: Any) -> Memory | None:
    """The memory that goes with a cache; None where both are empty."""
    layer = find(cache)
    if layer is None or layer.keys is None or layer.values is None:
        if seen(cache):
            raise FullrankError(
                f"the cache has {seen(cache)} tokens that the head knows nothing of: pass the whole text, or "
                "a cache that this model has filled"
            )
        return None
    return Memory(keys=layer.keys[:, 0], ids=layer.values[:, 0, :, 0])


def extend(cache: Any, memory: Memory) -> None:
    """Put the positions of a segment behind those that the cache has."""
    layer = find(cache)
    if layer is None:
        layer = add(cache)
    layer.update(memory.keys[:, None], memory.ids[:, None, :, None])


def add(cache: Any) -> MemoryLayer:
    """A memory layer behind the body's layers, which must be there."""
    layer = MemoryLayer()
    # Masks are made from the first layer of a kind: this one must not be the only one of its kind.
    layer.is_sliding = getattr(cache.layers[0], "is_sliding", False)
    cache.layers.append(layer)
    return layer
