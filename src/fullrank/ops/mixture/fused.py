"""The mixture's pass with a kernel between the products: `chunked.py` with `kernels.py` for its tiles.

A chunk is one product for its scores, one kernel that turns them into Q in place (`kernels.score_rows`), one
for losses and shares, and two products; or, where `product.py` serves, its product for both of the first. W
and the buffer's rows are padded to whole 64s of entries, which the fast products and the kernels want.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from fullrank.ops.mixture.kernels import mix_rows, score_rows
from fullrank.ops.mixture.product import raise_rows, tile_for
from fullrank.ops.pointwise import IDENTITY, Pointwise
from fullrank.ops.products import Gradients, Needs, add_bias, add_product, scale_all
from fullrank.ops.reduce import Statistics, capturing
from fullrank.ops.workspace import DEVICE_MOST_ROWS, LEAST_ROWS, MIB, Chunk, at

STRIDE = 64
ROUND_ROWS = 256
# A chunk of so many rows is as fast as a larger one. Where a single chunk would take more bytes than these,
# two take half the memory in the same time; below, launches cost more than memory does.
ENOUGH_ROWS = 4096
ENOUGH_BYTES = 640 * MIB
# Operations of the product that runs while the host looks at the targets: half a millisecond, or all of the
# first chunk where that is less, so that the device never waits.
AHEAD = 350_000_000_000
# Operations of all scores from which `product.py` pays: below, the host takes longer to launch three kernels
# for one than the device gains. While a graph is captured that costs nothing.
ENOUGH_WORK = 400_000_000_000
# A sum of so many products is rounded to bf16 along with each of them: one rounding more than a sum in fp32,
# for half the memory of W's gradient. fp16 could not hold a sum over tokens.
NARROW_CHUNKS = 2


def padded(V: int) -> int:
    return -(-V // STRIDE) * STRIDE


def chunk_tokens(*, N: int, K: int, D: int, V: int, product: torch.dtype, workspace: int) -> int:
    """Tokens in a chunk; 0 where the workspace cannot hold all V scores of enough rows."""
    narrow, wide = product.itemsize, 4
    # The sums of tiles of 64 entries or more stand beside the scores.
    row_bytes = D * (2 * narrow + 2 * wide) + padded(V) * narrow + padded(V) // 64 * wide
    most = max(1, min(N, DEVICE_MOST_ROWS // K))
    # An eighth is left for what stands beside the chunk.
    tokens = min(most, (workspace - workspace // 8) // (K * row_bytes))
    if tokens * K < min(LEAST_ROWS, most * K):
        return 0
    if tokens * K * padded(V) * narrow > ENOUGH_BYTES:
        tokens = min(tokens, max(ENOUGH_ROWS // K, -(-N // 2), 1))
    # Chunks of one size, the same number of them in less memory, but of sizes that products like.
    even = -(-max(N, 1) // -(-max(N, 1) // tokens))
    unit = ROUND_ROWS // math.gcd(K, ROUND_ROWS)
    return min(tokens, -(-even // unit) * unit)


class KernelMixture:
    """The pass over rows [N, K, D] with a kernel between the products: a `workspace.Work`, as `TorchMixture`.

    `narrow`: W's gradient may be in bf16 where W is and `NARROW_CHUNKS` products make all of it.
    """

    argmax: Tensor | None = None
    entropy: Tensor | None = None

    def __init__(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, pointwise: Pointwise, *, needs: Needs,
        product: torch.dtype, size: int, narrow: bool,
    ) -> None:  # fmt: skip
        N, K, D = rows.shape
        self.V, self.K, self.D = weight.shape[0], K, D
        self.rows, self.needs, self.size, self.product, self.pointwise = rows, needs, size, product, pointwise
        stride = padded(self.V)
        if stride != self.V:
            # W goes on with rows of zeros, whose scores the kernel leaves out and whose Q is 0.
            self.weight = weight.new_zeros(stride, D, dtype=product)
            self.weight[: self.V].copy_(weight)
        else:
            weight = weight.to(product)
            self.weight = weight if 1 in weight.stride() else weight.contiguous()
        self._buffer = self.weight.new_empty(size * K, stride)
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = functional.pad(bias.float(), (0, stride - self.V), value=-torch.inf)
        self.narrow = narrow and NARROW_CHUNKS * size >= N and product == weight.dtype == torch.bfloat16
        self.sums = Gradients()
        self.d_rows: Tensor | None = None
        # A newer chip measures its tiles here, so also where a graph is yet to be captured.
        tile = tile_for(self.weight, product) if needs.products else None
        worth = not rows.is_cuda or capturing(rows) or 2 * N * K * D * self.V >= ENOUGH_WORK
        self._tile = tile if worth else None
        self._ahead = 0
        self._found: Statistics | None = None
        self._current: tuple[Tensor, Tensor | None] | None = None

    def score_ahead(self, targets: Tensor) -> None:
        """Scores of the first rows as if no token were ignored: the device has something to do while the host
        looks at the targets and makes room for the gradients. Where some are ignored that much is lost."""
        worth = AHEAD // (2 * self.D * self._buffer.shape[1]) // ROUND_ROWS * ROUND_ROWS
        self._ahead = min(max(worth, ROUND_ROWS), self.rows.shape[0] * self.K, self._buffer.shape[0])
        tokens = slice(0, -(-self._ahead // self.K))
        rows = self.chunk_rows(tokens)[: self._ahead]
        if self._tile is None:
            torch.mm(rows, self.weight.t(), out=self._buffer[: self._ahead])
        else:
            self._found = self._empty_statistics(self._buffer)
            ahead = targets[tokens] if self.K == 1 else targets[tokens].repeat_interleave(self.K)
            self._raise(rows, ahead[: self._ahead], self._found, 0)
        self.make_room()

    def make_room(self) -> None:
        """For the gradients. What rows have is written once, so where some have none the caller clears it."""
        needs, weight = self.needs, self.weight
        wide = self.product if self.narrow else torch.float32
        self.sums = Gradients(
            weight=weight.new_empty(weight.shape, dtype=wide) if needs.weight else None,
            bias=weight.new_zeros(weight.shape[0], dtype=torch.float32) if needs.bias else None,
            unwritten=needs.weight,
        )
        if needs.rows:
            self.d_rows = torch.empty_like(self.rows, memory_format=torch.contiguous_format)

    def summed(self) -> Gradients:
        return self.sums.trimmed(self.V)

    def chunk_rows(self, index: slice | Tensor) -> Tensor:
        return at(self.rows, index).flatten(0, 1).to(self.product)

    def _score(self, rows: Tensor, done: int = 0) -> Tensor:
        """[rows, V] in the buffer, with the padding behind; of the first rows it is done."""
        lines = self._buffer if rows.shape[0] == self._buffer.shape[0] else self._buffer[: rows.shape[0]]
        if done < rows.shape[0]:
            torch.mm(rows[done:], self.weight.t(), out=lines[done:])
        return lines if lines.shape[1] == self.V else lines[:, : self.V]

    def _raise(self, rows: Tensor, targets: Tensor, found: Statistics, done: int) -> None:
        """Q in the buffer but for the factor of each row; of the first rows it is done."""
        assert self._tile is not None
        R = rows.shape[0]
        if done < R:
            rows = rows.contiguous()[done:]
            raise_rows(
                rows if rows.data_ptr() % 16 == 0 else rows.clone(), self.weight, self.bias, targets[done:],
                self.pointwise, places=found.at(slice(done, R)), out=self._buffer[done:R], V=self.V,
                tile=self._tile,
            )  # fmt: skip

    def _empty_statistics(self, rows: Tensor) -> Statistics:
        return Statistics(*(rows.new_empty(rows.shape[0], dtype=torch.float32) for _ in range(3)))

    def statistics(self, rows: Tensor, targets: Tensor) -> Statistics:
        found = self._empty_statistics(rows)
        score_rows(self._score(rows), self.bias, targets, self.pointwise, places=found)
        return found

    def losses(self, chunk: Chunk, nll: Tensor) -> Tensor | None:
        rows, gradient = self.chunk_rows(chunk.index), self.needs.products
        done, self._ahead = self._ahead if isinstance(chunk.index, slice) else 0, 0
        if self._tile is None and self.K == 1 and chunk.weight is None and not self.needs.prior:
            places = (chunk.log_prior.contiguous(), nll)
            score_rows(
                self._score(rows, done), self.bias, chunk.targets, self.pointwise, places=places,
                gradient=gradient,
            )  # fmt: skip
            self._current = rows, None
            return None
        raised = gradient and self.product != torch.float16
        found = self._found if self._found is not None and done else self._empty_statistics(rows)
        found, self._found = found.at(slice(0, rows.shape[0])), None
        if self._tile is not None:
            self._raise(rows, chunk.row_targets, found, done)
        else:
            score_rows(
                self._score(rows, done), self.bias, chunk.row_targets, self.pointwise, places=found,
                gradient=gradient, raised=raised,
            )  # fmt: skip
        narrow = raised and self.product == torch.bfloat16 and self.pointwise is IDENTITY
        share, factor = mix_rows(found, chunk.log_prior, nll, narrow=narrow)
        self._current = rows, chunk.upstream(factor) if raised else None
        return share

    def gradients(self, chunk: Chunk, upstream: Tensor | None) -> None:
        assert self._current is not None
        rows, factor = self._current
        self._current = None
        if not self.needs.products:
            return
        place: Tensor | None = None
        if self.d_rows is not None:
            in_place = isinstance(chunk.index, slice) and self.d_rows.dtype == self.product
            place = at(self.d_rows, chunk.index).view(rows.shape) if in_place else torch.empty_like(rows)
        self.add_products(rows, upstream if factor is None else factor, place)
        if self.d_rows is not None and place is not None and not in_place:
            self.d_rows[chunk.index] = place.view(*chunk.log_prior.shape, -1).to(self.d_rows.dtype)

    def add_products(self, rows: Tensor, factor: Tensor | None, d_rows: Tensor | None) -> None:
        """The products of what the kernel left in the buffer, each row of it times its factor."""
        Q = self._buffer if rows.shape[0] == self._buffer.shape[0] else self._buffer[: rows.shape[0]]
        if self.sums.bias is not None:
            add_bias(self.sums.bias, Q, factor)
        if d_rows is not None:
            torch.mm(Q, self.weight, out=d_rows)
        scaled = rows
        if factor is not None:
            pairs = [] if d_rows is None else [(d_rows, d_rows)]
            if self.sums.weight is not None:
                scaled = torch.empty_like(rows)
                pairs.append((rows, scaled))
            scale_all(pairs, factor)
        if self.sums.weight is not None:
            add_product(
                self.sums.weight, Q.t(), scaled, step=self._buffer.shape[1], first=self.sums.unwritten
            )
            self.sums.unwritten = False

    def late_gradients(
        self, rows: Tensor, targets: Tensor, statistics: Statistics, upstream: Tensor,
        d_rows: Tensor | None,
    ) -> None:  # fmt: skip
        """As `TorchMixture.late_gradients`."""
        # The factor is the rows': of half precision Q times a small number would be nothing.
        ones = torch.ones_like(upstream, dtype=torch.float32)
        score_rows(
            self._score(rows), self.bias, targets, self.pointwise, places=None, gradient=True, late=ones
        )
        self.add_products(rows, upstream, d_rows)

    def row_gradient(self, rows: Tensor) -> Tensor:
        return torch.empty_like(rows, memory_format=torch.contiguous_format)
