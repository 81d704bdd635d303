"""Who trains the runs of a study: this process, or several beside it on one device."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fullrank.errors import FullrankError
from fullrank.results.grid import GridRun
from fullrank.studies.grid_plan import Spec

POLL = 0.5
"""Seconds between two looks at the processes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a study runs and what it reads."""

    out: Path
    cache: Path
    data: tuple[Path, ...] = ()
    tokens: Path | None = None
    device: str = "auto"
    processes: int = 1
    seconds: float = math.inf


Train = Callable[[Spec, Place], GridRun | None]
"""One run; None where a signal stopped it."""


class Stopped(Exception):  # noqa: N818 - it is no error
    """A signal came; what was running is saved."""


class _Here:
    """Trains in this process."""

    def __init__(self, place: Place, train: Train) -> None:
        self.place, self.train = place, train
        self.running: dict[str, Spec] = {}

    def start(self, spec: Spec) -> None:
        self.running[spec.name] = spec

    def finished(self) -> Iterator[GridRun]:
        for name, spec in list(self.running.items()):
            found = self.train(spec, self.place)
            del self.running[name]
            if found is None:
                raise Stopped
            yield found

    def close(self) -> None:
        pass


class _Beside:
    """Trains in processes beside this one, each run after run."""

    def __init__(self, place: Place, train: Train) -> None:
        self.place, self.train = place, train
        self.running: dict[str, Spec] = {}
        self.context = multiprocessing.get_context("spawn")
        self.given: Any = self.context.Queue()
        self.back: Any = self.context.Queue()
        self.processes: list[Any] = []
        self.told = False
        self.before = {
            number: signal.signal(number, self._tell) for number in (signal.SIGINT, signal.SIGTERM)
        }

    def _tell(self, number: int, frame: Any) -> None:
        self.told = True

    def start(self, spec: Spec) -> None:
        self.running[spec.name] = spec
        alive = [one for one in self.processes if one.is_alive()]
        if len(alive) < min(self.place.processes, len(self.running)):
            process = self.context.Process(target=_work, args=(self.given, self.back, self.place, self.train))
            process.start()
            alive.append(process)
        self.processes = alive
        self.given.put(spec)

    def finished(self) -> Iterator[GridRun]:
        while self.running:
            if self.told:
                self.close()
                raise Stopped
            try:
                name, found, error = self.back.get(timeout=POLL)
            except queue.Empty:
                # A signal to all of them ends these first.
                if not self.told and not all(one.is_alive() for one in self.processes):
                    # Which run was its one nobody knows, and the others would be waited with for ever.
                    names = ", ".join(self.running)
                    self.close()
                    raise FullrankError(
                        f"a process has ended without a word, as when memory runs out, while {names} were "
                        "trained: try fewer --processes; the same command goes on"
                    ) from None
                continue
            del self.running[name]
            if error:
                self.close()
                raise FullrankError(f"{name}: {error}")
            yield found
            return

    def close(self) -> None:
        for one in self.processes:
            if one.is_alive():
                # The engine saves and leaves.
                os.kill(one.pid, signal.SIGTERM)
        for one in self.processes:
            one.join()
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before.clear()


def _work(given: Any, back: Any, place: Place, train: Train) -> None:
    """What a process beside does: runs, one after another."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.processes))
    while True:
        spec = given.get()
        try:
            found = train(spec, place)
        except Exception as error:
            back.put((spec.name, None, str(error) or type(error).__name__))
        else:
            if found is None:
                return
            back.put((spec.name, found, ""))


@contextlib.contextmanager
def trainer_of(place: Place, train: Train) -> Iterator[_Here | _Beside]:
    trainer = _Here(place, train) if place.processes == 1 else _Beside(place, train)
    try:
        yield trainer
    finally:
        trainer.close()
