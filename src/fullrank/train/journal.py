"""What a run tells while it trains: every event goes to the log, to the trackers and to whoever watches.

The main process alone writes; on the others all of this is silent. Alarms are a function of the evaluations
told, those before a resume among them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fullrank.train import folder
from fullrank.train.alarms import Alarms
from fullrank.train.config import Config, to_json
from fullrank.train.evaluate import Evaluation
from fullrank.train.log import Log, Trackers
from fullrank.train.state import State

_TRAINING = ("loss", "lr", "gradient_norm", "tokens_per_second")
_EVALUATION = ("loss", "perplexity", "bits_per_byte")
"""What of such lines trackers get."""


class Show:
    """What a terminal may want to hear; the default is silence."""

    def say(self, message: str) -> None: ...
    def reading(self, label: str, share: float) -> None: ...
    def step(self, done: int, total: int, loss: float, tokens_per_second: float) -> None: ...
    def evaluation(self, line: dict[str, Any], steps: int) -> None: ...


class Journal:
    """Log, trackers and terminal of a run of at most `steps` steps, whose state says where it stands."""

    def __init__(self, machine: Any, out: Path, state: State, show: Show, *, steps: int) -> None:
        self.machine, self.out, self.state, self.show, self.steps = machine, out, state, show, steps
        self.main = machine.is_main_process
        self.log: Log | None = None
        self.trackers: Trackers | None = None
        self.alarms = Alarms()

    def open(self, trackers: tuple[str, ...], config: Config) -> None:
        """Begin to write; lines of the log after the state's step go."""
        self.trackers = Trackers(self.machine, trackers, self.out, folder.flat(to_json(config)))
        if self.main:
            self.log = Log(self.out / folder.LOG, step=self.state.step)
            self.alarms = Alarms(self.log.evaluations)

    def write(self, event: str, **fields: Any) -> dict[str, Any]:
        """A line of the log, which comes back; nothing on other processes."""
        return self.log.write(event, self.state.step, **fields) if self.log is not None else {}

    def training(
        self, *, loss: float, gradient_norm: float, rate: float, tokens_per_second: float, skipped: int = 0,
        mfu: float | None = None, peak_bytes: int | None = None, penalties: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        """The means since the last such line; the share of the device's operations that were the model's, and
        the most memory so far, where these are known; penalties of the last step, where there are any."""
        if not self.main:
            return
        state = self.state
        known = {"skipped": skipped or None, "mfu": mfu, "peak_bytes": peak_bytes, "penalties": penalties}
        line = self.write(
            "train", epoch=state.epoch, tokens=state.tokens, loss=loss, lr=rate, gradient_norm=gradient_norm,
            tokens_per_second=tokens_per_second,
            **{name: value for name, value in known.items() if value is not None},
        )  # fmt: skip
        self._track({f"train/{name}": line[name] for name in _TRAINING})
        self.show.step(state.step, self.steps, loss, tokens_per_second)

    def evaluation(
        self, split: str, scored: Evaluation, monitors: dict[str, Any], seconds: float, *, averaged: bool
    ) -> None:
        """An evaluation and what the monitors, in some seconds, found; then the alarms that it raises."""
        if not self.main:
            return
        state = self.state
        line = self.write(
            "evaluate", epoch=state.epoch, tokens=state.tokens, split=split, loss=scored.loss,
            standard_error=scored.standard_error, perplexity=scored.perplexity,
            bits_per_byte=scored.bits_per_byte, counted=scored.counted, averaged=averaged,
            monitors=monitors, monitor_seconds=seconds, evaluate_seconds=scored.seconds,
        )  # fmt: skip
        values: dict[str, Any] = {f"{split}/{name}": line[name] for name in _EVALUATION}
        self._track(values | {f"monitor/{name}": value for name, value in monitors.items()})
        self.show.evaluation(line, self.steps)
        for alarm in self.alarms.check(state.step, line):
            self.write("alarm", kind=alarm.kind, message=alarm.message)
            self.show.say(f"alarm at step {alarm.step}: {alarm.message}")

    def _track(self, values: dict[str, Any]) -> None:
        if self.trackers is not None:
            self.trackers.write(self.state.step, values)

    def sync(self) -> None:
        if self.log is not None:
            self.log.sync()

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
        if self.trackers is not None:
            self.trackers.close()
