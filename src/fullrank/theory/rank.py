"""The rank of a language model's log-probability matrix, over everything that softmax cannot tell apart.

    F(A) = { A + c 1ᵀ : c in R^N }                  logits with the same softmax, row by row
    B = A (I - 1 1ᵀ / V)                            A with every row centred
    min over F(A) of rank = rank B,   rank A' = rank B + [mean of A' over its rows not in col(B)]

A and B are [N, V]: one row a context, one column a token. A softmax over H Wᵀ with H [N, D] and W [V, D]
gives exactly the distributions softmax(A) if and only if D >= rank B. Shift classes are from Yang et al.,
arXiv 1711.03953; the proofs, and what a bias adds, are in docs/theory.md.

A rank counted from rounded numbers is a count of singular values above the rounding. Numbers that were
made in 8 to 53 bits need a floor for that many bits: numpy's default tolerance believes that they were made
in 53, and then reports the rank of the noise, which is full.
"""

from __future__ import annotations

import dataclasses
import math

import numpy
import torch
from torch import Tensor

from fullrank.errors import FullrankError

UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}

# Half-precision products are summed in single precision and rounded once, then log_softmax rounds once more:
# sqrt(2), and a little for rows of uneven size. Single and double products are summed in their own precision,
# so their errors grow like sqrt(D); measured up to D = 8192 they stay below half of what is allowed here, and
# those of the half types below four fifths (results/rounding.json).
ROUNDINGS = {torch.float64: 32.0, torch.float32: 32.0, torch.float16: 1.5, torch.bfloat16: 1.5}

# Beyond any logit that a model computes: where it stands, someone wrote a mask.
MASKED = 1e30


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LeastRank:
    """The least rank over a shift class, with what is needed to judge it."""

    rank: int
    """Singular values above the noise floor: the least width whose softmax gives these distributions."""
    gap_rank: int
    """Where consecutive singular values fall by the largest ratio: a second opinion that hardly depends on
    the floor. Trust the rank where both agree; a spectrum that decays smoothly has no gap to find."""
    gap: float
    """That largest ratio."""
    noise_floor: float
    """The largest singular value that rounding alone is expected to make, in units of singular_values."""
    singular_values: Tensor
    """Of the centred matrix, falling, fp64. Rows and columns larger than twice the median one are scaled
    down to that first, which leaves the rank as it is."""
    ceiling: int
    """No matrix of this shape has more: min(N, V - 1), or min(N - 1, V - 1) beside a free bias. A rank at the
    ceiling says only that there were too few contexts or tokens."""
    source_dtype: torch.dtype
    """The dtype whose rounding the floor allows for."""
    bias: bool
    """Whether a bias over the vocabulary was free as well."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShiftClassRanks:
    """The ranks that occur in F(A): one, or two that differ by one."""

    least: int
    """rank B, taken where the row means lie in col(B), as for B itself."""
    greatest: int
    """rank B + 1, taken by almost every shift; rank B where B has rank N, since then col(B) is everything."""
    own: int
    """The rank of the matrix that came in."""


def least_rank(
    log_probs: Tensor | numpy.ndarray, *, bias: bool = False, source_dtype: torch.dtype | None = None
) -> LeastRank:
    """Least rank over the shift class of log-probabilities or logits [N, V]; both give the same answer.

    With `bias` it is the least rank beside a free bias, min over b of rank(B - 1 bᵀ).

    Hand over the matrix that was rounded, as it was rounded. If it was converted to a wider dtype since, name
    the dtype that made it in `source_dtype` (TF32 products round like float16). If large logits were rounded
    before log_softmax, hand over those logits: their rounding is larger than the log-probabilities show.
    """
    A, source = _matrix(log_probs, source_dtype)
    rows, columns = _level(A)
    singular_values = torch.linalg.svdvals(_centre(A, rows, columns, bias)).cpu()
    N, V = A.shape
    ceiling = min(N - 1 if bias else N, V - 1)
    floor = _noise_floor(rows * A * columns, float(singular_values[0]), source)
    rank = int((singular_values[:ceiling] > floor).sum())
    gap_rank, gap = largest_gap(singular_values[:ceiling], rank, floor)
    return LeastRank(
        rank=rank,
        gap_rank=gap_rank,
        gap=gap,
        noise_floor=floor,
        singular_values=singular_values,
        ceiling=ceiling,
        source_dtype=source,
        bias=bias,
    )


def shift_class_ranks(
    log_probs: Tensor | numpy.ndarray, *, source_dtype: torch.dtype | None = None
) -> ShiftClassRanks:
    """The ranks that occur among the logits of these distributions, and which one this matrix has."""
    least = least_rank(log_probs, source_dtype=source_dtype).rank
    A, source = _matrix(log_probs, source_dtype)
    N = A.shape[0]
    if least == N:
        return ShiftClassRanks(least=least, greatest=least, own=least)
    # A Aᵀ = B Bᵀ + V c cᵀ, so singular values interlace: only the one after the least rank is in question.
    rows, columns = _level(A)
    scaled = rows * A * columns
    singular_values = torch.linalg.svdvals(scaled)
    floor = _noise_floor(scaled, float(singular_values[0]), source)
    own = least + int(singular_values[least] > floor)
    return ShiftClassRanks(least=least, greatest=least + 1, own=own)


def expressible(
    log_probs: Tensor | numpy.ndarray,
    width: int,
    bias: bool = False,
    *,
    source_dtype: torch.dtype | None = None,
) -> bool:
    """Whether softmax(H Wᵀ) of this width, or softmax(H Wᵀ + 1 bᵀ), gives exactly these distributions.

    The test is exact, not off by one: width >= rank B, or rank B - [1 in col(B)] with a bias.
    """
    check_width(width)
    return width >= least_rank(log_probs, bias=bias, source_dtype=source_dtype).rank


def check_width(width: int) -> None:
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise FullrankError(f"width is {width!r}, expected a whole number of at least 1: give a head's width")


def as_matrix(values: Tensor | numpy.ndarray) -> Tensor:
    """A detached float tensor [N, V] in its own dtype, whatever its entries are."""
    if isinstance(values, numpy.ndarray):
        if values.dtype.kind != "f" or values.dtype.itemsize > 8:
            raise FullrankError(
                f"log_probs has dtype {values.dtype}, expected a floating dtype of at most 64 bits: "
                "convert it with .astype(numpy.float64)"
            )
        values = torch.tensor(values)
    if not isinstance(values, Tensor):
        raise FullrankError(
            f"log_probs is a {type(values).__name__}, expected a torch tensor or a numpy array [N, V]: "
            "convert it"
        )
    if values.dtype not in UNIT_ROUNDOFF:
        raise FullrankError(
            f"log_probs has dtype {values.dtype}, expected float64, float32, float16 or bfloat16: hand over "
            "log-probabilities or logits in one of these"
        )
    if values.ndim != 2:
        raise FullrankError(
            f"log_probs has shape {list(values.shape)}, expected [N, V]: flatten the leading dimensions into "
            "one row a context"
        )
    N, V = values.shape
    if N < 1 or V < 2:
        raise FullrankError(
            f"log_probs has shape [{N}, {V}], expected at least one context and two tokens: collect more"
        )
    if values.isnan().any() or values.isposinf().any():
        raise FullrankError(
            f"log_probs [{N}, {V}] holds NaN or +inf, expected numbers: find the context that made them, "
            "often an overflow in half precision, and compute it in float32"
        )
    return values.detach()


def _matrix(values: Tensor | numpy.ndarray, source_dtype: torch.dtype | None) -> tuple[Tensor, torch.dtype]:
    tensor = as_matrix(values)
    source = tensor.dtype if source_dtype is None else source_dtype
    if source not in UNIT_ROUNDOFF:
        raise FullrankError(
            f"source_dtype is {source}, expected float64, float32, float16 or bfloat16: name the one with "
            "the nearest number of bits"
        )
    if UNIT_ROUNDOFF[source] < UNIT_ROUNDOFF[tensor.dtype]:
        raise FullrankError(
            f"source_dtype is {source} but log_probs came in {tensor.dtype}, which is coarser: leave "
            "source_dtype out, or hand over the numbers before they were rounded"
        )
    A = tensor.double()
    masked = int((A.abs() > MASKED).sum())
    if masked:
        raise FullrankError(
            f"log_probs [{A.shape[0]}, {A.shape[1]}] holds {masked} zero probabilities (-inf or a mask), "
            "expected finite numbers because no finite logits make a zero: drop those tokens or smooth the "
            "distributions"
        )
    return A, source


def _level(A: Tensor) -> tuple[Tensor, Tensor]:
    """Factors [N, 1] and [1, V] that bring large rows and columns down to twice the median size.

    Rounding noise is as large as the numbers that were rounded. A row with a large offset, which centring
    removes while its noise stays, would count as a dimension of its own; a masked token would raise the floor
    for all the others. Scaling keeps the rank and makes the noise even, and ordinary matrices need none.
    """
    rows = turned_down(A.square().mean(dim=1, keepdim=True).sqrt())
    columns = turned_down((A * rows).square().mean(dim=0, keepdim=True).sqrt())
    return rows, columns


def turned_down(size: Tensor) -> Tensor:
    """Factors that bring sizes above twice the median one down to that."""
    heard = size[size > 0]
    if heard.numel() == 0:
        return torch.ones_like(size)
    return (2.0 * heard.median() / size).clamp(max=1.0)


def _centre(A: Tensor, rows: Tensor, columns: Tensor, bias: bool) -> Tensor:
    """Scale A and take away what shifts, and a bias, are free to choose.

    A shift c 1ᵀ becomes (rows c) columns after scaling, so centring becomes a projection off `columns`, which
    is subtraction of a weighted mean; likewise a bias and `rows`. Each is done twice, because the rounding of
    a large mean leaves a residue of rank one that the second pass removes.
    """
    for _ in range(2):
        A = A - A.mean(dim=1, keepdim=True)
    A = rows * A * columns
    across, down = columns / columns.norm(), rows / rows.norm()
    for _ in range(2):
        A = A - (A @ across.T) * across
        if bias:
            A = A - down * (down.T @ A)
    return A


def _noise_floor(scaled: Tensor, largest: float, source: torch.dtype) -> float:
    """The spectral norm of rounding noise: storage and products in the source dtype, then our own SVD.

    Rounding to nearest errs by at most u |a|, evenly, so its deviation is at most u |a| / sqrt(3); a matrix
    of independent errors of deviation s has norm near s (sqrt(N) + sqrt(V)). It is the numbers that were
    stored that count, offset and all, not the centred ones. By Weyl no singular value moves by more.
    """
    N, V = scaled.shape
    spread = math.sqrt(N) + math.sqrt(V)
    # Below the smallest normal number rounding is absolute, no longer relative.
    size = max(float(scaled.square().mean().sqrt()), torch.finfo(source).tiny)
    made = ROUNDINGS[source] * UNIT_ROUNDOFF[source] * size / math.sqrt(3.0) * spread
    # The backward error of the SVD was 2 to 11 times u times the largest value for N and V up to 1100.
    return made + UNIT_ROUNDOFF[torch.float64] * largest * spread


def largest_gap(singular_values: Tensor, rank: int, floor: float) -> tuple[int, float]:
    """The place of the largest ratio among values above the floor, which follows the last of them all.

    Ratios further down compare noise with noise: meaningless, and enormous where a value is zero.
    """
    if rank == 0:
        return 0, 1.0
    following = torch.cat([singular_values[1:], torch.tensor([floor], dtype=torch.float64)])[:rank]
    # An exact zero after the last value would make every other gap vanish beside an infinite one.
    smallest = UNIT_ROUNDOFF[torch.float64] * float(singular_values[0])
    ratios = singular_values[:rank] / following.clamp(min=smallest)
    place = int(ratios.argmax())
    return place + 1, float(ratios[place])
