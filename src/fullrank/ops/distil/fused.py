"""The outputs with a kernel between the products, on CUDA: `chunked.Pass` in two parts.

`KernelValues`: entropies and divergences by `kernels.py`, for a teacher of one row a token.

`KernelMasses`: masses at ids of single rows by the mixture's kernel. The scores at the ids are read from the
buffer and hidden there, -inf, so that the kernel of `mixture/kernels.py` reduces all others; its gradient of
their normaliser is Q = p_v / p_rest, 0 at the ids, where g_i is written into Q times g_rest. The
identity for f, temperature 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.ops.distil.kernels import distil_rows
from fullrank.ops.distil.teacher import Mixture
from fullrank.ops.mixture.fused import KernelMixture, chunk_tokens
from fullrank.ops.mixture.kernels import score_rows
from fullrank.ops.pointwise import IDENTITY, Pointwise
from fullrank.ops.products import Needs, sums_of
from fullrank.ops.reduce import Statistics
from fullrank.ops.triton_base import obstacle, refuse_or_say
from fullrank.ops.workspace import Index, at, pieces, workspace_of

HALF = (torch.bfloat16, torch.float16)
MOST_COMPONENTS = 32


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


def value_tokens(
    student: Mixture, teacher: Mixture | None, *, product: torch.dtype, teacher_product: torch.dtype | None,
    temperature: float, masked: bool, workspace: int | None, impl: str,
) -> int:  # fmt: skip
    """Tokens in a chunk of `KernelValues`; 0 where the kernel cannot serve, and impl="triton" raises."""
    (N, K, D), V, device = student.rows.shape, student.weight.shape[0], student.rows.device
    why = obstacle(device, product, student.pointwise, HALF)
    if why is None and teacher is not None:
        why = obstacle(device, teacher_product or product, teacher.pointwise, HALF)
        if why is None and teacher.rows.shape[1] > 1:
            why = f"the teacher has {teacher.rows.shape[1]} rows a token, and the kernel knows one"
    if why is None and K > 1 and temperature != 1.0:
        why = "several rows a token have a kernel at temperature 1 only"
    if why is None and masked:
        why = "tokens of probability zero have no kernel"
    if why is None and K > MOST_COMPONENTS:
        why = f"{K} components are more than the {MOST_COMPONENTS} that the kernel holds"
    if not refuse_or_say(impl, why):
        return 0
    room, lines = workspace_of(workspace, device), K
    if teacher is not None:
        lines, D = K + 1, max(D, teacher.rows.shape[2])
    size = chunk_tokens(N=N, K=lines, D=D, V=V, product=product, workspace=room)
    small = f"a workspace of {room} bytes does not hold all V={V} scores of enough rows"
    return size if refuse_or_say(impl, None if size else small) else 0


class KernelValues:
    """As `chunked.Pass` for the outputs of `kernels.OUTPUTS`."""

    def __init__(
        self, student: Mixture, teacher: Mixture | None, *, needs: Needs, product: torch.dtype,
        teacher_product: torch.dtype | None, temperature: float, size: int,
    ) -> None:  # fmt: skip
        self.student, self.teacher, self.needs, self.temperature = student, teacher, needs, temperature
        self.largest: Tensor | float = 1.0
        self.work = _lines(student, product, size, needs)
        self.theirs = None if teacher is None else _lines(teacher, teacher_product or product, size, Needs())
        self.d_prior = torch.zeros_like(student.log_prior) if needs.prior else None

    def values(self, name: str, positions: Tensor | None, upstream: Tensor | None) -> Tensor:
        work, (N, K) = self.work, self.student.log_prior.shape
        found = self.student.log_prior.new_zeros(N)
        if upstream is not None:
            work.make_room()
            if work.d_rows is not None and positions is not None:
                work.d_rows.zero_()
        for index in pieces(N, positions, work.size):
            rows = work.chunk_rows(index)
            scores, taught, bias = work._score(rows), None, None
            other: Pointwise = IDENTITY
            if self.theirs is not None:
                taught = self.theirs._score(self.theirs.chunk_rows(index))
                bias, other = self.theirs.bias, self.theirs.pointwise
            values, shares = distil_rows(
                name, scores, work.bias, at(self.student.log_prior, index).contiguous(), work.pointwise,
                taught, bias, other, temperature=self.temperature, gradient=upstream is not None,
            )  # fmt: skip
            found[index] = values
            if upstream is None:
                continue
            if self.d_prior is not None:
                self.d_prior[index] = shares * upstream[index, None]
            factor = upstream[index].repeat_interleave(K) if K > 1 else upstream[index].contiguous()
            d_rows = None if work.d_rows is None else work.row_gradient(rows)
            work.add_products(rows, factor, d_rows)
            if work.d_rows is not None and d_rows is not None:
                work.d_rows[index] = (d_rows * self.largest).view(-1, K, work.D).to(work.d_rows.dtype)
        return found

    def gradients(self) -> tuple[Tensor | None, ...]:
        return self.work.d_rows, self.d_prior, *sums_of(self.work.summed(), self.student.pointwise)


def _lines(mixture: Mixture, product: torch.dtype, size: int, needs: Needs) -> KernelMixture:
    return KernelMixture(
        mixture.rows, mixture.weight, mixture.bias, mixture.pointwise, needs=needs, product=product,
        size=size, narrow=False,
    )  # fmt: skip


class KernelMasses:
    """As `chunked.Pass` for masses of rows [N, 1, D]."""

    def __init__(self, student: Mixture, *, needs: Needs, product: torch.dtype, size: int) -> None:
        self.student, self.needs = student, needs
        self.largest: Tensor | float = 1.0
        self.work = _lines(student, product, size, needs)

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
            late = g_rest[index].float().contiguous()
            score_rows(scores, self.work.bias, some[:, 0], IDENTITY, places=None, gradient=True, late=late)
            lines = self.work._buffer[: rows.shape[0]]
            lines.scatter_add_(1, some, g_ids[index].to(lines.dtype))
            d_rows = None if self.work.d_rows is None else self.work.row_gradient(rows)
            self.work.add_products(rows, None, d_rows)
            if self.work.d_rows is not None and d_rows is not None:
                self.work.d_rows[index] = (
                    (d_rows * self.largest).view(-1, 1, self.work.D).to(self.work.d_rows.dtype)
                )

    def gradients(self) -> tuple[Tensor | None, ...]:
        prior = torch.zeros_like(self.student.log_prior) if self.needs.prior else None
        return self.work.d_rows, prior, *sums_of(self.work.summed(), IDENTITY)

    def _statistics(self, rows: Tensor) -> Statistics:
        return Statistics(*(rows.new_empty(rows.shape[0], dtype=torch.float32) for _ in range(3)))
