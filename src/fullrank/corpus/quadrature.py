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
agree on it up to a bracket that is exact (Krein & Nudelman 1977): its ends are those of the rules with m + 1
nodes, of which one can be chosen. The integral of min(λ, μ) is largest where μ is a node, and so a rule says
the upper end at all of its nodes; the lower end is near the least of several rules. So the error of a figure
is the bracket, which more steps shrink, plus Student's interval over the probes, which more probes shrink.

Eigenvectors that are known are taken out first: their eigenvalues are summed as they are, and Lanczos has a
shorter spectrum to resolve.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.linalg
import scipy.special
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CONFIDENCE = 0.999
LEVELS = 2000
"""Values of μ that are looked at."""
RULES = 48
"""That a bracket is the least and the largest of."""
SLACK = 0.05
"""Of a bracket, added at both ends: what lies between the rules, half a percent on average."""
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
        self._alpha, self._beta, self._square = alpha, beta, square
        nodes, first, self._last = _rule(alpha, beta[:-1])
        self.rule = np.maximum(nodes, 0.0), square * first
        """Nodes and weights of Gauss's rule."""
        self.exhausted = bool(beta[-1] == 0.0)
        """Whether the rule is the measure."""

    def ends(self, levels: Floats) -> tuple[Floats, Floats]:
        """The least and the largest ∫ min(λ, μ) dF over F on λ >= 0 with the same moments, at levels μ."""
        nodes = self.rule[0]
        least = most = _integrals(*self.rule, levels)
        if self.exhausted:
            return least, most
        top = nodes[-1]
        beyond = 2 * top - nodes[0] + self._beta[-1]
        wanted = np.geomspace(max(0.1 * nodes[0], 1e-7 * top), beyond, RULES)
        places, largest = [np.zeros(1), nodes], [np.zeros(1), _integrals(*self.rule, nodes)]
        for x in (0.0, *wanted):
            if np.abs(x - nodes).min() <= 1e-14 * beyond:
                continue
            points, weights = self._with(float(x))
            found = _integrals(points, weights, levels)
            # Below the first node, only what has no eigenvalue below zero counts.
            counts = (levels >= nodes[0]) | (points[0] >= -1e-12 * top)
            least, most = np.where(counts, np.minimum(least, found), least), np.maximum(most, found)
            above = points[points > 0]
            places.append(above)
            largest.append(_integrals(points, weights, above))
        joined, values = np.concatenate(places), np.concatenate(largest)
        order = np.argsort(joined)
        most = np.maximum(most, np.interp(levels, joined[order], values[order]))
        slack = SLACK * (most - least)
        # No larger than the whole, nor than its mean allows.
        whole = self._square * np.minimum(levels, self._alpha[0])
        return np.maximum(least - slack, 0.0), np.minimum(most + slack, whole)

    def _with(self, x: float) -> tuple[Floats, Floats]:
        """Nodes and weights of the rule that has x among its nodes."""
        extra = x - self._beta[-1] ** 2 * float((self._last / (x - self.rule[0])).sum())
        points, weights, _ = _rule(np.append(self._alpha, extra), self._beta)
        return points, self._square * weights


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
            *(float(one.rule[0][-1]) for one in self.measures),
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
        self.under, self.over = np.zeros(LEVELS), np.zeros(LEVELS)
        """How far M can lie under and over, by the brackets."""

    def bracket(self, probes: int | None = None) -> None:
        """Count brackets in the limits from here on: the mean of those of all probes, or of a few."""
        asked = self.measures[:probes]
        self.under, self.over = np.zeros(LEVELS), np.zeros(LEVELS)
        for one in asked:
            (least, most), gauss = one.ends(self.levels), _integrals(*one.rule, self.levels)
            self.under += (gauss - least) / len(asked)
            self.over += (most - gauss) / len(asked)

    def decided(self, bound: float) -> int:
        """The place among the levels of the μ at which the dimension of a bound is decided."""
        return int(np.argmax((self.below - bound) / self.levels))

    def dimension(self, bound: float) -> tuple[float, float, float]:
        """The d at which the sum beyond d falls to a bound, as a real number, with its limits."""
        value, low, high = (
            min(max(float(((one - bound) / self.levels).max()), 0.0), float(self._most))
            for one in self._limits()
        )
        return value, low, high

    def beyond(self, dimension: float) -> tuple[float, float, float]:
        """The sum of eigenvalues beyond so many, with its limits."""
        value, low, high = (max(float((one - dimension * self.levels).max()), 0.0) for one in self._limits())
        return value, low, high

    def _limits(self) -> tuple[Floats, Floats, Floats]:
        """M, and what it is no smaller and no larger than."""
        high = np.minimum(self.below + self.chance + self.over, self._most * self.levels)
        return self.below, self.below - self.chance - self.under, np.minimum(high, self._total)

    def _lines(self) -> tuple[Floats, Floats]:
        """Slope and constant (times μ) of the line nearest to min(λ, μ) over the measured spectrum."""
        nodes, weights = (np.concatenate(of) for of in zip(*(one.rule for one in self.measures), strict=True))
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
            nodes, weights = one.rule
            line = self._slope * float(weights @ nodes) + self._constant * self.levels * float(weights.sum())
            rows.append(_integrals(nodes, weights, self.levels) - line)
        return np.array(rows)

    def _of_known(self, levels: Floats) -> Floats:
        sums = np.concatenate([[0.0], np.cumsum(self.known)])
        place = np.searchsorted(self.known, levels, side="right")
        result: Floats = sums[place] + levels * (len(self.known) - place)
        return result


def _integrals(nodes: Floats, weights: Floats, levels: Floats) -> Floats:
    """∫ min(λ, μ) by a rule, at levels μ."""
    zeroth = np.concatenate([[0.0], np.cumsum(weights)])
    first = np.concatenate([[0.0], np.cumsum(weights * nodes)])
    place = np.searchsorted(nodes, levels, side="right")
    result: Floats = first[place] + levels * (zeroth[-1] - zeroth[place])
    return result


def _rule(alpha: Floats, beta: Floats) -> tuple[Floats, Floats, Floats]:
    """Nodes, rising, of the Gauss rule of a tridiagonal matrix, their weights, and what the last vector
    would have for weights."""
    if len(alpha) == 1:
        return alpha.copy(), np.ones(1), np.ones(1)
    nodes, vectors = scipy.linalg.eigh_tridiagonal(alpha, beta, check_finite=False)
    return np.asarray(nodes, dtype=np.float64), np.square(vectors[0]), np.square(vectors[-1])
