"""A mixture whose K rows share all but their last r entries: row_k = [trunk (D - r); private_k (r)].

    s_k = W_t trunk + W_p private_k + b,   W = [W_t (V x D - r), W_p (V x r)]

The trunk is scored once a token, and its gradient needs two products whatever K is; with Q_k and g_k of a row
as in `tiles.py`,

    d private_k = g_k (Q_k W_p)             d W_p = sum_k Q_k^T (g_k private_k)
    d trunk = (sum_k g_k Q_k) W_t           d W_t = (sum_k g_k Q_k)^T trunk

Keeping K x V scores of a token would cost what the sharing saves, so the gradient makes s_k again, for r / D
of a product. In products of the softmax's size: 3 (D - r) / D + 4 K r / D; a mixture of unshared rows takes
3 K.

Only the identity for f, and only losses whose weight is known in the forward pass: `dispatch.py` gives
everything else to the mixture of whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fullrank.errors import FullrankError
from fullrank.ops.chunks import pieces
from fullrank.ops.gradients import Needs
from fullrank.ops.mixture.reference import compute_dtype
from fullrank.ops.products import add_wide
from fullrank.ops.scaling import scale_rows
from fullrank.ops.statistics import Statistics, posterior
from fullrank.ops.targets import Asked, Counted
from fullrank.ops.vocabulary import say_slower
from fullrank.ops.workspace import DEVICE_MOST_ROWS, MIB, MOST_ROWS, default_workspace


@dataclass
class TrunkForward:
    """What one pass makes; gradients are those of sum_i weight_i nll_i, None where not asked for."""

    nll: Tensor
    """[N], without weights."""
    d_trunk: Tensor | None
    d_private: Tensor | None
    d_prior: Tensor | None
    d_weight: Tensor | None
    d_bias: Tensor | None


@torch.compiler.assume_constant_result
def trunk_serves(device: torch.device, product: torch.dtype, private: int) -> bool:
    """Whether this pass is the fast one: on a processor always, on CUDA with its kernels. A compiler asks
    and does not look inside."""
    if device.type != "cuda":
        return True
    from fullrank.ops.trunk import kernels as trunk_kernels

    obstacle = trunk_kernels.obstacle(device, product, private)
    if obstacle is not None:
        say_slower(f"{obstacle}; trunk goes as K whole rows")
    return obstacle is None


def kernels_for(impl: str, trunk: Tensor, private: int) -> ModuleType | None:
    """The module of kernels where they serve; impl="triton" raises where they cannot."""
    if impl == "chunked" or (impl == "auto" and trunk.device.type != "cuda"):
        return None
    from fullrank.ops.trunk import kernels as trunk_kernels

    obstacle = trunk_kernels.obstacle(trunk.device, trunk.dtype, private)
    if obstacle is not None and impl == "triton":
        raise FullrankError(
            f"impl='triton' cannot serve here: {obstacle}; pass impl='auto' for any path that can"
        )
    return None if obstacle is not None else trunk_kernels


@dataclass
class Chunk:
    """Some tokens: trunk [T, D - r], private [T, K, r], targets [T]."""

    trunk: Tensor
    private: Tensor
    targets: Tensor


class TrunkVocabulary:
    """W in its two parts and b, with the buffer for the trunk's scores of a chunk of tokens."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        shared: int,
        *,
        product: torch.dtype,
        kernels: ModuleType | None,
    ) -> None:
        self.V, self.kernels = weight.shape[0], kernels
        self.wide = compute_dtype(product)
        self.entries = -(-self.V // kernels.STRIDE) * kernels.STRIDE if kernels else self.V
        more = self.entries - self.V
        weight = weight.to(product)
        if more or weight.stride(1) != 1:
            weight = functional.pad(weight, (0, 0, 0, more)).contiguous()
        # Products take rows that lie apart, the kernels do not.
        self.shared, self.private = weight[:, :shared], weight[:, shared:].contiguous()
        self.bias = None if bias is None else functional.pad(bias.to(self.wide), (0, more), value=-torch.inf)

    def work_on(self, chunk: Chunk, scores: Tensor, d_private: Tensor | None) -> Any:
        """The chunk with its trunk's scores [T, entries] in the hands of the kernels, or of torch; d_private
        [T, K, r] takes the gradient of the private parts."""
        if self.kernels is None:
            return TorchScores(self, chunk, scores, d_private)
        return self.kernels.Scores(
            scores, chunk.private, self.private, self.bias, chunk.targets.contiguous(), self.V, d_private
        )

    def chunk_tokens(self, N: int, K: int, workspace: int, device: torch.device) -> int:
        """Tokens whose scores fit: in the narrow dtype for kernels, else four buffers in the wide one."""
        width = self.shared.shape[1] + self.private.shape[1] * K
        each = self.entries * (self.shared.itemsize if self.kernels else 4 * self.wide.itemsize)
        each += 3 * width * self.wide.itemsize
        fitting = workspace // each
        if fitting == 0:
            need = -(-each // MIB)
            raise FullrankError(
                f"a workspace of {workspace} bytes cannot hold the scores of one token: "
                f"pass workspace={need * MIB} ({need} MiB) or more"
            )
        tokens = max(1, min(N, fitting, MOST_ROWS.get(device.type, DEVICE_MOST_ROWS)))
        return -(-max(N, 1) // -(-max(N, 1) // tokens))


def trunk_forward(
    trunk: Tensor,
    private: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    asked: Asked,
    bias: Tensor | None,
    token_weight: Tensor | None,
    *,
    needs: Needs,
    workspace: int | None,
    impl: str,
) -> TrunkForward:
    """trunk [N, D - r], private [N, K, r], log_prior [N, K]; `needs.rows` is for both parts of the rows."""
    N, K, r = private.shape
    shared = trunk.shape[1]
    kernels = kernels_for(impl, trunk, r)
    vocabulary = TrunkVocabulary(weight, bias, shared, product=trunk.dtype, kernels=kernels)
    bytes_ = default_workspace(trunk.device) if workspace is None else workspace
    size = vocabulary.chunk_tokens(N, K, bytes_, trunk.device)
    buffer = trunk.new_empty(size, vocabulary.entries)

    def run(counted: Counted) -> TrunkForward:
        return over_chunks(
            vocabulary, buffer, trunk, private, log_prior, token_weight, counted, asked,
            needs=needs, room=bytes_,
        )  # fmt: skip

    if kernels is None or not asked.all_expected:
        return run(asked.answer())
    # As if no token were ignored, before the host has looked: the device need not wait for that.
    expected = asked.expected()
    out = run(replace(expected, targets=expected.targets.clamp(0, vocabulary.V - 1)))
    if asked.answer().positions is None:
        return out
    del out
    return run(asked.answer())


def over_chunks(
    vocabulary: TrunkVocabulary,
    buffer: Tensor,
    trunk: Tensor,
    private: Tensor,
    log_prior: Tensor,
    token_weight: Tensor | None,
    counted: Counted,
    asked: Asked,
    *,
    needs: Needs,
    room: int,
) -> TrunkForward:
    """The pass over the tokens that count; buffer [tokens, entries] is for the scores of a chunk."""
    N, K, r = private.shape
    shared, wide = trunk.shape[1], vocabulary.wide

    def zeros(*shape: int) -> Tensor:
        return trunk.new_zeros(shape, dtype=wide)

    d_weight = zeros(vocabulary.entries, shared + r) if needs.weight else None
    d_shared, d_owned = (None, None) if d_weight is None else (d_weight[:, :shared], d_weight[:, shared:])
    out = TrunkForward(
        nll=zeros(N),
        d_trunk=torch.zeros_like(trunk) if needs.rows else None,
        d_private=torch.zeros_like(private) if needs.rows else None,
        d_prior=zeros(N, K) if needs.prior else None,
        d_weight=None if d_weight is None else d_weight[: vocabulary.V],
        d_bias=zeros(vocabulary.entries) if needs.bias else None,
    )
    for index in pieces(N, counted.positions, buffer.shape[0]):
        chunk = Chunk(trunk[index], private[index].contiguous(), counted.targets[index])
        scores = buffer[: chunk.trunk.shape[0]]
        torch.mm(chunk.trunk, vocabulary.shared.t(), out=scores)
        asked.fetch()
        in_place = isinstance(index, slice)
        d_private: Tensor | None = None
        if out.d_private is not None:
            d_private = out.d_private[index] if in_place else torch.empty_like(chunk.private)
        work = vocabulary.work_on(chunk, scores, d_private)
        statistics: Statistics = work.statistics()
        prior = log_prior[index].to(wide)
        out.nll[index], share = posterior(prior, statistics.nll)
        factor = share if token_weight is None else share * token_weight[index, None].to(wide)
        if out.d_prior is not None:
            out.d_prior[index] = -factor
        if not needs.products:
            continue
        # A row that is masked from end to end has no normaliser.
        lse = torch.where(statistics.total == 0, 0.0, statistics.lse)
        entry = statistics.deficit / torch.where(statistics.total == 0, 1.0, statistics.total)
        summed: Tensor = work.gradients(lse, entry, factor.contiguous(), d_weight=d_owned)
        if out.d_trunk is not None and out.d_private is not None and d_private is not None:
            if in_place:
                torch.mm(summed, vocabulary.shared, out=out.d_trunk[index])
            else:
                out.d_private[index] = d_private
                out.d_trunk[index] = torch.mm(summed, vocabulary.shared)
        if d_shared is not None:
            add_wide(
                d_shared, summed.t(), chunk.trunk, step=max(1, room // (8 * shared * (wide.itemsize + 2)))
            )
        if out.d_bias is not None:
            out.d_bias += summed.sum(0, dtype=wide)
    if out.d_bias is not None:
        out.d_bias = out.d_bias[: vocabulary.V]
    return out


class TorchScores:
    """A chunk with torch alone, one component after the other; `trunk_kernels.Scores` does the same."""

    def __init__(
        self, vocabulary: TrunkVocabulary, chunk: Chunk, scores: Tensor, d_private: Tensor | None
    ) -> None:
        self.vocabulary, self.chunk, self.d_private = vocabulary, chunk, d_private
        self.scores = scores.to(vocabulary.wide)
        if vocabulary.bias is not None:
            self.scores += vocabulary.bias

    def component(self, k: int) -> Tensor:
        """s_k [T, V]."""
        return self.scores + torch.mm(self.chunk.private[:, k], self.vocabulary.private.t())

    def statistics(self) -> Statistics:
        """[T, K] each."""
        y = self.chunk.targets[:, None]
        parts = []
        for k in range(self.chunk.private.shape[1]):
            s = self.component(k)
            maximum, target = s.amax(1), s.gather(1, y)[:, 0]
            anchor = torch.where(torch.isneginf(maximum), 0.0, maximum)
            others = s.sub_(anchor[:, None]).exp_().scatter_(1, y, 0.0).sum(1)
            parts.append(Statistics(maximum, others, target))
        return Statistics(*(torch.stack(column, 1) for column in zip(*parts, strict=True)))

    def gradients(self, lse: Tensor, entry: Tensor, factor: Tensor, *, d_weight: Tensor | None) -> Tensor:
        """Fills d_private, adds to d_weight [V, r], returns the gradient of the trunk's scores."""
        y, vocabulary = self.chunk.targets[:, None], self.vocabulary
        summed = torch.zeros_like(self.scores)
        for k in range(self.chunk.private.shape[1]):
            own = self.chunk.private[:, k]
            s = self.component(k).sub_(lse[:, k, None]).exp_().scatter_(1, y, entry[:, k, None])
            q, g = s.to(own.dtype), factor[:, k].contiguous()
            if self.d_private is not None:
                part = torch.mm(q, vocabulary.private)
                self.d_private[:, k] = scale_rows(part, g, out=part)
            if d_weight is not None:
                scaled = scale_rows(own, g, out=torch.empty_like(own, memory_format=torch.contiguous_format))
                add_wide(d_weight, q.t(), scaled, step=vocabulary.V)
            summed.addcmul_(s, g[:, None])
        return summed.to(self.chunk.trunk.dtype)
