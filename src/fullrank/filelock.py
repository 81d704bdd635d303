"""Locks on open files: one writer at a time. The system frees a lock when its process ends, killed or not.

Linux and macOS have these locks. On Windows this module can be imported, and `require` and `lock` raise.
"""

from __future__ import annotations

from typing import IO, Any

from fullrank.errors import FullrankError

try:
    import fcntl
except ImportError:
    # Windows.
    fcntl = None  # type: ignore[assignment]

SUPPORTED = fcntl is not None
"""Whether this operating system has the locks."""


def require() -> None:
    """Raise where the operating system has no such locks, before anything is written."""
    if not SUPPORTED:
        raise FullrankError(
            "fullrank locks the files of a training run or a corpus, which works on Linux and macOS only: "
            "run it there, or in the Windows Subsystem for Linux"
        )


def lock(file: IO[Any], *, wait: bool) -> None:
    """Lock an open file until it is closed.

    Raises OSError where its file system has no locks; without `wait`, BlockingIOError where another process
    holds the lock.
    """
    require()
    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
