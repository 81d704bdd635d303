"""Sums over a whole spectrum without computing it: stochastic Lanczos quadrature with a stated error.

For a positive semidefinite G of size n with eigenvalues λ, everything that a curve of relative errors needs
is

    M(μ) = tr min(G, μ) = Σ min(λ_i, μ),   since   Σ_{i > d} λ_i = max_μ (M(μ) - d μ)

(the maximum is at μ = λ_d), and so the smallest d with Σ_{i > d} λ_i <= b is max_μ (M(μ) - b) / μ, rounded
up.

M is the mean of z' min(G, μ) z over vectors z of random signs (Hutchinson 1990). Its variance is twice the
sum of squares off the diagonal of min(G, μ), and most of a table's Gram matrix is on its diagonal. Two
control variates lower it further: tr G and tr 1 are known, so only what a line through min(λ, μ) leaves over
is noise.

Each z' f(G) z = ∫ f dF is read off m steps of Lanczos from z. All measures with the same first 2m moments
agree on it up to a bracket that is exact (Krein & Nudelman 1977): over the rules with m + 1 nodes, one of
them at x between the Gauss nodes around μ, the integral of min(λ, μ) is largest at x = μ and smallest at
another x, which is searched. So the error of a figure is the bracket, which more steps shrink, plus Student's
interval over the probes, which more probes shrink.

Eigenvectors that are known are taken out first: their eigenvalues are summed as they are, and Lanczos has a
shorter spectrum to resolve.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.special
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CONFIDENCE = 0.999
LEVELS = 2000
"""Values of μ that are looked at."""
PLACES = 6
"""Values of x at which a bracket's lower end is sought first, and then around the best of them."""
SLACK = 0.05
"""Of a bracket, added where its lower end was found by search."""
AGAIN = 0.1
"""A vector of which less is left is made orthogonal twice."""
TOLERANCE = 1e-3
"""Of an upper limit: how far above it can be what was not looked at."""
EXHAUSTED = 1e-11
"""A Krylov space ends where the next vector is so much shorter than the operator's norm."""


class Probes:
    """Lanczos from several vectors of random signs at once, which can be continued."""

    def __init__(
        self,
        apply: Callable[[Floats], Floats],
        known: Floats,
        signs: Floats,
        *,
        most: int,
    ) -> None:
        """`known` [n, k] are eigenvectors that are taken out, `signs` [n, probes] the vectors z."""
        size, count = signs.shape
        self._apply, self._known = apply, known
        start = signs - known @ (known.T @ signs)
        self.squares: Floats = np.square(start).sum(axis=0)
        """|z|², [probes]."""
        self._basis = np.empty((count, most + 1, size))
        self._basis[:, 0] = (start / np.sqrt(np.maximum(self.squares, 1e-300))).T
        self._alpha, self._beta = np.zeros((count, most)), np.zeros((count, most))
        self._ends = np.full(count, most)
        self._done = np.zeros(count, dtype=bool)
        self.steps = 0
        self.most = most

    def extend(self, steps: int, progress: Callable[[float], None] = lambda share: None) -> None:
        """Go on to so many steps."""
        for step in range(self.steps, min(steps, self.most)):
            image = self._apply(np.ascontiguousarray(self._basis[:, step].T))
            image -= self._known @ (self._known.T @ image)
            rows = np.ascontiguousarray(image.T)
            for place, row in enumerate(rows):
                before = self._basis[place, : step + 1]
                along = before @ row
                full = float(np.linalg.norm(row))
                row -= along @ before
                length = float(np.linalg.norm(row))
                if length < AGAIN * full:
                    row -= (before @ row) @ before
                    length = float(np.linalg.norm(row))
                self._alpha[place, step], self._beta[place, step] = along[step], length
                scale = float(np.abs(self._alpha[place, : step + 1]).max())
                if self._done[place] or length <= EXHAUSTED * scale:
                    self._ends[place] = min(self._ends[place], step + 1)
                    self._done[place] = True
                    self._basis[place, step + 1] = 0.0
                else:
                    self._basis[place, step + 1] = row / length
            self.steps = step + 1
            progress(self.steps / max(steps, 1))

    def release(self) -> None:
        """Give the memory of the basis back; no more steps can follow."""
        self._basis = np.empty((len(self.squares), 0, 0))
        self.most = self.steps

    def measures(self) -> list[Measure]:
        """Of every probe."""
        result = []
        for place, end in enumerate(self._ends):
            length = min(int(end), self.steps)
            off = self._beta[place, :length].copy()
            if self._done[place]:
                off[-1] = 0.0
            result.append(Measure(self._alpha[place, :length], off, float(self.squares[place])))
        return result


class Measure:
    """What the steps from one vector of squared length `square` know of its measure F.

    `alpha` [m] is the diagonal of the matrix of Lanczos, `beta` [m] its off-diagonal and the next element.
    """

    def __init__(self, alpha: Floats, beta: Floats, square: float = 1.0) -> None:
        self._alpha, self._beta, self.square = alpha, beta, square
        nodes, first, last = _rule(alpha, beta[:-1])
        self.nodes, self.weights, self._last = np.maximum(nodes, 0.0), square * first, last
        self.exhausted = bool(beta[-1] == 0.0)
        """Whether the rule is the measure."""

    def gauss(self, level: float) -> float:
        """∫ min(λ, μ) dF by the rule of the steps."""
        return float(self.weights @ np.minimum(self.nodes, level))

    def most(self, level: float) -> float:
        """The largest ∫ min(λ, μ) dF over F on λ >= 0 with the same moments."""
        gauss = self.gauss(level)
        return gauss if self.exhausted else max(gauss, self._with(level, level))

    def least(self, level: float) -> float:
        """The least of them."""
        gauss = self.gauss(level)
        if self.exhausted:
            return gauss
        nodes = self.nodes
        place = int(np.searchsorted(nodes, level))
        # No eigenvalue is negative.
        low = nodes[place - 1] if place > 0 else 0.0
        high = nodes[place] if place < len(nodes) else max(nodes[-1], level) + self._reach
        # The rule is Gauss's at the ends of the gap, but for 0, which is no node; cosines look closer there.
        places = low + (high - low) * (1 - np.cos(np.pi * (np.arange(PLACES + 2)) / (PLACES + 1))) / 2
        between = [self._with(float(x), level) for x in places[1:-1]]
        values = [self._with(float(low), level) if place == 0 else gauss, *between, gauss]
        best = min(max(int(np.argmin(values)), 1), PLACES)
        found = scipy.optimize.minimize_scalar(
            lambda x: self._with(float(x), level),
            bounds=(places[best - 1], places[best + 1]),
            method="bounded",
            options={"maxiter": PLACES},
        )
        least = min(*values, float(found.fun))
        # The search ends a little above the least.
        return max(least - SLACK * (self.most(level) - least), 0.0)

    @property
    def _reach(self) -> float:
        return float(self.nodes[-1] - self.nodes[0] + self._beta[-1])

    def _with(self, x: float, level: float) -> float:
        """Of the rule that has x among its nodes."""
        if np.abs(x - self.nodes).min() <= 1e-14 * self._reach:
            return self.gauss(level)
        extra = x - self._beta[-1] ** 2 * float((self._last / (x - self.nodes)).sum())
        points, weights, _ = _rule(np.append(self._alpha, extra), self._beta)
        return self.square * float(weights @ np.minimum(points, level))


class Sums:
    """M(μ) of a spectrum: some eigenvalues known, the others by probes."""

    def __init__(self, known: Floats, left_size: int, left_trace: float, probes: list[Probes]) -> None:
        self.known = np.sort(known)
        self.left_size, self.left_trace = left_size, max(left_trace, 0.0)
        self.measures = [measure for some in probes for measure in some.measures()]
        self._total = self.left_trace + float(self.known.sum())
        self._most = self.left_size + len(self.known)
        top = max(
            float(self.known[-1]) if len(self.known) else 0.0,
            *(float(one.nodes[-1]) for one in self.measures),
        )
        mean = self._total / max(self._most, 1)
        self.levels: Floats = np.geomspace(min(1e-7 * mean, 1e-3 * top), 1.001 * top, LEVELS)
        self._slope, self._constant = self._lines()
        samples = self._samples()
        count = len(samples)
        self.below: Floats = self._of_known(self.levels) + samples.mean(axis=0) + self._expected()
        """M at the levels."""
        spread = samples.std(axis=0, ddof=1) / np.sqrt(count) if count > 1 else np.full(LEVELS, np.inf)
        quantile = float(scipy.special.stdtrit(max(count - 1, 1), 0.5 + CONFIDENCE / 2))
        self.chance: Floats = quantile * spread
        """Half of Student's interval, at the levels."""
        self._asked: list[Measure] = []
        self._sure: list[int] = []
        self._unders: dict[int, float] = {}
        self._overs: dict[int, float] = {}

    def bracket(self, levels: list[float], probes: int | None = None) -> None:
        """Count the brackets in the limits from here on, of all probes or a few.

        Lower limits are sought at these levels alone, each of which proves one; upper limits at all.
        """
        self._asked = self.measures[:probes]
        self._unders, self._overs = {}, {}
        self._sure = sorted({self._place(level) for level in levels})

    def decided(self, bound: float) -> tuple[float, float]:
        """The d of `dimension`, without limits, and the μ at which it is decided."""
        found = (self.below - bound) / self.levels
        place = int(np.argmax(found))
        return float(found[place]), float(self.levels[place])

    def width(self, level: float) -> tuple[float, float]:
        """Of the bracket of M at a level, and half of Student's interval there."""
        place = self._place(level)
        return self._under(place) + self._over(place), float(self.chance[place])

    def dimension(self, bound: float) -> tuple[float, float, float]:
        """The d at which the sum beyond d falls to a bound, as a real number, with its limits."""
        found = self._limits(lambda one, level: (one - bound) / level)
        value, low, high = (min(max(one, 0.0), float(self._most)) for one in found)
        return value, low, high

    def beyond(self, dimension: float) -> tuple[float, float, float]:
        """The sum of eigenvalues beyond so many, with its limits."""
        found = self._limits(lambda one, level: one - dimension * level)
        value, low, high = (max(one, 0.0) for one in found)
        return value, low, high

    def _limits(self, figure: Callable[[Any, Any], Any]) -> tuple[float, float, float]:
        """Of the largest over μ of a figure of M(μ) and μ, which rises with M."""
        value = float(figure(self.below, self.levels).max())
        if not self._asked:
            ends = (figure(self.below + sign * self.chance, self.levels).max() for sign in (-1, 1))
            low, high = (float(end) for end in ends)
            return value, low, high
        low = max(figure(self._lower(place), float(self.levels[place])) for place in self._sure)
        return value, float(low), self._highest(figure)

    def _highest(self, figure: Callable[[Any, Any], Any]) -> float:
        """The largest of a figure over all levels when M is as large as it can be.

        M is concave and rises from 0: between levels a and b it is below M(b) and below μ M(a) / a, and what
        the figure can be there is known from the two ends. The interval where it can be most is halved.
        """

        def between(a: int, b: int) -> float:
            kink = self.levels[a] * max(self._upper(b) / self._upper(a), 1.0)
            return float(figure(self._upper(b), min(kink, self.levels[b])))

        def at(place: int) -> float:
            return float(figure(self._upper(place), float(self.levels[place])))

        best = max(at(0), at(LEVELS - 1))
        left = [(-between(0, LEVELS - 1), 0, LEVELS - 1)]
        while left and -left[0][0] > best + TOLERANCE * abs(best):
            _, a, b = heapq.heappop(left)
            if b - a == 1:
                continue
            middle = (a + b) // 2
            best = max(best, at(middle))
            for one, other in ((a, middle), (middle, b)):
                heapq.heappush(left, (-between(one, other), one, other))
        return max(best, -left[0][0]) if left else best

    def _place(self, level: float) -> int:
        return min(int(np.searchsorted(self.levels, level)), LEVELS - 1)

    def _upper(self, place: int) -> float:
        """M at a level is no larger."""
        level = float(self.levels[place])
        found = float(self.below[place] + self.chance[place]) + self._over(place)
        return max(min(found, self._total, self._most * level), 1e-300)

    def _lower(self, place: int) -> float:
        return float(self.below[place] - self.chance[place]) - self._under(place)

    def _over(self, place: int) -> float:
        """How far the mean over the probes can lie over the value of their rules."""
        if place not in self._overs:
            level = float(self.levels[place])
            over = (one.most(level) - one.gauss(level) for one in self._asked)
            self._overs[place] = sum(over) / len(self._asked)
        return self._overs[place]

    def _under(self, place: int) -> float:
        """How far it can lie under it."""
        if place not in self._unders:
            level = float(self.levels[place])
            under = (max(one.gauss(level) - one.least(level), 0.0) for one in self._asked)
            self._unders[place] = sum(under) / len(self._asked)
        return self._unders[place]

    def _lines(self) -> tuple[Floats, Floats]:
        """Slope and constant (times μ) of the line nearest to min(λ, μ) over the measured spectrum."""
        nodes, weights = (
            np.concatenate([getattr(one, name) for one in self.measures]) for name in ("nodes", "weights")
        )
        order = np.argsort(nodes)
        nodes, weights = nodes[order], weights[order]
        sums = [np.concatenate([[0.0], np.cumsum(weights * nodes**power)]) for power in range(3)]
        zeroth, first, second = (one[-1] for one in sums)
        place = np.searchsorted(nodes, self.levels, side="right")
        beyond0, beyond1 = zeroth - sums[0][place], first - sums[1][place]
        with_one = sums[1][place] + self.levels * beyond0
        with_node = sums[2][place] + self.levels * beyond1
        determinant = zeroth * second - first**2
        if determinant <= 1e-12 * zeroth * second:
            return np.zeros(LEVELS), with_one / (max(zeroth, 1e-300) * self.levels)
        slope = (zeroth * with_node - first * with_one) / determinant
        constant = (second * with_one - first * with_node) / determinant
        return slope, constant / self.levels

    def _expected(self) -> Floats:
        """The trace of the line, which is known."""
        result: Floats = self._slope * self.left_trace + self._constant * self.levels * self.left_size
        return result

    def _samples(self) -> Floats:
        """z' (min(G, μ) less the line) z, [probes, levels]."""
        rows = []
        for one in self.measures:
            nodes, weights = one.nodes, one.weights
            zeroth = np.concatenate([[0.0], np.cumsum(weights)])
            first = np.concatenate([[0.0], np.cumsum(weights * nodes)])
            place = np.searchsorted(nodes, self.levels, side="right")
            least = first[place] + self.levels * (zeroth[-1] - zeroth[place])
            rows.append(least - self._slope * first[-1] - self._constant * self.levels * zeroth[-1])
        return np.array(rows)

    def _of_known(self, levels: Floats) -> Floats:
        sums = np.concatenate([[0.0], np.cumsum(self.known)])
        place = np.searchsorted(self.known, levels, side="right")
        result: Floats = sums[place] + levels * (len(self.known) - place)
        return result


def _rule(alpha: Floats, beta: Floats) -> tuple[Floats, Floats, Floats]:
    """Nodes, rising, of the Gauss rule of a tridiagonal matrix, their weights, and what the last vector
    would have for weights."""
    if len(alpha) == 1:
        return alpha.copy(), np.ones(1), np.ones(1)
    nodes, vectors = scipy.linalg.eigh_tridiagonal(alpha, beta, check_finite=False)
    return np.asarray(nodes, dtype=np.float64), np.square(vectors[0]), np.square(vectors[-1])
