"""When a step becomes a graph; test_gpu.py and tests/train/test_gpu.py compare what graphs compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.fit import captured


class Graph:
    """A captured step that marks its result by adding 100."""

    def __init__(self, update: Any, *_: Any) -> None:
        self.update = update

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return (self.update(*inputs)[0] + 100,)


def step_of(monkeypatch: pytest.MonkeyPatch, *, waits: bool = False, captures: bool = True) -> captured.Step:
    """A step that adds 1, and in its operations waits for the device or does not."""

    @contextlib.contextmanager
    def asks_the_device() -> Iterator[list[str]]:
        files: list[str] = []
        yield files
        files += ["a_head.py"] if waits else []

    monkeypatch.setattr(captured, "CapturedStep", Graph)
    monkeypatch.setattr(captured, "asks_the_device", asks_the_device)
    optimiser = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    return captured.Step(lambda x: (x + 1,), optimiser, captures=captures, remedy="")


def results(step: captured.Step, sizes: list[int]) -> list[float]:
    return [float(step(torch.zeros(size))[0][0]) for size in sizes]


def test_the_synchronisation_debug_mode_of_the_user_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = [2]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with captured.asks_the_device():
        pass
    with pytest.raises(ZeroDivisionError), captured.asks_the_device():
        raise ZeroDivisionError
    assert modes == [2, "warn", 2, "warn", 2]


@pytest.mark.parametrize(
    ("graphs", "sizes", "expected"),
    [
        # The first three steps choose kernels.
        (1, [2] * 6, [1, 1, 1, 101, 101, 101]),
        # A batch of another shape runs without the graph and is not captured.
        (1, [2, 2, 2, 1, 2, 2, 2, 1, 2], [1, 1, 1, 1, 101, 101, 101, 1, 101]),
        (2, [2, 2, 2, 1, 3, 1, 2, 3, 1, 2], [1, 1, 1, 1, 1, 101, 101, 1, 101, 101]),
    ],
)
def test_a_graph_follows_the_first_steps(
    graphs: int, sizes: list[int], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(monkeypatch)
    step.graphs = graphs
    assert results(step, sizes) == expected
    step.renew()
    assert results(step, [2] * 5) == [1, 1, 1, 101, 101]


@pytest.mark.parametrize(("waits", "after"), [(False, [1, 101, 101]), (True, [1, 1, 1])])
def test_a_graph_is_captured_on_request_unless_the_step_waits_for_the_device(
    waits: bool, after: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert results(step_of(monkeypatch, waits=waits), [2] * 6)[3:] == ([1] * 3 if waits else [101] * 3)
    step = step_of(monkeypatch, waits=waits, captures=False)
    assert results(step, [2] * 7) == [1] * 7
    step.captures = True
    assert results(step, [2] * 3) == after
