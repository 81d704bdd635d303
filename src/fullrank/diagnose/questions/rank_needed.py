"""Question 5: what rank does it need? Held-out loss against the rank of the output matrix.

Two curves over the rank r, on states that stay as they are:

    truncated   W Π_r, the nearest matrix of rank r in the metric of the states: it minimises E |(W' - W) h|².
                With C = E h hᵀ and the r leading right singular vectors E_r of W C^{1/2},
                Π_r = C^{1/2} E_r E_rᵀ C^{-1/2}; W is centred over the vocabulary, to which softmax is blind.
    refitted    A B with A [V, r] and B = Qᵀ (I + M) [r, D], fitted from the truncation A Qᵀ = W Π_r, where Q
                is orthonormal and M = 0 (`frozen`), with a learning rate chosen for each r. Its r = D is the
                control for the fitting.

The original matrix is the control for the truncation. The need is where a curve comes within `tolerance` of
its own control, read between measured ranks on a log scale; its interval comes from a bootstrap over text
blocks. Godey et al. (2404.07647) fit W = A B from random factors, with 150 million tokens; a fit from the
truncation needs few, and tells ranks below the knee worse from each other than theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fullrank.diagnose.questions.spectrum import centred_gram, gram_matrix
from fullrank.errors import FullrankError
from fullrank.fit import estimates, frozen
from fullrank.heads.contexts import Contexts
from fullrank.models.output_layer import OutputLayer
from fullrank.results.diagnosis import Estimate, RankNeeded, RankPoint

TOLERANCE = 0.02
"""Nats per token, about 2% of perplexity."""
REPLICATES = 1000
REFIT_TOKENS, CHOOSE_TOKENS = 2048, 512
CUTTING = 0.2
"""Share of the time that the truncated curve takes."""


class Narrow(nn.Module):
    """One context Qᵀ (h + M h + m) of r entries."""

    down: Tensor

    def __init__(self, down: Tensor) -> None:
        super().__init__()
        width = len(down)
        self.linear = Contexts(sources=((width, 1),), width=width, as_published=False)
        self.register_buffer("down", down)

    def forward(self, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        contexts, log_prior = self.linear(states)
        return contexts @ self.down, log_prior


def rank_needed(
    setting: frozen.Setting,
    *,
    ranks: Sequence[int] = (),
    refit: Sequence[int] = (),
    rates: Sequence[float] = frozen.RATES,
    epochs: int = frozen.EPOCHS,
    tolerance: float = TOLERANCE,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda label, share: None,
) -> RankNeeded:
    """Both curves. `ranks` default to a grid over the width, `refit` to those around the truncated knee.

    D belongs to both in any case.
    """
    D = setting.output.width
    ranks = sorted({*(ranks or default_ranks(D)), *refit, D})
    if ranks[0] < 1 or ranks[-1] > D:
        raise FullrankError(f"ranks {ranks[0]} to {ranks[-1]} were asked for, expected 1 to the width {D}")
    held_out, blocks = setting.split.held_out, setting.split.held_out.blocks
    original = setting.output.losses(held_out.hidden, held_out.targets, setting.limit)
    factors = truncation(setting.output, setting.split.fit.hidden)
    truncated: dict[int, Tensor] = {}
    for place, rank in enumerate(ranks):
        progress(f"rank {rank}", CUTTING * place / len(ranks))
        output, down = narrowed(setting.output, factors, rank)
        truncated[rank] = (
            original if rank == D else output.losses(held_out.hidden @ down, held_out.targets, setting.limit)
        )
    cut_knee = knee(truncated, blocks, tolerance, seed=seed)
    chosen = sorted({*(refit or ranks_to_refit(ranks, cut_knee.value)), D})
    refitted: dict[int, frozen.Fitted] = {}
    for place, rank in enumerate(chosen):

        def report(share: float, rank: int = rank, place: int = place) -> None:
            progress(f"refit of rank {rank}", CUTTING + (1 - CUTTING) * (place + share) / len(chosen))

        report(0.0)
        output, down = narrowed(setting.output, factors, rank)
        refitted[rank] = _refit(setting, output, down, rates, epochs, seed, report)
    points = tuple(
        RankPoint(
            rank=rank,
            truncated=_beside(truncated[rank], original, blocks),
            refitted=_beside(refitted[rank].losses, refitted[D].losses, blocks) if rank in refitted else None,
            learning_rate=refitted[rank].rate if rank in refitted else None,
        )
        for rank in ranks
    )
    curve = {rank: one.losses for rank, one in refitted.items()}
    need, slope = knee(curve, blocks, tolerance, seed=seed), _slope(curve, blocks)
    return RankNeeded(
        points=points,
        original=estimates.mean(original, blocks),
        tolerance=tolerance,
        knee=need,
        truncated_knee=cut_knee,
        still_falling=len(chosen) > 1 and need.high > chosen[-2] and slope.low > 0,
        slope=slope,
    )


def default_ranks(width: int) -> list[int]:
    """Where the truncated curve is looked at."""
    shares = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 7 / 8)
    return sorted({max(1, round(width * share)) for share in shares})


def ranks_to_refit(ranks: Sequence[int], truncated_knee: float) -> list[int]:
    """The first rank at or above the truncated knee and the three below: a refit moves it down, if at all."""
    place = next((place for place, rank in enumerate(ranks) if rank >= truncated_knee), len(ranks) - 1)
    return list(ranks[max(0, place - 3) : place + 1])


def truncation(output: OutputLayer, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """[D, D] and [D, D] in fp64 whose first r columns and rows multiply to Π_r."""
    values, vectors = torch.linalg.eigh(gram_matrix(hidden) / len(hidden))
    # Directions that no state has are of no weight; a floor keeps their inverse finite.
    root = values.clamp(min=1e-10 * float(values[-1])).sqrt()
    half, inverse = (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
    # A soft cap, unlike softmax, is not blind to a score that all tokens share: there the mean row counts.
    gram = centred_gram(output.weight)[1] if output.linear else gram_matrix(output.weight)
    _, right = torch.linalg.eigh(half @ gram @ half)
    leading = right.flip(1)
    return half @ leading, leading.T @ inverse


def narrowed(output: OutputLayer, factors: tuple[Tensor, Tensor], rank: int) -> tuple[OutputLayer, Tensor]:
    """A [V, r] as an output layer for the states h Q, and Q [D, r], such that A Qᵀ = W Π_r."""
    basis, inverse = factors
    down, triangle = torch.linalg.qr(inverse[:rank].T)
    weight = output.weight @ (basis[:, :rank] @ triangle.T).to(output.weight.dtype)
    narrow = OutputLayer(weight=weight, bias=output.bias, pointwise=output.pointwise, tokens=output.tokens)
    return narrow, down.to(output.weight.dtype)


def _refit(
    setting: frozen.Setting,
    output: OutputLayer,
    down: Tensor,
    rates: Sequence[float],
    epochs: int,
    seed: int,
    progress: Callable[[float], None],
) -> frozen.Fitted:
    """Fit from the truncation. Rows are drawn from the truncated head: the original proposes other tokens."""
    split = frozen.Split(
        fit=setting.split.fit.first(REFIT_TOKENS),
        choose=setting.split.choose.first(CHOOSE_TOKENS),
        held_out=setting.split.held_out,
    )
    narrow = frozen.prepared(output, split, setting.trained_rows, limit=setting.limit, seed=seed, down=down)
    return frozen.fit(narrow, lambda: Narrow(down), rates=rates, epochs=epochs, seed=seed, progress=progress)


def _beside(losses: Tensor, control: Tensor, blocks: Tensor) -> Estimate:
    """The mean loss with the interval of its difference to the control: what both share says nothing."""
    excess = estimates.mean(losses - control, blocks)
    level = float(control.double().mean())
    return Estimate(value=level + excess.value, low=level + excess.low, high=level + excess.high)


def knee(curve: dict[int, Tensor], blocks: Tensor, tolerance: float, *, seed: int = 0) -> Estimate:
    """The rank at which losses [N] by rank come within the tolerance of the largest rank's."""
    ranks = np.array(sorted(curve))
    numbers, place = torch.unique(blocks, return_inverse=True)
    sums = torch.zeros(len(ranks), len(numbers), dtype=torch.float64)
    for row, rank in enumerate(ranks.tolist()):
        sums[row].index_add_(0, place.cpu(), curve[rank].double().cpu())
    sizes = torch.bincount(place.cpu(), minlength=len(numbers)).double()
    generator = np.random.default_rng(seed)
    even = np.full(len(numbers), 1 / len(numbers))
    counts = torch.from_numpy(generator.multinomial(len(numbers), even, size=REPLICATES)).double()
    drawn = ((counts @ sums.T) / (counts @ sizes)[:, None]).numpy()
    found = [crossing(ranks, one, tolerance) for one in drawn]
    low, high = np.quantile(found, (0.025, 0.975))
    centre = crossing(ranks, (sums.sum(dim=1) / sizes.sum()).numpy(), tolerance)
    return Estimate(value=centre, low=float(min(low, centre)), high=float(max(high, centre)))


def crossing(ranks: np.ndarray, losses: np.ndarray, tolerance: float) -> float:
    """The least rank from which on the curve stays within the tolerance of its end, on a log scale."""
    excess = losses - losses[-1]
    above = np.flatnonzero(excess > tolerance)
    if len(above) == 0:
        return float(ranks[0])
    last = above[-1]
    start, stop = math.log(ranks[last]), math.log(ranks[last + 1])
    share = (excess[last] - tolerance) / (excess[last] - excess[last + 1])
    return math.exp(start + share * (stop - start))


def _slope(curve: dict[int, Tensor], blocks: Tensor) -> Estimate:
    """Nats per token that the last doubling of the rank bought, from the last two refits."""
    ranks = sorted(curve)
    if len(ranks) < 2:
        return estimates.around(math.nan, math.nan, 0)
    low, high = ranks[-2:]
    return estimates.mean((curve[low] - curve[high]) / math.log2(high / low), blocks)
