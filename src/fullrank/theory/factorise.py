"""The best softmax of a given width, with free context vectors: min over H, W of mean KL(P || softmax(H Wᵀ)).

    H [N, D], W [V, D];   loss = sum over contexts i of weight_i KL(P_i || softmax(W H_i)), nats per token

No softmax head of width D without a bias gets below the least such loss on these contexts, whatever body
feeds it, because a body only chooses H. A head with a bias is a softmax of width D + 1 whose last context
column is all ones, so its floor lies between those of D + 1 and D.

At D >= rank B the singular value decomposition of the row-centred log-probabilities B gives P itself
(docs/theory.md). Below that the problem is a weighted low-rank approximation: no closed form, many local
minima. We descend with L-BFGS from truncated decompositions and from random vectors of a larger width that
are narrowed one direction at a time, then hop: misplace some token vectors of the best found and descend
again. What comes back is the lowest loss found, an upper bound of the true floor and no certificate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.theory.rank import as_matrix, check_width, least_rank

# Near enough to its minimum to compare one descent with another; only the winner is followed to the end.
DESCENT_STEPS = 300
POLISH_STEPS = 3000
RANDOM_STARTS = 3
START_SCALE = 0.1
# A hop goes on from a place up to this much worse than the best: that is what gets round a barrier.
ACCEPTED = 1.005
# A wider problem has fewer poor minima: solve it roughly, drop its least direction, and so on down. For 512
# contexts of rank 32 at width 8 the median random start then ended 0.0003 nats above the best ever found,
# without it 0.001.
SPARE_WIDTH = 4
NARROWING_STEPS = 60


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Factorisation:
    """Context vectors and token vectors whose softmax is as near to P as was found."""

    H: Tensor
    """[N, width], fp64."""
    W: Tensor
    """[V, width], fp64."""
    loss: float
    """Mean over contexts of KL(P || softmax(H Wᵀ)), nats per token."""
    exact: bool
    """Whether this width reaches P: True at and above the least rank. False where P holds zeros, which no
    finite logits give; the loss may then fall towards zero without arriving."""
    descents: tuple[float, ...]
    """The loss at the end of every start and hop, in order: their spread shows how rugged the problem is.
    Empty where exact."""


def factorise(
    log_probs: Tensor | numpy.ndarray,
    width: int,
    *,
    context_weight: Tensor | None = None,
    hops: int = 24,
    seed: int = 0,
    source_dtype: torch.dtype | None = None,
) -> Factorisation:
    """Factor distributions, given as log-probabilities or logits [N, V], as softmax(H Wᵀ) of this width.

    Exactly where width reaches the least rank, else by the lowest loss found. `context_weight` [N] says how
    often each context occurs; without it all count alike. `-inf` is a zero probability. `hops` trades time
    for a lower loss; `source_dtype` is as in `least_rank`.
    """
    check_width(width)
    tensor = as_matrix(log_probs)
    zeros = bool(tensor.isneginf().any())
    if tensor.isneginf().all(dim=1).any():
        raise FullrankError(
            f"log_probs {list(tensor.shape)} holds a context without any possible token, expected at least "
            "one finite entry a row: drop that context"
        )
    exact = not zeros and width >= least_rank(tensor, source_dtype=source_dtype).rank
    log_probs = torch.log_softmax(tensor.double().cpu(), dim=1)
    weight = _normalised(context_weight, log_probs.shape[0])
    divergence = _Divergence(log_probs, weight)
    # A zero is out of reach; for the start it stands one nat below the least likely token that occurs.
    lowest = float(log_probs[log_probs.isfinite()].min())
    reachable = log_probs.masked_fill(log_probs.isneginf(), lowest - 1.0)

    descents: list[float] = []
    if exact:
        H, W = _truncated(reachable, width)
    else:
        import threadpoolctl

        generator = torch.Generator().manual_seed(seed)
        starts = _starts(reachable, weight, width, generator)
        # Thousands of steps on small vectors: threads cost more than they bring, several times over where
        # they outnumber the idle cores.
        with threadpoolctl.threadpool_limits(1):
            H, W, descents = divergence.search(starts, width, hops, generator)
    # Rounding can put a loss of nothing a hair below zero.
    loss = max(divergence.loss_and_gradient(_flat(H, W), width)[0], 0.0)
    return Factorisation(H=H, W=W, loss=loss, exact=exact, descents=tuple(descents))


def _normalised(context_weight: Tensor | None, N: int) -> Tensor:
    if context_weight is None:
        return torch.full((N,), 1.0 / N, dtype=torch.float64)
    weight = torch.as_tensor(context_weight).detach().double().cpu()
    if weight.shape != (N,) or not bool((weight.isfinite() & (weight > 0)).all()):
        raise FullrankError(
            f"context_weight has shape {list(weight.shape)}, expected [{N}] finite numbers above zero: drop "
            "contexts that never occur"
        )
    return weight / weight.sum()


class _Divergence:
    """The loss as a function of H and W of any width, and the descents on it."""

    def __init__(self, log_probs: Tensor, weight: Tensor) -> None:
        P = log_probs.exp()
        self.shape = log_probs.shape
        self.weight = weight[:, None]
        self.joint = P * self.weight
        self.negative_entropy = float(torch.where(P > 0, self.joint * log_probs, 0.0).sum())

    def loss_and_gradient(self, point: numpy.ndarray, width: int) -> tuple[float, numpy.ndarray]:
        """At H and W laid out as one vector; the gradient of the scores is softmax minus P, weighted."""
        H, W = self._split(point, width)
        scores = H @ W.T
        scores -= scores.amax(dim=1, keepdim=True)
        agreement = float(torch.dot(self.joint.view(-1), scores.view(-1)))
        # One exponential serves the loss and the gradient: it is most of the time.
        odds = scores.exp_()
        total = odds.sum(dim=1, keepdim=True)
        loss = self.negative_entropy - agreement + float((self.weight * total.log()).sum())
        slope = odds.mul_(self.weight / total).sub_(self.joint)
        return loss, _flat(slope @ W, slope.T @ H)

    def descend(
        self, H: Tensor, W: Tensor, steps: int, tolerance: float = 1e-7
    ) -> tuple[Tensor, Tensor, float]:
        """H and W at the end of a descent, balanced, and the loss there.

        It ends after so many steps, or when a step improves the loss by less than `tolerance` of it: a hop
        that fell back into the basin it came from should cost little.
        """
        import scipy.optimize

        width = H.shape[1]
        found = scipy.optimize.minimize(
            self.loss_and_gradient,
            _flat(H, W),
            args=(width,),
            jac=True,
            method="L-BFGS-B",
            options={
                "maxiter": steps,
                "maxfun": 10 * steps,
                "maxcor": 20,
                "ftol": tolerance,
                "gtol": 1e-10,
            },
        )
        return *_balanced(*self._split(found.x, width)), float(found.fun)

    def narrow(self, H: Tensor, W: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Drop the least direction, after a short descent each time, until the width is reached."""
        while H.shape[1] > width:
            H, W, _ = self.descend(H, W, NARROWING_STEPS)
            H, W = H[:, :-1], W[:, :-1]
        return H, W

    def search(
        self,
        starts: Iterator[tuple[Tensor, Tensor]],
        width: int,
        hops: int,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor, list[float]]:
        """The best H and W from all starts and hops, followed to the end, and the loss of each of them."""
        descents: list[float] = []
        least = float("inf")
        for start in starts:
            found = self.descend(*self.narrow(*start, width), DESCENT_STEPS)
            descents.append(found[2])
            if found[2] < least:
                H, W, least = found
        here = H, W
        for hop in range(hops):
            moved = _misplaced(here[1], flip=bool(hop % 2), generator=generator)
            found = self.descend(here[0], moved, DESCENT_STEPS)
            descents.append(found[2])
            if found[2] < least:
                H, W, least = found
            if found[2] < ACCEPTED * least:
                here = found[:2]
        H, W, _ = self.descend(H, W, POLISH_STEPS, tolerance=1e-13)
        return H, W, descents

    def _split(self, point: numpy.ndarray, width: int) -> tuple[Tensor, Tensor]:
        N, V = self.shape
        vector = torch.from_numpy(point)
        return vector[: N * width].view(N, width), vector[N * width :].view(V, width)


def _flat(H: Tensor, W: Tensor) -> numpy.ndarray:
    return torch.cat([H.reshape(-1), W.reshape(-1)]).numpy()


def _starts(
    log_probs: Tensor, weight: Tensor, width: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    yield _truncated(log_probs, width)
    yield _fisher_truncated(log_probs, weight, width)
    for _ in range(RANDOM_STARTS):
        yield _gaussians(log_probs.shape, width + SPARE_WIDTH, generator)


def _gaussians(shape: torch.Size, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    H, W = (torch.randn(rows, width, generator=generator, dtype=torch.float64) for rows in shape)
    return START_SCALE * H, START_SCALE * W


def _truncated(log_probs: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The nearest centred matrix of this rank in the plain metric; P itself where the rank suffices."""
    centred = log_probs - log_probs.mean(dim=1, keepdim=True)
    return _top(centred, width)


def _fisher_truncated(log_probs: Tensor, weight: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The same where an error counts as KL counts it: by context weight and token probability.

    KL(P_i || Q_i) is half the variance under P_i of the error of the logits, to second order; with one
    average distribution for all contexts the metric is a product and the truncation stays in closed form.
    """
    average = weight @ log_probs.exp()
    # A token of no probability has no say, but its vector must be found by division.
    token = average.clamp(min=1e-6 / average.numel()).sqrt()
    context = weight.sqrt()[:, None]
    centred = log_probs - (log_probs @ average)[:, None]
    H, W = _top(context * centred * token, width)
    return H / context, W / token[:, None]


def _top(matrix: Tensor, width: int) -> tuple[Tensor, Tensor]:
    left, singular_values, right = torch.linalg.svd(matrix, full_matrices=False)
    root = singular_values[:width].sqrt()
    missing = max(width - root.numel(), 0)
    H, W = left[:, :width] * root, right[:width].T * root
    return torch.nn.functional.pad(H, (0, missing)), torch.nn.functional.pad(W, (0, missing))


def _balanced(H: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    """The same product with orthogonal columns that share their size: no direction is hidden by its scale."""
    left, left_core = torch.linalg.qr(H)
    right, right_core = torch.linalg.qr(W)
    core_left, core_right = _top(left_core @ right_core.T, H.shape[1])
    return left @ core_left, right @ core_right


def _misplaced(W: Tensor, *, flip: bool, generator: torch.Generator) -> Tensor:
    """W with a tenth to six tenths of its tokens drawn anew, or turned to the opposite side.

    For fixed W the best H is a convex problem, and for fixed H the best W: a poor minimum is one where tokens
    hold each other in the wrong place. Moving a part of them keeps what the rest has found, and leaves basins
    to which noise on all vectors only returns.
    """
    share = 0.1 + 0.5 * torch.rand((), generator=generator)
    moved = torch.rand(W.shape[0], 1, generator=generator) < share
    drawn = torch.randn(W.shape, generator=generator, dtype=torch.float64) * W.square().mean(dim=0).sqrt()
    return torch.where(moved, -W if flip else drawn, W)
