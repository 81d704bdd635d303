"""How many windows a body runs on at once.

    auto    as many as fit into a quarter of --memory on a CPU, 4 at most: more are no faster there; into half
            of what is free on a GPU, 64 at most

by the tensors that live at once in a layer of a transformer, some 8 of the width and 3 of the inner width a
token, and the scores of every head where attention is eager. That is a guess: where a GPU runs out of memory
the number is halved, and the work goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from fullrank.errors import FullrankError
from fullrank.models.sizes import largest

MOST_ON_CPU, MOST_ON_GPU = 4, 64

Found = TypeVar("Found")


def chosen(model: Any, length: int, memory: int, asked: int | None = None) -> int:
    """Windows of `length` tokens at once: as many as were asked for, else by what fits."""
    if asked is not None:
        return asked
    device = model.device
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(1, min(MOST_ON_GPU, free // 2 // _bytes(model, length)))
    return max(1, min(MOST_ON_CPU, memory // 4 // _bytes(model, length)))


def _bytes(model: Any, length: int) -> int:
    """That one window takes while the body runs on it."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config

    width = largest(config, "hidden_size") or 1024
    inner = largest(config, "intermediate_size") or 4 * width
    eager = getattr(config, "_attn_implementation", None) == "eager"
    scores = max(1, largest(config, "num_attention_heads")) * length * length if eager else 0
    return model.dtype.itemsize * length * (8 * width + 3 * inner) + 4 * scores


def over(
    count: int,
    size: int,
    run: Callable[[slice], Found],
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[tuple[slice, Found]]:
    """What `run` gives for every part of `count` windows, `size` at once or fewer where memory runs out."""
    start = 0
    while start < count:
        part = slice(start, min(start + size, count))
        found = _try(run, part)
        if found is not None:
            yield part, found
            start = part.stop
        elif size == 1:
            raise FullrankError(
                "the device has no memory for a single window: take a shorter --window, --dtype bfloat16 or "
                "--device-map auto"
            )
        else:
            size = max(1, min(size, part.stop - part.start) // 2)
            torch.cuda.empty_cache()
            say(f"out of memory: running the model on {size} windows at once")


def _try(run: Callable[[slice], Found], part: slice) -> Found | None:
    # In a function of its own: what the error's frames hold is free when it returns.
    try:
        return run(part)
    except torch.OutOfMemoryError:
        return None
