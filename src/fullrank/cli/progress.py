"""What long commands share: a bar that shows the time left, and the name of the device they run on."""

from __future__ import annotations


def device_of(name: str) -> str:
    """The device that was asked for, checked; auto is cuda where there is one."""
    import torch

    from fullrank.models import checks

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    checks.device(name)
    return name


def device_name(device: str) -> str:
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return f"{device}, {torch.get_num_threads()} threads" if device == "cpu" else device


class Bar:
    """One line a stage, with the time left in it."""

    def __init__(self, console: object) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description:<34}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,  # type: ignore[arg-type]
            transient=True,
            # Into a file or a pipe it would write an empty line.
            disable=not console.is_terminal,  # type: ignore[attr-defined]
        )
        self._stage, self._task = "", None

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, stage: str, share: float) -> None:
        key = stage.split(":")[0]
        if key != self._stage:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(stage, total=1.0)  # type: ignore[assignment]
            self._stage = key
        self._progress.update(self._task, description=stage, completed=share)  # type: ignore[arg-type]
