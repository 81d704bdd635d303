"""What attention weights can select, as functions. Proofs: docs/attention_theory.md.

A row is one query's weights a_i >= 0 over n visible positions; softmax gives a = softmax(l / T) of scores l.

    entropy            H = -sum a_i log a_i of the weights over their sum; exp H is the effective number
    envelope           exp(-r) / n <= a_i <= exp(r) / n,   r = (max l - min l) / T <= 2 |q| max |k| / T
    sensitivity        the spectral norm of the Jacobian, the largest eigenvalue of diag(a) - a a^T over T,
                       is at most 1 / (2 T), and exactly that for two equal weights and no other

and with values x_i and a set I of N positions, s = sum_I a_i x_i and D_i = |s - a_i x_i|,

    recall             R = #{i in I: D_i < min_{j not in I} D_j} / N, the separable share N_s / N
    precision          P = N / (N + #{j not in I: D_j <= max_{i in I} D_i})
    distance           sum over j not in I of D_j, at most what `Sets.bound` says

(Mudarisov et al. 2025, 2508.17821, and 2026, 2602.01893). Shapes: weights [..., rows, L], values [..., L, D],
what is visible [..., rows, L], True for a position that a query may see, ranks in an order [..., rows, L].
Everything is computed in fp64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from fullrank.errors import FullrankError

HALVINGS = 52
"""Of the bracket around the eigenvalue: it is at most 2^-52 wide then."""


def entropy(weights: Tensor) -> Tensor:
    """The entropy [...] in nats of weights [..., L], as shares of their sum; NaN where all are zero."""
    wide = weights.double()
    shares = wide / wide.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1)


def softmax_range(largest: Tensor, smallest: Tensor, count: Tensor, temperature: float = 1.0) -> Tensor:
    """[..., 2]: the sharp ends of a softmax weight among `count` scores between `smallest` and `largest`."""
    _check_temperature(temperature)
    width = (largest.double() - smallest.double()) / temperature
    others = count.double() - 1
    return torch.stack([1 / (1 + others * width.exp()), 1 / (1 + others * (-width).exp())], dim=-1)


def jacobian_norm(weights: Tensor, temperature: float = 1.0) -> Tensor:
    """The spectral norm [...] of d softmax(l / T) / d l at weights [..., L], exactly.

    With the weights in falling order the largest eigenvalue of diag(a) - a a^T lies in [a_2, a_1] and is the
    one root there of sum a_i^2 / (a_i - x) = 1, whose left side rises. So every halving keeps the root
    inside, and the last bracket, 2^-52 wide, proves the value up to the rounding of the sum. Weights may sum
    to less than 1, as beside a sink.
    """
    _check_temperature(temperature)
    wide = weights.double()
    if bool((wide < 0).any()) or bool((wide.sum(-1) > 1 + 1e-6).any()):
        raise FullrankError("the weights are negative or sum to more than 1: expected those of a softmax")
    # A weight of zero more changes no eigenvalue but one of zero, and gives a single weight its bracket.
    padded = torch.nn.functional.pad(wide, (0, 1))
    top = padded.topk(2, dim=-1).values
    high, low = top[..., 0], top[..., 1]
    tied = high == low
    squares = padded.square()
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        left = (squares / (padded - middle[..., None])).sum(-1)
        above = left > 1
        high, low = torch.where(above, middle, high), torch.where(above, low, middle)
    # Two equal largest weights: e_1 - e_2 is an eigenvector for them, and no eigenvalue is larger.
    return torch.where(tied, top[..., 0], (low + high) / 2) / temperature


def jacobian_frobenius(weights: Tensor, temperature: float = 1.0) -> Tensor:
    """The Frobenius norm [...] of the same matrix: sqrt(sum a^2 - 2 sum a^3 + (sum a^2)^2) / T."""
    _check_temperature(temperature)
    wide = weights.double()
    square = wide.square().sum(-1)
    total = square - 2 * wide.pow(3).sum(-1) + square.square()
    return total.clamp(min=0).sqrt() / temperature


def difference_quotient(
    scores: Tensor, direction: Tensor, *, temperature: float = 1.0, step: float = 1e-3
) -> Tensor:
    """The paper's estimator [...]: |softmax((l + e v) / T) - softmax(l / T)| / e, unit vectors v [..., L].

    Scores of -inf are hidden and stay so, whatever v is there.
    """
    _check_temperature(temperature)
    wide = scores.double()
    moved = torch.softmax((wide + step * direction.double()) / temperature, -1)
    return (moved - torch.softmax(wide / temperature, -1)).norm(dim=-1) / step


def top_ranks(weights: Tensor, visible: Tensor) -> Tensor:
    """The place [..., rows, L] of every position, 0 for the largest weight; hidden positions come last."""
    return _places(weights.double().masked_fill(~visible, -torch.inf))


def random_ranks(visible: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Places in an order of the visible positions that is drawn at random; hidden positions come last."""
    draws = torch.rand(visible.shape, generator=generator, dtype=torch.float64)
    return _places(draws.to(visible.device).masked_fill(~visible, -1.0))


def _places(keys: Tensor) -> Tensor:
    order = keys.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(keys.shape[-1], device=keys.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Separation:
    """How sets stand apart from what else is visible, a number [..., rows, sizes] each."""

    precision: Tensor
    recall: Tensor
    """The separable share N_s / N."""
    f: Tensor
    """Harmonic mean of the two; 0 where the recall is."""
    distance: Tensor
    """The sum of D_j over what is visible and not in the set."""
    mass: Tensor
    """The sum of the set's weights."""


class Sets:
    """Weights and values with what all their sets share. A set of size N holds the first N of an order."""

    def __init__(self, weights: Tensor, values: Tensor, visible: Tensor) -> None:
        if weights.shape != visible.shape or weights.shape[-1] != values.shape[-2]:
            raise FullrankError(
                f"weights {list(weights.shape)}, values {list(values.shape)} and visible positions "
                f"{list(visible.shape)} do not fit: expected [..., rows, L], [..., L, D] and [..., rows, L]"
            )
        self.visible = visible[..., None, :]
        self.weights = weights.double().masked_fill(~visible, 0.0)[..., None, :]
        self.values = values.double()
        self.squares = self.values.square().sum(-1)[..., None, None, :]
        self.least = int(visible.sum(-1).min()) if visible.numel() else 0

    def separation(self, ranks: Tensor, sizes: Sequence[int]) -> Separation:
        """Of the sets of some sizes in the order with these ranks [..., rows, L]."""
        chosen, outside, counts = self._parts(ranks, sizes)
        inside = self.weights * chosen
        # One product for all rows and sizes: the values are read once.
        total = inside.flatten(-3, -2) @ self.values
        products = (total @ self.values.transpose(-1, -2)).unflatten(-2, chosen.shape[-3:-1])
        square = total.square().sum(-1).unflatten(-1, chosen.shape[-3:-1])
        # D_i^2 - |s|^2, which has the order of D_i and none of its cancellation.
        excess = self.weights * (self.weights * self.squares - 2 * products)
        nearest = excess.masked_fill(~outside, torch.inf).amin(-1, keepdim=True)
        farthest = excess.masked_fill(~chosen, -torch.inf).amax(-1, keepdim=True)
        recall = (excess < nearest).logical_and_(chosen).sum(-1) / counts
        precision = counts / (counts + (excess <= farthest).logical_and_(outside).sum(-1))
        lengths = excess.add_(square[..., None]).clamp_(min=0).sqrt_()
        return Separation(
            precision=precision,
            recall=recall,
            f=2 * precision * recall / (precision + recall),
            distance=lengths.mul_(outside).sum(-1),
            mass=inside.sum(-1),
        )

    def bound(self, ranks: Tensor, sizes: Sequence[int]) -> Tensor:
        """What the distance is at most: d1 sum_{j not in I} a_j + d2 sum_{j not in I} |m - a_j|.

        d1 is the largest distance between a value in the set and one outside, d2 the largest norm in the set,
        m its mass. For a set of largest weights every a_j <= m, and with A the sum of all weights the bound
        is d1 (A - m) + d2 ((n - N) m - (A - m)).
        """
        chosen, outside, _ = self._parts(ranks, sizes)
        first = self._farthest(ranks, sizes)
        second = self.squares.masked_fill(~chosen, 0.0).amax(-1).sqrt()
        mass = (self.weights * chosen).sum(-1, keepdim=True)
        rest = (self.weights * outside).sum(-1)
        gaps = ((mass - self.weights).abs() * outside).sum(-1)
        return first * rest + second * gaps

    def _farthest(self, ranks: Tensor, sizes: Sequence[int]) -> Tensor:
        """d1 [..., rows, sizes]: with positions in order, the largest of pairs[:N, N:] for each size N."""
        length, most = ranks.shape[-1], max(sizes)
        order = ranks.argsort(-1)
        pairs = torch.cdist(self.values, self.values)[..., None, :, :].expand(*ranks.shape, length)
        pairs = pairs.gather(-2, order[..., :most, None].expand(*order.shape[:-1], most, length))
        pairs = pairs.gather(-1, order[..., None, :].expand_as(pairs))
        seen = self.visible.squeeze(-2).gather(-1, order)[..., None, :]
        pairs = pairs.masked_fill(~seen, 0.0)
        ends = sorted(set(sizes))
        pieces = zip(ends, [*ends[1:], length], strict=True)
        largest = torch.stack([pairs[..., begin:end].amax(-1) for begin, end in pieces], dim=-1)
        beyond = largest.flip(-1).cummax(-1).values.flip(-1)
        found = {end: beyond[..., :end, place].amax(-1) for place, end in enumerate(ends)}
        return torch.stack([found[size] for size in sizes], dim=-1)

    def _parts(self, ranks: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """In the set and outside of it [..., rows, sizes, L], and the sizes [sizes]."""
        if not sizes or min(sizes) < 1 or max(sizes) >= self.least:
            raise FullrankError(
                f"sets of {list(sizes)} were asked for where a query sees {self.least} positions: expected "
                "at least 1 and fewer than are seen, so that something is left outside"
            )
        counts = torch.tensor(sizes, device=ranks.device)
        chosen = ranks[..., None, :] < counts[:, None]
        return chosen, self.visible & ~chosen, counts


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise FullrankError(f"temperature={temperature} is impossible: expected a finite number above 0")
