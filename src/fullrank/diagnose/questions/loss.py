"""Question 1: how good is it?

    nats per token   mean of -log p(token | its window so far)
    bits per byte    Σ nats / (log 2 · bytes of the predicted text): comparable across tokenizers

Every predicted token counts once. The first token of a window has nothing before it, and is predicted only
where the model starts its texts with a beginning-of-text token. Short windows cost: a token sees at most one
window back, which is why the loss is also given by position.
"""

from __future__ import annotations

import math

from torch import Tensor

from fullrank.fit import estimates
from fullrank.results.diagnosis import Loss, PositionLoss


def loss(losses: Tensor, sizes: Tensor, positions: Tensor, blocks: Tensor) -> Loss:
    """From each token's loss in nats, bytes, position in its window and block of text, [N] each."""
    nats = estimates.mean(losses, blocks)
    _, error, count = estimates.mean_and_error(losses, blocks)
    total = float(sizes.sum())
    sums, counts = estimates.block_sums(losses, blocks)
    per_byte = losses.numel() / total / math.log(2) if total else math.nan
    return Loss(
        nats_per_token=nats,
        standard_error=error,
        perplexity=estimates.transformed(nats, _exp),
        bits_per_byte=estimates.transformed(nats, lambda value: value * per_byte),
        tokens=losses.numel(),
        bytes=int(total),
        blocks=count,
        by_position=_by_position(losses, positions, blocks),
        block_nats=tuple(sums.tolist()),
        block_tokens=tuple(counts.tolist()),
    )


def _by_position(losses: Tensor, positions: Tensor, blocks: Tensor) -> tuple[PositionLoss, ...]:
    """In bins that double: 0-1, 2-3, 4-7, 8-15, ..."""
    bins, first = [], 0
    longest = int(positions.max())
    while first <= longest:
        last = min(max(1, 2 * first - 1), longest)
        chosen = (positions >= first) & (positions <= last)
        if chosen.any():
            # One position a window is one token a block: windows are the blocks here.
            estimate = estimates.mean(losses[chosen], blocks[chosen])
            bins.append(PositionLoss(first=first, last=last, nats=estimate))
        first = last + 1
    return tuple(bins)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
