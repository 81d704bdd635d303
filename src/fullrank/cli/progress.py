"""What long commands share: how far they are, how they are stopped, and the device they run on."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

EVERY = 10.0
"""Seconds between two lines of progress where there is no terminal."""


def device_of(name: str) -> str:
    """The device that was asked for, checked; auto is cuda where there is one."""
    import torch

    from fullrank.models import checks

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    checks.device(name)
    return name


def device_name(device: str) -> str:
    from fullrank.models import checks

    return checks.device_name(device)


@contextlib.contextmanager
def stops_at_sigterm() -> Iterator[None]:
    """SIGTERM, as batch systems send it, stops the work as Ctrl-C does, with its own exit code.

    A second one is obeyed at once.
    """
    received: list[int] = []
    before = signal.getsignal(signal.SIGTERM)

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, before)
        raise KeyboardInterrupt

    # Python hands signals to the main thread only.
    ours = threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        if not received:
            raise
        print("fullrank: stopped by SIGTERM; nothing further was written", file=sys.stderr)
        raise SystemExit(128 + received[0]) from None
    finally:
        if ours:
            signal.signal(signal.SIGTERM, before)


class Bar:
    """One line a stage, with the time left in it.

    Without a terminal: a plain line on stderr when a stage begins, and every ten seconds where it lasts.
    """

    def __init__(self, console: object) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._drawn: bool = console.is_terminal  # type: ignore[attr-defined]
        self._progress = Progress(
            TextColumn("{task.description:<34}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,  # type: ignore[arg-type]
            transient=True,
            # Into a file or a pipe it would write an empty line.
            disable=not self._drawn,
        )
        self._stage, self._task = "", None
        self._began = self._said = time.monotonic()

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, stage: str, share: float) -> None:
        key = stage.split(":")[0]
        begins, self._stage = key != self._stage, key
        if not self._drawn:
            now = time.monotonic()
            if begins or now - self._said >= EVERY:
                self._said = now
                self.say(f"{now - self._began:6.0f} s  {stage}" + ("" if begins else f"  {share:.0%}"))
            return
        if begins:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(stage, total=1.0)  # type: ignore[assignment]
        self._progress.update(self._task, description=stage, completed=share)  # type: ignore[arg-type]

    def say(self, line: str) -> None:
        """A line that stays, beside the progress."""
        if self._drawn:
            self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)
