"""How well a distribution completes an ambiguous prompt.

    Acc@k        share of prompts with both answers among the k likeliest tokens
    distracted   share of prompts in which a distractor is likelier than the less likely answer

A word is known by its first piece, with a leading space or without, whichever is likelier. `memory_log_probs`
is the distribution of the memory alone, of any model's states: log of the sum over remembered steps i with
x_{i+1} = w of exp(h_t . h_i / temperature), normalised; a token that is not remembered is in no top k.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullrank.studies.templates import Prompt

TOP = (2, 5, 10, 25)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
    """A prompt as ids."""

    ids: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]
    """First piece with and without a space, of both answers and both distractors, in this order."""

    @property
    def answers(self) -> tuple[int, int]:
        return self.pieces[0][0], self.pieces[1][0]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Prompts of one length."""

    ids: Tensor
    """[n, time]"""
    pieces: Tensor
    """[n, 4, 2]"""
    recorded: Tensor
    """[n, time, H] what enters the layers that are trained."""

    def __len__(self) -> int:
        return len(self.ids)

    def some(self, chosen: Tensor | slice) -> Batch:
        return Batch(ids=self.ids[chosen], pieces=self.pieces[chosen], recorded=self.recorded[chosen])


def encode(tokenizer: Any, prompt: Prompt) -> Encoded | None:
    """The prompt in a tokenizer's ids; None where the pieces of its words cannot be told apart."""
    ids = _ids(tokenizer, prompt.text)
    pieces = []
    for word in (*prompt.answers, *prompt.distractors):
        whole = _ids(tokenizer, f"{prompt.text} {word}")
        bare = tokenizer(word, add_special_tokens=False, verbose=False)["input_ids"]
        if whole[: len(ids)] != ids or len(whole) == len(ids) or not bare:
            return None
        pieces.append((whole[len(ids)], bare[0]))
    if len({with_space for with_space, _ in pieces}) < len(pieces):
        return None
    if not {pieces[0][0], pieces[1][0]} <= set(ids):
        return None
    return Encoded(ids=tuple(ids), pieces=tuple(pieces))


def by_length(prompts: Sequence[Encoded]) -> list[tuple[Tensor, Tensor]]:
    """Ids [n, time] and pieces [n, 4, 2], one entry a length: nothing is padded."""
    groups: dict[int, list[Encoded]] = defaultdict(list)
    for prompt in prompts:
        groups[len(prompt.ids)].append(prompt)
    return [
        (torch.tensor([one.ids for one in group]), torch.tensor([one.pieces for one in group]))
        for _, group in sorted(groups.items())
    ]


def ranks(log_probs: Tensor, pieces: Tensor) -> Tensor:
    """Ranks [n, 4] of words with pieces [n, 4, 2] under log-probabilities [n, V]: 1 is the likeliest token.

    A word of probability 0 has a rank beyond V.
    """
    found = log_probs[:, None, :].expand(-1, pieces.shape[1], -1).gather(2, pieces).amax(dim=2)
    before = torch.stack([(log_probs > column[:, None]).sum(dim=1) for column in found.unbind(dim=1)], dim=1)
    return torch.where(torch.isneginf(found), log_probs.shape[1] + 1, before + 1)


def accuracy(found: Tensor) -> dict[str, float]:
    """Acc@k by k, and the share that is distracted, from ranks [n, 4]."""
    both = found[:, :2].amax(dim=1)
    shares = {str(k): float((both <= k).double().mean()) for k in TOP}
    return shares | {"distracted": float((found[:, 2:].amin(dim=1) < both).double().mean())}


@torch.no_grad()
def memory_log_probs(states: Tensor, ids: Tensor, vocabulary: int, temperature: float) -> Tensor:
    """The memory's own log-probabilities [n, V] at the last of states [n, time, H] over ids [n, time]."""
    scores = torch.einsum("nh,nth->nt", states[:, -1], states[:, :-1]) / temperature
    mass = torch.softmax(scores.double(), dim=1)
    table = torch.zeros(len(ids), vocabulary, dtype=torch.float64, device=ids.device)
    return table.scatter_add_(1, ids[:, 1:], mass).log()


def _ids(tokenizer: Any, text: str) -> list[int]:
    """As a model gets a text that goes on: with the token that begins it, if any, and none that ends it."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids
