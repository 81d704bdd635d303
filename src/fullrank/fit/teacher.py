"""A teacher: what another model says of the same text, and heads that are trained to say the same.

    KL(q || p) = Σ_v q_v (log q_v - log p_v),      q the teacher's distribution, p the head's

It is an output layer, any head of ours, and its own states of the windows that the students have states of.
Its scores are made from these a chunk at a time (`ops.divergence`), and N x V of them are never held.

Where only rows S of W are trained (`sampling`), what it says of these is kept, [N, S], and some of the others
are drawn from it. With r the probability of all others,

    Σ_v q_v log p_v  ≈  Σ_{v in S} q_v log p_v + r mean_v log p_v,      v drawn from q outside S

which is right on average, and where S is the whole vocabulary it is exact. Rows drawn from the start alone
would miss where a student goes that follows its teacher, and its normaliser would come out too small. So half
are the teacher's, and all are weighed by the mean m of the two distributions outside S that they come from:

    Σ_{v not in S} exp f(z_v)  ≈  mean_v exp( f(z_v) - log m_v ),      no weight of start or teacher above 2
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit import sampling
from fullrank.fit.sampling import Sampled
from fullrank.fit.states import Part, Parts
from fullrank.heads import Head
from fullrank.heads.rows import RowHead
from fullrank.models.output_layer import OutputLayer
from fullrank.ops import Mixture, mixture_log_probs
from fullrank.ops.distil import reference

TINY = 1e-30
"""The least probability that anything is divided by."""


def check_students(heads: Iterable[Head]) -> None:
    """Raise for a head that cannot be trained on its divergence from a teacher."""
    other = next((head for head in heads if not isinstance(head, RowHead)), None)
    if other is not None:
        raise FullrankError(
            f"{other.name} is not rows over one matrix, so its divergence from a teacher is not at hand: "
            "distil into a head that is, such as mos or trunk"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Taught:
    """What a teacher says of some tokens, where not all rows are trained."""

    shares: Tensor
    """[N, S] probabilities of the rows S."""
    rest: Tensor
    """[N] probability of all others."""
    drawn: Tensor
    """[N, m] ids of others, drawn from what it says of them."""
    entropy: Tensor
    """[N] of all it says, nats."""

    def __getitem__(self, chosen: Tensor) -> Taught:
        return Taught(
            shares=self.shares[chosen], rest=self.rest[chosen], drawn=self.drawn[chosen],
            entropy=self.entropy[chosen],
        )  # fmt: skip

    def fewer(self) -> Taught:
        """Some of the draws of each token, anew at every call."""
        return dataclasses.replace(self, drawn=self.drawn[:, sampling.some_of(self.drawn)])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Teacher:
    """Another model's head, and its states of the students' windows."""

    head: Head
    parts: Parts
    vocab: int
    """Rows of the students' matrix, V."""

    @property
    def is_rows(self) -> bool:
        """Whether it can be asked for any tokens by themselves."""
        return isinstance(self.head, RowHead)

    @functools.cached_property
    def layer(self) -> tuple[Tensor, Tensor | None]:
        """Its matrix and bias over the students' V tokens: rows beyond these are left out, and what it has no
        rows for has no probability."""
        decoder = self.head.decoder
        weight, bias = decoder.weight.detach(), None if decoder.bias is None else decoder.bias.detach()
        lacking = self.vocab - len(weight)
        if lacking <= 0:
            return weight[: self.vocab], None if bias is None else bias[: self.vocab]
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        return (
            torch.cat([weight, weight.new_zeros(lacking, weight.shape[1])]),
            torch.cat([bias, bias.new_full((lacking,), -math.inf)]),
        )

    @torch.no_grad()
    def says(self, states: Sequence[Tensor]) -> Mixture:
        """Its distributions at states [..., H] of its own, for `ops.divergence`."""
        rows, log_prior, _, _, pointwise = cast(RowHead, self.head.eval()).distribution(list(states))
        return Mixture(rows, log_prior, *self.layer, pointwise)

    def at(self, part: Part, chosen: Tensor) -> Mixture:
        """The same of chosen tokens of a part of `parts`."""
        return self.says([state.flatten(0, 1)[chosen] for state in part.states])

    @torch.no_grad()
    def log_probs(
        self, part: Part, limit: int, chosen: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Log-probabilities [n, V] of some tokens at a time, and which of the chosen they are; `limit` bounds
        a table in bytes. A head that is not rows is asked for whole windows."""
        time = part.targets.shape[1]
        size = max(1, limit // (4 * self.vocab))
        if self.is_rows:
            chosen = torch.arange(len(part), device=part.targets.device) if chosen is None else chosen
            for place, some in enumerate(chosen.split(size)):
                rows, log_prior, weight, bias, pointwise = self.at(part, some)
                table = mixture_log_probs(
                    rows, log_prior, weight, bias=bias, pointwise=pointwise, workspace=limit
                )
                yield slice(place * size, place * size + len(some)), table
            return
        assert chosen is None
        size = max(1, size // time)
        for start in range(0, len(part.targets), size):
            piece = part.windows(slice(start, start + size))
            states = list(piece.states[: self.head.states])
            table = cast(Tensor, self.head.eval()(states, context=piece.ids)).flatten(0, 1)
            yield slice(start * time, start * time + len(table)), table.float()

    def share(self, part: Part, limit: int) -> Tensor:
        """[V] what it says of some tokens, summed: which rows count most."""
        spread: Tensor | None = None
        if self.is_rows:
            spread = torch.arange(0, len(part), max(1, len(part) // 512), device=part.targets.device)
        else:
            part = part.windows(slice(None, None, max(1, len(part.targets) // 4)))
        tables = self.log_probs(part, limit // 2, spread)
        return torch.stack([table.exp_().sum(dim=0) for _, table in tables]).sum(dim=0)

    @torch.no_grad()
    def losses(self, part: Part, limit: int) -> Tensor:
        """[tokens] nats of its own on a part, of the tokens that came."""
        targets = part.targets.flatten()[:, None]
        return torch.cat([-table.gather(1, targets[at])[:, 0] for at, table in self.log_probs(part, limit)])

    @torch.no_grad()
    def draws(self, part: Part, chosen: Tensor, limit: int, generator: torch.Generator) -> Tensor:
        """[n] a token for each of the chosen, drawn from what it says there."""
        tables = self.log_probs(part, limit // 2, chosen)
        return torch.cat([sampling.draw(table.exp_(), 1, generator)[:, 0] for _, table in tables])

    @torch.no_grad()
    def taught(
        self, part: Part, sampled: Sampled, start: OutputLayer, rows: Tensor, limit: int,
        generator: torch.Generator,
    ) -> tuple[Taught, Sampled]:  # fmt: skip
        """What it says of every token of a part, and the rows drawn for the normaliser with as many of its
        own among them; `start` and `rows` [N, D] are the layer and the rows that others are drawn from."""
        other = torch.ones(self.vocab, dtype=torch.bool, device=rows.device)
        other[sampled.rows] = False
        ids = other.nonzero()[:, 0]
        found = Taught(
            shares=rows.new_empty(len(rows), len(sampled.rows)),
            rest=rows.new_zeros(len(rows)),
            drawn=sampled.drawn.new_zeros(len(rows), sampling.POOL if len(ids) else 1),
            entropy=rows.new_empty(len(rows)),
        )
        proposed = []
        for at, log_probs in self.log_probs(part, limit // 4):
            found.entropy[at] = reference.entropy(log_probs)
            probabilities = log_probs.exp_()
            found.shares[at] = probabilities[:, sampled.rows]
            if not len(ids):
                continue
            tail = probabilities[:, ids]
            rest = tail.sum(dim=1)
            own = ids[sampling.draw(tail, sampling.POOL, generator)]
            found.rest[at], found.drawn[at] = rest, own
            # Both proposals at both sets of draws.
            both = torch.cat([sampled.drawn[at], own], dim=1)
            theirs = (probabilities.gather(1, both) / rest.clamp(min=TINY)[:, None]).log()
            mine = torch.cat([sampled.scores[at], start.logits(rows[at]).gather(1, own)], dim=1)
            proposed.append(torch.logaddexp(mine - sampled.normaliser[at, None], theirs) - math.log(2.0))
        if len(ids):
            sampled = dataclasses.replace(
                sampled, drawn=torch.cat([sampled.drawn, found.drawn], dim=1), scores=torch.cat(proposed),
                normaliser=torch.zeros_like(sampled.normaliser),
            )  # fmt: skip
        return found, sampled

    def digest(self) -> list[Tensor | str]:
        """What its words depend on, for `checkpoints.digest`."""
        own = [parameter for _, parameter in self.head.own_parameters()]
        layer = [one for one in self.layer if one is not None]
        parts = (self.parts.fit, self.parts.choose, self.parts.held_out)
        states = [state for part in parts for state in part.states]
        return [self.head.name, repr(self.head.softcap), *own, *layer, *states]
