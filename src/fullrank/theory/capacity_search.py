"""The search behind `capacity`: a state that proves a set of tokens free, found without a linear program.

All states h [r] in standard coordinates that hold the set S level, z_s·h = c for s in S, are combinations of
E = [base / |base|, null]: base the shortest h with level one, null [r, r - m] the null space of Z_S. In those
coordinates S is one point, p = (1/|base|, 0, ..., 0), and S is free if p leads the points E'z_j of the other
rows: the question of `argmax` for one token. As there, p itself is tried first, and then the direction of
widest margin over the rivals that stood in the way so far,

    min |g|²  subject to  (p - E'z_j)·g >= 1       dual:  min_{a >= 0} |Σ_j a_j (p - E'z_j)|² / 2 - Σ_j a_j,

by projected gradient steps with momentum. Each direction is tried on all rows, in single precision, and the
rivals that come near join. What leads in single precision counts only if it leads in fp64, by as much as a
program's optimum must.

A search that ends without a witness proves nothing. For any a, |Σ_j a_j (p - E'z_j)| / Σ_j a_j is no less
than the distance of p from the hull of the rivals: where that is nearly nothing the search gives up.
"""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import torch
from numpy.typing import NDArray

from fullrank.theory.linear_program import TOLERANCE, Array

Indices = NDArray[np.int64]

# Free sets were found within 25 rounds at V = 49152, D = 576, also next to the critical size.
_ROUNDS = 40
_STEPS = 150
# Below this share of |p| the distance from the rivals' hull counts as none.
_NEAR = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """The states that hold a set of m tokens level, in standard coordinates."""

    tokens: Indices
    base: Array
    """The shortest state [r] at which every token of the set scores one."""
    null: Array
    """Orthonormal directions [r, r - m] along which no token of the set changes its score."""
    least: float
    """Smallest singular value of the set's points: a change of e in their scores takes at most e / least."""


def level_states(rows: Array, tokens: Indices) -> Level | None:
    """The states that hold at most r tokens level; None where their points are dependent, to rounding."""
    m = len(tokens)
    directions, triangle = np.linalg.qr(rows[tokens].T, mode="complete")
    singular = np.linalg.svd(triangle[:m], compute_uv=False)
    if singular[-1] <= 1e-12 * singular[0]:
        return None
    base = directions[:, :m] @ np.linalg.solve(triangle[:m].T, np.ones(m))
    return Level(tokens=tokens, base=base, null=directions[:, m:], least=float(singular[-1]))


class WitnessSearch:
    """Looks for states that prove sets free, among points [V, r] in standard coordinates."""

    def __init__(self, rows: Array, deadline: float = math.inf) -> None:
        self.rows = torch.from_numpy(rows)
        self.coarse = self.rows.float()
        self.reach = float(torch.linalg.vector_norm(self.rows, dim=1).max())
        self.deadline = deadline

    def find(self, level: Level) -> Array | None:
        """A state [r] at which the level's tokens score one and all others less; None if none was found."""
        base = torch.from_numpy(level.base)
        size = torch.linalg.vector_norm(base)
        frame = torch.cat([base[:, None] / size, torch.from_numpy(level.null)], dim=1)
        own = torch.zeros(frame.shape[1], dtype=torch.float64)
        own[0] = 1 / size
        tokens = torch.from_numpy(level.tokens)
        V, r = self.rows.shape
        grow = max(32, r // 4)
        direction = own
        active = torch.zeros(0, dtype=torch.int64)
        ahead, dual = torch.zeros(0, len(own), dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        gram = torch.zeros(0, 0, dtype=torch.float64)
        for _ in range(_ROUNDS):
            scores = self.coarse @ (frame @ direction).float()
            scores[tokens] = -math.inf
            height = float(own @ direction)
            if scores.max() < (1 - TOLERANCE) * height:
                state = (frame @ (direction / height)).numpy()
                if self.is_witness(level, state):
                    return state
            if time.monotonic() > self.deadline:
                return None
            scores[active] = -math.inf
            worst = scores.topk(min(grow, V - len(tokens) - len(active)))
            # The rivals known so far are a whole unit behind; who is less than half of one behind joins.
            joining = worst.indices[worst.values > height - 0.5]
            active = torch.cat([active, joining])
            fresh = own - self.rows[joining] @ frame
            ahead = torch.cat([ahead, fresh])
            products = fresh @ ahead.T
            gram = torch.cat([torch.cat([gram, products[:, : len(gram)].T], dim=1), products])
            dual = _widest(gram, torch.cat([dual, torch.zeros(len(joining), dtype=torch.float64)]))
            direction = ahead.T @ dual
            if torch.linalg.vector_norm(direction) <= _NEAR * own[0] * dual.sum():
                return None
            # Rivals without weight leave; they come back if they stand in the way again.
            kept = dual > 0
            active, ahead, dual, gram = active[kept], ahead[kept], dual[kept], gram[kept][:, kept]
        return None

    def is_witness(self, level: Level, state: Array) -> bool:
        """Whether the state proves the level's tokens free, in fp64."""
        scores = self.rows.numpy() @ state
        uneven = np.linalg.norm(scores[level.tokens] - 1)
        scores[level.tokens] = -np.inf
        # A state that is exactly level is this near, and changes another row's score by at most this.
        return bool(scores.max() + self.reach * uneven / level.least < 1 - TOLERANCE)


def _widest(gram: torch.Tensor, dual: torch.Tensor) -> torch.Tensor:
    """Go on from the dual [k] towards that of the widest margin over rivals with products gram [k, k].

    As `linear_program.widest_margin`, but for one set and many steps, where the products pay off.
    """
    vector = torch.ones(len(gram), dtype=gram.dtype)
    for _ in range(10):  # power iteration: the largest curvature sets the step
        vector = gram @ vector
        size = torch.linalg.vector_norm(vector).clamp_min(1e-300)
        vector = vector / size
    rate = 1 / (1.05 * float(size))
    extrapolated, momentum = dual, 1.0
    for _ in range(_STEPS):
        step = torch.addmv(extrapolated + rate, gram, extrapolated, alpha=-rate).clamp_min_(0)
        if torch.dot(extrapolated - step, step - dual) > 0:
            momentum = 1.0  # it points uphill: start anew
        grown = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
        extrapolated = step + (momentum - 1) / grown * (step - dual)
        dual, momentum = step, grown
    return dual
