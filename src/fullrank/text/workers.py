"""Processes that tokenise: one a core, fed in order, gone with the process that started them.

Processes and not the tokenizers library's own threads, because these leave the making of arrays from their
results, and all of a word vocabulary, to one core. A short text is done by the process itself: starting
others takes a second or two.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any

from fullrank.errors import FullrankError

SMALL = 8 << 20
"""Characters up to which a text is tokenised in this process."""

GUARD = 'A script that calls this must do so under `if __name__ == "__main__":`'

_held: Any = None
"""What a process that tokenises works with."""


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def refuse_nested() -> None:
    """Raise where this process is one of `workers` that runs the caller's script for a second time: it would
    wait for what the first one is making."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise FullrankError(GUARD)


@contextlib.contextmanager
def workers(make: Callable[..., Any], *arguments: Any, count: int) -> Iterator[Callable[..., Future[Any]]]:
    """A function that hands `function(made, *arguments)` to one of `count` processes, or does it here.

    Every process calls `make(*arguments)` once for what it works with.
    """
    if count == 1:
        made = make(*arguments)

        def here(function: Callable[..., Any], *given: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(function(made, *given))
            return future

        yield here
        return
    # Not forked: libraries with threads of their own do not survive that.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_start, initargs=(make, arguments))
    try:
        yield lambda function, *given: pool.submit(_work, function, given)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def result(future: Future[Any]) -> Any:
    """Of a process, or why there is none."""
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise FullrankError(
            "a process that tokenised was killed, most likely for want of memory: give fewer --workers or a "
            "machine with more memory; what is finished will be used again. " + GUARD
        ) from error


def in_order(
    submit: Callable[..., Future[Any]], function: Callable[..., Any], batches: Iterable[Any], count: int
) -> Iterator[Any]:
    """`function(made, batch)` of every batch, in order; few are held at once."""
    waiting: deque[Future[Any]] = deque()
    for batch in batches:
        waiting.append(submit(function, batch))
        if len(waiting) > 2 * count or waiting[0].done():
            yield result(waiting.popleft())
    while waiting:
        yield result(waiting.popleft())


def _start(make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    global _held
    # The first process answers the keyboard for all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    if parent is not None:

        def leave() -> None:
            wait([parent.sentinel])
            os._exit(1)

        threading.Thread(target=leave, daemon=True).start()
    _held = make(*arguments)


def _work(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(_held, *arguments)
