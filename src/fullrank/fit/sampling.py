"""The normaliser of a large vocabulary from few of its rows: what makes fits on a processor affordable.

Training all V rows of W on some ten thousand tokens would cost much and teach nothing to rows whose token
never comes up. So the rows S that are trained are the tokens that occur, and those with the largest share of
the model's probability; the others stay as they are, and their part of the normaliser is estimated by
importance sampling. For each token, other rows are drawn from the start's own distribution q,

    Σ_{v not in S} exp f(z_v)  ≈  exp(l_q) · mean_v exp( f(z_v) - q_v ),    l_q = logsumexp_{v not in S} q_v

with q_v the start's score: unbiased, and exact as long as the head has not moved. More rows are drawn than a
step uses, so that no fit can learn the draws. Losses that are reported are computed over the whole
vocabulary: what this costs a fit it costs every head alike, and none is flattered.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from fullrank.models.output_layer import OutputLayer

ROWS = 1536
"""Rows of W that are trained, more if the text has more distinct tokens."""
DRAWN = 16
"""Rows drawn a token and step for the rest of the normaliser."""
POOL = 64
"""Rows drawn a token in all; where losses are compared all of them are used."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """What the estimated normaliser of some tokens needs; `rows` are the ids that scores are computed for."""

    rows: Tensor
    place: Tensor
    """[N] where each target stands in `rows`."""
    drawn: Tensor
    """[N, m] ids drawn from the start's distribution over the other rows."""
    scores: Tensor
    """[N, m] their scores at the start."""
    normaliser: Tensor
    """[N] logsumexp of the start's scores over the other rows."""

    def __getitem__(self, chosen: Tensor) -> Sampled:
        return dataclasses.replace(
            self, place=self.place[chosen], drawn=self.drawn[chosen], scores=self.scores[chosen],
            normaliser=self.normaliser[chosen],
        )  # fmt: skip

    def fewer(self) -> Sampled:
        """Some of the draws of each token, anew at every call."""
        at = some_of(self.drawn)
        return dataclasses.replace(self, drawn=self.drawn[:, at], scores=self.scores[:, at])


def some_of(drawn: Tensor) -> Tensor | slice:
    """Columns of a pool of draws [N, m] that a step uses, anew at every call."""
    count = drawn.shape[1]
    return slice(None) if count <= DRAWN else torch.randint(count, (DRAWN,), device=drawn.device)


@torch.no_grad()
def rows_to_train(
    output: OutputLayer, rows: Tensor, targets: Tensor, count: int, limit: int, share: Tensor | None = None
) -> Tensor:
    """Ids, rising: every token that occurs, then those with the largest mean probability; `share` [V] is
    what someone else gives to each token, and counts as much."""
    occurring = torch.unique(targets)
    if len(occurring) >= output.vocabulary:
        return occurring
    spread = rows[:: max(1, len(rows) // 512)]
    own = torch.zeros(output.vocabulary, device=rows.device)
    for piece in output.pieces(spread, limit // 2):
        own += torch.softmax(output.logits(piece), dim=1).sum(dim=0)
    share = own if share is None else own / own.sum() + share / share.sum()
    share[occurring] = math.inf
    count = min(max(count, len(occurring)), output.vocabulary)
    return share.topk(count).indices.sort().values


@torch.no_grad()
def sample(
    output: OutputLayer, hidden: Tensor, targets: Tensor, rows: Tensor, limit: int, generator: torch.Generator
) -> Sampled:
    """Draw some of the rows that are not in `rows` for each token, from the start's own distribution."""
    device = hidden.device
    other = torch.ones(output.vocabulary, dtype=torch.bool, device=device)
    other[rows] = False
    ids = other.nonzero()[:, 0]
    place = torch.searchsorted(rows, targets)
    if len(ids) == 0:
        return Sampled(
            rows=rows, place=place, drawn=torch.zeros(len(targets), 1, dtype=torch.int64, device=device),
            scores=torch.zeros(len(targets), 1, device=device),
            normaliser=torch.full((len(targets),), -math.inf, device=device),
        )  # fmt: skip
    others = OutputLayer(
        weight=output.weight[ids], bias=None if output.bias is None else output.bias[ids],
        pointwise=output.pointwise, tokens=len(ids),
    )  # fmt: skip
    drawn, scores, normaliser = [], [], []
    for piece in output.pieces(hidden, limit // 2):
        found = others.logits(piece)
        total = found.logsumexp(dim=1)
        which = draw((found - total[:, None]).exp_(), POOL, generator)
        drawn.append(ids[which])
        scores.append(found.gather(1, which))
        normaliser.append(total)
    return Sampled(
        rows=rows, place=place, drawn=torch.cat(drawn), scores=torch.cat(scores),
        normaliser=torch.cat(normaliser),
    )  # fmt: skip


def draw(probabilities: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[N, count] columns drawn from the rows of a table [N, V], which is overwritten."""
    sums = probabilities.cumsum_(dim=1)
    at = torch.rand(len(sums), count, device=sums.device, generator=generator) * sums[:, -1:]
    return torch.searchsorted(sums, at).clamp_(max=sums.shape[1] - 1)
