"""Train the last layers of a model alone: what the layers below give is recorded once and played back.

A frozen layer gives the same states every time. So the body runs once over each text up to layer `cut`; after
that the layers below are passed by, layer cut - 1 returns the recorded states, and the model's own code does
the rest, with its masks, positions and norms. `check` holds both ways against each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.models.loading import quiet

TOLERANCE = 1e-4
"""Of states that were played back, relative to those of the whole model."""


class _Reached(Exception):  # noqa: N818  (a signal, not an error)
    """The states are here: the layers above are not needed."""


class UpperLayers:
    """The last `count` of a model's layers; `model` is one made by `fullrank.upgrade.upgrade`."""

    def __init__(self, model: Any, blocks: tuple[nn.Module, ...], count: int) -> None:
        if not 1 <= count < len(blocks):
            raise FullrankError(
                f"{count} layers of {type(model.model).__name__} were asked for, expected 1 to "
                f"{len(blocks) - 1} of its {len(blocks)}: choose another --layers"
            )
        self.model, self.lower, self.upper = model, blocks[:-count], blocks[-count:]
        self._length = 0
        """Of the tuple that a layer returns; 0 where it returns a tensor."""

    def parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{number}.{name}": parameter
            for number, block in enumerate(self.upper)
            for name, parameter in block.named_parameters()
        }

    @torch.no_grad()
    def record(self, ids: Tensor) -> Tensor:
        """What enters the first upper layer for ids [batch, time]: [batch, time, H]."""
        caught: list[Tensor] = []

        def catch(module: nn.Module, inputs: Any, result: Any) -> None:
            self._length = len(result) if isinstance(result, tuple | list) else 0
            caught.append((result[0] if self._length else result).detach())
            raise _Reached

        handle = self.lower[-1].register_forward_hook(catch)
        try:
            with contextlib.suppress(_Reached), quiet():
                self.model.head_inputs(ids)
        finally:
            handle.remove()
        if not caught or caught[0].shape[:2] != ids.shape:
            raise FullrankError(
                f"{type(self.model.model).__name__} does not hand states [batch, time, H] from layer to "
                "layer: give a model whose layers do"
            )
        return caught[0]

    def states(self, ids: Tensor, recorded: Tensor) -> Tensor:
        """What enters the head, [batch, time, H], with gradients for the upper layers."""
        with self._playing(recorded):
            return self.model.head_inputs(ids).states[0]

    def mixed(self) -> contextlib.AbstractContextManager[Any]:
        """bf16 products on a GPU, where what is trained is; nothing changes elsewhere."""
        kind = self.model.device.type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda")

    def check(self, ids: Tensor) -> None:
        """Refuse a model whose upper layers need more than the states."""
        with torch.no_grad():
            whole = self.model.head_inputs(ids).states[0]
            played = self.states(ids, self.record(ids))
        if float((played - whole).norm()) > TOLERANCE * float(whole.norm()):
            raise FullrankError(
                f"the upper layers of {type(self.model.model).__name__} need more than the states below "
                "them, and cannot be trained alone: give a model whose layers hand on a state only"
            )

    @contextlib.contextmanager
    def _playing(self, recorded: Tensor) -> Iterator[None]:
        def given(value: Tensor) -> Any:
            return (value, *[None] * (self._length - 1)) if self._length else value

        def passed(*inputs: Any, **keywords: Any) -> Any:
            return given(inputs[0] if inputs else keywords["hidden_states"])

        def played(*inputs: Any, **keywords: Any) -> Any:
            return given(recorded)

        ways: list[Callable[..., Any]] = [passed] * (len(self.lower) - 1) + [played]
        for block, way in zip(self.lower, ways, strict=True):
            # On the object, so that whatever the model reads of its layers is still theirs.
            block.forward = way
        try:
            yield
        finally:
            for block in self.lower:
                del block.forward
