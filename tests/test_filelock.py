"""Without POSIX locks, as on Windows, all works but the commands that need locks, and those say so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fullrank import filelock
from fullrank.errors import FullrankError
from fullrank.results import files, reading

WITHOUT_LOCKS = """
import contextlib, os, sys

sys.modules["fcntl"] = None
del os.fork, os.geteuid, os.killpg, os.sched_getaffinity, os.sysconf
import fullrank
import torch

rows, targets = torch.zeros(2, 1, 3), torch.tensor([0, 1])
print(f"{fullrank.mixture_nll(rows, torch.zeros(2, 1), torch.zeros(5, 3), targets):.4f}")
head = fullrank.heads.build("mos", hidden=4, vocab=5, components=2)
print(head(torch.zeros(2, 4), targets).isfinite().item())
for name in fullrank.__all__:
    getattr(fullrank, name)
from fullrank.cli import main

with contextlib.suppress(SystemExit):
    main.run(["--help"])
print(main.run(["corpus", "dimension", "text.txt", "--cache", "cache", "--out", "out"]))
print(sorted(os.listdir()))
"""


def test_without_locks_losses_work_and_a_command_that_needs_them_says_so(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat\n" * 300)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_LOCKS],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    lines = run.stdout.splitlines()
    # ln 5, and a finite loss of a head.
    assert lines[:2] == ["1.6094", "True"], run.stderr
    assert any(line.startswith("usage: fullrank") for line in lines)
    # Refused as a user's mistake, in one line, with nothing written.
    assert lines[-2:] == ["2", "['text.txt']"], run.stderr
    assert "works on Linux and macOS only: run it there" in run.stderr.splitlines()[-1]


def test_a_lock_is_refused_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filelock, "SUPPORTED", False)
    with (tmp_path / "file").open("w") as file, pytest.raises(FullrankError, match="Linux and macOS"):
        filelock.lock(file, wait=True)


def test_a_result_is_renamed_closed_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows renames no open file."""
    monkeypatch.setattr(filelock, "SUPPORTED", False)
    opened: list[Any] = []
    fdopen, replace = os.fdopen, os.replace

    def remember(*arguments: Any, **options: Any) -> Any:
        opened.append(fdopen(*arguments, **options))
        return opened[-1]

    def replace_closed(source: Any, target: Any) -> None:
        assert all(file.closed for file in opened)
        replace(source, target)

    monkeypatch.setattr(files.os, "fdopen", remember)
    monkeypatch.setattr(files.os, "replace", replace_closed)
    files.write_whole(tmp_path / "result.json", "text")
    assert len(opened) == 1
    assert [path.read_text() for path in tmp_path.iterdir()] == ["text"]


def test_a_system_that_does_not_tell_its_memory_limits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").write_text("{}")
    monkeypatch.setattr(reading.Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(OSError()))
    monkeypatch.delattr(reading.os, "sysconf")
    reading.memory.cache_clear()
    try:
        assert reading.memory() == sys.maxsize
        assert reading.read_json(tmp_path / "a.json") == {}
    finally:
        reading.memory.cache_clear()
