"""Question 5: what rank does it need? Held-out loss against the rank of the output matrix.

Two curves over the rank r, on states that stay as they are:

    truncated   W Π_r, the nearest matrix of rank r in the metric of the states: it minimises E |(W' - W) h|².
                With C = E h hᵀ and the r leading right singular vectors E_r of W C^{1/2},
                Π_r = C^{1/2} E_r E_rᵀ C^{-1/2}; W is centred over the vocabulary, to which softmax is blind.
    refitted    A B with A [V, r] and B [r, D], both fitted from the truncation until the learning curve is
                flat (`fit.loop`). Its r = D is the control for the fitting: what the text itself teaches any
                matrix is in both.

The need is where a curve comes within `tolerance` of its own control, read between measured ranks on a log
scale; its interval comes from a bootstrap over text blocks. Two refits of the full rank with different seeds
say how far retraining alone moves a loss, and the tolerance is never below twice that. Where every refit is
within it the need is "at most" the smallest rank, and where none is "at least" the largest below the width.
Fewer than four tokens a direction of the states are too few: the covariance is then mostly noise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fullrank.diagnose.questions.spectrum import centred_gram, gram_matrix
from fullrank.errors import FullrankError
from fullrank.fit import comparison, estimates, training
from fullrank.fit.controls import plain_layer
from fullrank.fit.setting import Setting, layer_of
from fullrank.fit.states import Part, Parts
from fullrank.heads import Head
from fullrank.models.output_layer import OutputLayer
from fullrank.results.diagnosis import Estimate, RankNeeded, RankPoint

TOLERANCE = 0.02
"""Nats per token, about 2% of perplexity."""
REPLICATES = 1000
PER_DIRECTION = 4
"""Tokens to fit on that every direction of the states must have."""
REFIT_TOKENS = 4096
"""Tokens to fit on, where the width does not want more."""
MORE = 2
"""Further ranks that are refitted below the first ones, where all of these are within the tolerance."""
SHRINK = 0.1
"""How much of D / N the states' covariance is drawn to a multiple of the identity."""
CUTTING = 0.2
"""Share of the time that the truncated curve takes."""


def rank_needed(
    plain: Head,
    parts: Parts,
    *,
    settings: comparison.Settings,
    ranks: Sequence[int] = (),
    tolerance: float = TOLERANCE,
    progress: Callable[[str, float], None] = lambda label, share: None,
) -> RankNeeded:
    """Both curves. `ranks` default to a grid over the width; D belongs to them in any case."""
    D, output = plain.width, layer_of(plain)
    ranks = sorted({*(ranks or default_ranks(D)), D})
    if ranks[0] < 1 or ranks[-1] > D:
        raise FullrankError(f"ranks {ranks[0]} to {ranks[-1]} were asked for, expected 1 to the width {D}")
    if len(parts.fit) < PER_DIRECTION * D:
        raise FullrankError(
            f"{len(parts.fit):,} tokens to fit on are too few for states of width {D}: give text for "
            f"{PER_DIRECTION * D * 7 // 4:,} --tokens or more"
        )
    # What is left of a refit's cost is in its tokens: as many as the width wants, and no more.
    tokens = max(REFIT_TOKENS, PER_DIRECTION * D)
    parts = dataclasses.replace(
        parts, fit=_first(parts.fit, tokens), choose=_first(parts.choose, tokens // 4)
    )
    hidden, targets = parts.held_out.states[0].flatten(0, 1), parts.held_out.targets.flatten()
    blocks, limit = parts.held_out.blocks.flatten(), settings.memory // 4
    original = output.losses(hidden, targets, limit)
    factors = truncation(output, parts.fit.states[0].flatten(0, 1), min(0.5, SHRINK * D / len(parts.fit)))
    truncated: dict[int, Tensor] = {}
    for place, rank in enumerate(ranks):
        progress(f"rank {rank}", CUTTING * place / len(ranks))
        layer, down = narrowed(output, factors, rank)
        truncated[rank] = original if rank == D else layer.losses(hidden @ down, targets, limit)
    # Truncations change little by little, so that what lies between two of them can be read.
    cut_knee, _ = knee(truncated, blocks, tolerance, seed=settings.seed, between=True)
    waiting = ranks_to_refit(ranks, cut_knee.value)
    refitted: dict[int, training.Fitted] = {}
    planned, more = len(waiting) + 1, MORE

    def refit(setting: Setting, seed: int = 0, rate: float | None = None) -> training.Fitted:
        done, rank = len(refitted), setting.plain.width

        def report(share: float) -> None:
            progress(f"refit of rank {rank}", CUTTING + (1 - CUTTING) * min(1.0, (done + share) / planned))

        plan = comparison.plan_for(setting, setting.plain, settings)
        if rate is not None:
            plan = dataclasses.replace(plan, rates=(rate,))
        return training.train(setting, setting.plain, plan, seed=settings.seed + seed, progress=report)[0]

    # Rows are drawn from the truncated head: the original proposes other tokens.
    full = comparison.setting_for([plain], plain, parts, settings)
    while waiting:
        rank = waiting.pop()
        narrow = full
        if rank < D:
            head = narrow_head(plain, factors, rank)
            narrow = comparison.setting_for([head], head, parts, settings)
        refitted[rank] = refit(narrow)
        lower = [one for one in ranks if one < rank]
        within = float((refitted[rank].losses - refitted[D].losses).double().mean()) <= tolerance
        if not waiting and within and lower and more:
            waiting.append(lower[-1])
            planned, more = planned + 1, more - 1
    again = refit(full, 1, refitted[D].rate)
    noise = abs(float((again.losses - refitted[D].losses).double().mean()))
    tolerance = max(tolerance, 2 * noise)
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
    need, bound = knee(curve, blocks, tolerance, seed=settings.seed)
    slope = _slope(curve, blocks, D)
    return RankNeeded(
        points=points,
        original=estimates.mean(original, blocks),
        tolerance=tolerance,
        knee=need,
        truncated_knee=cut_knee,
        still_falling=bound == "at least",
        slope=slope,
        noise=noise,
        bound=bound,
        converged=all(one.converged for one in refitted.values()),
    )


def _first(part: Part, tokens: int) -> Part:
    """Whole windows with so many tokens, or all there are."""
    return part.windows(slice(0, max(1, -(-tokens // part.targets.shape[1]))))


def default_ranks(width: int) -> list[int]:
    """Where the truncated curve is looked at."""
    shares = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8)
    return sorted({max(1, round(width * share)) for share in shares})


def ranks_to_refit(ranks: Sequence[int], truncated_knee: float) -> list[int]:
    """Rising: the first rank at or above the truncated knee and the two below, since a refit moves it down,
    if at all; half the width, for the last doubling; and the width."""
    place = next((place for place, rank in enumerate(ranks) if rank >= truncated_knee), len(ranks) - 1)
    half = min(ranks, key=lambda rank: abs(rank - ranks[-1] / 2))
    return sorted({*ranks[max(0, place - 2) : place + 1], half, ranks[-1]})


def truncation(output: OutputLayer, hidden: Tensor, shrink: float = 0.0) -> tuple[Tensor, Tensor]:
    """[D, D] and [D, D] in fp64 whose first r columns and rows multiply to Π_r. `shrink` draws the states'
    covariance to a multiple of the identity."""
    values, vectors = torch.linalg.eigh(gram_matrix(hidden) / len(hidden))
    # Small variances are estimated too small, and by much where tokens are few: drawn a little to the mean.
    values = (1 - shrink) * values + shrink * values.mean()
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


def narrow_head(plain: Head, factors: tuple[Tensor, Tensor], rank: int) -> Head:
    """W Π_r as a softmax over rows of r entries."""
    layer, down = narrowed(layer_of(plain), factors, rank)
    head = plain_layer(layer, hidden=plain.width)
    with torch.no_grad():
        head.get_parameter(head.row_map).copy_(down.T)
    return head


def _beside(losses: Tensor, control: Tensor, blocks: Tensor) -> Estimate:
    """The mean loss with the interval of its difference to the control: what both share says nothing."""
    excess = estimates.mean(losses - control, blocks)
    level = float(control.double().mean())
    return Estimate(value=level + excess.value, low=level + excess.low, high=level + excess.high)


def knee(
    curve: dict[int, Tensor], blocks: Tensor, tolerance: float, *, seed: int = 0, between: bool = False
) -> tuple[Estimate, str]:
    """The rank at which losses [N] by rank come within the tolerance of the largest rank's; "at most" where
    they are from the smallest rank on, "at least" where they are not below the largest. `between` reads the
    curve between its last two ranks as well."""
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
    level = (sums.sum(dim=1) / sizes.sum()).numpy()
    centre = crossing(ranks, level, tolerance)
    need = Estimate(value=centre, low=float(min(low, centre)), high=float(max(high, centre)))
    if centre <= ranks[0]:
        return need, "at most"
    if len(ranks) > 1 and not between and level[-2] - level[-1] > tolerance:
        # Between the last two ranks nothing was measured.
        return dataclasses.replace(
            need, value=float(ranks[-2]), low=min(need.low, float(ranks[-2]))
        ), "at least"
    return need, ""


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


def _slope(curve: dict[int, Tensor], blocks: Tensor, width: int) -> Estimate:
    """Nats per token that the last doubling of the rank bought; NaN where half the width was not refitted."""
    half = next((rank for rank in curve if 2 * rank in (width - 1, width, width + 1)), None)
    if half is None:
        return estimates.around(math.nan, math.nan, 0)
    return estimates.mean(curve[half] - curve[width], blocks)
