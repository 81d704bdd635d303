"""Checkpoints written beside training: in order, all of them, and no failure lost."""

from __future__ import annotations

import threading

import pytest

from fullrank.train.writer import Writer


def test_jobs_are_done_in_order_beside_the_caller() -> None:
    writer, done, go = Writer(), [], threading.Event()

    def job(number: int) -> None:
        go.wait(10)
        done.append((number, threading.current_thread() is threading.main_thread()))

    writer.hand(lambda: job(0))
    assert not done
    go.set()
    writer.hand(lambda: job(1))
    # The second was handed over when the first was done.
    assert done[0] == (0, False)
    writer.wait()
    assert done == [(0, False), (1, False)]
    writer.close()


def test_what_went_wrong_is_raised_once_and_the_next_job_goes_on() -> None:
    writer, done = Writer(), []

    def fails() -> None:
        raise OSError("the disk is full")

    writer.hand(fails)
    with pytest.raises(OSError, match="the disk is full"):
        writer.hand(lambda: done.append(1))
    writer.hand(lambda: done.append(2))
    writer.wait()
    assert done == [2]
    writer.hand(fails)
    # At an end that has its own error nothing is raised over it.
    writer.close()
