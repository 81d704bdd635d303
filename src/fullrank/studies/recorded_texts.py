"""Texts behind their prompts as tensors, and what a model's frozen layers make of them, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullrank.fit.loop import fast_products
from fullrank.models import loading, sampling
from fullrank.studies.generation_tasks import Example
from fullrank.studies.upper_layers import UpperLayers

RECORDED = 64
"""Texts that the frozen layers read at once."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Texts:
    """Texts of one length after padding at their end, which nothing before it sees."""

    context: Tensor
    """[n, time] ids, -1 under padding."""
    targets: Tensor
    """[n, time] the next ids; -100 in the prompt and under padding."""
    recorded: Tensor
    """[n, time, H] what enters the layers that are trained."""

    @property
    def ids(self) -> Tensor:
        return self.context.clamp_min(0)


class RecordedTexts:
    """Of one model; `longest` is the most tokens of a text."""

    def __init__(self, loaded: loading.Loaded, upper: UpperLayers, longest: int) -> None:
        self.loaded, self.upper, self.longest = loaded, upper, longest
        self.device = upper.model.device
        self._cut: dict[Example, tuple[list[int], int]] = {}
        self._recorded: dict[Example, Tensor] = {}
        """By text [time, H]."""

    def of(self, examples: Sequence[Example], width: int = 0) -> Texts:
        """Prompts and texts behind them, padded at the end, to a width or the longest of them, and what the
        frozen layers make of them."""
        rows = [self._ids(one) for one in examples]
        width = width or max(len(ids) for ids, _ in rows)
        context = torch.full((len(rows), width), -1)
        targets = torch.full((len(rows), width), -100)
        for row, (ids, first) in enumerate(rows):
            context[row, : len(ids)] = torch.tensor(ids)
            targets[row, first - 1 : len(ids) - 1] = torch.tensor(ids[first:], dtype=torch.long)
        context, targets = (one.to(self.device, non_blocking=True) for one in (context, targets))
        return Texts(context=context, targets=targets, recorded=self._record(context, examples))

    def _ids(self, example: Example) -> tuple[list[int], int]:
        """Of prompt and text, and how many are the prompt's; made once a text."""
        if example not in self._cut:
            tokenizer: Any = self.loaded.tokenizer
            prompt = sampling.prompt_ids(self.loaded, example.prompt)
            text = list(tokenizer(example.text, add_special_tokens=False, verbose=False)["input_ids"])
            self._cut[example] = (prompt + text)[: self.longest], len(prompt)
        return self._cut[example]

    def _record(self, context: Tensor, examples: Sequence[Example]) -> Tensor:
        """What enters the trained layers: made once a text, since all methods read the same texts."""
        new = [row for row, one in enumerate(examples) if one not in self._recorded]
        if new:
            with fast_products(self.device):
                recorded = self.upper.record(context[new].clamp_min(0))
            for row, states in zip(new, recorded, strict=True):
                # Without its padding, which nothing before it has seen.
                self._recorded[examples[row]] = states[: len(self._ids(examples[row])[0])].clone()
        rows = [self._recorded[one] for one in examples]
        padded = rows[0].new_zeros(len(rows), context.shape[1], rows[0].shape[1])
        for row, states in enumerate(rows):
            padded[row, : len(states)] = states
        return padded

    def read(self, examples: Sequence[Example]) -> None:
        """The frozen layers over all of them, many of about one length at once."""
        ordered = sorted(dict.fromkeys(examples), key=lambda one: len(self._ids(one)[0]))
        for start in range(0, len(ordered), RECORDED):
            some = ordered[start : start + RECORDED]
            if any(one not in self._recorded for one in some):
                self.of(some)
