"""HistAlign's ranking loss: memories whose token is like the target should score high, most of all its own.

Wan et al. 2023 (2305.04782). At position t the memories that it sees are ranked by the cosine of their
token's embedding to the target's, those that hold the target itself first (P_t), equal ones in order of time:

    loss_t = sum over i in P_t, j not in P_t of max(0, s_tj - s_ti + margin (rank_j - rank_i))

so the margin grows with the distance of the ranks. Every member of P_t ranks before all others, so "j after
i" is no further condition. With a_j = s_tj + margin rank_j and c_i = s_ti + margin rank_i a pair counts where
a_j > c_i, and

    loss_t = sum_j a_j #{i in P_t: c_i < a_j} - sum_i c_i #{j not in P_t: a_j > c_i}:

two sorts and two searches a position, T x L numbers, and no pair is ever formed; the same expression with the
counts held fixed has the loss's gradient. It is made a piece of positions at a time, and again backward.

P_t comes from the input ids, so that copies in a context without labels are credited; labels say only which
positions count. A position without a memory of its target, or without any other memory, has loss 0 and is
left out of the mean; where all are, the loss is 0 with gradient 0. `pairs="mean"` divides a position's sum by
its pairs, so that long texts weigh as much as short ones; "sum" is the published form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads.base import States
from fullrank.heads.cache import CacheHead
from fullrank.heads.memory import Memory, rectangles
from fullrank.heads.pieces import checkpointed, piece_tokens
from fullrank.ops.arguments import REDUCTIONS
from fullrank.ops.reduce import reduce_losses

MARGIN = 1e-3
"""As published."""
PAIRS = ("mean", "sum")


def alignment_loss(
    head: CacheHead,
    hidden: States,
    targets: Tensor,
    *,
    context: Tensor,
    memory: Memory | None = None,
    embedding: Tensor | None = None,
    margin: float = MARGIN,
    pairs: str = "mean",
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """The ranking loss of states [..., time, H] and targets [..., time] in the memory that `head` gives them.

    Tokens are alike by `embedding` [V, E], the head's own W by default; no gradient goes there. `reduction`
    is "mean" over the positions that have a pair, "sum", or "none" for one number a position.
    """
    if reduction not in REDUCTIONS:
        raise FullrankError(f"reduction={reduction!r} is unknown: expected one of {', '.join(REDUCTIONS)}")
    if pairs not in PAIRS:
        raise FullrankError(f"pairs={pairs!r} is unknown: expected one of {', '.join(PAIRS)}")
    if not 0 <= margin < float("inf"):
        raise FullrankError(
            f"margin={margin} is impossible: expected a number of 0 or more, such as {MARGIN}"
        )
    states = head._checked(hidden, targets, context)
    table = head.decoder.weight if embedding is None else embedding
    if table.ndim != 2 or table.shape[0] < head.vocab:
        raise FullrankError(
            f"embedding has shape {list(table.shape)}, expected [V, E] with V={head.vocab}: a row a token"
        )
    remembered = head.remembered(states, context, memory)
    wanted = targets.reshape(remembered.queries.shape[:2]).long()
    wanted = wanted.masked_fill(wanted == ignore_index, -1)
    (B, time, _), entries = remembered.queries.shape, remembered.keys.shape[1]
    # A position holds its scores and what sorts them about two dozen times.
    spans = rectangles(B, time, piece_tokens(targets.device, 24 * entries + 1))

    def losses(span: slice) -> Tensor:
        """Loss and number of pairs [n, 2] of the span of this number."""
        batch, rows = spans[span.start]
        scores, seen, tokens = remembered.scores(batch, rows)
        with torch.no_grad():
            likeness = _likeness(table, wanted[batch, rows], tokens)
        mine = wanted[batch, rows].flatten()
        held = tokens[:, None, :].expand_as(scores).flatten(0, 1)
        return ranking(
            scores.flatten(0, 1),
            seen.expand_as(scores).flatten(0, 1),
            held == mine[:, None],
            likeness,
            margin,
        )

    loss, count = checkpointed(losses, [slice(k, k + 1) for k in range(len(spans))]).unbind(1)
    if pairs == "mean":
        loss = loss / count.clamp_min(1.0)
    found = reduce_losses(loss, (count > 0).to(loss.dtype), reduction)
    return found.view(targets.shape) if reduction == "none" else found


def ranking(scores: Tensor, seen: Tensor, own: Tensor, likeness: Tensor, margin: float) -> Tensor:
    """Loss summed over pairs, and their number, [n, 2], of scores [n, m] of memories.

    `seen` and `own` [n, m] say which count and which hold the target, `likeness` [n, m] ranks the others.
    """
    own = own & seen
    other = seen & ~own
    with torch.no_grad():
        # Own first, then by likeness; what is not seen comes last and counts nowhere.
        key = likeness.masked_fill(own, torch.inf).masked_fill(~seen, -torch.inf)
        order = torch.argsort(key, dim=1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(
            1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
        )
        offset = scores.masked_fill(~seen, -torch.inf).amax(1, keepdim=True) if scores.shape[1] else scores
        offset = torch.where(torch.isfinite(offset), offset, 0.0)
    # The counts of both sums agree, so that an offset of all scores drops out, and with it their rounding.
    placed = scores - offset + margin * rank.to(scores.dtype)
    with torch.no_grad():
        ceiling = placed.masked_fill(~own, torch.inf).sort(1).values
        floor = placed.masked_fill(~other, torch.inf).sort(1).values
        number = other.sum(1, keepdim=True)
        below = torch.searchsorted(ceiling, placed.contiguous())
        above = number - torch.searchsorted(floor, placed.contiguous(), right=True)
        count = torch.where(other, below, 0) - torch.where(own, above.clamp_min(0), 0)
        pairs = (own.sum(1) * other.sum(1)).to(scores.dtype)
    return torch.stack([(torch.where(seen, placed, 0.0) * count).sum(1), pairs], dim=1)


def _likeness(table: Tensor, targets: Tensor, tokens: Tensor) -> Tensor:
    """Cosines [b t, m] of the targets' [b, t] and the memories' [b, m] embeddings."""
    with torch.autocast(table.device.type, enabled=False):
        mine, theirs = (
            torch.nn.functional.normalize(table[ids.clamp_min(0)].float(), dim=-1)
            for ids in (targets, tokens)
        )
        return torch.matmul(mine, theirs.transpose(1, 2)).flatten(0, 1)
