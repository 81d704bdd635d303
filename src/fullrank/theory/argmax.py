"""Which tokens a linear output layer can never rank first (Demeter et al. 2020; Grivas et al. 2022).

Token i of the logits W h + b, W [V, D], b [V] or none, is *argmaxable* if some state h [D] gives

    w_i·h + b_i  >  w_j·h + b_j    for every j != i,

strictly: a token that can only tie is not. Geometrically w_i must be a vertex of the convex hull of the
rows; with a bias, (w_i, b_i) must be a vertex of the upper hull. In the standard coordinates z [V, r] of
`linear_program` one linear program decides it, because the mean row lies inside the hull:

    v_i = max { z_i·x : z_j·x <= 1 for all j != i }        (x's bias coordinate >= 0)

v_i > 1: the optimal x is a witness, and token i leads from it.
v_i < 1: the multipliers λ >= 0 of the program certify z_i = Σ λ_j z_j with Σ λ_j = v_i, so z_i lies inside
the hull, at depth 1 - v_i on the ray from the mean. v_i = 1: on the boundary, where a tie is the best.

Both answers are checked apart from the solver. A witness counts if, with the given W and b, token i leads by
more than `margin` (max_j |w_j| |h| + max_j |b_j|), thousands of times the rounding of that product in fp64;
one found in fp32 must lead by all that fp32 can err on top of it.
A certificate with residual e = z_i - Σ λ_j z_j counts if |e| <= (1 - v)(1/reach - |e|): then (1) of
`linear_program` gives z_i·x <= max_j z_j·x for every x in spite of e. Rows that are equal to the last bit
are exact: of equal rows only the one with strictly the highest bias can lead. What is neither, within about
1e-7 of the boundary or out of time, is reported undecided and never guessed.

`argmax_search` does the work in two stages: matrix products that find witnesses, and the programs for what
they leave.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time

import numpy as np
import torch

from fullrank.theory.argmax_search import (
    MARGIN,
    Certificate,
    Indices,
    OutOfTimeError,
    Progress,
    Search,
    renamed,
)
from fullrank.theory.linear_program import Array, as_bias, as_matrix, equal_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgmaxReport:
    """What each token of an output layer can do; every token is in one of the three groups."""

    vocabulary: int
    argmaxable: int
    """How many tokens lead from some state, each by a verified witness."""
    never: tuple[int, ...]
    """Tokens that lead from no state, each with a verified certificate."""
    undecided: tuple[int, ...]
    """Tokens too near the boundary to tell in fp64, or not reached within the time limit."""
    certificates: tuple[Certificate, ...]
    """One for each token of `never`, in its order."""
    witnesses: torch.Tensor | None
    """States [V, D] in fp64, NaN for a token without one; None unless asked for."""
    margin: float
    """A witness's lead over (max_j |w_j| |h| + max_j |b_j|) is more than this."""
    rank: int
    """Dimension of the affine span of the rows, counting a bias that adds one."""
    after_screen: int
    """Tokens that the screen left to the linear programs."""
    programs: int
    """Tokens that were given to the linear programs."""
    screen_seconds: float
    seconds: float


def unargmaxable(
    weight: torch.Tensor | Array,
    bias: torch.Tensor | Array | None = None,
    *,
    time_limit: float | None = None,
    witnesses: bool = False,
    progress: Progress | None = None,
) -> ArgmaxReport:
    """Sort the tokens of an output layer into those that can lead, those that never do, and undecided ones.

    Args:
        weight: the output matrix [V, D].
        bias: the output bias [V], or None.
        time_limit: seconds after which the tokens not yet decided are reported undecided.
        witnesses: keep the state that each argmaxable token leads from (V x D numbers in fp64).
        progress: called with the stage ("screen" or "programs"), tokens done and tokens in all.
    """
    started = time.monotonic()
    matrix = as_matrix(weight)
    V = len(matrix)
    vector = None if bias is None else as_bias(bias, V)
    leaders, beaten = _beaten_by_equals(matrix, vector)
    search = Search(
        matrix[leaders],
        None if vector is None else vector[leaders],
        keep=witnesses,
        deadline=math.inf if time_limit is None else started + time_limit,
        progress=progress,
    )
    left = np.flatnonzero([token not in beaten for token in leaders.tolist()])
    if len(leaders) == 1:
        # Every other token has the same row and a lower bias, so any state will do.
        search.argmaxable[left] = True
        if search.witnesses is not None:
            search.witnesses[left] = 0
        left = left[:0]
    rivals = np.zeros((0, 0), dtype=np.int64)
    with contextlib.suppress(OutOfTimeError):
        left, rivals = search.screen(left)
    screen_seconds = time.monotonic() - started
    left = left[~search.argmaxable[left]]
    programs = 0
    with contextlib.suppress(OutOfTimeError):
        for token, known in zip(left.tolist(), rivals, strict=False):
            search.tick("programs", programs, len(left))
            search.decide(token, known)
            programs += 1
        if vector is not None:
            undecided = [token for token in left.tolist() if search.is_open(token)]
            _decide_among_higher(search, vector[leaders], undecided)

    able = np.zeros(V, dtype=bool)
    able[leaders[search.argmaxable]] = True
    certificates = {int(leaders[one.token]): renamed(one, leaders) for one in search.certificates.values()}
    certificates.update(beaten)
    never = tuple(sorted(certificates))
    states = None
    if search.witnesses is not None:
        states = torch.full(matrix.shape, math.nan, dtype=torch.float64)
        states[torch.from_numpy(leaders)] = torch.from_numpy(search.witnesses)
    return ArgmaxReport(
        vocabulary=V,
        argmaxable=int(able.sum()),
        never=never,
        undecided=tuple(int(token) for token in np.flatnonzero(~able) if int(token) not in certificates),
        certificates=tuple(certificates[token] for token in never),
        witnesses=states,
        margin=MARGIN,
        rank=search.points.rows.shape[1],
        after_screen=len(left),
        programs=programs,
        screen_seconds=screen_seconds,
        seconds=time.monotonic() - started,
    )


def _decide_among_higher(search: Search, bias: Array, tokens: list[int]) -> None:
    """Certify tokens that lie inside the hull of the rows whose bias is at least their own.

    Where many biases are equal (mostly zero, say) such a token is on the boundary of the upper hull, on a
    flat face, where the program with the bias can prove nothing.
    """
    values, counts = np.unique(bias, return_counts=True)
    flat = set(values[counts > 1].tolist())
    for value in sorted({float(bias[token]) for token in tokens} & flat):
        members = np.flatnonzero(bias >= value)
        level = Search(
            search.weight.numpy()[members], None, keep=False, deadline=search.deadline, progress=None
        )
        for token in tokens:
            if bias[token] == value:
                level.tick("programs", 0, 0)
                place = int(np.searchsorted(members, token))
                others = np.delete(np.arange(len(members)), place)
                level.decide(place, others[: 4 * level.points.rows.shape[1]])
        for certificate in level.certificates.values():
            named = renamed(certificate, members)
            search.certificates[named.token] = named


def _beaten_by_equals(weight: Array, bias: Array | None) -> tuple[Indices, dict[int, Certificate]]:
    """One token for each distinct row of the weight, and certificates for the tokens an equal row beats.

    The token kept has the highest bias of its equals; where that is a tie it is itself beaten, yet stays
    among the rows that others have to beat.
    """
    group = equal_rows(weight)
    height = np.zeros(len(weight)) if bias is None else bias
    order = np.lexsort((-height, group))
    starts = np.flatnonzero(np.r_[True, np.diff(group[order]) != 0])
    ends = np.r_[starts[1:], len(order)]
    beaten = {}
    for several in np.flatnonzero(ends - starts > 1):
        leader, *rest = order[starts[several] : ends[several]].tolist()
        beats = dict.fromkeys(rest, leader)
        if height[rest[0]] == height[leader]:
            beats[leader] = rest[0]
        for token, rival in beats.items():
            beaten[token] = Certificate(token=token, rivals=(rival,), weights=(1.0,), depth=0.0, residual=0.0)
    return np.sort(order[starts]), beaten
