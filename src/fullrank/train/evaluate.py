"""How well a model predicts a text: every token once, in nats, with a standard error.

    loss           Σ_t -log p(x_t | x_<t) / L, nats per token, the first token predicted from <eos>
    perplexity     exp(loss)
    bits per byte  Σ_t nats / ln 2 / bytes of the text: comparable across vocabularies

A recurrent body reads the text as `batch` contiguous pieces side by side and carries its state along each.
The start of a piece has seen one token only, so batch=1 is exact and a larger batch costs batch - 1 cold
starts. A body with a context reads windows of `length` tokens. With stride < length they overlap: every token
still counts once, and beyond the first window each sees more than length - stride tokens.

Rows of a batch know nothing of each other, so processes that each hold the model take every n-th row.

Neighbouring losses are alike, so tokens are not independent draws. The text is cut into contiguous blocks (64
unless told), and the standard error is that of the mean over blocks (`fit.estimates`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit import estimates
from fullrank.models import FullrankForCausalLM
from fullrank.models.anatomy import longest
from fullrank.results.evaluation import FrequencyBin
from fullrank.train import objective
from fullrank.train.batches import IGNORED, evaluation_streams, evaluation_windows

BLOCKS = 64
"""Blocks of text behind a standard error."""
EDGES = (0, 10, 100, 1_000, 10_000)
"""Lower ends of the bins of training frequency."""

# Losses that wait on the device before they are copied: a copy a batch would stop the device a batch.
_PENDING = 1 << 20

Progress = Callable[[float], None]
"""Told the share of the work that is done."""


class Split(Protocol):
    """A text as tokens."""

    @property
    def tokens(self) -> np.ndarray: ...

    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well a text was predicted."""

    loss: float
    """Mean nats per token."""
    standard_error: float
    """Of the loss, over contiguous blocks of text; inf where there are fewer than two."""
    perplexity: float
    bits_per_byte: float
    """Where part of the text was counted, its bytes are taken as that share of all bytes; nan without any."""
    counted: int
    """Tokens predicted, each once."""
    tokens: int
    """Of the whole text."""
    seconds: float


def evaluate(
    model: FullrankForCausalLM,
    split: Split,
    *,
    eos: int,
    batch: int,
    length: int,
    stride: int | None = None,
    limit: int = 0,
    pieces: int = 1,
    device: torch.device | str = "cpu",
    blocks: int = BLOCKS,
    progress: Progress | None = None,
    rank: int = 0,
    processes: int = 1,
) -> Evaluation:
    """Predict the split, or `limit` tokens of it: its first ones, or so many pieces from all over it. stride
    is for bodies with a context, None is length. Several processes call this together, each on its share."""
    start = time.perf_counter()
    losses = token_losses(
        model,
        spread(split.tokens, limit, pieces),
        eos=eos,
        batch=batch,
        length=length,
        stride=stride,
        device=device,
        progress=progress,
        rank=rank,
        processes=processes,
    )
    if processes > 1:
        # Zero wherever another process has it.
        every = torch.from_numpy(losses).to(device)
        torch.distributed.all_reduce(every)
        losses = every.cpu().numpy()
    return summarise(losses, split, seconds=time.perf_counter() - start, blocks=blocks)


def summarise(losses: np.ndarray, split: Split, *, seconds: float, blocks: int = BLOCKS) -> Evaluation:
    """From the loss of each token [L] in text order, the first L of the split."""
    tokens, counted = len(split.tokens), len(losses)
    loss, error, _ = estimates.mean_and_error(torch.from_numpy(losses), _blocks(counted, blocks))
    size = split.bytes * counted / tokens
    return Evaluation(
        loss=loss,
        standard_error=error,
        # Beyond e^700 there is no float; nan stays nan.
        perplexity=math.inf if loss > 700 else math.exp(loss),
        bits_per_byte=loss * counted / math.log(2) / size if size else math.nan,
        counted=counted,
        tokens=tokens,
        seconds=seconds,
    )


def spread(tokens: np.ndarray, limit: int, pieces: int) -> np.ndarray:
    """About `limit` tokens, all with 0: equal pieces at equal distances, the same at every call. With as many
    as a batch has rows none runs on into another."""
    size = limited(tokens, limit).shape[0] // max(1, pieces)
    if not limit or limit >= len(tokens) or pieces < 2 or not size:
        return limited(tokens, limit)
    last = len(tokens) - size
    starts = [place * last // (pieces - 1) for place in range(pieces)]
    return np.concatenate([np.asarray(tokens[start : start + size]) for start in starts])


def limited(tokens: np.ndarray, limit: int) -> np.ndarray:
    """The first `limit` tokens, all with 0."""
    if limit < 0:
        raise FullrankError(f"limit={limit} is impossible: expected tokens to count, or 0 for all")
    return tokens[:limit] if limit else tokens


def token_losses(
    model: FullrankForCausalLM,
    tokens: np.ndarray,
    *,
    eos: int,
    batch: int,
    length: int,
    stride: int | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    keep: Callable[[Tensor, Tensor], None] | None = None,
    rank: int = 0,
    processes: int = 1,
) -> np.ndarray:
    """-log p of every token [L], fp32 nats in text order; of one of several processes 0 for all tokens but
    those in its rows.

    `keep(positions, states)` is given the last layer's states [n, H], what the head reads, and the positions
    [n] of the tokens that they predicted: for the neural cache.
    """
    device = torch.device(device)

    def batches() -> Iterator[tuple[Tensor, Tensor, bool]]:
        return batches_of(model, tokens, eos=eos, batch=batch, length=length, stride=stride)

    losses = torch.full((len(tokens),), torch.nan if processes == 1 else 0.0)
    waiting: list[tuple[Tensor, Tensor, Tensor]] = []
    done = 0
    carried: objective.Carried = ()
    with in_eval_mode(model), torch.no_grad():
        for ids, targets, fresh, position in _places(batches, tokens):
            done += len(position)
            if processes > 1:
                own = torch.arange(len(ids)) % processes == rank
                counted = targets != IGNORED
                position = position[(counted & own[:, None])[counted]]
                ids, targets = ids[own], targets[own]
            if not len(ids):
                continue
            found = objective.token_losses(
                model,
                ids.to(device, non_blocking=True),
                targets.to(device, non_blocking=True),
                () if fresh else carried,
            )
            carried = found.carried
            counted = targets != IGNORED
            waiting.append((found.nll, counted, position))
            if len(waiting) * targets.numel() > _PENDING:
                _settle(losses, waiting)
            if keep is not None:
                keep(position, found.state.float().cpu()[counted])
            if progress is not None:
                progress(done / len(tokens))
        _settle(losses, waiting)
    return losses.numpy()


def _places(
    batches: Callable[[], Iterator[tuple[Tensor, Tensor, bool]]], tokens: np.ndarray
) -> Iterator[tuple[Tensor, Tensor, bool, Tensor]]:
    """Batches with the positions in the text of their counted targets, row after row.

    Until the text starts afresh, a row of the batches is one contiguous piece of text, and the rows follow
    each other. A first round through the batches, without the model, counts how long the rows are.
    """
    groups: list[Tensor] = []
    for _, targets, fresh in batches():
        counts = (targets != IGNORED).sum(1)
        if fresh or not groups:
            groups.append(counts)
        else:
            groups[-1] += counts
    ends = torch.cat(groups).cumsum(0)
    starts = iter(torch.cat([ends.new_zeros(1), ends[:-1]]).split([len(group) for group in groups]))
    if int(ends[-1]) != len(tokens):
        raise FullrankError(
            f"the batches count {int(ends[-1])} of {len(tokens)} tokens: each must count once"
        )
    filled = torch.empty(0)
    for index, (ids, targets, fresh) in enumerate(batches()):
        fresh = fresh or index == 0
        if fresh:
            filled = next(starts).clone()
        counted = targets != IGNORED
        position = (filled[:, None] + counted.cumsum(1) - 1)[counted]
        filled += counted.sum(1)
        # Cheap beside the model, and a wrong order would give a plausible wrong number.
        if not np.array_equal(tokens[position.numpy()], targets[counted].numpy()):
            raise FullrankError(
                "a batch does not hold the text in order: each row must be one contiguous piece, and the "
                "rows must follow each other"
            )
        yield ids, targets, fresh, position


def _settle(losses: Tensor, waiting: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    for nll, counted, position in waiting:
        losses[position] = nll.float().cpu()[counted]
    waiting.clear()


def batches_of(
    model: FullrankForCausalLM,
    tokens: np.ndarray,
    *,
    eos: int,
    batch: int,
    length: int,
    stride: int | None = None,
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """ids, targets [batch, time] and whether the text starts afresh: streams or windows, by the body."""
    if model.carries_state:
        if stride is not None and stride != length:
            raise FullrankError(
                f"stride={stride} is for bodies with a context, this one carries its state over the whole "
                "text: leave it out"
            )
        # More rows than tokens would be empty.
        return evaluation_streams(tokens, eos, min(batch, max(1, len(tokens))), length)
    context = longest(model)
    if context is not None and length > context:
        raise FullrankError(f"length={length} is more than the body's context of {context}: use {context}")
    return evaluation_windows(tokens, eos, batch, length, length if stride is None else stride)


@contextlib.contextmanager
def in_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """No dropout of any kind inside; every module's own training flag comes back."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, flag in before.items():
            module.training = flag


def token_counts(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """How often each of the V types occurs, [V]."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    # In parts: bincount makes a wide copy, and a token file may be larger than memory.
    for start in range(0, len(tokens), 1 << 22):
        counts += np.bincount(tokens[start : start + (1 << 22)], minlength=vocabulary)
    return counts


def by_frequency(
    losses: np.ndarray,
    targets: np.ndarray,
    counts: np.ndarray,
    *,
    edges: Sequence[int] = EDGES,
    blocks: int = BLOCKS,
) -> tuple[FrequencyBin, ...]:
    """Mean nats of the tokens in each bin of training frequency: where a head gains, rare words or common.

    losses and targets are [L] in text order, counts [V] from the training split.
    """
    if losses.shape != targets.shape:
        raise FullrankError(
            f"losses {list(losses.shape)} and targets {list(targets.shape)} differ: expected one loss a token"
        )
    seen = torch.from_numpy(counts[np.asarray(targets)])
    values, place = torch.from_numpy(losses), _blocks(len(losses), blocks)
    bins = []
    for low, high in zip(edges, (*edges[1:], None), strict=True):
        chosen = seen >= low if high is None else (seen >= low) & (seen < high)
        counted = int(chosen.sum())
        loss, error = math.nan, math.inf
        if counted:
            loss, error, _ = estimates.mean_and_error(values[chosen], place[chosen])
        bins.append(FrequencyBin(low=low, high=high, counted=counted, loss=loss, standard_error=error))
    return tuple(bins)


def _blocks(counted: int, blocks: int) -> Tensor:
    """The block of each token: contiguous, of sizes that differ by one at most."""
    if blocks < 2:
        raise FullrankError(f"blocks={blocks} give no standard error: expected at least 2")
    return torch.arange(counted) * min(blocks, counted) // max(counted, 1)


__all__ = [
    "Evaluation",
    "batches_of",
    "by_frequency",
    "evaluate",
    "summarise",
    "token_counts",
    "token_losses",
]
