"""A run directory as a record: what is in the log, a torn end, a resumed run, and what is no log."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullrank import results
from fullrank.errors import FullrankError
from fullrank.results import Training, Trainings, read_log
from fullrank.results.training_log import flattened

Lines = Callable[..., list[dict[str, Any]]]
Write = Callable[..., Path]


def test_everything_in_the_log_is_in_the_record(write_run: Write, run_lines: Lines) -> None:
    lines = run_lines(turns=True, dead_from=7)
    record = read_log(write_run("mine", lines=lines))
    assert (record.name, record.head, record.recipe) == ("mine", "mos", "transformer-tiny")
    assert (record.parameters, record.vocabulary, record.device) == (4_321_000, 33_278, "cpu")
    assert record.config["head.components"] == "4"
    assert record.config["head.bias"] == "true"
    assert record.config["head.contexts"] == "2,1"
    assert record.data == {"digest": "0f1e2d"}
    assert [one.step for one in record.points] == list(range(50, 2401, 50))
    evaluated = [line for line in lines if line["event"] == "evaluate"]
    assert [(one.step, one.split, one.loss) for one in record.evaluations] == [
        (line["step"], line["split"], line["loss"]) for line in evaluated
    ]
    first = record.evaluations[0]
    assert first.parts("component_shares") == tuple(evaluated[0]["monitors"]["component_shares"])
    assert first.parts("anisotropy") == ()
    assert first.monitors["anisotropy"] == evaluated[0]["monitors"]["anisotropy"]
    assert [(one.step, one.kind) for one in record.alarms] == [
        (1400, "dead_components"),
        (2200, "curve_turned"),
    ]
    best = record.best()
    assert best is not None
    assert best.loss == min(line["loss"] for line in evaluated if line["split"] == "valid")
    assert record.valid is not None
    # The end tells the loss of the best weights; the curve keeps that of the last ones.
    assert record.valid.value == best.loss < record.validation()[-1].loss
    assert record.valid.high - record.valid.value == pytest.approx(1.96 * 0.012)
    assert record.test is not None
    assert record.test.value == evaluated[-1]["loss"]
    assert (record.reason, record.steps, record.planned, record.starts) == ("finished", 2400, 2400, 1)
    going = read_log(write_run("going", lines=run_lines(turns=True, finished=False)))
    assert going.valid is not None
    assert going.valid.value == evaluated[-2]["loss"]
    assert (going.test, going.reason) == (None, "")


def test_time_is_that_at_work_and_monitors_have_their_share(write_run: Write, run_lines: Lines) -> None:
    lines = run_lines(evaluations=2, finished=False)
    wall = lines[-1]["time"] - lines[0]["time"]
    record = read_log(write_run("one", lines=lines))
    assert record.seconds == pytest.approx(wall)
    assert record.seconds_training == pytest.approx(wall - 3 * 1.45)
    assert record.monitor_share == pytest.approx(3 * 0.05 / wall)
    # Resumed an hour later from step 200: what came after is lived again, and the hour is no work.
    again = {**lines[0], "resumed": True, "step": 200, "time": lines[-1]["time"] + 3600}
    rest = [{**line, "time": line["time"] + 3600 + wall} for line in lines if line["step"] > 200]
    record = read_log(write_run("two", lines=[*lines, again, *rest]))
    assert record.starts == 2
    assert [one.step for one in record.points] == [*range(50, 401, 50)]
    assert [one.step for one in record.evaluations] == [0, 200, 400]
    assert record.seconds == pytest.approx(wall + rest[-1]["time"] - again["time"])


def test_a_torn_last_line_is_left_out_and_every_cut_can_be_read(write_run: Write) -> None:
    run = write_run(evaluations=2)
    log = run / "log.jsonl"
    whole = log.read_bytes()
    ends = [place for place, byte in enumerate(whole) if byte == ord("\n")]
    torn = 0
    for cut in range(ends[1], len(whole), 97):
        log.write_bytes(whole[:cut])
        record = read_log(run)
        lines = sum(end < cut for end in ends) + (cut in ends)
        told = 1 + len(record.points) + len(record.evaluations) + (record.reason != "")
        assert told == lines
        torn += 1
    assert torn > 20


def test_a_damaged_line_in_the_middle_is_named(write_run: Write) -> None:
    run = write_run(evaluations=1)
    lines = (run / "log.jsonl").read_text().splitlines()
    lines[3] = lines[3][:20]
    (run / "log.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(FullrankError, match=r"line 4 of .* cannot be read"):
        read_log(run)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"event": "train", "step": 3, "time": 0.0}, "line 2 .* is no 'train' line"),
        ({"event": "evaluate", "step": "x", "time": 0.0}, "line 2 .* is no 'evaluate' line"),
        ({"step": 3}, "line 2 .*no object with event and step"),
        ([1, 2], "line 2 .*no object with event and step"),
    ],
)
def test_lines_that_are_no_log_lines(line: Any, words: str, write_run: Write, run_lines: Lines) -> None:
    run = write_run(lines=run_lines(evaluations=0, finished=False)[:1])
    with (run / "log.jsonl").open("a") as log:
        log.write(json.dumps(line) + "\n")
    with pytest.raises(FullrankError, match=words):
        read_log(run)


def test_a_run_that_has_only_begun_and_a_directory_that_is_none(
    write_run: Write, run_lines: Lines, tmp_path: Path
) -> None:
    with pytest.raises(FullrankError, match=r"no training step and no evaluation yet: let the run go on"):
        read_log(write_run(lines=run_lines(evaluations=0, finished=False)[:1]))
    with pytest.raises(FullrankError, match=r"pass the --out of"):
        read_log(tmp_path / "nothing")
    assert not results.is_run(tmp_path)


def test_numbers_that_json_has_no_word_for(write_run: Write, run_lines: Lines) -> None:
    lines = run_lines(evaluations=1, finished=False)
    evaluated = next(line for line in lines if line["event"] == "evaluate")
    evaluated["monitors"] |= {"head_condition": "inf", "anisotropy": "nan"}
    evaluated["loss"] = "nan"
    record = read_log(write_run(lines=lines))
    assert record.evaluations[0].monitors["head_condition"] == math.inf
    assert math.isnan(record.evaluations[0].monitors["anisotropy"])
    best = record.best()
    assert best is not None
    assert best.step == 200


def test_an_event_of_a_later_version_is_passed_over(write_run: Write, run_lines: Lines) -> None:
    lines = run_lines(evaluations=1, finished=False)
    lines.insert(2, {"event": "something", "step": 10, "time": 0.0})
    assert read_log(write_run(lines=lines)).steps == 200


def test_records_survive_their_files(write_run: Write, tmp_path: Path) -> None:
    made = results.provenance(seed=3, device="cpu")
    record = read_log(write_run("a", dead_from=5))
    results.save(record, tmp_path / "one.json", made)
    assert results.load(tmp_path / "one.json")[0] == record
    both = Trainings(runs=(record, read_log(write_run("b", components=1))))
    results.save(both, tmp_path / "two.json", made)
    loaded = results.load(tmp_path / "two.json")[0]
    assert loaded == both
    assert all(isinstance(run, Training) for run in loaded.runs)


def test_settings_as_the_command_line_takes_them() -> None:
    nested = {"a": {"b": True, "c": [1, 2]}, "d": 0.5, "e": "", "f": [], "g": [{"h": 1}]}
    assert flattened(nested) == {
        "a.b": "true", "a.c": "1,2", "d": "0.5", "e": "", "f": "", "g.0.h": "1",
    }  # fmt: skip
