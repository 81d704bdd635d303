"""The continuous neural cache: states vote for the tokens that followed them (Grave et al. 2017, 1612.04426).

    p(y | h_t)       = (1 - weight) p_model(y | h_t) + weight · p_cache(y | h_t)
    p_cache(y | h_t) = Σ_{i: x_i = y} exp(theta h_t · h_i) / Σ_i exp(theta h_t · h_i)

h_i is the last layer's state that predicted token x_i, as the head reads it, without dropout; i runs over the
`window` tokens before t. Nothing is trained. Only the target's probability is needed, so no N x V tensor is
made: log p = logaddexp(log(1 - weight) + log p_model(y), log weight + log p_cache(y)), in fp32.

The cache is used from the second token on with what it holds; the public code of AWD-LSTM leaves it out until
`window` tokens have gone by, which gives the first 3785 tokens of WikiText-2 the plain loss. With an empty
cache, at the first token, the model stands alone.

`trace` takes a run's model through a text, `trace_transformers` any causal language model of transformers,
one of ours included; what follows is the same for both.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.models import FullrankForCausalLM, anatomy
from fullrank.models.loading import Loaded, quiet
from fullrank.ops.arguments import widest_dtype
from fullrank.train.evaluate import BLOCKS, Evaluation, Progress, Split, limited, summarise, token_losses

WEIGHTS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
SHARPNESS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""theta times the mean squared norm of the states: nats between a state and one at a right angle to it."""

# Scores of a piece of tokens against its window, in bytes; several such buffers live at once.
_BYTES = 32 << 20
# States beyond this lie in an unnamed temporary file.
_IN_MEMORY = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Settings; the defaults are those published for AWD-LSTM on WikiText-2."""

    weight: float = 0.1279
    """Of the cache in the mixture, lambda."""
    theta: float = 0.662
    window: int = 3785
    """Tokens that the cache holds."""

    def __post_init__(self) -> None:
        if not 0 <= self.weight < 1:
            raise FullrankError(f"weight={self.weight} is impossible: expected 0 <= weight < 1")
        # Beyond this its product with a score is no fp32 number.
        if not abs(self.theta) <= 1e9:
            raise FullrankError(f"theta={self.theta} is impossible: expected a number of 1e9 at most")
        if self.window < 1:
            raise FullrankError(f"window={self.window} is impossible: expected at least 1 token")


@dataclass(frozen=True, kw_only=True)
class CacheEvaluation:
    """What came out, and with which settings."""

    evaluation: Evaluation
    settings: Cache
    losses: np.ndarray
    """[counted], nats in text order."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A model's way through a text: all that a cache needs."""

    tokens: np.ndarray
    """[L]"""
    losses: np.ndarray
    """[L], of the model alone, nats."""
    states: np.ndarray
    """[L, H], fp32: states[i] predicted tokens[i]."""


def trace(
    model: FullrankForCausalLM,
    tokens: np.ndarray,
    *,
    eos: int,
    batch: int,
    length: int,
    stride: int | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Trace:
    """Run the model over a text once; every setting of the cache can then be tried."""
    shape = (len(tokens), model.config.hidden_size)
    if math.prod(shape) * 4 > _IN_MEMORY:
        with tempfile.TemporaryFile() as file:  # the map keeps it open
            states: np.ndarray = np.memmap(file, dtype=np.float32, shape=shape, mode="w+")
    else:
        states = np.empty(shape, dtype=np.float32)

    def keep(positions: Tensor, found: Tensor) -> None:
        states[positions.numpy()] = found.numpy()

    losses = token_losses(
        model,
        tokens,
        eos=eos,
        batch=batch,
        length=length,
        stride=stride,
        device=device,
        progress=progress,
        keep=keep,
    )
    return Trace(tokens=tokens, losses=losses, states=states)


@torch.no_grad()
def trace_transformers(
    loaded: Loaded, ids: Tensor, *, batch: int = 4, progress: Progress | None = None
) -> Trace:
    """Run a model of transformers over windows of ids [windows, window], in the order of the text.

    A window sees nothing before it, as in `fit.collect`; its tokens but the first are predicted. The
    cache sees across windows.
    """
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise FullrankError(
            f"the text has windows of shape {list(ids.shape)}, expected [windows, window] of 2 tokens or more"
        )
    model: Any = loaded.model
    upgraded = hasattr(model, "head_inputs")
    output = None if upgraded else anatomy.examine(loaded).output
    device = next(model.parameters()).device
    losses, found = [], []
    for start in range(0, len(ids), batch):
        piece = ids[start : start + batch].to(device)
        targets = piece[:, 1:]
        with quiet():
            if output is None:
                # One of our heads, which may read more than the last state; the cache reads that one.
                states, context, _ = model.head_inputs(piece)
                states = [state[:, :-1] for state in states]
                known = None if context is None else context[:, :-1]
                nll = model.lm_head(states, targets, context=known, reduction="none")
                last = states[0]
            else:
                last = anatomy.states(model, piece)[:, :-1]
                nll = output.losses(last.float().flatten(0, 1), targets.flatten())
        losses.append(nll.float().flatten().cpu().numpy())
        found.append(last.float().flatten(0, 1).cpu().numpy())
        if progress is not None:
            progress(min(1.0, (start + batch) / len(ids)))
    return Trace(
        tokens=ids[:, 1:].flatten().cpu().numpy(), losses=np.concatenate(losses), states=np.concatenate(found)
    )


def evaluate_cache(
    model: FullrankForCausalLM,
    split: Split,
    *,
    eos: int,
    batch: int,
    length: int,
    stride: int | None = None,
    settings: Cache | None = None,
    limit: int = 0,
    device: torch.device | str = "cpu",
    blocks: int = BLOCKS,
    progress: Progress | None = None,
) -> CacheEvaluation:
    """Predict the split, or its first `limit` tokens, with model and cache."""
    settings = Cache() if settings is None else settings
    start = time.perf_counter()
    way = trace(
        model,
        limited(split.tokens, limit),
        eos=eos,
        batch=batch,
        length=length,
        stride=stride,
        device=device,
        progress=None if progress is None else lambda share: progress(share / 2),
    )
    losses = with_cache(
        way,
        settings,
        device=device,
        progress=None if progress is None else lambda share: progress(0.5 + share / 2),
    )
    evaluation = summarise(losses, split, seconds=time.perf_counter() - start, blocks=blocks)
    return CacheEvaluation(evaluation=evaluation, settings=settings, losses=losses)


def with_cache(
    way: Trace, settings: Cache, *, device: torch.device | str = "cpu", progress: Progress | None = None
) -> np.ndarray:
    """-log p of every token [L] under model and cache, fp32 nats."""
    losses = np.empty(len(way.tokens), dtype=np.float32)
    for start, votes in _votes(way, settings.window, (settings.theta,), device):
        part = slice(start, start + votes.shape[1])
        own = torch.from_numpy(way.losses[part]).to(votes.device)
        losses[part] = _mixed(own, votes[0], settings.weight, empty=start == 0).cpu().numpy()
        if progress is not None:
            progress(part.stop / len(losses))
    return losses


def tune(
    way: Trace,
    *,
    windows: Iterable[int] = (500, Cache.window),
    thetas: Sequence[float] = (),
    weights: Sequence[float] = WEIGHTS,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Cache:
    """The settings of a small grid with the lowest loss on a text: use the validation split.

    Without thetas, the grid is the published one and SHARPNESS over the mean squared norm of these states,
    since states of one model are ten times as long as those of another.
    """
    if not thetas:
        size = float(
            np.mean([np.square(rows).sum(1).mean() for rows in np.array_split(way.states, 16) if len(rows)])
        )
        thetas = (Cache.theta, *(sharpness / size for sharpness in SHARPNESS if size > 0))
    windows = sorted(set(windows))
    found: list[tuple[float, Cache]] = []
    for number, window in enumerate(windows):
        totals = np.zeros((len(thetas), len(weights)))
        for start, votes in _votes(way, window, thetas, device):
            part = slice(start, start + votes.shape[1])
            own = torch.from_numpy(way.losses[part]).to(votes.device)
            for column, weight in enumerate(weights):
                mixed = _mixed(own, votes, weight, empty=start == 0)
                totals[:, column] += mixed.sum(1, dtype=widest_dtype(mixed.device)).cpu().numpy()
            if progress is not None:
                progress((number + part.stop / len(way.tokens)) / len(windows))
        for (row, column), total in np.ndenumerate(totals):
            settings = Cache(weight=weights[column], theta=float(thetas[row]), window=window)
            found.append((float(total), settings))
    return min(found, key=lambda entry: entry[0])[1]


def _votes(
    way: Trace, window: int, thetas: Sequence[float], device: torch.device | str
) -> Iterator[tuple[int, Tensor]]:
    """Pieces of text: their start, and log p_cache of their tokens [thetas, n]; -inf where no state votes."""
    total = len(way.tokens)
    step = max(1, min(512, _BYTES // 4 // (window + 512)))
    for start in range(0, total, step):
        end, first = min(start + step, total), max(0, start - window)
        states = torch.from_numpy(np.ascontiguousarray(way.states[first:end])).to(device)
        tokens = torch.from_numpy(way.tokens[first:end].astype(np.int64)).to(device)
        # Narrow dtypes of a caller's autocast would lose whole nats of theta h·h.
        with torch.autocast(states.device.type, enabled=False), torch.no_grad():
            products = states[start - first :] @ states.T
            now = torch.arange(start - first, end - first, device=states.device)[:, None]
            then = torch.arange(end - first, device=states.device)
            held = (then < now) & (then >= now - window)
            right = held & (tokens == tokens[start - first :, None])
            votes = []
            for theta in thetas:
                scores = theta * products
                every = scores.masked_fill(~held, -torch.inf).logsumexp(1)
                agreeing = scores.masked_fill_(~right, -torch.inf).logsumexp(1)
                # The first token has an empty cache: -inf, not -inf + inf.
                votes.append(agreeing - every.masked_fill(torch.isneginf(every), 0.0))
        yield start, torch.stack(votes)


def _mixed(own: Tensor, votes: Tensor, weight: float, *, empty: bool) -> Tensor:
    """-log p of the mixture from the model's losses [n] and the cache's log-probabilities [..., n]."""
    if weight == 0:
        return own.expand_as(votes).clone()
    mixed = -torch.logaddexp(math.log1p(-weight) - own, math.log(weight) + votes)
    if empty:
        mixed[..., 0] = own[0]
    return mixed


__all__ = [
    "Cache",
    "CacheEvaluation",
    "Trace",
    "evaluate_cache",
    "trace",
    "trace_transformers",
    "tune",
    "with_cache",
]
