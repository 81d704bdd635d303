"""Row skipping: rows with a small posterior share are left out of the two gradient products.

A row h with target y, posterior share r and token weight w (divided by the total weight for a mean) gives,
with Q_v = f'(z_v) (p_v - 1[v = y]) as in `tiles.py`,

    to its own gradient  w r sum_v Q_v W_v,    to row v of W's  w r Q_v h,    to entry v of b's  w r Q_v

and sum_v |Q_v| <= 2 max|f'| (1 - p_y). So where every row with r <= row_skip is left out, in Euclidean norms:

    a skipped row's own gradient is 0 and would have been at most   2 row_skip w max|f'| max_v |W_v|
    the rows of W's gradient miss together, summed over v, at most  2 row_skip max|f'| sum_skipped w |h|
    and the entries of b's in the same way                          2 row_skip max|f'| sum_skipped w

where row_skip may be replaced by the rows' own shares under the sums. The loss and the gradients of the log
prior and of what f trains stay exact.

With torch's operations Q of the kept rows moves to the top of the buffer in place: row j of the result is row
kept[j] >= j of the buffer, so blocks of rows in ascending order, each through a small temporary, never read
what was overwritten. The kernels of `score_kernels.py` make Q when it is known which rows are kept, and write
it where it belongs: nothing moves. Then the products take 1 + 2 kept / all of a product's time instead of 3.
The host must know how many rows are kept before it can launch their products: it asks when a chunk is scored
and waits when the next one is, so that the device has work meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.ops.later import Later

# The width D at which moving a row of Q takes as long as its two products. On an H200, 4 bytes a score at
# 4.3 TB/s against 4 D operations at 790 TFLOP/s; on a CPU as measured, in fp32. So moving pays as long as no
# more than D / (D + this) of the rows are kept: 0.6 at width 280 on a device, 0.85 at 1040.
MOVING_WIDTH = {"cpu": 5}
DEVICE_MOVING_WIDTH = 184


class Kept:
    """Which rows are above the bound, found by a kernel; `read` waits for that and for nothing later."""

    def __init__(self, share: Tensor, row_skip: float) -> None:
        from fullrank.ops import row_kernels

        self._rows, count = row_kernels.keep_rows(share, row_skip)
        self._count = Later(count)

    def read(self) -> Tensor | None:
        """Their ascending numbers; None where all are."""
        count = int(self._count.read())
        return None if count == self._rows.shape[0] else self._rows[:count]


def rows_to_keep(share: Tensor, row_skip: float, D: int) -> Tensor | None:
    """Ascending numbers of the rows of width D with a share above the bound, from shares [tokens, K].

    None where so many are kept that moving them would take longer than the products on all rows: then the
    chunk stays exact.
    """
    # Not `share > row_skip`: a share that is no number stays, and shows in the gradients.
    kept = (~(share.flatten() <= row_skip)).nonzero()[:, 0]
    most = share.numel() * D / (D + MOVING_WIDTH.get(share.device.type, DEVICE_MOVING_WIDTH))
    return kept if kept.shape[0] <= most else None


def compact(scores: Tensor, kept: Tensor, step: int) -> Tensor:
    """Move the kept rows of scores [R, V] to the top, `step` rows at a time; returns those [kept, V].

    kept must ascend.
    """
    count = kept.shape[0]
    room = scores.new_empty(min(step, count), scores.shape[1])
    for start in range(0, count, step):
        some = kept[start : start + step]
        block = room[: some.shape[0]]
        torch.index_select(scores, 0, some, out=block)
        scores[start : start + step][: some.shape[0]].copy_(block)
    return scores[:count]
