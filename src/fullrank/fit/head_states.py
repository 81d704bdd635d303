"""States of a model that has one of our heads: what `fit.collect` is for any other model.

Windows are those of `collect`: every token of one but the first is predicted, and a window sees nothing but
itself; an LSTM starts each afresh. Of a head that makes one row x [D] a token the rows are kept, of any other
the states that it reads. They are made anew each time and not kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit import collect
from fullrank.fit.estimates import BLOCK
from fullrank.models.head_anatomy import one_row, rows
from fullrank.models.loading import quiet

BATCH = 4
"""Windows at once."""
OUTPUT = "output"
"""The name of the rows among the layers, where they are not the last layer's states."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadStates(collect.States):
    """States of a model with a head of ours. Its layers may differ in width, so they stand in `sampled`."""

    single: bool
    """Whether the head makes one row a token: then `hidden` are these rows, else the last layer's states."""
    read: tuple[Tensor, ...]
    """[N, H] each: what a head that is not single reads, the last layer first."""
    losses: Tensor
    """[N] nats, by the model itself."""
    inputs: Tensor
    """[N] the token under each state."""
    segment: int
    """Tokens that the model was given at once."""
    sampled: tuple[Tensor, ...]
    """[n, width] of each layer in `layer_names`, at `layer_positions`."""


@torch.no_grad()
def collect_states(
    model: Any,
    windows: collect.Windows,
    *,
    memory: int,
    progress: Callable[[float], None] = lambda share: None,
) -> HeadStates:
    """Run the model over the windows."""
    head, ids = model.lm_head, windows.ids
    if int(ids.max()) >= head.vocab:
        raise FullrankError(
            f"the text has token {int(ids.max())}, but the output matrix has {head.vocab} rows: the "
            "tokenizer belongs to another model"
        )
    count, window = ids.shape[0], ids.shape[1] - 1
    N, single = count * window, one_row(head)
    number, position = torch.arange(N) // window, torch.arange(N) % window
    blocks = number * -(-window // BLOCK) + position // BLOCK
    places = _sample(position)
    widths = [head.width] if single else list(head.state_widths)
    layers = model.config.get_text_config().num_hidden_layers + 2
    _check_memory(N, sum(widths), len(places) * layers * max(head.state_widths), memory)
    kept, losses = [torch.empty(N, width) for width in widths], torch.empty(N)
    sampled: list[list[Tensor]] = []
    done = 0
    for piece in ids.split(BATCH):
        inputs, targets = piece[:, :-1].to(model.device), piece[:, 1:].to(model.device)
        with quiet():
            read, context, output = model.head_inputs(inputs, layers=True)
        after = done + inputs.numel()
        losses[done:after] = (
            cast(Tensor, head(read, targets, context=context, reduction="none")).float().flatten().cpu()
        )
        made = [rows(head, read)] if single else read
        for place, one in zip(kept, made, strict=True):
            place[done:after] = one.float().flatten(0, 1).cpu()
        seen = [*(output.hidden_states or (read[0],))]
        if single and made[0].data_ptr() != read[0].data_ptr():
            seen.append(made[0])
        here = (places[(places >= done) & (places < after)] - done).to(inputs.device)
        sampled.append([layer.float().flatten(0, 1)[here].cpu() for layer in seen])
        done = after
        progress(done / N)
    if not all(bool(torch.isfinite(one).all()) for one in kept):
        raise FullrankError(
            f"the model's states hold NaN or infinity in {model.dtype}: run it with --dtype float32, or "
            "check its weights"
        )
    return HeadStates(
        hidden=kept[0],
        targets=ids[:, 1:].flatten(),
        sizes=windows.sizes.flatten(),
        positions=position,
        blocks=blocks,
        windows=number,
        layers=torch.empty(0, 0, 0),
        layer_names=_names(len(sampled[0]), projected=len(sampled[0]) == layers),
        layer_positions=position[places],
        layer_blocks=blocks[places],
        single=single,
        read=() if single else tuple(kept),
        losses=losses,
        inputs=ids[:, :-1].flatten(),
        segment=window,
        sampled=tuple(torch.cat(parts) for parts in zip(*sampled, strict=True)),
    )


def _sample(position: Tensor) -> Tensor:
    """Places for the geometry of the layers. Not first positions: these have seen one token only."""
    later = (position > 0).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(0)
    return later[torch.randperm(len(later), generator=generator)[: collect.LAYER_STATES]].sort().values


def _check_memory(N: int, width: int, sampled: int, memory: int) -> None:
    needed = 4 * (N * width + sampled)
    if needed > memory:
        raise FullrankError(
            f"states of {N} tokens take {needed / 2**30:.1f} GiB, more than --memory {memory / 2**30:.1f} "
            "GiB: take fewer --tokens or allow more"
        )


def _names(count: int, *, projected: bool) -> tuple[str, ...]:
    layers = [f"layer {layer}" for layer in range(1, count - projected)]
    return ("embedding", *layers, *([OUTPUT] if projected else []))
