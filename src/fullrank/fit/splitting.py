"""Would splitting the head's rows help? A test that trains nothing.

With one row r for a token, p = softmax(W r), g = Wᵀ (e_y - p) and H = Wᵀ (diag p - p pᵀ) W, replace r by two
rows r + d and r - d of equal prior. Then (docs/theory.md has the proof)

    log( ½ p_y(r + d) + ½ p_y(r - d) )  =  log p_y(r) + ½ dᵀ (g gᵀ - H) d + O(|d|⁴)

The first derivative is zero: equal components are a saddle, which short fits do not leave. The second is what
a mixture can take. If p is right given the state, E[g gᵀ | state] = H and there is nothing in any direction.

Directions are affine in the state, d = M x with x = (1, h), and what they gain together is the quadratic form

    T(M) = E[ (gᵀ M x)² - xᵀ Mᵀ H M x ]

whose leading eigenvectors are sought on one part of the text, in units in which E[H] and the states'
covariance are the identity, so that they are the same however W and h are scaled. The expectation under H is
a mean over m tokens drawn from p in place of y, so a product with T costs no pass over the vocabulary.

M has as many entries as it can be told apart from noise with: a direction is found where it gains more than
about (entries of M) / (2 tokens) nats (`Directions.least`). So for wide rows M is confined to rows along
which the constant split gains more than chance, then those along which p moves most (the leading eigenvectors
of E[H]), and to the leading directions of the states; and tokens beyond what can be held whole are kept in
these coordinates. There g is cut to its usual length, of y and of drawn tokens alike: the few that nobody
expected would else decide alone, and where y is drawn from p the expectation is zero as before.

On another part of the text a direction's quotient is an honest estimate: under the null y and the drawn
tokens have one distribution, and its expectation is zero. The same search with a drawn token in place of y
says what the largest eigenvalue is when nothing is to be had.

With a teacher, y is a token drawn from what that says, not the one that came.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fullrank.fit import estimates, sampling
from fullrank.fit.setting import Setting, layer_of, plain_rows
from fullrank.fit.states import Part
from fullrank.results import Estimate

DRAWN, FEWEST = 16, 4
"""Tokens drawn from p for each state; and where the states are more than memory has room for with so many.
With m of them the noise of a token is 1 + 1/m of what y alone has, so states are worth more."""
WIDTH, LEADING = 64, 20
"""Directions of rows, and of states, that M is confined to, at most; and in a model of more than `NARROW`
dimensions: with 600,000 tokens the fits of a real one gained more from 12 or 20 of its 576 than from 32 or 64
(docs/diagnose.md)."""
NARROW = 128
PER_ENTRY = 64
"""Tokens that every entry of M must have. A trained entry costs 1/2N nats of noise, so that all of them
together cost 1/128: with 16 a gain of 0.03 would drown in it."""
DIRECTIONS = 7
"""Eigenvectors: what eight components can use."""
RIDGE = 1e-3
"""Of the mean variance, added before a covariance is inverted."""
CUT = 1.0
"""Of the root mean square length of a score: what a score is cut to."""
MOST = 1 << 18
"""Tokens that directions are sought on, at most."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Basis:
    """What M is confined to."""

    rows: Tensor
    """[r, fewer] directions of rows, E[H] being the identity in them."""
    states: Tensor
    """[H, fewer] those of states, each of unit variance."""
    mean: Tensor
    """[H] of the states."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Tokens as the test sees them."""

    states: Tensor
    """[N, H]"""
    scores: Tensor
    """[N, r] g."""
    drawn: Tensor
    """[N, m, r] g of tokens drawn from p."""
    blocks: Tensor
    """[N]"""

    def within(self, basis: Basis) -> Moments:
        """In the coordinates of M, states with a one before them."""
        x = (self.states - basis.mean) @ basis.states
        return Moments(
            states=torch.cat([torch.ones_like(x[:, :1]), x], dim=1),
            scores=_cut(self.scores @ basis.rows),
            drawn=_cut(self.drawn @ basis.rows),
            blocks=self.blocks,
        )

    def last(self, own: int) -> Moments:
        """For the last entries of a row alone."""
        return dataclasses.replace(self, scores=self.scores[:, -own:], drawn=self.drawn[..., -own:])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Directions:
    """Ways to split a row, the steepest first among those that surely lead somewhere, then among the others:
    a few tokens can make a direction the steepest of all that leads nowhere."""

    maps: Tensor
    """[J, r, H]"""
    shifts: Tensor
    """[J, r]: direction j moves a row by maps[j] h + shifts[j]."""
    inner: Tensor
    """[J, rows, states] the same in the coordinates of the basis, each of norm 1."""
    found: tuple[float, ...]
    """Eigenvalues on the part they were found on."""
    null: float
    """The largest eigenvalue there when y is drawn from the model."""
    judged: tuple[Estimate, ...]
    """Quotients on the other part, their intervals at 95% for all of them together."""
    basis: Basis
    """What was looked at."""
    tokens: int
    """What they were found on."""

    @property
    def least(self) -> float:
        """Nats per token below which a direction cannot be told from noise, about."""
        return self.basis.rows.shape[1] * (self.basis.states.shape[1] + 1) / (2 * self.tokens)

    @property
    def covered(self) -> float:
        """The share of all entries that an M could have."""
        rows, states = self.basis.rows, self.basis.states
        return rows.shape[1] * (states.shape[1] + 1) / (rows.shape[0] * (states.shape[0] + 1))

    @property
    def sure(self) -> int:
        """How many lead to more than nothing on the other part."""
        return sum(one.low > 0 for one in self.judged)

    def lengths(self, number: int) -> Tensor:
        """[J] steps along the first so many, each in proportion to the root of its eigenvalue: gain λ s²
        against a cost of s⁴ is best there."""
        found = torch.tensor(self.found[:number], dtype=self.maps.dtype).clamp(min=1e-12)
        return found.sqrt().to(self.maps.device)

    def step(self, number: int) -> tuple[Tensor, Tensor]:
        lengths = self.lengths(number)
        return lengths[:, None, None] * self.maps[:number], lengths[:, None] * self.shifts[:number]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Gathered:
    """Moments of two parts of a text: to find directions on, and to judge them on."""

    find: Moments
    judge: Moments
    basis: Basis
    within: tuple[Moments, Moments]
    """The same parts in the basis: of more tokens, where not all could be held whole."""


def gather(
    setting: Setting,
    *,
    tokens: int,
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> Gathered:
    """The moments of at most so many tokens to fit on, and to choose on."""
    generator = torch.Generator(device=setting.parts.fit.targets.device).manual_seed(seed)
    parts, teacher = setting.parts, setting.teacher
    taught = None if teacher is None else teacher.parts

    def both(
        room: int, place: float, share: float, basis: Basis | None = None, drawn: int = DRAWN
    ) -> tuple[Moments, Moments]:
        many = max(256, min(tokens, room))
        found = moments(
            setting, parts.fit, many, generator, lambda part: progress(place + 0.7 * share * part),
            taught=None if taught is None else taught.fit, basis=basis, drawn=drawn,
        )  # fmt: skip
        judge = moments(
            setting, parts.choose, many, generator, lambda part: progress(place + share * (0.7 + 0.3 * part)),
            taught=None if taught is None else taught.choose, basis=basis, drawn=drawn,
        )  # fmt: skip
        return found, judge

    # They are kept for every drawn token.
    room = setting.limit // (8 * DRAWN * setting.plain.width)
    scores = setting.limit // (8 * _most(setting.plain.width))
    wanted = max(1, min(tokens, len(parts.fit), MOST, scores // FEWEST))
    enough = wanted < 2 * room
    find, judge = both(room, 0.0, 1.0 if enough else 0.3)
    basis = _basis(find, _width(len(find.states) if enough else wanted, find))
    if enough:
        within = find.within(basis), judge.within(basis)
    else:
        within = both(wanted, 0.3, 0.7, basis, max(FEWEST, min(DRAWN, scores // wanted)))
    return Gathered(find=find, judge=judge, basis=basis, within=within)


def search(gathered: Gathered, *, own: int | None = None, seed: int = 0) -> Directions:
    """Directions of rows whose last `own` entries may differ; None is all."""
    basis, (find, judge) = gathered.basis, gathered.within
    if own is not None:
        find, judge = gathered.find.last(own), gathered.judge.last(own)
        basis = _basis(find, _width(len(find.states), find))
        find, judge = find.within(basis), judge.within(basis)
    values, vectors = _leading(find.scores, find.drawn, find.states, DIRECTIONS, seed)
    null, _ = _leading(find.drawn[:, 0], find.drawn[:, 1:], find.states, 1, seed)
    judged = [_quotient(judge, vector, 1 - (1 - estimates.LEVEL) / len(vectors)) for vector in vectors]
    order = sorted(range(len(judged)), key=lambda place: judged[place].low <= 0)
    values, vectors = values[order], vectors[order]
    maps, shifts = in_units(basis, vectors)
    return Directions(
        maps=maps, shifts=shifts, inner=vectors, found=tuple(values.tolist()), null=float(null[0]),
        judged=tuple(judged[place] for place in order), basis=basis, tokens=len(find.states),
    )  # fmt: skip


def in_units(basis: Basis, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """M's of the coordinates [J, r, q] in the units of rows and states: maps [J, D, H], and shifts [J, D]
    that have the mean of the states in them."""
    maps = torch.einsum("dr,jrq,hq->jdh", basis.rows, vectors[:, :, 1:], basis.states)
    return maps, torch.einsum("dr,jr->jd", basis.rows, vectors[:, :, 0]) - maps @ basis.mean


@torch.no_grad()
def moments(
    setting: Setting,
    part: Part,
    tokens: int,
    generator: torch.Generator,
    progress: Callable[[float], None] = lambda share: None,
    *,
    taught: Part | None = None,
    basis: Basis | None = None,
    drawn: int = DRAWN,
) -> Moments:
    """Scores of tokens from all over a part, and of so many `drawn` from the model: one pass over W. `taught`
    are the teacher's states of the same part; in a basis, all is in its coordinates from the start."""
    output, rows = layer_of(setting.plain), plain_rows(setting.plain, part)
    # Every so many, but in blocks as they come: intervals are over blocks.
    chosen = torch.arange(0, len(part), max(1, -(-len(part) // tokens)), device=rows.device)
    rows, targets = rows[chosen], part.targets.flatten()[chosen]
    if setting.teacher is not None and taught is not None:
        targets = setting.teacher.draws(taught, chosen, setting.limit, generator)
    states, blocks = part.states[0].flatten(0, 1)[chosen], part.blocks.flatten()[chosen]
    weight = output.weight
    found: list[Moments] = []
    done = 0
    for piece in output.pieces(rows, setting.limit // 3):
        here = slice(done, done + len(piece))
        raw = piece @ output.weight.T
        if output.bias is not None:
            raw += output.bias
        slope: Tensor | None = None
        if not output.linear:
            # Of a soft cap: how much of a step of the row reaches the score.
            evaluated = output.pointwise.evaluate_(raw, gradient=True)
            raw, slope = evaluated.value, evaluated.slope
        p = torch.softmax(raw, dim=1)
        mean = (p if slope is None else p * slope) @ weight
        ids = sampling.draw(p, drawn, generator)

        def at(ids: Tensor, slope: Tensor | None = slope, mean: Tensor = mean) -> Tensor:
            some = weight[ids]
            if slope is not None:
                some = slope.gather(1, ids)[..., None] * some
            return some - mean[:, None]

        made = Moments(
            states=states[here], scores=at(targets[here][:, None])[:, 0], drawn=at(ids), blocks=blocks[here]
        )
        found.append(made if basis is None else made.within(basis))
        done += len(piece)
        progress(done / len(rows))
    return Moments(
        **{
            field.name: torch.cat([getattr(one, field.name) for one in found])
            for field in dataclasses.fields(Moments)
        }
    )


def _inverse_root(covariance: Tensor) -> Tensor:
    covariance = covariance.double()
    ridge = RIDGE * covariance.diagonal().mean().clamp(min=1e-30)
    values, vectors = torch.linalg.eigh(covariance + ridge * torch.eye(len(covariance)).to(covariance))
    return (vectors * values.clamp(min=float(ridge)).rsqrt()) @ vectors.T


def _most(width: int) -> int:
    return WIDTH if width <= NARROW else LEADING


def _width(tokens: int, find: Moments) -> int:
    """Directions that so many tokens can tell from noise."""
    return max(4, min(_most(find.states.shape[1]), int(math.sqrt(tokens / PER_ENTRY))))


def _basis(find: Moments, width: int) -> Basis:
    """Of so many directions, a constant among those of the states."""
    states, mean = _state_directions(find.states, width - 1)
    return Basis(rows=_row_directions(find, width), states=states, mean=mean)


def _row_directions(find: Moments, width: int) -> Tensor:
    """[r, at most width]: those whose constant split gains more than any would by chance, then the leading
    eigenvectors of E[H]."""
    r = find.scores.shape[1]

    def second(some: Tensor) -> Tensor:
        flat = some.reshape(-1, r)
        return (flat.T @ flat).double() / len(flat)

    expected = second(find.drawn)
    root = _inverse_root(expected)
    by_chance = root @ (second(find.drawn[:, 0]) - expected) @ root
    gains, vectors = torch.linalg.eigh(root @ (second(find.scores) - expected) @ root)
    sure = vectors[:, gains > torch.linalg.eigvalsh(by_chance)[-1]].flip(1)
    _, moving = torch.linalg.eigh(expected)
    chosen, _ = torch.linalg.qr(torch.cat([sure, moving.flip(1)], dim=1)[:, :width])
    return (root @ chosen).to(find.scores.dtype)


def _state_directions(states: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """[H, at most width] in which the states' leading directions have unit variance, and their mean."""
    mean = states.mean(dim=0)
    centred = states - mean
    values, vectors = torch.linalg.eigh((centred.T @ centred).double() / len(centred))
    values, vectors = values.flip(0)[:width], vectors.flip(1)[:, :width]
    # A direction that states do not have would be divided by nothing.
    kept = values > 1e-6 * values[0]
    return (vectors[:, kept] * values[kept].rsqrt()).to(states.dtype), mean


def _leading(scores: Tensor, drawn: Tensor, x: Tensor, number: int, seed: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues of T, falling, and their eigenvectors [J, r, q]."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    count, r, q = len(x), scores.shape[1], x.shape[1]
    size = r * q

    def product(vector: np.ndarray) -> np.ndarray:
        M = torch.from_numpy(vector.reshape(r, q)).to(x)
        moved = x @ M.T
        pulled = scores * (scores * moved).sum(dim=1, keepdim=True)
        weights = torch.einsum("nmr,nr->nm", drawn, moved)
        pulled -= torch.einsum("nm,nmr->nr", weights, drawn) / drawn.shape[1]
        return ((pulled.T @ x).double() / count).cpu().numpy().reshape(-1)

    number = min(number, size)
    if size <= 256:
        whole = np.stack([product(column) for column in np.eye(size)], axis=1)
        values, vectors = np.linalg.eigh((whole + whole.T) / 2)
    else:
        start = np.random.default_rng(seed).standard_normal(size)
        operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
        values, vectors = eigsh(operator, k=number, which="LA", v0=start, tol=1e-3, maxiter=size)
    order = np.argsort(values)[::-1][:number]
    found = torch.from_numpy(vectors[:, order].T.reshape(-1, r, q).copy()).to(x)
    return torch.from_numpy(values[order].copy()), found


def _quotient(judge: Moments, vector: Tensor, level: float) -> Estimate:
    moved = judge.states @ vector.T
    gained = (judge.scores * moved).sum(dim=1).square()
    expected = torch.einsum("nmr,nr->nm", judge.drawn, moved).square().mean(dim=1)
    return estimates.mean(gained - expected, judge.blocks, level)


def _cut(scores: Tensor) -> Tensor:
    """Scores in coordinates in which E[H] is the identity, none longer than CUT times the usual length."""
    longest = CUT * math.sqrt(scores.shape[-1])
    return scores * (longest / scores.norm(dim=-1, keepdim=True).clamp(min=longest))
