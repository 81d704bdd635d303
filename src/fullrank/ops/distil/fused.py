"""Masses at ids with the mixture's kernel between the products: `Pass.masses` of single rows on CUDA.

The scores at the ids are read from the buffer and hidden there, -inf, so that the kernel of
`mixture/kernels.py` reduces all others; its gradient of their normaliser is Q = p_v / p_rest, 0 at the ids,
where g_i is written after Q was multiplied by g_rest. The identity for f, temperature 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.ops.distil.teacher import Mixture
from fullrank.ops.mixture.fused import KernelMixture, chunk_tokens
from fullrank.ops.mixture.kernels import score_rows
from fullrank.ops.pointwise import IDENTITY
from fullrank.ops.products import Needs, scale, sums_of
from fullrank.ops.reduce import Statistics
from fullrank.ops.triton_base import obstacle, refuse_or_say
from fullrank.ops.workspace import Index, pieces, workspace_of


def chunk_size(
    student: Mixture, product: torch.dtype, temperature: float, workspace: int | None, impl: str
) -> int:
    """Rows in a chunk; 0 where the kernel cannot serve, and impl="triton" raises."""
    rows, weight = student.rows, student.weight
    why = obstacle(rows.device, product, student.pointwise)
    if why is None and (student.pointwise is not IDENTITY or temperature != 1.0):
        why = "masses at ids have a kernel for the identity at temperature 1 only"
    if not refuse_or_say(impl, why):
        return 0
    (N, K, D), room = rows.shape, workspace_of(workspace, rows.device)
    size = chunk_tokens(N=N, K=K, D=D, V=weight.shape[0], product=product, workspace=room) if K == 1 else 0
    small = f"a workspace of {room} bytes does not hold all V={weight.shape[0]} scores of enough rows"
    return size if refuse_or_say(impl, None if size else small) else 0


class KernelMasses:
    """As `chunked.Pass` for masses of rows [N, 1, D]."""

    def __init__(self, student: Mixture, *, needs: Needs, product: torch.dtype, size: int) -> None:
        self.student, self.needs = student, needs
        self.largest: Tensor | float = 1.0
        self.work = KernelMixture(
            student.rows, student.weight, student.bias, IDENTITY, needs=needs, product=product, size=size,
            narrow=False,
        )  # fmt: skip

    def _hidden(self, index: Index, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of a chunk and their scores without those at ids [n, M]; those, with the bias."""
        rows = self.work.chunk_rows(index)
        scores = self.work._score(rows)
        at_ids = scores.gather(1, ids).float()
        scores.scatter_(1, ids, -torch.inf)
        return rows, scores, at_ids if self.work.bias is None else at_ids + self.work.bias[ids]

    def masses(self, ids: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        at_ids = self.student.rows.new_zeros(ids.shape, dtype=torch.float32)
        rest = at_ids.new_zeros(ids.shape[0])
        for index in pieces(ids.shape[0], positions, self.work.size):
            some = ids[index]
            rows, scores, at_ids[index] = self._hidden(index, some)
            found = self._statistics(rows)
            score_rows(scores, self.work.bias, some[:, 0], IDENTITY, places=found)
            rest[index] = found.maximum + found.others.log()
        return at_ids, rest

    def mass_gradients(
        self, ids: Tensor, rest: Tensor, positions: Tensor | None, g_ids: Tensor, g_rest: Tensor
    ) -> None:
        self.work.make_room()
        if self.work.d_rows is not None:
            self.work.d_rows.zero_()
        for index in pieces(ids.shape[0], positions, self.work.size):
            some = ids[index]
            rows, scores, _ = self._hidden(index, some)
            score_rows(
                scores, self.work.bias, some[:, 0], IDENTITY, places=self._statistics(rows), gradient=True,
                late=True,
            )  # fmt: skip
            lines = self.work._buffer[: rows.shape[0]]
            scale(lines, g_rest[index].contiguous(), out=lines)
            lines.scatter_add_(1, some, g_ids[index].to(lines.dtype))
            d_rows = None if self.work.d_rows is None else self.work.row_gradient(rows)
            self.work._add_products(rows, None, d_rows)
            if self.work.d_rows is not None and d_rows is not None:
                self.work.d_rows[index] = (
                    (d_rows * self.largest).view(-1, 1, self.work.D).to(self.work.d_rows.dtype)
                )

    def gradients(self) -> tuple[Tensor | None, ...]:
        prior = torch.zeros_like(self.student.log_prior) if self.needs.prior else None
        sums = sums_of(self.work.summed(), IDENTITY)
        return self.work.d_rows, prior, *(None if each is None else each.mul_(self.largest) for each in sums)

    def _statistics(self, rows: Tensor) -> Statistics:
        return Statistics(*(rows.new_empty(rows.shape[0], dtype=torch.float32) for _ in range(3)))
