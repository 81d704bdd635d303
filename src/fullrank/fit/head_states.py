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

from fullrank.fit import batch_size, collect
from fullrank.fit.estimates import BLOCK
from fullrank.models.head_anatomy import one_row, rows
from fullrank.models.loading import quiet

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
    batch: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
    say: Callable[[str], None] = lambda line: None,
) -> HeadStates:
    """Run the model over the windows, `batch` at once."""
    head, ids = model.lm_head, windows.ids
    collect.check_vocabulary(ids, head.vocab)
    count, window = ids.shape[0], ids.shape[1] - 1
    N, single = count * window, one_row(head)
    number, position = torch.arange(N) // window, torch.arange(N) % window
    blocks = number * -(-window // BLOCK) + position // BLOCK
    places = _sample(position)
    widths = [head.width] if single else list(head.state_widths)
    layers = model.config.get_text_config().num_hidden_layers + 2
    sample = len(places) * layers * max(head.state_widths)
    collect.check_memory(N, 4 * (N * sum(widths) + sample), memory)
    kept, losses = [torch.empty(N, width) for width in widths], torch.empty(N)
    sampled: list[list[Tensor]] = []

    def run(part: slice) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Losses, what is kept of every token, and every layer at the sampled places."""
        inputs, targets = (one.to(model.device) for one in (ids[part, :-1], ids[part, 1:]))
        with quiet():
            read, context, output = model.head_inputs(inputs, layers=True)
        nats = cast(Tensor, head(read, targets, context=context, reduction="none"))
        made = [rows(head, read)] if single else read
        seen = [*(output.hidden_states or (read[0],))]
        if single and made[0].data_ptr() != read[0].data_ptr():
            seen.append(made[0])
        inside = (places >= part.start * window) & (places < part.stop * window)
        here = (places[inside] - part.start * window).to(inputs.device)
        return (
            nats.float().flatten().cpu(),
            [one.float().flatten(0, 1).cpu() for one in made],
            [layer.flatten(0, 1)[here].float().cpu() for layer in seen],
        )

    size = batch_size.chosen(model, window, memory, batch)
    for part, (nats, made, layer) in batch_size.over(count, size, run, say):
        tokens = slice(part.start * window, part.stop * window)
        losses[tokens] = nats
        for place, one in zip(kept, made, strict=True):
            place[tokens] = one
        sampled.append(layer)
        progress(part.stop / count)
    collect.check_finite(model, *kept)
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


def _names(count: int, *, projected: bool) -> tuple[str, ...]:
    layers = [f"layer {layer}" for layer in range(1, count - projected)]
    return ("embedding", *layers, *([OUTPUT] if projected else []))
