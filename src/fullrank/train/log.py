"""What a run says while it trains: log.jsonl always, trackers where asked, one line a time for a person.

The log's lines are described in docs/train.md. A resumed run drops the lines after its checkpoint, which it
is about to live again, so that steps never go back.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fullrank.errors import FullrankError
from fullrank.results import write_whole
from fullrank.results.reading import read_text

Say = Callable[[str], None]


class Log:
    """Appends to RUN/log.jsonl; numbers that JSON cannot hold are written as strings."""

    def __init__(self, path: Path, *, step: int) -> None:
        self.path = path
        lines = _lines(path) if path.exists() else []
        keep = [line for line in lines if line["step"] <= step and not _told_again(line, step)]
        self.evaluations = [line for line in keep if line["event"] == "evaluate"]
        self.alarms = [line for line in keep if line["event"] == "alarm"]
        try:
            write_whole(path, "".join(_text(line) for line in keep))
            # Unbuffered: what a full disk refused must not be tried again when the file is closed.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._refused(error) from error

    def write(self, event: str, step: int, **fields: Any) -> dict[str, Any]:
        line = {"event": event, "step": step, "time": round(time.time(), 3), **fields}
        try:
            _write_all(self._file, _text(line).encode())
        except OSError as error:
            raise self._refused(error) from error
        if event == "evaluate":
            self.evaluations.append(line)
        elif event == "alarm":
            self.alarms.append(line)
        return line

    def _refused(self, error: OSError) -> FullrankError:
        return FullrankError(
            f"{self.path} cannot be written ({error.strerror}); the last checkpoint is intact: make room and "
            "run the same command again"
        )

    def sync(self) -> None:
        """Make the lines durable: a checkpoint must not be older than what the log lacks."""
        with contextlib.suppress(OSError):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _told_again(line: dict[str, Any], step: int) -> bool:
    """Whether a line of the checkpoint's step comes after the checkpoint: a start, an end, the test split."""
    return line["step"] == step and (line["event"] in ("start", "end") or line.get("split") == "test")


def _write_all(file: io.FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def finished(path: Path) -> bool:
    """Whether a run's log says that it came to its end."""
    return path.exists() and any(
        line["event"] == "end" and line.get("reason") == "finished" for line in _lines(path)
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in read_text(path, errors="replace").splitlines():
        try:
            line = json.loads(text)
            if not isinstance(line["step"], int) or not isinstance(line["event"], str):
                break
        except (ValueError, KeyError, TypeError):
            # Only the last line can be torn, by a kill; what follows it is nothing.
            break
        lines.append(line)
    return lines


def _text(line: dict[str, Any]) -> str:
    return json.dumps(_plain(line), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


class Trackers:
    """TensorBoard by default, W&B or Trackio where asked, all through accelerate."""

    def __init__(self, accelerator: Any, names: tuple[str, ...], path: Path, config: dict[str, Any]) -> None:
        self.accelerator, self.active = accelerator, bool(names)
        if names:
            flat = {
                name: value if isinstance(value, int | float | str) else str(value)
                for name, value in config.items()
            }
            accelerator.init_trackers("fullrank", config=flat)

    def write(self, step: int, values: dict[str, Any]) -> None:
        if not self.active:
            return
        numbers: dict[str, float] = {}
        for name, value in values.items():
            if isinstance(value, list | tuple):
                numbers |= {f"{name}/{place}": float(item) for place, item in enumerate(value)}
            elif isinstance(value, int | float) and not isinstance(value, bool):
                numbers[name] = float(value)
        self.accelerator.log(numbers, step=step)

    def close(self) -> None:
        if self.active:
            self.accelerator.end_training()


def available(names: tuple[str, ...], say: Say) -> tuple[str, ...]:
    """The trackers among `names` that are installed. A default that is missing is no error, a wish is."""
    import importlib.util

    modules = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
    out = []
    for name in names:
        if name not in modules:
            raise FullrankError(
                f"no tracker is called {name!r}: expected some of {', '.join(modules)} or none"
            )
        if importlib.util.find_spec(modules[name]) is None:
            if name != "tensorboard":
                raise FullrankError(
                    f"--track {name} needs the package {modules[name]}: pip install {modules[name]}"
                )
            say("tensorboard is not installed: only log.jsonl is written")
            continue
        out.append(name)
    if "wandb" in out:
        # A library must not print over the progress of a run.
        os.environ.setdefault("WANDB_SILENT", "true")
    return tuple(out)
