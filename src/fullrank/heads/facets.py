"""Multi-facet softmax: several softmaxes, one of them with a facet for each part of the vocabulary.

Chang and McCallum 2022 (ACL, "Softmax bottleneck makes language models unable to represent multi-mode word
distributions"). With the states of `layers` layers at `positions` positions, the current one and those before
it (zero before the start):

    q = [h ; gelu(M [all layers x positions] + m)]                        2 H, h the last layer's state
    p = sum_s prior_s softmax(z_s),      prior = softmax(G q + c)         S softmaxes
    z_{1,v} = facet_{v mod P} . w_v + b_v                                 P partitions, one facet each
    z_{s,v} = facet_{P+s-1} . w_v + b_v                                   s = 2 .. S, whole vocabulary
    facet_j = L_j q                                                       D, without bias

L_j starts as [A | noise] with A the identity, noise uniform within +-0.5e-4 and none in the last facet, so
that the head starts as plain softmax. Where H != D, A is one random projection that all facets start with.

forward takes `layers` states, the last layer first, [..., time, H]; with positions > 1 the time axis must be
there. The loss asks the primitive for each part: P + 1 calls, S times the product of one softmax.

Parameters: V D + L P' H^2 + H + (P + S - 1) 2 H D + S (2 H + 1), + V with a bias; L layers, P' positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads.base import Head, States, require_positive
from fullrank.heads.confident import against, mixed_nll
from fullrank.heads.labels import Labels, Loss
from fullrank.heads.pieces import CountedTokens, cut, joined, piece_tokens
from fullrank.heads.start import Start
from fullrank.ops import linear_nll
from fullrank.ops.arguments import compute_dtype
from fullrank.ops.memory.reference import masked_logsumexp
from fullrank.ops.mixture.reference import bent_scores

NOISE = 1e-4
"""Width of the uniform noise that tells the facets apart at the start."""


class MultiFacet(Head):
    name = "facets"
    mixture: ClassVar[bool] = True

    def __init__(
        self,
        *,
        hidden: int,
        vocab: int,
        width: int | None = None,
        bias: bool = False,
        layers: int = 3,
        positions: int = 3,
        partitions: int = 4,
        softmaxes: int = 3,
    ) -> None:
        super().__init__(hidden=hidden, vocab=vocab, width=width, bias=bias)
        require_positive(layers=layers, positions=positions, partitions=partitions, softmaxes=softmaxes)
        if partitions > vocab:
            raise FullrankError(
                f"facets got partitions={partitions}, expected at most V={vocab}: every part needs a token"
            )
        self.positions, self.partitions, self.softmaxes = positions, partitions, softmaxes
        self.state_widths = (hidden,) * layers
        self.reads_time = positions > 1
        count = partitions + softmaxes - 1
        self.blend = nn.Linear(layers * positions * hidden, hidden)
        self.facets = nn.Linear(2 * hidden, count * self.width, bias=False)
        self.prior = nn.Linear(2 * hidden, softmaxes)
        with torch.no_grad():
            each = self.facets.weight.view(count, self.width, 2 * hidden)
            start = torch.eye(hidden) if self.width == hidden else nn.Linear(hidden, self.width).weight
            each[:, :, :hidden] = start
            each[:, :, hidden:].uniform_(-NOISE / 2, NOISE / 2)
            each[-1, :, hidden:] = 0.0

    def scored(self) -> int:
        return self.softmaxes * super().scored()

    @classmethod
    def options_for(cls, settings: Mapping[str, Any], widths: Sequence[int]) -> dict[str, Any]:
        """As many of the last layers as have one width, three as published at most."""
        same = [source == widths[0] for source in widths[: cls.options()["layers"]]]
        layers = same.index(False) if False in same else len(same)
        return {**super().options_for(settings, widths), "layers": layers}

    @classmethod
    def start_options(cls, start: Start, options: Mapping[str, Any]) -> dict[str, Any]:
        last, *below = start.widths
        if any(width != last for width in below):
            raise FullrankError(
                f"facets reads layers of one width, the body's have {below[0]} and its last state {last}: "
                "take doc, which reads them as they are"
            )
        return super().start_options(start, options)

    @torch.no_grad()
    def start_from(self, start: Start) -> None:
        """Without the noise between facets: their gates and parts of the vocabulary tell them apart."""
        self.facets.weight.view(-1, self.width, 2 * self.hidden)[:, :, self.hidden :] = 0.0
        self.prior.weight.div_(max(start.size, 1.0))
        super().start_from(start)

    def pace(self, name: str, parameter: Tensor, sizes: Sequence[float]) -> float:
        if parameter.ndim > 1 and name.startswith(("prior", "blend")):
            # To numbers of about unit size.
            return 1.0 / (parameter.shape[-1] * (sizes[0] if name.startswith("prior") else max(sizes)))
        return super().pace(name, parameter, sizes)

    def _checked(self, hidden: States, targets: Tensor | None, context: Tensor | None) -> list[Tensor]:
        states = super()._checked(hidden, targets, context)
        if self.positions > 1 and states[0].ndim < 3:
            raise FullrankError(
                f"facets reads {self.positions} positions of a sequence and got states of shape "
                f"{list(states[0].shape)}, expected [batch, time, H]: keep the time axis, or build it with "
                "positions=1"
            )
        return states

    def _inputs(self, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Flat last states [N, H] and all layers at all positions [N, L P' H]."""
        shifted = [
            # A sequence shorter than the shift has nothing that far back.
            state if back == 0 else nn.functional.pad(state, (0, 0, back, 0))[..., : state.shape[-2], :]
            for state in states
            for back in range(self.positions)
        ]
        return states[0].flatten(0, -2), torch.cat(shifted, dim=-1).flatten(0, -2)

    def _rows(self, last: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
        """Facets [n, P + S - 1, D] and log prior [n, S]."""
        blended = nn.functional.gelu(self.blend(window), approximate="tanh")
        query = torch.cat([last.to(blended.dtype), blended], dim=-1)
        rows = self.facets(query).unflatten(-1, (self.partitions + self.softmaxes - 1, self.width))
        log_prior = torch.log_softmax(self.prior(query).to(compute_dtype(last.dtype)), dim=-1)
        return rows, log_prior

    def _part(self, part: int) -> tuple[Tensor, Tensor | None]:
        """W and bias of one part of the vocabulary, as views."""
        step, bias = self.partitions, self.decoder.bias
        return self.decoder.weight[part::step], None if bias is None else bias[part::step]

    def _piece_log_probs(self, rows: Tensor, log_prior: Tensor) -> Tensor:
        """[n, V], materialised."""
        divided = log_prior.new_empty(rows.shape[0], self.vocab)
        for part in range(self.partitions):
            weight, bias = self._part(part)
            divided[:, part :: self.partitions] = bent_scores(rows[:, part], weight, bias, self.pointwise)
        decoder = self.decoder
        whole = bent_scores(rows[:, self.partitions :], decoder.weight, decoder.bias, self.pointwise)
        scores = torch.cat([divided[:, None], whole], dim=1)
        return torch.logsumexp(torch.log_softmax(scores, dim=-1) + log_prior[:, :, None], dim=1)

    def _pieces(self, tokens: int) -> list[slice]:
        # Each softmax holds its scores, their logarithms and a temporary.
        columns = 3 * (self.softmaxes + 1) * self.vocab
        return cut(tokens, piece_tokens(self.decoder.weight.device, columns))

    def _log_probs(self, states: list[Tensor], context: Tensor | None) -> Tensor:
        rows, log_prior = self._rows(*self._inputs(states))
        found = joined(
            lambda piece: self._piece_log_probs(rows[piece], log_prior[piece]), self._pieces(len(rows))
        )
        return found.view(*states[0].shape[:-1], self.vocab)

    def _loss(self, states: list[Tensor], labels: Labels, context: Tensor | None) -> Loss:
        tokens = CountedTokens(labels, self.vocab)
        last, window = self._inputs(states)
        rows, log_prior = self._rows(last[tokens.index], window[tokens.index])
        y, own = tokens.targets // self.partitions, tokens.targets % self.partitions
        nll, normalisers = torch.zeros_like(log_prior[:, 0]), []
        for part in range(self.partitions):
            weight, bias = self._part(part)
            # A target of another part has no row here: any row will do, and where() cuts its gradient.
            here = own == part
            found, lse = linear_nll(
                rows[:, part], weight, torch.where(here, y, 0), bias=bias, pointwise=self.pointwise
            )
            nll = torch.where(here, found, nll)
            normalisers.append(lse)
        every = torch.stack(normalisers, dim=1)
        others = torch.arange(self.partitions, device=own.device) != own[:, None]
        odds = masked_logsumexp(every, others) - every.gather(1, own[:, None])[:, 0]
        each = [(nll + against(odds))[:, None]]
        if self.softmaxes > 1:
            found, _ = linear_nll(
                rows[:, self.partitions :].flatten(0, 1),
                self.decoder.weight,
                tokens.targets.repeat_interleave(self.softmaxes - 1),
                bias=self.decoder.bias,
                pointwise=self.pointwise,
            )
            each.append(found.unflatten(0, (len(tokens), self.softmaxes - 1)))
        loss = tokens.reduce(mixed_nll(torch.cat(each, dim=1), log_prior))
        if not labels.stats:
            return Loss(loss, None, log_prior)
        stats = tokens.statistics(
            lambda piece: self._piece_log_probs(rows[piece], log_prior[piece]), self._pieces(len(tokens))
        )
        return Loss(loss, stats, log_prior)
