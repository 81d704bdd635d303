"""The linear-program plumbing of `argmax` and `capacity`: standard coordinates, and one program on HiGHS.

Which token leads is a question about the convex hull of the rows w_j of W [V, D], so it survives every
invertible linear map and every common shift of the rows. `standardise` uses that freedom: it returns
points z_j [V, r] in the affine span of the rows (r its dimension) with mean 0 and covariance 1. Then

    max_j z_j·x  >=  |x| / reach,      reach = max_j |z_j|                     (1)

because values x_j = z_j·x of mean 0 and variance |x|² in [-reach |x|, M] have variance <= reach |x| M
(Bhatia and Davis 2000). So the mean lies inside the hull, no token's region hides at infinity, and
{x : z_j·x <= c for all j} lies in a ball of radius c·reach: a box of that size cuts off nothing.

A bias adds one coordinate. With b_j = w_j·u + const + β_j (least squares) the logits of h are, up to a
shift, those of h + u without a bias plus β_j; so the last coordinate of z_j is β_j / std(β), and its factor
must be positive (a ray with factor 0 is a limit of h going to infinity). If β = 0 the bias only moves h.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from numpy.typing import NDArray

from fullrank.errors import FullrankError

Array = NDArray[np.float64]

# Feasibility tolerance of the solver, on rows whose right-hand side is about one. Decisions are taken
# TOLERANCE away from equality, so the solver's own error does not reach them.
SOLVER_TOLERANCE = 1e-9
TOLERANCE = 1e-7


def as_matrix(weight: torch.Tensor | Array) -> Array:
    """The checked output matrix [V, D] in fp64."""
    matrix = _as_float64(weight)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise FullrankError(
            f"weight has shape {tuple(matrix.shape)}, expected [V, D] with V >= 1 and D >= 1: pass the "
            "output layer's matrix, one row a token"
        )
    _require_finite("weight", matrix)
    return matrix


def as_bias(bias: torch.Tensor | Array, vocabulary: int) -> Array:
    """The checked bias [V] in fp64."""
    vector = _as_float64(bias)
    if vector.shape != (vocabulary,):
        raise FullrankError(
            f"bias has shape {tuple(vector.shape)}, expected [{vocabulary}], one value a row of the weight: "
            "pass the output layer's own bias or None"
        )
    _require_finite("bias", vector)
    return vector


def _as_float64(values: torch.Tensor | Array) -> Array:
    if isinstance(values, torch.Tensor):
        return values.detach().to("cpu", torch.float64).numpy()
    return np.asarray(values, dtype=np.float64)


def _require_finite(name: str, values: Array) -> None:
    bad = values.size - int(np.isfinite(values).sum())
    if bad:
        raise FullrankError(
            f"{name} holds {bad} values that are NaN or infinite, expected finite numbers: drop masked or "
            "padded rows first"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandardPoints:
    """The rows of an output layer in standard coordinates."""

    rows: Array
    """Points z [V, r], or [V, r + 1] where `upward`."""
    mean: Array
    """Mean row of the weight [D]."""
    basis: Array
    """Map [D, r]: z = (w - mean) basis, and h = basis x gives the logits z·x up to a shift."""
    reach: float
    """Largest norm of a point."""
    shift: Array
    """The state u [D] that the bias amounts to; zero without one."""
    strength: float
    """Standard deviation over the tokens of the logits w·u."""
    spread: float
    """Standard deviation of what the bias adds beyond a shift of the state; 0 where it adds nothing."""

    @property
    def upward(self) -> bool:
        """Whether the last coordinate is the bias's, whose factor may not be negative."""
        return self.spread > 0

    def states(self, directions: Array) -> Array:
        """Hidden states [B, D] whose logits with the bias order the tokens as z·x does, for x [B, r(+1)].

        Where `upward`, the last coordinate of x must be positive.
        """
        if not self.upward:
            # The size of x is free: at the size of the logits that the shift takes out, neither drowns.
            size = np.linalg.norm(directions, axis=1, keepdims=True) / max(1.0, self.strength)
            return directions / np.maximum(size, 1e-300) @ self.basis.T - self.shift
        factor = directions[:, -1:] / self.spread
        return directions[:, :-1] @ self.basis.T / factor - self.shift


def standardise(weight: Array, bias: Array | None = None) -> StandardPoints:
    """Standard coordinates of the rows of weight [V, D] and, where it adds a dimension, of the bias [V]."""
    V, D = weight.shape
    mean = weight.mean(axis=0)
    rows, basis = _whiten(torch.from_numpy(weight - mean))
    shift, strength, spread = np.zeros(D), 0.0, 0.0
    if bias is not None:
        centred = bias - bias.mean()
        fit = rows.T @ centred / V
        rest = centred - rows @ fit
        rest -= rest.mean()
        # Below this the rest is the rounding of the fit, not a direction of its own.
        if np.linalg.norm(rest) > 1e-11 * np.linalg.norm(centred):
            spread = float(rest.std())
            rows = np.column_stack([rows, rest / spread])
        shift, strength = basis @ fit, float(np.linalg.norm(fit))
    return StandardPoints(
        rows=rows,
        mean=mean,
        basis=basis,
        reach=float(np.linalg.norm(rows, axis=1).max()),
        shift=shift,
        strength=strength,
        spread=spread,
    )


def _whiten(centred: torch.Tensor) -> tuple[Array, Array]:
    """Points [V, r] of covariance 1 and the map [D, r] that makes them from centred rows [V, D].

    Through the Gram matrix, ten times faster than an SVD. That errs by the squared condition number times a
    rounding: nothing to speak of where the number is below 100, as of trained matrices; below 1e4 a second
    pass over the points removes what the first one left; beyond, an SVD.
    """
    V, D = centred.shape
    if V > 4 * D:
        map_ = torch.eye(D, dtype=torch.float64)
        points, least = centred, 1e-8
        for _ in range(2):
            values, vectors = torch.linalg.eigh(points.T @ points / V)
            if values[0] <= least * values[-1]:
                break
            map_ = map_ @ (vectors / values.sqrt())
            points = centred @ map_
            if values[0] > 1e-4 * values[-1]:
                return points.numpy(), map_.numpy()
            least = 0.5  # the second pass only corrects
    left, singular, right = torch.linalg.svd(centred, full_matrices=False)
    floor = float(singular[0]) * max(V, D) * np.finfo(np.float64).eps if V > 1 else np.inf
    rank = int((singular > floor).sum())
    return (
        left[:, :rank].numpy() * np.sqrt(V),
        (right[:rank].T / singular[:rank]).numpy() * np.sqrt(V),
    )


def equal_rows(weight: Array) -> NDArray[np.int64]:
    """A number for each row [V]: rows that are equal to the last bit, and only they, share one."""
    # Adding zero makes -0.0 and 0.0 the same bytes.
    rows = np.ascontiguousarray(weight + 0.0)
    V, D = rows.shape
    # Integers wrap around but do not round, so equal rows have equal keys; the few rows that share a key are
    # compared byte by byte.
    factors = np.random.default_rng(0).integers(2**63, size=D, dtype=np.uint64) * 2 + 1
    key = np.einsum("vd,d->v", rows.view(np.uint64), factors)
    _, group, counts = np.unique(key, return_inverse=True, return_counts=True)
    suspects = np.flatnonzero(counts[group] > 1)
    opaque = rows[suspects].view(np.dtype((np.void, rows.itemsize * D)))[:, 0]
    group[suspects] = V + np.unique(opaque, return_inverse=True)[1]
    return group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solution:
    """An optimum of a `Program`."""

    value: float
    point: Array
    multipliers: Array
    """One a row, in the order added; not negative up to the solver's tolerance."""


class Program:
    """Maximise cost·x over rows·x <= limits and lower <= x <= upper; rows are added between solves.

    Added rows leave the last basis dual feasible, so HiGHS goes on from it with the dual simplex method.
    """

    def __init__(self, cost: Array, lower: Array, upper: Array) -> None:
        import highspy  # here, because ranks must be measurable where no solver is installed

        self._highs = highspy.Highs()
        self._optimal = highspy.HighsModelStatus.kOptimal
        self._highs.setOptionValue("output_flag", False)
        self._highs.setOptionValue("threads", 1)
        self._highs.setOptionValue("solver", "simplex")
        # The rows are dense: presolve finds nothing to remove and would lose the basis.
        self._highs.setOptionValue("presolve", "off")
        self._highs.setOptionValue("primal_feasibility_tolerance", SOLVER_TOLERANCE)
        self._highs.setOptionValue("dual_feasibility_tolerance", SOLVER_TOLERANCE)
        self._highs.changeObjectiveSense(highspy.ObjSense.kMaximize)
        self._width = len(cost)
        empty = np.zeros(0, dtype=np.int32)
        starts = np.zeros(self._width, dtype=np.int32)
        self._highs.addCols(self._width, cost, lower, upper, 0, starts, empty, np.zeros(0))

    def add(self, rows: Array, limits: Array) -> None:
        count = len(rows)
        starts = np.arange(count, dtype=np.int32) * self._width
        columns = np.tile(np.arange(self._width, dtype=np.int32), count)
        none = np.full(count, -np.inf)
        self._highs.addRows(
            count, none, limits, rows.size, starts, columns, np.ascontiguousarray(rows).ravel()
        )

    def solve(self) -> Solution | None:
        """The optimum, or None where the solver gives up; the caller then leaves its question open."""
        self._highs.run()
        if self._highs.getModelStatus() != self._optimal:
            return None
        solution = self._highs.getSolution()
        return Solution(
            value=float(self._highs.getInfo().objective_function_value),
            point=np.array(solution.col_value),
            multipliers=np.array(solution.row_dual),
        )


def widest_margin(own: torch.Tensor, rivals: torch.Tensor, steps: int = 25) -> torch.Tensor:
    """Directions [B, r] in which own [B, r] leads rivals [B, k, r] by about the widest margin.

    The dual of the hard-margin classifier, min_{a >= 0} |Σ_j a_j (own - rival_j)|² / 2 - Σ_j a_j, batched, by
    projected gradient steps with momentum. It is a search for witnesses, not a proof of anything.
    """
    ahead = own[:, None] - rivals
    transposed = ahead.transpose(1, 2).contiguous()
    vector = torch.ones(*ahead.shape[:2], 1, dtype=ahead.dtype)
    for _ in range(6):  # power iteration: the largest curvature sets the step
        vector = ahead @ (transposed @ vector)
        size = torch.linalg.vector_norm(vector, dim=1, keepdim=True).clamp_min_(1e-30)
        vector /= size
    size = 1.05 * size
    dual = torch.zeros_like(vector)
    extrapolated, momentum = dual, 1.0
    for _ in range(steps):
        step = (extrapolated - (ahead @ (transposed @ extrapolated) - 1) / size).clamp_min_(0)
        grown = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
        extrapolated = step + (momentum - 1) / grown * (step - dual)
        dual, momentum = step, grown
    return (transposed @ dual)[:, :, 0]
