"""The questions over one model's states, a method each, and what each takes of the memory allowed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fullrank.diagnose.attention import question as attention
from fullrank.diagnose.questions import (
    anisotropy,
    better_head,
    gradient,
    logprob_rank,
    loss,
    rank_needed,
    spectrum,
    unreachable,
)
from fullrank.diagnose.settings import LARGEST_BUFFER, Settings
from fullrank.errors import FullrankError
from fullrank.fit import collect, comparison
from fullrank.fit import states as states_of
from fullrank.fit.controls import plain_layer
from fullrank.heads import Head
from fullrank.models import anatomy

Progress = Callable[[str, float], None]


class Answers:
    """The questions over one model's states, a method each; what two of them share is made once.

    A method that raises FullrankError leaves its question without an answer, for that reason.
    """

    states: collect.States

    def __init__(
        self,
        build: anatomy.Anatomy,
        states: collect.States | None,
        settings: Settings,
        name: Callable[[int], str],
        watched: tuple[Any, torch.Tensor] | None = None,
    ) -> None:
        """`states` is None where only questions by name are asked; `watched` is a model and its windows."""
        self.build, self.settings, self.name, self.watched = build, settings, name, watched
        self.output = build.output
        self._ready: tuple[Head, states_of.Parts] | None = None
        self.held = 0
        if states is not None:
            self.states = states
            device = self.output.weight.device
            self.hidden = states.hidden.to(device)
            self.targets = states.targets.to(device)
            self.held = 4 * (states.hidden.numel() + states.layers.numel())
        # A quarter of what is left for one V-wide buffer: there may be two, and what a question holds itself.
        self.limit = min(LARGEST_BUFFER, max(1, settings.memory - self.held) // 4)

    def needs(self, question: str) -> int:
        """Bytes that a question takes at most, beside the model, one copy of W in fp32, and the states."""
        V, D = self.output.weight.shape
        N, sampled = (0, 0) if not self.held else (len(self.hidden), len(self.states.layer_positions))
        # Slices of W in fp64, and their Gram matrix with its vectors.
        slices = 32 * min(V, 8192) * D + 64 * D * D
        biased = 4 * V * (D + 1) if self.output.bias is not None else 0
        match question:
            case "loss":
                return self.limit * 5 // 4
            case "spectrum":
                return slices
            case "anisotropy":
                return 40 * sampled * D
            case "logprob_rank":
                return slices + 40 * min(N, logprob_rank.SLICE + D) * D + 3 * biased
            case "gradient":
                return slices + 2 * self.limit
            case "rank_needed" | "better_head":
                # W refitted, rows of it that are not drawn from, with those that are trained, for a planted
                # gain and for what is written down; the states in three parts, and their rows.
                return 40 * V * D + 12 * N * D + self.limit * 3 // 2
            case "unreachable":
                # W and its standard coordinates in fp64, and a copy in fp32 for the search.
                return 24 * V * D + 16 * min(V * V, 1 << 25)
        return 0

    def check_memory(self, question: str) -> None:
        """Raise where an answer would take more memory than it may."""
        needed = self.held + self.needs(question)
        if needed > self.settings.memory:
            raise FullrankError(
                f"states and buffers of this question take {needed / 2**30:.1f} GiB, more than --memory "
                f"{self.settings.memory / 2**30:.1f} GiB: allow more"
            )

    def ready(self) -> tuple[Head, states_of.Parts]:
        """The output layer as a head, and the states in three parts."""
        if self._ready is None:
            length = int((self.states.windows == 0).sum())
            device = self.output.weight.device
            whole = states_of.Part(
                states=(self.hidden.view(-1, length, self.hidden.shape[-1]),),
                targets=self.targets.view(-1, length),
                ids=self.targets.view(-1, length),
                blocks=self.states.blocks.view(-1, length).to(device),
            )
            self._ready = plain_layer(self.output), states_of.split(whole)
        return self._ready

    def _heads(self) -> tuple[str, ...]:
        # A trunk gains no more than the mixture it is cut from; fitting it says how much less.
        weight = self.output.weight
        cheap = weight.device.type != "cpu" or len(weight) <= comparison.SMALL_VOCABULARY
        return ("mos", "trunk") if cheap else ("mos",)

    def effort(self) -> comparison.Settings:
        """What fits may take."""
        settings = self.settings
        return comparison.Settings(
            memory=4 * self.limit, seeds=settings.seeds, work=settings.fit_work, seed=settings.seed
        )

    def loss(self, progress: Progress) -> object:
        losses = torch.cat(
            [
                self.output.losses(hidden, targets, self.limit)
                for hidden, targets in zip(self.hidden.split(1024), self.targets.split(1024), strict=True)
            ]
        ).cpu()
        return loss.loss(losses, self.states.sizes, self.states.positions, self.states.blocks)

    def spectrum(self, progress: Progress) -> object:
        return spectrum.spectrum(self.output.weight[: self.output.tokens], self.build.facts.storage)

    def anisotropy(self, progress: Progress) -> object:
        if not self.states.layer_names:
            raise FullrankError("the layers of this architecture were not recognised")
        return anisotropy.anisotropy(
            self.states.layers,
            self.states.layer_positions,
            self.states.layer_blocks,
            self.states.layer_names,
            seed=self.settings.seed,
        )

    def logprob_rank(self, progress: Progress) -> object:
        return logprob_rank.logprob_rank(
            self.hidden,
            self.output,
            storage=self.build.facts.storage,
            states_rank=self.build.states_rank,
            norm=self.build.facts.final_norm,
            dtype=getattr(torch, self.build.facts.dtype),
            seed=self.settings.seed,
        )

    def rank_needed(self, progress: Progress) -> object:
        plain, parts = self.ready()
        # Many ranks share what one head has.
        effort = dataclasses.replace(self.effort(), work=self.settings.fit_work / 10)
        return rank_needed.rank_needed(plain, parts, settings=effort, progress=progress)

    def better_head(self, progress: Progress) -> object:
        plain, parts = self.ready()
        return better_head.better_head(
            plain,
            parts,
            heads=self.settings.heads or self._heads(),
            components=self.settings.components,
            measure_power=self.settings.power,
            settings=self.effort(),
            progress=progress,
        )

    def unreachable(self, progress: Progress) -> object:
        return unreachable.unreachable(
            self.output,
            self.name,
            seconds=self.settings.search_seconds,
            seed=self.settings.seed,
            progress=progress,
        )

    def attention(self, progress: Progress) -> object:
        assert self.watched is not None
        # Let go of it here, so that the questions after this one have the model's memory.
        (model, ids), self.watched = self.watched, None
        return attention.attention(
            model,
            self.output,
            ids,
            memory=self.settings.memory,
            loss_tokens=self.settings.attention_loss_tokens,
            seed=self.settings.seed,
            progress=progress,
        )

    def gradient(self, progress: Progress) -> object:
        step = max(1, len(self.targets) // self.settings.gradient_tokens)
        return gradient.gradient(
            self.hidden[::step],
            self.targets[::step],
            self.states.blocks[::step],
            self.output,
            limit=self.limit,
        )
