"""Files that others wrote, read so that none can hold a command up or fill its memory.

A pipe has no end until someone writes to it, and /dev/zero has none at all: what is read must be a regular
file, or a link to one. A file that is read whole must fit into memory several times, because JSON takes that.
"""

from __future__ import annotations

import functools
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

from fullrank.errors import FullrankError

KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
COPIES = 8
"""Times its size that a file of JSON takes in memory, at most some ten in use."""
CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class NotRegularError(FullrankError):
    """There is something of that name, and it is no regular file, or one that is far too large."""


def require_regular(path: str | Path) -> None:
    """Raise for a pipe, a device or a socket; a missing file is the reader's to complain of."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    # Of a directory the system itself says that it is one.
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        kind = next((words for test, words in KINDS if test(mode)), "no file")
        raise NotRegularError(f"{path} is {kind}, expected a regular file: save its content to one")


def require_plain(directory: Path) -> None:
    """Raise for a directory with anything in it that is neither a regular file nor a directory: a library
    that looks through it may open whatever it finds."""
    try:
        names = [entry.path for entry in os.scandir(directory) if not (entry.is_dir() or entry.is_file())]
    except OSError as error:
        raise FullrankError(
            f"{directory} cannot be read ({error.strerror}): check its permissions"
        ) from error
    for name in names:
        # A link that leads nowhere is missing, and no danger.
        require_regular(name)


def read_bytes(path: str | Path) -> bytes:
    """A whole regular file; raises OSError where it cannot be read."""
    require_regular(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size * COPIES > memory():
            raise NotRegularError(
                f"{path} has {size:,} bytes, too many to read at once here: is it the right file?"
            )
        return file.read()


def read_text(path: str | Path, encoding: str = "utf8", errors: str = "strict") -> str:
    return read_bytes(path).decode(encoding, errors)


def read_json(path: str | Path) -> Any:
    """Raises ValueError for what is no JSON, also for brackets in brackets without end."""
    try:
        return json.loads(read_text(path))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


@functools.cache
def memory() -> int:
    """Bytes of memory and swap that this machine, or this container, has in all."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf8").splitlines()
        words = {line.split(":")[0]: line.split(":")[1].split() for line in lines if ":" in line}
        whole = sum(int(words[name][0]) for name in ("MemTotal", "SwapTotal")) << 10
    except (OSError, KeyError, ValueError, IndexError):
        if hasattr(os, "sysconf"):
            whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        else:
            # Windows has no such call: sizes are not checked before an allocation there.
            whole = sys.maxsize
    for place in CGROUPS:
        try:
            whole = min(whole, int(Path(place).read_text(encoding="utf8")))
        except (OSError, ValueError):
            # There is none, or it says "max".
            continue
    return whole
