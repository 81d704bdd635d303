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

from collections.abc import Callable

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

    def matrices(self) -> list[tuple[Floats, Floats]]:
        """Diagonal [m] and off-diagonal [m] of every probe's matrix, whose last element leads beyond it."""
        result = []
        for place, end in enumerate(self._ends):
            length = min(int(end), self.steps)
            off = self._beta[place, :length].copy()
            if self._done[place]:
                off[-1] = 0.0
            result.append((self._alpha[place, :length], off))
        return result


class Sums:
    """M(μ) of a spectrum: some eigenvalues known, the others by probes."""

    def __init__(self, known: Floats, left_size: int, left_trace: float, probes: list[Probes]) -> None:
        self.known = np.sort(known)
        self.left_size, self.left_trace = left_size, max(left_trace, 0.0)
        self.squares = np.concatenate([some.squares for some in probes])
        self.matrices = [matrix for some in probes for matrix in some.matrices()]
        rules = [_rule(alpha, beta[:-1]) for alpha, beta in self.matrices]
        self._nodes = [np.maximum(nodes, 0.0) for nodes, _ in rules]
        self._weights = [weights * square for (_, weights), square in zip(rules, self.squares, strict=True)]
        top = max(float(self.known[-1]) if len(self.known) else 0.0, *(float(one[-1]) for one in self._nodes))
        mean = (self.left_trace + float(self.known.sum())) / max(self.left_size + len(self.known), 1)
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
        self.under, self.over = np.zeros(LEVELS), np.zeros(LEVELS)
        """How far M can lie under and over, by the brackets."""
        self._sure = np.arange(LEVELS)

    def bracket(self, levels: list[float], probes: int | None = None) -> None:
        """Work out the brackets at some levels, of all probes or a few; between them interpolated."""
        wanted = np.clip(levels, self.levels[0], self.levels[-1])
        self._sure = np.unique(np.minimum(np.searchsorted(self.levels, wanted), LEVELS - 1))
        pairs = np.array([self._bracket(float(self.levels[place]), probes) for place in self._sure])
        # Between two levels the wider bracket of both, as far as it is known.
        before = np.searchsorted(self._sure, np.arange(LEVELS), side="right") - 1
        after = np.searchsorted(self._sure, np.arange(LEVELS), side="left")
        last = len(self._sure) - 1
        ends = np.clip(before, 0, last), np.clip(after, 0, last)
        self.under, self.over = (np.maximum(pairs[ends[0], side], pairs[ends[1], side]) for side in (0, 1))

    def level(self, bound: float) -> float:
        """μ at which the dimension of a bound is decided."""
        return float(self.levels[int(np.argmax((self.below - bound) / self.levels))])

    def dimension(self, bound: float) -> tuple[float, float, float]:
        """The d at which the sum beyond d falls to a bound, as a real number, with its limits."""
        # A single level proves a lower limit, so only those whose bracket was worked out are asked.
        low = np.full(LEVELS, -np.inf)
        low[self._sure] = (self.below - self.chance - self.under)[self._sure]
        high = self.below + self.chance + self.over
        found = [float(((one - bound) / self.levels).max()) for one in (self.below, low, high)]
        most = float(self.left_size + len(self.known))
        value, low_d, high_d = (min(max(one, 0.0), most) for one in found)
        return value, low_d, high_d

    def beyond(self, dimension: float) -> tuple[float, float, float]:
        """The sum of eigenvalues beyond so many, with its limits."""
        low = self.below - self.chance - self.under
        high = self.below + self.chance + self.over
        value, low_s, high_s = (
            max(float((one - dimension * self.levels).max()), 0.0) for one in (self.below, low, high)
        )
        return value, low_s, high_s

    def _lines(self) -> tuple[Floats, Floats]:
        """Slope and constant (times μ) of the line nearest to min(λ, μ) over the measured spectrum."""
        nodes, weights = np.concatenate(self._nodes), np.concatenate(self._weights)
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
        for nodes, weights in zip(self._nodes, self._weights, strict=True):
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

    def _bracket(self, level: float, probes: int | None) -> tuple[float, float]:
        """How far the mean over the probes can lie under and over the Gauss rules' value."""
        under = over = 0.0
        matrices = self.matrices[:probes]
        for place, (alpha, beta) in enumerate(matrices):
            if beta[-1] == 0.0:
                continue
            gauss = float(self._weights[place] @ np.minimum(self._nodes[place], level))
            low, high = bracket(alpha, beta, level)
            under += max(gauss - self.squares[place] * low, 0.0)
            over += max(self.squares[place] * high - gauss, 0.0)
        return under / len(matrices), over / len(matrices)


def bracket(alpha: Floats, beta: Floats, level: float) -> tuple[float, float]:
    """Least and largest ∫ min(λ, μ) dF over F on λ >= 0 with the moments of a Lanczos matrix of m steps.

    `alpha` [m] is its diagonal, `beta` [m] its off-diagonal and the next element of it.
    """
    nodes, vectors = scipy.linalg.eigh_tridiagonal(alpha, beta[:-1], check_finite=False)
    last = np.square(vectors[-1])
    place = int(np.searchsorted(nodes, level))
    reach = nodes[-1] - nodes[0] + beta[-1]
    # No eigenvalue is negative.
    low = nodes[place - 1] if place > 0 else min(0.0, nodes[0])
    high = nodes[place] if place < len(nodes) else max(nodes[-1], level) + reach

    def integral(x: float) -> float:
        """Of the rule that has x among its nodes."""
        if np.abs(x - nodes).min() <= 1e-14 * reach:
            return gauss
        extra = x - beta[-1] ** 2 * float((last / (x - nodes)).sum())
        points, weights = _rule(np.append(alpha, extra), beta)
        return float(weights @ np.minimum(points, level))

    gauss = float(np.square(vectors[0]) @ np.minimum(nodes, level))
    most = max(gauss, integral(level))
    # At the ends of the gap the rule is Gauss's, but for 0, which is no node; cosines put more places there.
    places = low + (high - low) * (1 - np.cos(np.pi * (np.arange(PLACES + 2)) / (PLACES + 1))) / 2
    values = [integral(low) if place == 0 else gauss, *(integral(float(x)) for x in places[1:-1]), gauss]
    best = min(max(int(np.argmin(values)), 1), PLACES)
    found = scipy.optimize.minimize_scalar(
        integral, bounds=(places[best - 1], places[best + 1]), method="bounded", options={"maxiter": PLACES}
    )
    least = min(*values, float(found.fun))
    # The search ends a little above the least.
    return least - SLACK * (most - least), most


def _rule(alpha: Floats, beta: Floats) -> tuple[Floats, Floats]:
    """Nodes, rising, and weights of the Gauss rule of a tridiagonal matrix."""
    if len(alpha) == 1:
        return alpha.copy(), np.ones(1)
    nodes, vectors = scipy.linalg.eigh_tridiagonal(alpha, beta, check_finite=False)
    return np.asarray(nodes, dtype=np.float64), np.square(vectors[0])
