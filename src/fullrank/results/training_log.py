"""A run directory as a record: RUN/run.json and RUN/log.jsonl, also while the run is going on.

The log has one JSON object a line, each with "event", "step" and "time" in seconds:

    start      config, parameters, vocabulary, device, processes, resumed, data, steps (planned), unmeasured
    train      epoch, tokens, loss, lr, gradient_norm, tokens_per_second
    evaluate   epoch, tokens, split, loss, standard_error, perplexity, bits_per_byte, counted, averaged,
               monitors, monitor_seconds, evaluate_seconds
    alarm      kind, message
    end        reason, and of a finished run valid and test: the evaluations of its best weights

A last line that was cut short, by a kill or by reading while it is written, is left out. Any other line that
cannot be read is an error. What stands after the step of a later start was trained again, and is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullrank.errors import FullrankError
from fullrank.results.diagnosis import Estimate
from fullrank.results.reading import NotRegularError, read_json, read_text
from fullrank.results.training import Evaluation, RaisedAlarm, Training, TrainingPoint

CONFIG, LOG = "run.json", "log.jsonl"


def is_run(path: Path) -> bool:
    """Whether this is the directory of a training run."""
    return (path / CONFIG).is_file() and (path / LOG).is_file()


def read_log(run: Path) -> Training:
    """The record of the run in a directory; raises FullrankError for what is none."""
    document = _config(run / CONFIG)
    lines = _lines(run / LOG)
    starts = [line for _, line in lines if line["event"] == "start"]
    points: list[TrainingPoint] = []
    evaluations: dict[tuple[int, str], Evaluation] = {}
    alarms: list[RaisedAlarm] = []
    spent = {"evaluate_seconds": 0.0, "monitor_seconds": 0.0}
    reason = ""
    final: dict[str, Estimate] = {}
    for number, line in lines:
        try:
            step = int(line["step"])
            match line["event"]:
                case "start":
                    points = [one for one in points if one.step <= step]
                    alarms = [one for one in alarms if one.step <= step]
                    evaluations = {key: one for key, one in evaluations.items() if one.step <= step}
                    reason, final = "", {}
                case "train":
                    points.append(_point(line))
                case "evaluate":
                    one = _evaluation(line)
                    # The last evaluation of a step is over all tokens, an earlier one perhaps over some.
                    evaluations.pop((step, one.split), None)
                    evaluations[step, one.split] = one
                    for name in spent:
                        spent[name] += _number(line.get(name, 0.0))
                case "alarm":
                    alarms.append(
                        RaisedAlarm(step=step, kind=str(line["kind"]), message=str(line["message"]))
                    )
                case "end":
                    reason = str(line["reason"])
                    for split in ("valid", "test"):
                        if isinstance(line.get(split), dict):
                            final[split] = _estimate(line[split]["loss"], line[split]["standard_error"])
                    if isinstance(line.get("valid"), dict):
                        spent["evaluate_seconds"] += _number(line["valid"].get("seconds", 0.0))
        except (KeyError, TypeError, ValueError) as error:
            raise FullrankError(
                f"line {number} of {run / LOG} is no {str(line['event'])[:40]!r} line as this version writes "
                f"them ({error!r}): draw the run with the version that trained it"
            ) from error
    # One that ended before it had either, as where its first steps are no numbers, is a record all the same.
    if not points and not evaluations and not reason:
        raise FullrankError(f"{run / LOG} holds no training step and no evaluation yet: let the run go on")
    seconds = _seconds([line for _, line in lines])
    start: Mapping[str, Any] = starts[-1] if starts else {}
    config = start.get("config") or document.get("config") or document
    settings = flattened(config)
    facts = start.get("data", document.get("data"))
    kept = sorted(evaluations.values(), key=lambda one: one.step)
    return Training(
        name=run.resolve().name,
        config=settings,
        recipe=settings.get("recipe", ""),
        head=settings.get("head.name", ""),
        parameters=int(start.get("parameters", 0)),
        flops_per_token=float(start.get("flops_per_token", 0.0)),
        vocabulary=int(start.get("vocabulary", 0)),
        unmeasured={str(name): str(why) for name, why in (start.get("unmeasured") or {}).items()},
        data=flattened(facts) if isinstance(facts, dict) else {"digest": str(facts)} if facts else {},
        device=str(start.get("device", "")),
        processes=int(start.get("processes", 1)),
        points=tuple(points),
        evaluations=tuple(kept),
        alarms=tuple(alarms),
        valid=final.get("valid", _last(kept, "valid")),
        test=final.get("test", _last(kept, "test")),
        reason=reason,
        planned=int(start.get("steps", 0)),
        steps=max([one.step for one in points] + [one.step for one in kept], default=0),
        starts=max(1, len(starts)),
        seconds=seconds,
        seconds_training=max(0.0, seconds - sum(spent.values())),
        monitor_share=spent["monitor_seconds"] / seconds if seconds > 0 else math.nan,
        saturation=None,
    )


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a": {"b": true}} as {"a.b": "true"}; a list joined by commas, as --set takes it."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found |= flattened(value, f"{path}.")
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            found |= flattened({str(place): item for place, item in enumerate(value)}, f"{path}.")
        elif isinstance(value, list | tuple):
            found[path] = ",".join(map(str, value))
        else:
            found[path] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def _config(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path)
        if not isinstance(document, dict):
            raise ValueError(f"a {type(document).__name__}")
    except OSError as error:
        raise FullrankError(
            f"{path} cannot be read ({error.strerror}): pass the --out of `fullrank train`"
        ) from error
    except NotRegularError:
        raise
    except ValueError as error:
        raise FullrankError(
            f"{path} is no training config ({error}): pass the --out of `fullrank train`"
        ) from error
    return document


def _lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Number and content of every line."""
    try:
        text = read_text(path, errors="replace")
    except OSError as error:
        raise FullrankError(
            f"{path} cannot be read ({error.strerror}): pass the --out of `fullrank train`"
        ) from error
    *whole, rest = text.split("\n")
    found = []
    for number, line in enumerate([*whole, rest], start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            if not isinstance(content, dict) or "event" not in content or "step" not in content:
                raise ValueError("no object with event and step")
        except ValueError as error:
            if number > len(whole):
                break
            raise FullrankError(
                f"line {number} of {path} cannot be read ({error}): the file is damaged; take that line out"
            ) from error
        found.append((number, content))
    return found


def _point(line: Mapping[str, Any]) -> TrainingPoint:
    return TrainingPoint(
        step=int(line["step"]),
        epoch=_number(line["epoch"]),
        tokens=int(line["tokens"]),
        loss=_number(line["loss"]),
        lr=_number(line["lr"]),
        gradient_norm=_number(line["gradient_norm"]),
        tokens_per_second=_number(line["tokens_per_second"]),
    )


def _evaluation(line: Mapping[str, Any]) -> Evaluation:
    monitors: dict[str, float] = {}
    for name, value in (line.get("monitors") or {}).items():
        if isinstance(value, list):
            monitors |= {f"{name}/{place}": _number(item) for place, item in enumerate(value)}
        else:
            monitors[str(name)] = _number(value)
    return Evaluation(
        step=int(line["step"]),
        epoch=_number(line["epoch"]),
        tokens=int(line["tokens"]),
        split=str(line["split"]),
        loss=_number(line["loss"]),
        standard_error=_number(line["standard_error"]),
        perplexity=_number(line["perplexity"]),
        bits_per_byte=_number(line["bits_per_byte"]),
        counted=int(line["counted"]),
        averaged=bool(line["averaged"]),
        monitors=monitors,
    )


def _number(value: Any) -> float:
    # "nan" and "inf" are strings in the log, because JSON has no word for them.
    return math.nan if value is None else float(value)


def _last(evaluations: list[Evaluation], split: str) -> Estimate | None:
    for one in reversed(evaluations):
        if one.split == split:
            return _estimate(one.loss, one.standard_error)
    return None


def _estimate(loss: Any, standard_error: Any) -> Estimate:
    value, error = _number(loss), _number(standard_error)
    # A text of one block has an infinite error, which is no interval.
    half = 1.96 * error if math.isfinite(error) else math.nan
    return Estimate(value=value, low=value - half, high=value + half)


def _seconds(lines: list[dict[str, Any]]) -> float:
    """Time at work: from every start to the last line before the next."""
    total, began, last = 0.0, math.nan, math.nan
    for line in lines:
        now = _number(line.get("time"))
        if line["event"] == "start" or math.isnan(began):
            total += 0.0 if math.isnan(began) else last - began
            began = now
        last = now
    return max(0.0, total + (0.0 if math.isnan(last - began) else last - began))
