"""Batches: every token once, true next tokens, and a cursor that is all a resumed run needs."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullrank.errors import FullrankError
from fullrank.train.batches import (
    IGNORED,
    Ahead,
    Batch,
    Cursor,
    Streams,
    Windows,
    evaluation_streams,
    evaluation_windows,
    for_training,
)
from fullrank.train.config import BodyConfig, Config

EOS = 99_999


def numbered(count: int) -> np.ndarray:
    """Tokens that are their own positions, so that a batch says where it came from."""
    return np.arange(count, dtype=np.uint32)


def epoch_of(source: Streams | Windows, epoch: int) -> list[Batch]:
    cursor = Cursor(epoch)
    batches = []
    while cursor.epoch == epoch:
        batches.append(source.take(cursor))
        cursor = batches[-1].next
    return batches


def same(left: Batch, right: Batch) -> bool:
    return (
        torch.equal(left.ids, right.ids)
        and torch.equal(left.targets, right.targets)
        and (left.fresh, left.next, left.tokens) == (right.fresh, right.next, right.tokens)
    )


sizes = st.tuples(st.integers(1, 7), st.integers(1, 9), st.integers(0, 200), st.integers(-3, 5))


@given(sizes=sizes, jitter=st.booleans(), rotate=st.booleans(), epoch=st.integers(0, 3))
def test_streams_predict_every_token_once_and_in_order(
    sizes: tuple[int, int, int, int], jitter: bool, rotate: bool, epoch: int
) -> None:
    batch, length, more, seed = sizes
    count = batch * length + 1 + more
    streams = Streams(numbered(count), batch=batch, length=length, jitter=jitter, seed=seed, rotate=rotate)
    batches = epoch_of(streams, epoch)
    assert len(batches) == streams.steps(epoch)
    assert [item.fresh for item in batches] == [True] + [False] * (len(batches) - 1)
    ids = torch.cat([item.ids for item in batches], dim=1)
    targets = torch.cat([item.targets for item in batches], dim=1)
    assert ids.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, (ids + 1) % count)
    # Row after row, the streams are the text, but for fewer than `batch` tokens at its end.
    predicted = targets.flatten()
    first = ids.flatten()[0] if rotate else 0
    assert torch.equal(predicted, (first + torch.arange(1, len(predicted) + 1)) % count)
    assert 0 <= count - 1 - len(predicted) < batch
    assert sum(item.tokens for item in batches) == len(predicted)
    assert batches[-1].epoch == epoch + 1
    assert all(left.epoch < right.epoch for left, right in itertools.pairwise(batches))
    assert all(item.length_scale == item.ids.shape[1] / length for item in batches)


@given(sizes=sizes, epoch=st.integers(0, 3))
def test_windows_predict_no_token_twice_and_leave_less_than_a_batch(
    sizes: tuple[int, int, int, int], epoch: int
) -> None:
    batch, length, more, seed = sizes
    count = batch * length + 1 + more
    windows = Windows(numbered(count), batch=batch, length=length, seed=seed)
    batches = epoch_of(windows, epoch)
    assert len(batches) == windows.steps(epoch) >= 1
    assert all(
        item.ids.shape == (batch, length) and item.fresh and item.length_scale == 1 for item in batches
    )
    ids, targets = (torch.cat([getattr(item, name) for item in batches]) for name in ("ids", "targets"))
    assert torch.equal(targets, ids + 1)
    predicted = targets.flatten()
    assert len(predicted.unique()) == len(predicted) == sum(item.tokens for item in batches)
    # Before the offset and after the last window fewer than `length` each, and fewer than `batch` windows.
    assert count - 1 - len(predicted) <= (batch - 1) * length + 2 * (length - 1)
    assert batches[-1].epoch == epoch + 1


@pytest.mark.parametrize("kind", ["streams", "jitter", "rotate", "windows"])
def test_rows_of_processes_and_resumed_cursors_equal_one_uninterrupted_process(kind: str) -> None:
    def build() -> Streams | Windows:
        if kind == "windows":
            return Windows(numbered(1000), batch=6, length=11, seed=3)
        return Streams(
            numbered(1000), batch=6, length=11, jitter=kind == "jitter", rotate=kind == "rotate", seed=3
        )

    source = build()
    cursor = Cursor()
    straight = []
    for _ in range(60):
        straight.append(source.take(cursor))
        cursor = straight[-1].next
    assert cursor.epoch >= 2
    for step in (0, 1, 7, 14, 15, 16, 33, 58):
        # Another object, and a cursor that went through a file.
        place = straight[step - 1].next.to_json() if step else Cursor().to_json()
        resumed = build().take(Cursor.from_json(json.loads(json.dumps(place))))
        assert same(resumed, straight[step])
    for item, before in zip(straight[1:], straight[:-1], strict=True):
        halves = [source.take(before.next, slice(0, 3)), source.take(before.next, slice(3, 6))]
        assert torch.equal(torch.cat([half.ids for half in halves]), item.ids)
        assert torch.equal(torch.cat([half.targets for half in halves]), item.targets)
        assert all(half.tokens == item.tokens == item.targets.numel() for half in halves)
        assert all(half.next == item.next for half in halves)


def test_streams_that_rotate_are_cut_anew_in_every_epoch_and_by_every_seed() -> None:
    begun = {
        int(Streams(numbered(5000), batch=4, length=32, rotate=True, seed=seed).take(Cursor(epoch)).ids[0, 0])
        for seed in (0, 1)
        for epoch in range(8)
    }
    assert len(begun) > 12
    still = Streams(numbered(5000), batch=4, length=32)
    assert torch.equal(still.take(Cursor(0)).ids, still.take(Cursor(7)).ids)


def test_orders_and_offsets_change_with_epoch_and_seed() -> None:
    first = [Windows(numbered(5000), batch=4, length=32, seed=seed).take(Cursor()).ids for seed in (0, 1)]
    assert not torch.equal(*first)
    windows = Windows(numbered(5000), batch=4, length=32)
    offsets = {int(windows.take(Cursor(epoch)).ids[0, 0]) % 32 for epoch in range(40)}
    assert len(offsets) > 15
    assert not torch.equal(windows.take(Cursor(0)).ids, windows.take(Cursor(1)).ids)
    # Neighbours in a batch are not neighbours in the text.
    starts = torch.cat([item.ids[:, 0] for item in epoch_of(windows, 0)]).float()
    assert abs(float(torch.corrcoef(torch.stack([starts[:-1], starts[1:]]))[0, 1])) < 0.3


def test_jittered_lengths_are_those_of_awd_lstm() -> None:
    streams = Streams(numbered(4 * 400_000), batch=4, length=70, jitter=True, seed=1)
    lengths = np.array([item.ids.shape[1] for item in epoch_of(streams, 0)[:-1]])
    assert len(lengths) > 5000
    assert lengths.min() >= 5
    assert lengths.max() <= 90
    # Lengths are drawn in blocks; no block repeats.
    assert not np.array_equal(lengths[:1024], lengths[1024:2048])
    half = lengths < 52
    # Binomial and normal standard errors at five deviations.
    assert abs(half.mean() - 0.05) < 5 * np.sqrt(0.05 * 0.95 / len(lengths))
    # Truncation takes half a token.
    assert abs(lengths[~half].mean() - 69.5) < 5 * 5 / np.sqrt(len(lengths))
    assert abs(lengths[half].mean() - 34.5) < 5 * 5 / np.sqrt(half.sum())
    assert abs(lengths[~half].std() - 5) < 0.3
    drawn = Streams(numbered(4 * 400_000), batch=4, length=70, jitter=True, seed=1, longer=3)
    assert max(item.ids.shape[1] for item in epoch_of(drawn, 0)) == 73
    other = [item.ids.shape[1] for item in epoch_of(streams, 1)]
    assert other[:50] != lengths[:50].tolist()


@given(
    count=st.integers(1, 120),
    batch=st.integers(1, 9),
    length=st.integers(1, 20),
    limit=st.integers(0, 130),
)
def test_evaluation_streams_predict_every_token_once(count: int, batch: int, length: int, limit: int) -> None:
    items = list(evaluation_streams(numbered(count), EOS, batch, length, limit))
    assert [fresh for _, _, fresh in items] == [True] + [False] * (len(items) - 1)
    ids, targets = (torch.cat([item[index] for item in items], dim=1) for index in (0, 1))
    assert all(item[0].shape == item[1].shape and item[0].shape[1] <= length for item in items)
    counted = targets != IGNORED
    expected = min(count, limit) if limit else count
    # Rows are contiguous and follow each other, so in row order the targets are the text.
    assert torch.equal(targets[counted], torch.arange(expected))
    assert torch.equal(ids[counted], torch.tensor([EOS, *range(expected - 1)]))
    per_row = counted.sum(1)
    assert per_row.max() - per_row.min() <= 1
    # What is counted comes first in a row: padding cannot touch the state before it.
    assert all(bool(row[: int(size)].all()) for row, size in zip(counted, per_row, strict=True))


@given(
    count=st.integers(1, 120),
    batch=st.integers(1, 5),
    length=st.integers(1, 20),
    data=st.data(),
)
def test_evaluation_windows_predict_every_token_once(
    count: int, batch: int, length: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, length))
    limit = data.draw(st.integers(0, count + 5))
    items = list(evaluation_windows(numbered(count), EOS, batch, length, stride, limit))
    expected = min(count, limit) if limit else count
    targets = torch.cat([item[1][item[1] != IGNORED] for item in items])
    assert torch.equal(targets, torch.arange(expected))
    for ids, wanted, fresh in items:
        assert fresh
        assert ids.shape[0] <= batch
        assert ids.shape[1] == min(length, expected)
        for row in range(len(ids)):
            counted = wanted[row] != IGNORED
            last = int(wanted[row, -1])
            start = last - ids.shape[1] + 1
            assert torch.equal(
                ids[row], torch.tensor([EOS if n == 0 else n - 1 for n in range(start, last + 1)])
            )
            assert torch.equal(wanted[row][counted], torch.arange(last - int(counted.sum()) + 1, last + 1))
            # Context: all that there is, or at least length - stride.
            assert start == 0 or int((~counted).sum()) >= length - stride


def test_large_ids_survive_small_files() -> None:
    tokens = np.array([65_535, 40_000, 0, 32_768, 1], dtype=np.uint16)
    batch = Streams(tokens, batch=2, length=2).take(Cursor())
    assert batch.ids.tolist() == [[65_535, 40_000], [0, 32_768]]
    assert batch.targets.tolist() == [[40_000, 0], [32_768, 1]]


def test_body_chooses_the_kind() -> None:
    recurrent = Config(recipe="x", batch=2, length=8, jitter=True, seed=4)
    streams = for_training(recurrent, numbered(100))
    assert isinstance(streams, Streams)
    assert (streams.batch, streams.length, streams.jitter, streams.seed) == (2, 8, True, 4)
    windows = for_training(
        Config(recipe="x", batch=2, length=8, seed=4, body=BodyConfig(kind="neox")), numbered(100)
    )
    assert isinstance(windows, Windows)
    assert windows.seed == 4


@pytest.mark.parametrize("kind", [Streams, Windows])
def test_too_few_tokens_say_how_many_are_needed(kind: type) -> None:
    kind(numbered(21), batch=4, length=5)
    with pytest.raises(
        FullrankError, match=r"20 tokens, one batch of 4 sequences of 5 needs 21.*--set batch=1"
    ):
        kind(numbered(20), batch=4, length=5)
    with pytest.raises(FullrankError, match="batch=0"):
        kind(numbered(20), batch=0, length=5)


def test_bad_places_and_sizes_are_refused() -> None:
    streams = Streams(numbered(101), batch=2, length=5)
    with pytest.raises(FullrankError, match="other data"):
        streams.take(Cursor(0, 50, 10))
    windows = Windows(numbered(101), batch=2, length=5)
    for cursor in (Cursor(0, 1, 0), Cursor(0, 2000, 1000)):
        with pytest.raises(FullrankError, match="other data"):
            windows.take(cursor)
    for data in ({"epoch": 0}, {"epoch": 0, "position": -1, "step_in_epoch": 0}, {"epoch": 0.5}):
        with pytest.raises(FullrankError, match="no place in the data"):
            Cursor.from_json(data)
    with pytest.raises(FullrankError, match="no token"):
        list(evaluation_streams(numbered(0), EOS, 2, 5))
    with pytest.raises(FullrankError, match=r"stride=6.*1 to length=5"):
        list(evaluation_windows(numbered(20), EOS, 2, 5, 6))
    with pytest.raises(FullrankError, match="limit=-1"):
        list(evaluation_windows(numbered(20), EOS, 2, 5, 5, -1))
    with pytest.raises(FullrankError, match="length=0"):
        list(evaluation_streams(numbered(20), EOS, 2, 0))


@pytest.mark.parametrize("jitter", [False, True])
def test_batches_made_ahead_are_those_made_when_asked_for(jitter: bool) -> None:
    """In their order over epochs, and after a jump to another place."""
    streams = Streams(np.arange(101, dtype=np.uint16), batch=3, length=6, jitter=jitter)
    ahead = Ahead(streams, slice(1, 3), pinned=False)
    cursor = Cursor()
    for step in range(20):
        found, expected = ahead.take(cursor), streams.take(cursor, slice(1, 3))
        assert torch.equal(found.ids, expected.ids)
        assert torch.equal(found.targets, expected.targets)
        assert found.next == expected.next
        cursor = Cursor() if step == 9 else found.next
    with pytest.raises(FullrankError, match="does not lie in"):
        ahead.take(Cursor(position=1000))
    ahead.close()
