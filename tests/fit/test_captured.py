"""When a step becomes a graph; what graphs do is in tests/train/test_gpu.py and test_gpu.py beside this."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.fit import captured


class Graph:
    """Stands where a device would be asked for one."""

    def __init__(self, update: Any, *others: Any) -> None:
        self.update = update

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return (self.update(*inputs)[0] + 100,)


def step(monkeypatch: pytest.MonkeyPatch, *, asks: bool = False, captures: bool = True) -> captured.Step:
    @contextlib.contextmanager
    def asked() -> Iterator[list[str]]:
        found: list[str] = []
        yield found
        found += ["a_head.py"] if asks else []

    monkeypatch.setattr(captured, "CapturedStep", Graph)
    monkeypatch.setattr(captured, "asks_the_device", asked)
    optimiser = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    return captured.Step(lambda x: (x + 1,), optimiser, captures=captures, remedy="")


def steps(one: captured.Step, number: int) -> list[float]:
    return [float(one(torch.zeros(()))[0]) for _ in range(number)]


def test_a_graph_follows_the_steps_in_which_kernels_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    one = step(monkeypatch)
    assert steps(one, 6) == [1, 1, 1, 101, 101, 101]
    one.renew()
    assert steps(one, 5) == [1, 1, 1, 101, 101]


def test_the_synchronisation_debug_mode_of_the_user_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = [2]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with captured.asks_the_device():
        pass
    with pytest.raises(ZeroDivisionError), captured.asks_the_device():
        raise ZeroDivisionError
    assert modes == [2, "warn", 2, "warn", 2]


def test_what_asks_the_device_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(step(monkeypatch, asks=True), 6) == [1] * 6


def test_a_graph_may_be_wanted_later_and_the_device_is_asked_for_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for asks, after in ((False, [1, 101, 101]), (True, [1, 1, 1])):
        one = step(monkeypatch, asks=asks, captures=False)
        assert steps(one, 7) == [1] * 7
        one.captures = True
        assert steps(one, 3) == after


def test_a_batch_of_another_shape_goes_without_the_graph_and_is_none_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = step(monkeypatch)
    sizes = [2, 2, 2, 1, 2, 2, 2, 1, 2]
    found = [float(one(torch.zeros(size))[0][0]) for size in sizes]
    # The fourth would be the graph, and no other has had its shape.
    assert found == [1, 1, 1, 1, 101, 101, 101, 1, 101]


def test_there_may_be_graphs_of_several_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    one = step(monkeypatch)
    one.graphs = 2
    sizes = [2, 2, 2, 1, 3, 1, 2, 3, 1, 2]
    found = [float(one(torch.zeros(size))[0][0]) for size in sizes]
    assert found == [1, 1, 1, 1, 1, 101, 101, 1, 101, 101]
