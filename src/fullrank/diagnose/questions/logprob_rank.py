"""Question 4: the rank of the log-probabilities, over everything that softmax cannot tell apart.

The table A [N, V] of log-probabilities has the least rank over its shift class that its row-centred form has
(docs/theory.md). For a linear head A is, up to shifts, H Wᵀ + 1 bᵀ, so nothing of size N x V is needed:

    X = [H, 1]  [N, D + 1],    Y = [W, b] with its columns centred over the vocabulary  [V, D + 1]
    least rank = rank( X Yᵀ ) = rank( X E ),    E an orthonormal basis of the row space of Y.

The second form divides the matrix's own scale out, which leaves the rank as it is and makes noise easy to
judge: E has as many columns as Y has singular values above the noise of its storage format, and X E carries
the rounding of the states alone. `singular_values` are those of X E.

Other heads (a soft cap bends every score) have no such form: their logits are computed for sampled contexts
and columns, and the rank is that of the sample, never more than its size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fullrank.diagnose.questions.spectrum import centred_gram, storage_noise, triangle
from fullrank.errors import FullrankError
from fullrank.models.output_layer import OutputLayer
from fullrank.results.diagnosis import LogprobRank
from fullrank.theory import least_rank
from fullrank.theory.rank import ROUNDINGS, UNIT_ROUNDOFF, largest_gap, turned_down

CONTEXTS, COLUMNS = 1536, 2048
"""Size of the sample for heads that are not linear."""
SLICE = 8192
"""States in fp64 at a time."""


def logprob_rank(
    hidden: Tensor,
    output: OutputLayer,
    *,
    storage: str = "float32",
    states_rank: int | None = None,
    norm: str = "",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> LogprobRank:
    """From states [N, D] that were made in `dtype` (their own, if not given), and the output layer.

    `states_rank` is the dimension that the final norm, of class `norm`, leaves to the states; D if unknown.
    """
    if len(hidden) < 2:
        raise FullrankError(f"{len(hidden)} states were collected, expected 2 or more: use more text")
    if not output.linear:
        return _by_columns(hidden, output, seed)
    most = output.width if states_rank is None else states_rank
    return _by_core(hidden, output, storage, most, norm, dtype or hidden.dtype)


def _by_core(
    hidden: Tensor, output: OutputLayer, storage: str, states_rank: int, norm: str, source: torch.dtype
) -> LogprobRank:
    N = len(hidden)
    V = output.tokens
    basis, values = _row_space(output, storage)
    # A slice at a time: in fp64 a million states would take more than all else.
    squares = sum(float(part.double().square().sum()) for part in hidden.split(SLICE))
    size = math.sqrt(squares / hidden.numel())

    def slices() -> Iterator[Tensor]:
        for part in hidden.split(SLICE):
            states = part.double()
            if output.bias is not None:
                # A bias is one more direction, of the size of a state so that it is judged like one.
                states = torch.cat([states, states.new_full((len(states), 1), size)], dim=1)
            yield states @ basis

    singular = torch.linalg.svdvals(triangle(slices())).cpu()
    rounding = ROUNDINGS[source] * UNIT_ROUNDOFF[source] / math.sqrt(3.0)
    noise = rounding * size * (math.sqrt(N) + math.sqrt(basis.shape[1]))
    most = min(states_rank + (output.bias is not None), V - 1)
    rank = int((singular > noise).sum())
    gap_rank, gap = largest_gap(singular, rank, noise)
    if len(values) > basis.shape[1]:
        # What ends the matrix's own spectrum ends the rank too, if its fall is the steeper one.
        below = max(float(values[basis.shape[1]]), 1e-16 * float(values[0]))
        fall = float(values[basis.shape[1] - 1]) / below if basis.shape[1] else 1.0
        if fall > gap:
            gap_rank, gap = min(basis.shape[1], rank), fall
    return LogprobRank(
        least_rank=rank,
        gap_rank=gap_rank,
        gap=gap,
        noise_floor=noise,
        ceiling=min(most, N),
        ceiling_reason=_reason(output, states_rank, norm, N, most),
        contexts=N,
        columns=V,
        method="core",
        singular_values=tuple(singular.tolist()),
    )


def _row_space(output: OutputLayer, storage: str) -> tuple[Tensor, Tensor]:
    """An orthonormal basis [D (+ 1), r] of the centred matrix's rows, and the singular values it was told by.

    Rows of padding are left out: they are no tokens, and a constant that fills them would pass for a rank.
    Large rows and columns are scaled down first, as in `theory.rank`: it leaves the rank as it is and makes
    rounding even. Columns with a large mean would else pass for dimensions by their rounding.
    """
    matrix = output.weight[: output.tokens]
    rows, columns = _level(matrix)
    noise, _ = storage_noise(matrix, storage, rows, columns)
    if output.bias is not None:
        bias = output.bias[: output.tokens, None]
        spread = float((bias - bias.mean()).double().std()) if len(bias) > 1 else 0.0
        # The bias's column is scaled to the others' size, so that one floor serves them all.
        scale = float(matrix.double().std()) / spread if spread > 0 else 0.0
        matrix = torch.cat([matrix, scale * bias], dim=1)
        columns = torch.cat([columns, columns.median()[None]])
    mean, gram = centred_gram(matrix, rows, columns)
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0).clamp(min=0).sqrt(), vectors.flip(1)
    if float(values[-1]) <= 1e-6 * float(values[0]):
        # The Gram matrix squares the condition number: where that hurts, pay for QR.
        slices = zip(matrix.split(8192), rows[:, None].split(8192), strict=True)
        centred = triangle((part.double() - mean) * factor * columns for part, factor in slices)
        _, values, right = torch.linalg.svd(centred)
        vectors = right.T
    # Our own arithmetic in fp64 sets the least floor.
    floor = max(noise, 1e-14 * float(values[0]) * math.sqrt(len(matrix)))
    spanned = vectors[:, : int((values > floor).sum())] / columns[:, None]
    return torch.linalg.qr(spanned).Q, values.cpu()


def _level(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the rows [V] and of the columns [D], 1 where they are of ordinary size."""
    squares = sum(part.double().square().sum(dim=0) for part in matrix.split(8192))
    columns = turned_down(torch.as_tensor(squares).sqrt())
    rows = torch.cat([(part.double() * columns).norm(dim=1) for part in matrix.split(8192)])
    return turned_down(rows), columns


def _by_columns(hidden: Tensor, output: OutputLayer, seed: int) -> LogprobRank:
    generator = torch.Generator().manual_seed(seed)
    contexts = torch.randperm(len(hidden), generator=generator)[:CONTEXTS]
    columns = torch.randperm(output.tokens, generator=generator)[:COLUMNS]
    logits = output.logits(hidden[contexts.to(hidden.device)], columns.to(hidden.device)).float()
    return of_table(logits, "The head is not linear, so its width sets no ceiling")


def of_table(table: Tensor, why: str) -> LogprobRank:
    """From logits or log-probabilities of sampled contexts and tokens [n, m], in the dtype that made them.

    `why` is a sentence on why the sample is the only ceiling.
    """
    found = least_rank(table)
    return LogprobRank(
        least_rank=found.rank,
        gap_rank=found.gap_rank,
        gap=found.gap,
        noise_floor=found.noise_floor,
        ceiling=found.ceiling,
        ceiling_reason=f"the sample: {table.shape[0]} contexts by {table.shape[1]} tokens. {why}",
        contexts=table.shape[0],
        columns=table.shape[1],
        method="columns",
        singular_values=tuple(found.singular_values.tolist()),
    )


def _reason(output: OutputLayer, states_rank: int, norm: str, contexts: int, most: int) -> str:
    parts = [f"width {output.width}"]
    if states_rank < output.width:
        parts.append(f"less {output.width - states_rank} that {norm or 'the final norm'} takes")
    if output.bias is not None:
        parts.append("plus 1 for the bias")
    reason = ", ".join(parts)
    if output.tokens - 1 < states_rank + (output.bias is not None):
        reason = f"{output.tokens} tokens, less 1 for the shift"
    if contexts < most:
        reason = f"only {contexts} contexts were seen, fewer than {reason} allow: use more text"
    return reason
