"""Checkpoints are written while training goes on: one thread, one file after another, in their order.

What is written is a copy, made before; so what may wait is one job, and a second one waits for it. A job that
failed raises where the next is handed over, or where somebody waits: no later than the run's own end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Writer:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._job: Future[None] | None = None

    def hand(self, job: Callable[[], None]) -> None:
        """Do a job after those before it; waits until they are done."""
        self.wait()
        self._job = self._thread.submit(job)

    def wait(self) -> None:
        """Until everything is written; raises what went wrong."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def close(self) -> None:
        """At any end: what was handed over is finished, and nothing is raised."""
        self._thread.shutdown(wait=True)
