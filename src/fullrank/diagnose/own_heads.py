"""The questions to a model that has one of our heads: each that its head allows.

    one row a token     every question is asked of f(W x + b), with the rows x for states. Where f bends the
                        scores, `better_head` is left out: its controls are softmaxes
    anything else       there is no single layer to ask. Loss, spectrum of W, geometry of the body's states,
                        and the least rank of the head's log-probabilities

Which head is which, `models.head_anatomy` says. The rank of what is not linear is that of sampled contexts
and tokens in fp64, as the monitors measure it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from fullrank.diagnose.answers import Answers, Progress
from fullrank.diagnose.monitors import sampled_log_probs
from fullrank.diagnose.questions import anisotropy, logprob_rank, loss
from fullrank.diagnose.settings import Settings
from fullrank.errors import FullrankError
from fullrank.fit.head_states import HeadStates
from fullrank.heads.base import Head
from fullrank.models.anatomy import Anatomy
from fullrank.models.head_anatomy import described, one_row
from fullrank.models.output_layer import OutputLayer
from fullrank.results.diagnosis import Anisotropy


def answers_of(head: Head) -> type[RowAnswers]:
    return RowAnswers if one_row(head) else MixtureAnswers


class RowAnswers(Answers):
    """The questions to a head that makes one row a token."""

    states: HeadStates

    def __init__(
        self,
        build: Anatomy,
        states: HeadStates | None,
        settings: Settings,
        name: Callable[[int], str],
        watched: tuple[Any, Tensor] | None = None,
        *,
        head: Head,
    ) -> None:
        super().__init__(build, states, settings, name, watched)
        self.head = head

    def loss(self, progress: Progress) -> object:
        states = self.states
        return loss.loss(states.losses, states.sizes, states.positions, states.blocks)

    def anisotropy(self, progress: Progress) -> object:
        states = self.states
        layers = tuple(
            anisotropy.layer_geometry(
                sampled,
                states.layer_positions,
                states.layer_blocks,
                layer=number,
                name=name,
                seed=self.settings.seed,
            )
            for number, (sampled, name) in enumerate(zip(states.sampled, states.layer_names, strict=True))
        )
        return Anisotropy(tokens=len(states.layer_positions), layers=layers)

    def logprob_rank(self, progress: Progress) -> object:
        if not self.output.linear:
            return logprob_rank.of_table(
                self._bent_table(), f"{self.head.name} bends the scores, so the width sets no ceiling"
            )
        return logprob_rank.logprob_rank(
            self.hidden,
            self.output,
            storage=self.build.facts.storage,
            states_rank=self.build.states_rank,
            norm=self._taken_by(),
            dtype=getattr(torch, self.build.facts.dtype),
            seed=self.settings.seed,
        )

    def better_head(self, progress: Progress) -> object:
        if not self.output.linear:
            raise FullrankError(
                f"{self.head.name} bends the scores of this model, and the heads of this question are "
                "refitted from a softmax"
            )
        return super().better_head(progress)

    def _taken_by(self) -> str:
        """What takes dimensions from the rows."""
        norm, lost = self.build.facts.final_norm, self.head.width - self.build.states_rank
        return norm if norm and lost == 1 and self.head.hidden == self.head.width else "the head's projection"

    def _bent_table(self) -> Tensor:
        """f(W x + b) of sampled rows and tokens, fp64: the rows as they are, so that no rank is rounding."""
        generator = torch.Generator().manual_seed(self.settings.seed)
        rows = torch.randperm(len(self.hidden), generator=generator)[: logprob_rank.CONTEXTS]
        tokens = torch.randperm(self.output.tokens, generator=generator)[: logprob_rank.COLUMNS]
        weight, bias = self.output.weight, self.output.bias
        tokens = tokens.to(weight.device)
        wide = OutputLayer(
            weight=weight[tokens].double(),
            bias=None if bias is None else bias[tokens].double(),
            pointwise=self.output.pointwise,
            tokens=len(tokens),
        )
        return wide.logits(self.hidden[rows.to(weight.device)].double())


class MixtureAnswers(RowAnswers):
    """The questions to a head that is no single layer: a softmax's figures would not be its own."""

    def logprob_rank(self, progress: Progress) -> object:
        states, device = self.states, self.output.weight.device
        # Whole segments: some heads look at the tokens before.
        count = len(states.targets) // states.segment
        shape, used = (count, states.segment), count * states.segment
        generator = torch.Generator().manual_seed(self.settings.seed)
        with torch.no_grad():
            table = sampled_log_probs(
                self.head,
                [one[:used].view(*shape, -1).to(device) for one in states.read],
                states.inputs[:used].view(shape).to(device),
                logprob_rank.CONTEXTS,
                generator,
            )
        if not bool(torch.isfinite(table).all()):
            raise FullrankError("some log-probabilities came out as no finite number, so they have no rank")
        why = f"The width sets no ceiling to {described(self.head)}"
        return logprob_rank.of_table(table, why)

    def rank_needed(self, progress: Progress) -> object:
        self._refuse()

    def better_head(self, progress: Progress) -> object:
        self._refuse()

    def unreachable(self, progress: Progress) -> object:
        self._refuse()

    def gradient(self, progress: Progress) -> object:
        self._refuse()

    def attention(self, progress: Progress) -> object:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise FullrankError(
            f"this question is about one linear output layer, and this model has {described(self.head)} "
            "instead"
        )
