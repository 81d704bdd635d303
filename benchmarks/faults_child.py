"""A command of fullrank in a process of its own that takes milliseconds to start: a fork of one that has
imported everything.

The process that forks has one thread. A child is the leader of a group, so that its own workers die with it;
its output goes to files; its home, its temporary files and its caches are inside the sandbox.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HEAVY = (
    "torch", "transformers", "tokenizers", "safetensors.torch", "pyarrow.parquet", "ibis", "duckdb", "gguf",
    "altair", "jinja2", "rich.progress", "tensorboard", "accelerate", "scipy.stats", "highspy",
    "fullrank.cli.main", "fullrank.diagnose.diagnosis", "fullrank.train.loop", "fullrank.upgrade.run",
    "fullrank.upgrade.collapse", "fullrank.corpus.dimension", "fullrank.report",
    "fullrank.diagnose.series.series", "fullrank.train.cache", "fullrank.train.dynamic",
    "fullrank.models.sampling",
)  # fmt: skip
"""Imported before the first fork."""
MOST_MEMORY = 6 << 30
"""Bytes at which a child is stopped: no input here is worth them."""


def prepare() -> None:
    """Import what commands import, and keep torch at one thread: a fork has only one."""
    import importlib

    for name in HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    """Its exit code; negative is a signal."""
    stopped: str
    """Why it was stopped from here: "hang", "memory", "killed", or "" where it ended by itself."""
    seconds: float
    peak: int
    """Bytes of memory at most, of the command's own process."""
    output: str
    errors: str


def run(
    arguments: Sequence[str],
    place: Path,
    *,
    limit: float,
    kill_after: float | None = None,
    file_size: int | None = None,
    memory: int = MOST_MEMORY,
) -> Ended:
    """`fullrank ARGUMENTS` in the sandbox `place`, stopped after `limit` seconds.

    `kill_after` sends SIGKILL at that moment; `file_size` is the most bytes that it may write to a file.
    """
    home = place / "home"
    for folder in (home, home / "tmp"):
        folder.mkdir(parents=True, exist_ok=True)
    logs = [place / "stdout", place / "stderr"]
    start = time.monotonic()
    child = os.fork()
    if not child:
        _become(arguments, place, home, logs, file_size)
    stopped, peak = "", 0
    while True:
        found, status, used = os.wait4(child, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            peak = max(peak, used.ru_maxrss << 10)
            break
        passed = time.monotonic() - start
        peak = max(peak, _resident(child))
        if kill_after is not None and passed >= kill_after:
            stopped = "killed"
        elif passed > limit:
            stopped = "hang"
        elif peak > memory:
            stopped = "memory"
        if stopped:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            _, status, used = os.wait4(child, 0)
            code = os.waitstatus_to_exitcode(status)
            # It may have come to its end in that very moment.
            stopped = stopped if code < 0 else ""
            break
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    said = [log.read_text(encoding="utf8", errors="replace") for log in logs]
    return Ended(
        code=code,
        stopped=stopped,
        seconds=time.monotonic() - start,
        peak=peak,
        output=said[0],
        errors=said[1],
    )


def _become(
    arguments: Sequence[str], place: Path, home: Path, logs: list[Path], file_size: int | None
) -> None:
    """The child's whole life."""
    code = 99
    try:
        os.setpgid(0, 0)
        for number, log in enumerate(logs, start=1):
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, number)
            os.close(handle)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
        os.chdir(place)
        os.environ.update(
            HOME=str(home), TMPDIR=str(home / "tmp"), FULLRANK_CACHE=str(place / "cache"),
            HF_HOME=str(home / "hf"), HF_HUB_OFFLINE="1", COLUMNS="120",
        )  # fmt: skip
        import tempfile

        tempfile.tempdir = None
        sys.argv = ["fullrank", *arguments]
        if file_size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
        code = _called()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        # Only what is left of standard error can say it.
        with contextlib.suppress(BaseException):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _called() -> int:
    from fullrank.cli.main import main

    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def _resident(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def complaint(ended: Ended) -> str:
    """The one sentence of a command that refused; "" where there is none, or more than one line of it."""
    lines = [line for line in ended.errors.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith("fullrank: ")]
    if len(starts) == 1 and starts[0] == len(lines) - 1:
        return lines[-1].removeprefix("fullrank: ")
    # What the parser of the command line says has a frame around it, and the help of the option in it.
    if not starts and any("For full helptext" in line for line in lines):
        return "the command line cannot be parsed"
    return ""


def refused(ended: Ended, *, sentence: bool = True) -> str:
    """What is wrong with how bad input was refused; "" if nothing is."""
    both = ended.output + ended.errors
    if ended.stopped:
        return f"{ended.stopped} after {ended.seconds:.0f} s and {ended.peak >> 20} MiB"
    if "Traceback (most recent call last)" in both:
        return "traceback: " + both.strip().splitlines()[-1][:200]
    if ended.code < 0:
        return f"died of signal {-ended.code}"
    if ended.code == 1:
        return "a mistake of ours: " + (complaint(ended) or ended.errors.strip()[-200:])
    if ended.code not in (0, 2):
        return f"exit code {ended.code}: {ended.errors.strip()[-200:]}"
    if sentence and ended.code == 2 and not complaint(ended):
        return "not one sentence: " + ended.errors.strip()[-200:]
    return ""


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[bool]:
    """A file system of so many bytes at `place`, where this user may mount one; gives whether it did."""
    import subprocess

    place.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    done = _quietly(lambda: subprocess.run(command, capture_output=True, timeout=10).returncode == 0)
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "-l", str(place)], capture_output=True, timeout=10)


def _quietly(work: Callable[[], bool]) -> bool:
    try:
        return work()
    except OSError:
        return False
