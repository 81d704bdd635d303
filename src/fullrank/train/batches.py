"""Batches as a pure function of a cursor: resuming a run needs the cursor and nothing else.

Streams are for bodies that carry a state. The L tokens of a split are cut into `batch` contiguous streams of
n = (L - 1) // batch predictions; row r of the step at position p has the tokens r n + p to r n + p + T as
input and the ones after them as targets. The first token is never a target, and the last (L - 1) mod batch
ones are left out, fewer than `batch`. Every other token is predicted once an epoch. Streams that rotate take
the tokens as a ring, which every epoch cuts at another place: without that, or jitter, all epochs have the
same batches.

With jitter T is drawn as for AWD-LSTM (Merity et al. 2017, 1708.02182): normal with standard deviation 5
around `length`, or around half of it with probability 0.05, at least 5, at most length + 20. Without jitter T
= length. The last step of an epoch is what is left of the streams.

Windows are for transformers. An epoch cuts the tokens into windows of `length` predictions, from a random
offset on, and takes them in random order. A last batch that is not full is left out, and so are the tokens
before the offset; other ones in the next epoch.

Evaluation leaves nothing out: every token of a split is a target exactly once, the first one after <eos>.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.train.config import Config

IGNORED = -100
"""The target where there is nothing to predict."""
HALF = 0.05
"""Probability of a step around half of the length."""
DEVIATION = 5.0
SHORTEST = 5
LONGER = 20
"""Most tokens that jitter adds to the length."""
ALL = slice(None)

# Lengths, offsets and orders of one seed come from different numbers.
_LENGTHS, _OFFSETS, _ORDERS = range(3)
_DRAWN = 1024
"""Lengths drawn at once."""


@dataclass(frozen=True)
class Cursor:
    """Where in the training data a run is."""

    epoch: int = 0
    position: int = 0
    """Streams: tokens of each stream that were predicted in this epoch; Windows: windows that were taken."""
    step_in_epoch: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cursor:
        names = set(cls.__dataclass_fields__)
        if set(data) != names or any(type(value) is not int or value < 0 for value in data.values()):
            raise FullrankError(
                f"{data!r} is no place in the data: expected {', '.join(sorted(names))} as whole numbers >= 0"
            )
        return cls(**data)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The rows of one process of one step's batch."""

    ids: Tensor
    """[rows, T] int64."""
    targets: Tensor
    """[rows, T] int64, the tokens after `ids`; IGNORED where there is nothing to predict."""
    fresh: bool
    """Whether a carried state must be reset before this batch."""
    tokens: int
    """Targets that count, over all rows of the whole batch."""
    next: Cursor
    length_scale: float
    """T over the configured length, to scale the learning rate with."""
    epoch: float
    """Epochs done after this batch."""


class Ahead:
    """Batches made one step before they are asked for, by a thread; in pinned memory they are copied to a
    device beside its work."""

    def __init__(self, batches: Streams | Windows, rows: slice = ALL, *, pinned: bool) -> None:
        self._batches, self._rows, self._pinned = batches, rows, pinned
        self._pool = ThreadPoolExecutor(1)
        self._next: tuple[Cursor, Future[Batch]] | None = None

    def take(self, cursor: Cursor) -> Batch:
        if self._next is not None and self._next[0] == cursor:
            batch = self._next[1].result()
        else:
            batch = self._make(cursor)
        self._next = batch.next, self._pool.submit(self._make, batch.next)
        return batch

    def _make(self, cursor: Cursor) -> Batch:
        batch = self._batches.take(cursor, self._rows)
        if not self._pinned:
            return batch
        return replace(batch, ids=batch.ids.pin_memory(), targets=batch.targets.pin_memory())

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class Streams:
    """`batch` contiguous streams, T tokens of each a step."""

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        batch: int,
        length: int,
        jitter: bool = False,
        seed: int = 0,
        longer: int = LONGER,
        rotate: bool = False,
    ) -> None:
        _require_batch(tokens, batch, length)
        self.batch, self.length, self.jitter, self.seed, self.longer = batch, length, jitter, seed, longer
        self.rotate = rotate
        self.size = (len(tokens) - 1) // batch
        """Predictions of each stream in an epoch."""
        self._tokens = tokens
        self._drawn = functools.lru_cache(maxsize=8)(self._draw)

    def take(self, cursor: Cursor, rows: slice = ALL) -> Batch:
        """The step at a cursor; `rows` are those of one process."""
        if not 0 <= cursor.position < self.size:
            raise _other_data(cursor, f"streams of {self.size} tokens")
        start = cursor.position
        stop = min(start + self._time(cursor.epoch, cursor.step_in_epoch), self.size)
        ended = stop == self.size
        first = self._cut(cursor.epoch) + self.size * np.arange(self.batch)[rows, None]
        # Of a memory-mapped file only what a batch takes is read.
        taken = _tensor(self._tokens[(first + np.arange(start, stop + 1)) % len(self._tokens)])
        return Batch(
            ids=taken[:, :-1].contiguous(),
            targets=taken[:, 1:].contiguous(),
            fresh=start == 0,
            tokens=self.batch * (stop - start),
            next=Cursor(cursor.epoch + 1) if ended else Cursor(cursor.epoch, stop, cursor.step_in_epoch + 1),
            length_scale=(stop - start) / self.length,
            epoch=cursor.epoch + stop / self.size,
        )

    def steps(self, epoch: int) -> int:
        """Steps of this epoch, exactly."""
        if not self.jitter:
            return -(-self.size // self.length)
        done = steps = 0
        while True:
            ends = done + np.cumsum(self._drawn(epoch, steps // _DRAWN))
            if ends[-1] >= self.size:
                return steps + int(np.searchsorted(ends, self.size)) + 1
            done, steps = int(ends[-1]), steps + _DRAWN

    def _cut(self, epoch: int) -> int:
        """The token that an epoch begins with."""
        return int(_random(_OFFSETS, self.seed, epoch).integers(len(self._tokens))) if self.rotate else 0

    def _time(self, epoch: int, step: int) -> int:
        if not self.jitter:
            return self.length
        return int(self._drawn(epoch, step // _DRAWN)[step % _DRAWN])

    def _draw(self, epoch: int, block: int) -> np.ndarray:
        """The lengths of steps block * _DRAWN and on."""
        random = _random(_LENGTHS, self.seed, epoch, block)
        middle = np.where(random.random(_DRAWN) < HALF, self.length / 2, self.length)
        lengths = np.trunc(random.normal(middle, DEVIATION)).astype(np.int64)
        return np.clip(lengths, min(SHORTEST, self.length), self.length + self.longer)


class Windows:
    """Windows of `length` tokens in random order, `batch` of them a step."""

    def __init__(self, tokens: np.ndarray, *, batch: int, length: int, seed: int = 0) -> None:
        _require_batch(tokens, batch, length)
        self.batch, self.length, self.seed = batch, length, seed
        self._tokens = tokens
        self._starts = functools.lru_cache(maxsize=1)(self._shuffle)

    def take(self, cursor: Cursor, rows: slice = ALL) -> Batch:
        """The step at a cursor; `rows` are those of one process."""
        steps = self.steps(cursor.epoch)
        if not 0 <= cursor.step_in_epoch < steps or cursor.position != cursor.step_in_epoch * self.batch:
            raise _other_data(cursor, f"{steps} steps of {self.batch} windows")
        starts = self._starts(cursor.epoch)[cursor.position : cursor.position + self.batch][rows]
        windows = _tensor(self._tokens[starts[:, None] + np.arange(self.length + 1)])
        done = cursor.step_in_epoch + 1
        ended = done == steps
        return Batch(
            ids=windows[:, :-1].contiguous(),
            targets=windows[:, 1:].contiguous(),
            fresh=True,
            tokens=self.batch * self.length,
            next=Cursor(cursor.epoch + 1) if ended else Cursor(cursor.epoch, done * self.batch, done),
            length_scale=1.0,
            epoch=cursor.epoch + done / steps,
        )

    def steps(self, epoch: int) -> int:
        """Steps of this epoch, exactly."""
        return (len(self._tokens) - 1 - self._offset(epoch)) // self.length // self.batch

    def _offset(self, epoch: int) -> int:
        # Never so far that not one batch is left.
        largest = min(self.length - 1, len(self._tokens) - 1 - self.batch * self.length)
        return int(_random(_OFFSETS, self.seed, epoch).integers(largest + 1))

    def _shuffle(self, epoch: int) -> np.ndarray:
        """The first token of every window of an epoch, in the order of their use."""
        offset = self._offset(epoch)
        count = (len(self._tokens) - 1 - offset) // self.length
        order = _random(_ORDERS, self.seed, epoch).permutation(count)
        return offset + order * self.length


def for_training(config: Config, tokens: np.ndarray) -> Streams | Windows:
    """Streams for a body that carries a state, windows for a transformer."""
    if config.body.kind != "awd_lstm":
        return Windows(tokens, batch=config.batch, length=config.length, seed=config.seed)
    return Streams(
        tokens,
        batch=config.batch,
        length=config.length,
        jitter=config.jitter,
        seed=config.seed,
        longer=config.jitter_longer,
        rotate=config.rotate,
    )


def evaluation_streams(
    tokens: np.ndarray, eos: int, batch: int, length: int, limit: int = 0
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """ids and targets [batch, T] and whether a carried state must be reset: every token predicted once.

    The tokens, the first `limit` of them if it is not 0, are cut into `batch` contiguous pieces whose lengths
    differ by at most one. Each has the token before it as its first input, the first piece <eos>. Rows that
    are at their end have IGNORED targets.
    """
    tokens = _limited(tokens, limit, batch=batch, length=length)
    bounds = len(tokens) * np.arange(batch + 1) // batch
    longest = int(np.diff(bounds).max())
    for start in range(0, longest, length):
        width = min(length, longest - start)
        ids = np.full((batch, width), eos, dtype=np.int64)
        targets = np.full((batch, width), IGNORED, dtype=np.int64)
        for row, (first, last) in enumerate(itertools.pairwise(bounds)):
            _fill(ids[row], targets[row], tokens, int(first) + start, int(last))
        yield torch.from_numpy(ids), torch.from_numpy(targets), start == 0


def evaluation_windows(
    tokens: np.ndarray, eos: int, batch: int, length: int, stride: int, limit: int = 0
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """ids and targets [rows, T] and True: every token predicted once, each from up to `length` before it.

    The first window counts all its tokens. Each window after it ends `stride` tokens later and counts only
    those; the others, at least length - stride, are their context and have IGNORED targets. The last
    batch may have fewer rows.
    """
    tokens = _limited(tokens, limit, batch=batch, length=length)
    if not 1 <= stride <= length:
        raise FullrankError(f"stride={stride} is impossible: expected 1 to length={length}")
    width = min(length, len(tokens))
    ends = [*range(width, len(tokens), stride), len(tokens)]
    for group in range(0, len(ends), batch):
        rows = ends[group : group + batch]
        ids = np.full((len(rows), width), eos, dtype=np.int64)
        targets = np.full((len(rows), width), IGNORED, dtype=np.int64)
        for row, end in enumerate(rows):
            _fill(ids[row], targets[row], tokens, end - width, end)
            counted = ends[group + row - 1] if group + row else 0
            targets[row, : counted - (end - width)] = IGNORED
        yield torch.from_numpy(ids), torch.from_numpy(targets), True


def _fill(ids: np.ndarray, targets: np.ndarray, tokens: np.ndarray, start: int, stop: int) -> None:
    """Targets from `start` to `stop`, as far as there is room, and the token before each as input."""
    stop = min(stop, start + len(targets))
    if start >= stop:
        return
    targets[: stop - start] = tokens[start:stop]
    # Before the first token there is none: <eos> is there already.
    skip = int(start == 0)
    ids[skip : stop - start] = tokens[start + skip - 1 : stop - 1]


def _limited(tokens: np.ndarray, limit: int, *, batch: int, length: int) -> np.ndarray:
    for name, value in (("batch", batch), ("length", length)):
        if value < 1:
            raise FullrankError(f"{name}={value} is impossible: expected at least 1")
    if limit < 0:
        raise FullrankError(f"limit={limit} is impossible: expected tokens to count, or 0 for all")
    if len(tokens) == 0:
        raise FullrankError("the text holds no token: give one with at least one")
    return tokens[:limit] if limit else tokens


def _require_batch(tokens: np.ndarray, batch: int, length: int) -> None:
    needed = batch * length + 1
    if batch < 1 or length < 1:
        raise FullrankError(f"batch={batch} and length={length} are impossible: expected at least 1")
    if len(tokens) < needed:
        raise FullrankError(
            f"the training split has {len(tokens)} tokens, one batch of {batch} sequences of {length} needs "
            f"{needed}: give more text, or set a smaller batch or length (--set batch=1 --set "
            f"length={max(1, min(length, len(tokens) - 1))})"
        )


def _other_data(cursor: Cursor, expected: str) -> FullrankError:
    return FullrankError(
        f"{cursor} does not lie in {expected}: it belongs to other data or to another batch or "
        "length, train anew"
    )


def _random(kind: int, seed: int, *place: int) -> np.random.Generator:
    # A seed may be negative, numpy takes none such.
    return np.random.default_rng([kind, seed % (1 << 63), *place])


def _tensor(tokens: np.ndarray) -> Tensor:
    return torch.from_numpy(tokens.astype(np.int64))
