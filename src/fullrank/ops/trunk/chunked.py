"""A mixture whose K rows share all but their last r entries: row_k = [trunk (D - r); private_k (r)].

    s_k = W_t trunk + W_p private_k + b,   W = [W_t (V x D - r), W_p (V x r)]

The trunk is scored once a token, and its gradient needs two products whatever K is; with Q_k and g_k of a row
as in `mixture/chunked.py`,

    d private_k = g_k (Q_k W_p)             d W_p = sum_k Q_k^T (g_k private_k)
    d trunk = (sum_k g_k Q_k) W_t           d W_t = (sum_k g_k Q_k)^T trunk

Keeping K x V scores of a token would cost what the sharing saves, so the gradient makes s_k again, for r / D
of a product. In products of the softmax's size: 3 (D - r) / D + 4 K r / D; a mixture of unshared rows takes
3 K.

Only the identity for f, and only losses whose weight is known in the forward pass: `operator.py` gives
everything else to the mixture of whole rows. The K components of a chunk are in the hands of
`TorchComponents` here, or of `kernels.KernelComponents`; the products with the trunk are the same for both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fullrank.ops.arguments import compute_dtype
from fullrank.ops.products import Matrix, Needs, add_product, scale
from fullrank.ops.reduce import Statistics, posterior
from fullrank.ops.workspace import Chunk, at, most_rows, too_small, workspace_of


class TorchComponents:
    """The K components of a chunk with torch's operations, one after the other."""

    def __init__(
        self, scores: Tensor, private: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
        d_private: Tensor | None, wide: torch.dtype,
    ) -> None:  # fmt: skip
        """scores [T, V], private [T, K, r], weight [V, r], bias [V], targets [T]; d_private [T, K, r]."""
        self.private, self.weight, self.targets, self.d_private = private, weight, targets[:, None], d_private
        self.scores = scores.to(wide)
        if bias is not None:
            self.scores += bias

    def _component(self, k: int) -> Tensor:
        """s_k [T, V]."""
        return self.scores + torch.mm(self.private[:, k], self.weight.t())

    def statistics(self) -> Statistics:
        parts = []
        for k in range(self.private.shape[1]):
            s = self._component(k)
            maximum, target = s.amax(1), s.gather(1, self.targets)[:, 0]
            anchor = torch.where(torch.isneginf(maximum), 0.0, maximum)
            others = s.sub_(anchor[:, None]).exp_().scatter_(1, self.targets, 0.0).sum(1)
            parts.append(Statistics(maximum, others, target))
        return Statistics(*(torch.stack(column, 1) for column in zip(*parts, strict=True)))

    def gradients(self, statistics: Statistics, factor: Tensor, d_weight: Tensor | None) -> Tensor:
        lse, entry = normaliser_and_entry(statistics)
        summed = torch.zeros_like(self.scores)
        for k in range(self.private.shape[1]):
            own = self.private[:, k]
            s = self._component(k).sub_(lse[:, k, None]).exp_().scatter_(1, self.targets, entry[:, k, None])
            q, g = s.to(own.dtype), factor[:, k].contiguous()
            if self.d_private is not None:
                part = torch.mm(q, self.weight)
                self.d_private[:, k] = scale(part, g, out=part)
            if d_weight is not None:
                scaled = scale(own, g, out=torch.empty_like(own, memory_format=torch.contiguous_format))
                add_product(d_weight, q.t(), scaled, step=d_weight.shape[0])
            summed.addcmul_(s, g[:, None])
        return summed.to(self.private.dtype)


def normaliser_and_entry(statistics: Statistics) -> tuple[Tensor, Tensor]:
    """lse of every row and p_y - 1; a row that is masked from end to end has no normaliser."""
    empty = statistics.total == 0
    entry = statistics.deficit / torch.where(empty, 1.0, statistics.total)
    return torch.where(empty, 0.0, statistics.lse), entry


class TrunkPass:
    """The pass over trunk [N, D - r] and private [N, K, r]: a `workspace.Work`; with kernels where `kernel`.

    Gradients are those of sum_i weight_i nll_i, None where not asked for; `needs.rows` is for both parts of
    the rows.
    """

    def __init__(
        self, trunk: Tensor, private: Tensor, weight: Tensor, bias: Tensor | None, *, needs: Needs,
        product: torch.dtype, workspace: int | None, kernel: bool,
    ) -> None:  # fmt: skip
        (N, K, r), (V, D) = private.shape, weight.shape
        shared = D - r
        self.trunk, self.private, self.product, self.kernel = trunk, private, product, kernel
        self.needs, self.V, self.wide = needs, V, compute_dtype(product)
        room = workspace_of(workspace, trunk.device)
        self.matrix_rows = max(1, room // (8 * shared * (self.wide.itemsize + product.itemsize)))
        entries = V
        if kernel:
            from fullrank.ops.trunk.kernels import STRIDE

            entries = -(-V // STRIDE) * STRIDE
            weight = weight.to(product)
            if entries > V:
                weight = functional.pad(weight, (0, 0, 0, entries - V))
        # Products take rows that lie apart, the kernels do not.
        self.shared = Matrix(weight[:, :shared], product, most=self.matrix_rows)
        self.owned = weight[:, shared:].to(product).contiguous()
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = functional.pad(bias.to(self.wide), (0, entries - V), value=-torch.inf)
        self.size = self._chunk_tokens(N, K, entries, room, weight.dtype != product)
        self._buffer = trunk.new_empty(self.size, entries, dtype=product)
        self.d_trunk, self.d_private = (
            torch.zeros_like(part, memory_format=torch.contiguous_format) if needs.rows else None
            for part in (trunk, private)
        )
        self._first: Tensor | None = None
        self.d_weight = trunk.new_zeros(entries, D, dtype=self.wide) if needs.weight else None
        self.d_bias = trunk.new_zeros(entries, dtype=self.wide) if needs.bias else None
        self._state: tuple[Tensor, Tensor | None, Any, Statistics] | None = None

    def _chunk_tokens(self, N: int, K: int, entries: int, room: int, cast: bool) -> int:
        """Tokens whose scores fit: in the narrow dtype for kernels, else four buffers in the wide one, and
        beside them what is cast of W."""
        width = self.shared.D + self.owned.shape[1] * K
        each = entries * (self.product.itemsize if self.kernel else 4 * self.wide.itemsize)
        each += 3 * width * self.wide.itemsize
        fixed = self.owned.numel() * self.owned.itemsize + room // 8 if cast else 0
        if room - fixed < each:
            raise too_small(room, "the scores of one token", 2 * (each + fixed))
        tokens = max(1, min(N, (room - fixed) // each, most_rows(self.trunk.device)))
        return -(-max(N, 1) // -(-max(N, 1) // tokens))

    def score_ahead(self) -> None:
        """As `mixture.fused.KernelMixture.score_ahead`."""
        if self.kernel:
            trunk = self.trunk[: self.size].to(self.product)
            self._first = self.shared.score(trunk, self._buffer[: trunk.shape[0]], 0)

    def losses(self, chunk: Chunk, nll: Tensor) -> Tensor | None:
        trunk, private = (at(part, chunk.index).to(self.product) for part in (self.trunk, self.private))
        private = private.contiguous()
        scores, self._first = self._first, None
        if scores is None or not isinstance(chunk.index, slice):
            scores = self.shared.score(trunk, self._buffer[: trunk.shape[0]], 0)
        d_private = None if self.d_private is None else self._room(self.d_private, chunk, private)
        components: Any
        if self.kernel:
            from fullrank.ops.trunk.kernels import KernelComponents

            components = KernelComponents(
                scores, private, self.owned, self.bias, chunk.targets, self.V, d_private,
                signed=chunk.weight is not None,
            )  # fmt: skip
        else:
            components = TorchComponents(
                scores, private, self.owned, self.bias, chunk.targets, d_private, self.wide
            )
        statistics = components.statistics()
        loss, share = posterior(chunk.log_prior, statistics.nll)
        nll.copy_(loss)
        self._state = trunk, d_private, components, statistics
        return share

    def gradients(self, chunk: Chunk, upstream: Tensor | None) -> None:
        assert self._state is not None
        assert upstream is not None
        trunk, d_private, components, statistics = self._state
        self._state = None
        if not self.needs.products:
            return
        d_owned = None if self.d_weight is None else self.d_weight[:, self.shared.D :]
        summed = components.gradients(statistics, upstream.view(chunk.log_prior.shape), d_owned)
        if self.d_trunk is not None and self.d_private is not None and d_private is not None:
            one = self.shared.most >= self.shared.V
            d_trunk = (
                self._room(self.d_trunk, chunk, trunk) if one else torch.zeros_like(trunk, dtype=self.wide)
            )
            self.shared.add_row_gradient(summed, d_trunk, 0)
            for whole, part in ((self.d_trunk, d_trunk), (self.d_private, d_private)):
                if part.data_ptr() != whole[chunk.index].data_ptr():
                    whole[chunk.index] = part.to(whole.dtype)
        if self.d_weight is not None:
            d_shared = self.d_weight[:, : self.shared.D]
            add_product(d_shared, summed.t(), trunk, step=self.matrix_rows)
        if self.d_bias is not None:
            self.d_bias += summed.sum(0, dtype=self.wide)

    def _room(self, whole: Tensor, chunk: Chunk, like: Tensor) -> Tensor:
        """Where the chunk's part of a gradient goes: in place if it lies side by side, in the same dtype."""
        if isinstance(chunk.index, slice) and whole.dtype == self.product:
            return at(whole, chunk.index)
        return torch.empty_like(like)

    @property
    def made(self) -> tuple[Tensor | None, ...]:
        """Gradients of W and b, without padding."""
        return tuple(None if each is None else each[: self.V] for each in (self.d_weight, self.d_bias))
