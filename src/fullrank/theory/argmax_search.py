"""The search behind `argmax`: witnesses by matrix products, then a linear program for each token left.

Stage one, the screen, proves most tokens argmaxable by matrix products. `narrow` comes first: most tokens of
a trained matrix lead by so much that a random subspace of 64 dimensions shows it in single precision. Token i
tries to lead from its own point in that subspace; a lead by more than rounding can make up is proof. At
V = 49152, D = 576 that is a ninth of the work of the product W Wᵀ and leaves half a percent of the tokens.
These try again from their own points in all dimensions, against the whole vocabulary, and keep the strongest
rivals of those that fail; a few rounds then try the direction of widest margin over the rivals known so far.
Each of these is a product with the given W and b in fp64, so a success is a proof too.

Stage two solves `argmax`'s program over the known rivals only. A value below one is then already a
certificate, because more rows can only lower it; an optimum that leads the whole vocabulary is a witness;
else the rows it violates join and the dual simplex method goes on. A fresh small program for each token was
20 times faster at V = 50,000, D = 64 than one program that keeps every token's rows.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from fullrank.theory.linear_program import (
    SOLVER_TOLERANCE,
    TOLERANCE,
    Array,
    Program,
    StandardPoints,
    standardise,
    widest_margin,
)

# A lead counts from this share of the logits' possible size on; see `argmax`.
MARGIN = 1e-9
Indices = NDArray[np.int64]
Progress = Callable[[str, int, int], None]

# Scores held at once, in entries of fp64: 256 MiB.
_BLOCK_ENTRIES = 2**25
# A screen's round that decides less than this share of what is left makes way for the programs.
_ROUND_WORTH = 0.2
_ROUNDS = 4
# Dimensions of the subspace in which `narrow` looks: twice as many cost twice as much and settle hardly more.
_NARROW = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificate:
    """Why a token never leads: w_token = Σ weights·w[rivals] + (1 - Σ weights)·mean(w), inside the hull.

    The mean is over the distinct rows, or, for a token among many of equal bias, over those whose bias is at
    least its own. With a bias the right side's bias is at least the token's.
    """

    token: int
    rivals: tuple[int, ...]
    weights: tuple[float, ...]
    """Not negative, with a sum of at most one."""
    depth: float
    """One minus the sum of the weights: how far inside, as a share of the ray from the mean to the hull."""
    residual: float
    """Norm of the two sides' difference in standard coordinates, with rounding; 0 for an equal row."""


class OutOfTimeError(Exception):
    """The deadline has passed; what is proved so far stands."""


def renamed(certificate: Certificate, names: Indices) -> Certificate:
    """The certificate of a part of the rows, in the names [rows] that they have in the whole."""
    rivals = tuple(names[list(certificate.rivals)].tolist())
    return dataclasses.replace(certificate, token=int(names[certificate.token]), rivals=rivals)


class Search:
    """The distinct rows of an output layer and what has been proved about each."""

    def __init__(
        self, weight: Array, bias: Array | None, *, keep: bool, deadline: float, progress: Progress | None
    ) -> None:
        self.weight = torch.from_numpy(weight)
        self.bias = None if bias is None else torch.from_numpy(bias)
        self.points: StandardPoints = standardise(weight, bias)
        # The screen's inner loop only proposes directions, so single precision is enough for it.
        self.coarse = torch.from_numpy(self.points.rows).float()
        self.size = float(torch.linalg.vector_norm(self.weight, dim=1).max())
        self.bias_size = 0.0 if bias is None else float(np.abs(bias).max())
        # What rounding can hide of a certificate's residual: much, where the rows nearly lack a direction.
        hidden = 2 * self.size * float(np.linalg.norm(self.points.basis, 2)) if len(weight) > 1 else 0.0
        if self.points.upward:
            hidden += 2 * self.bias_size / self.points.spread
        self.rounding = 16 * float(np.finfo(np.float64).eps) * hidden
        V, D = weight.shape
        self.argmaxable = np.zeros(V, dtype=bool)
        self.certificates: dict[int, Certificate] = {}
        self.witnesses = np.full((V, D), np.nan) if keep else None
        self.deadline, self.progress = deadline, progress

    def tick(self, stage: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(stage, done, total)
        if time.monotonic() > self.deadline:
            raise OutOfTimeError

    def is_open(self, token: int) -> bool:
        return not self.argmaxable[token] and token not in self.certificates

    def compete(self, tokens: Indices, directions: Array, rivals: int) -> tuple[NDArray[np.bool_], Indices]:
        """Let token n lead from direction n with the given W and b; who does, and the others' rivals."""
        states = torch.from_numpy(self.points.states(directions))
        logits = states @ self.weight.T
        if self.bias is not None:
            logits += self.bias
        own_index = torch.from_numpy(tokens)[:, None]
        own = logits.gather(1, own_index)[:, 0]
        logits.scatter_(1, own_index, -math.inf)
        size = self.size * torch.linalg.vector_norm(states, dim=1) + self.bias_size
        leads = (own - logits.amax(dim=1) > MARGIN * size).numpy()
        self.argmaxable[tokens[leads]] = True
        if self.witnesses is not None:
            self.witnesses[tokens[leads]] = states.numpy()[leads]
        return leads, logits[~leads].topk(rivals, dim=1).indices.numpy()

    def screen(self, tokens: Indices) -> tuple[Indices, Indices]:
        """Prove what matrix products can; return the tokens left and their rivals, the last found first."""
        V, r = self.points.rows.shape
        if self.bias is None and V > 1:
            tokens = self.narrow(tokens)
        block = max(1, _BLOCK_ENTRIES // V)
        count = min(V - 1, 256, max(16, 4 * r))
        left, rivals = tokens, np.zeros((len(tokens), 0), dtype=np.int64)
        for turn in range(1 + _ROUNDS if len(tokens) else 0):
            kept_tokens, kept_rivals = [], []
            for start in range(0, len(left), block):
                self.tick("screen", int(self.argmaxable.sum()), V)
                tokens, known = left[start : start + block], rivals[start : start + block]
                directions = self.points.rows[tokens] if turn == 0 else self.widest(tokens, known)
                if self.points.upward:
                    # A factor of at least a thousandth keeps the state finite; the programs go nearer to 0.
                    floor = 1e-3 * np.maximum(np.linalg.norm(directions, axis=1), 1e-3)
                    directions = np.column_stack([directions[:, :-1], np.maximum(directions[:, -1], floor)])
                leads, found = self.compete(tokens, directions, count if turn == 0 else (count + 1) // 2)
                kept_tokens.append(tokens[~leads])
                kept_rivals.append(np.concatenate([found, known[~leads]], axis=1))
            before = len(left)
            left, rivals = np.concatenate(kept_tokens), np.concatenate(kept_rivals)
            if len(left) == 0 or (turn > 0 and before - len(left) < _ROUND_WORTH * before):
                break
        return left, rivals

    def narrow(self, tokens: Indices) -> Indices:
        """Let tokens lead from their own points in a random subspace; return those that do not.

        The subspace is the span of a map P [D, k]: the points are a_j = P'(w_j - mean), and from the state
        h = P a_i row j scores a_j·a_i more than the mean row does, whatever numbers P holds. Token i leads by
        the difference to a_i·a_i, less three things. Single precision: rounding a_j and a product of width k
        err by at most k + 1 roundings of |a_i| |a_j|, for the token and for its rival; half as much again
        covers second-order terms and the norms. Double precision, in a_j and in h: less than 6 (D + k)
        roundings of max |w| |P| |a_i|, far less than MARGIN of it. And the lead that counts, MARGIN of
        max |w| |h|. Here |P| is the Frobenius norm.
        """
        r = self.points.basis.shape[1]
        map_ = torch.from_numpy(self.points.basis)
        if r > _NARROW:
            # Any order of coordinates can hide what tells tokens apart; a random rotation cannot.
            draw = np.random.default_rng(0).normal(size=(r, _NARROW))
            map_ = map_ @ torch.from_numpy(np.linalg.qr(draw)[0])
        points = (self.weight @ map_ - torch.from_numpy(self.points.mean) @ map_).float()
        length = torch.linalg.vector_norm(points, dim=1).double()
        rounding = 3 * (points.shape[1] + 2) * 2.0**-24 * float(length.max())
        counts = 2 * MARGIN * self.size * float(torch.linalg.matrix_norm(map_))
        # Products of denormal numbers err by more than their share.
        threshold = (rounding + counts) * length + 1e-30
        # The shortest are the likeliest to lie inside the hull: a time limit leaves the others open.
        sequence = tokens[np.argsort(length[tokens].numpy(), kind="stable")]
        block = max(1, _BLOCK_ENTRIES // len(points))
        for start in range(0, len(sequence), block):
            self.tick("screen", int(self.argmaxable.sum()), len(points))
            part = torch.from_numpy(sequence[start : start + block])
            scores = points[part] @ points.T
            own = scores.gather(1, part[:, None])[:, 0].double()
            scores.scatter_(1, part[:, None], -math.inf)
            leads = part[own - scores.amax(dim=1) > threshold[part]]
            self.argmaxable[leads.numpy()] = True
            if self.witnesses is not None:
                self.witnesses[leads.numpy()] = (points[leads].double() @ map_.T).numpy()
        return tokens[~self.argmaxable[tokens]]

    def widest(self, tokens: Indices, rivals: Indices) -> Array:
        """Directions in which each token leads its rivals by about the widest margin."""
        parts = [slice(start, start + 128) for start in range(0, len(tokens), 128)]
        found = [widest_margin(self.coarse[tokens[part]], self.coarse[rivals[part]]) for part in parts]
        return torch.cat(found).double().numpy()

    def decide(self, token: int, rivals: Indices) -> None:
        """Solve token's linear program over its rivals, grown until it proves one thing or the other."""
        points = self.points.rows
        r = points.shape[1]
        own = points[token]
        # Twice the radius in which every x with all z_j·x <= 1 lies: the box never decides.
        upper = np.full(r, 2 * self.points.reach)
        lower = -upper
        if self.points.upward:
            lower[-1] = 0
        program = Program(own, lower, upper)
        active = np.unique(rivals)
        program.add(points[active], np.ones(len(active)))
        while True:
            solution = program.solve()
            if solution is None:
                return
            if solution.value < 1 - TOLERANCE:
                self._certify(token, active, np.maximum(solution.multipliers, 0))
                return
            scores = points @ solution.point
            score, scores[token] = scores[token], -np.inf
            lead = score - scores.max()
            if lead > 0:
                direction = solution.point.copy()
                if self.points.upward:
                    # Off the ray at infinity, by a step that costs at most half of the lead.
                    direction[-1] = max(direction[-1], lead / (4 * np.abs(points[:, -1]).max()))
                if self.compete(np.array([token]), direction[None], 1)[0][0]:
                    return
            scores[active] = -np.inf
            worst = np.argsort(scores)[::-1][: max(64, r // 2)]
            violated = worst[scores[worst] > 1 + 10 * SOLVER_TOLERANCE]
            if len(violated) == 0:
                return
            program.add(points[violated], np.ones(len(violated)))
            active = np.concatenate([active, violated])

    def _certify(self, token: int, rivals: Indices, weights: Array) -> None:
        support = weights > 0
        rivals, weights = rivals[support], weights[support]
        total = float(weights.sum())
        weight, mean = self.weight.numpy(), self.points.mean
        # From the given rows, not from the standard ones, whose rounding it is meant to catch.
        gap = weight[token] - mean - weights @ (weight[rivals] - mean)
        error = gap @ self.points.basis
        if self.bias is not None and self.points.upward:
            bias = self.bias.numpy() - self.bias.numpy().mean()
            above = bias[token] - weights @ bias[rivals] - gap @ self.points.shift
            error = np.append(error, max(0.0, above / self.points.spread))
        residual = float(np.linalg.norm(error)) + self.rounding
        if residual <= (1 - total) * (1 / self.points.reach - residual):
            self.certificates[token] = Certificate(
                token=token,
                rivals=tuple(int(rival) for rival in rivals),
                weights=tuple(float(value) for value in weights),
                depth=1 - total,
                residual=residual,
            )
