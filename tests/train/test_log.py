"""The log: what a resumed run keeps, torn lines, numbers that JSON has no word for, and trackers."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import math
import resource
from pathlib import Path
from typing import Any

import pytest

from fullrank.errors import FullrankError
from fullrank.results.training_log import read_log
from fullrank.train.log import Log, Trackers, available, finished
from fullrank.train.processes import accelerator


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def told(path: Path) -> list[tuple[str, int]]:
    return [(line["event"], line["step"]) for line in lines(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run that was killed at step 7, with a checkpoint at 4."""
    path = tmp_path / "log.jsonl"
    log = Log(path, step=0)
    log.write("start", 0, resumed=False)
    for step in (2, 4, 6):
        log.write("train", step, loss=1.0 / step)
        log.write("evaluate", step, split="valid", loss=2.0 / step)
    log.write("alarm", 4, kind="curve_turned", message="so")
    log.write("train", 7, loss=0.1)
    log.close()
    return path


def test_a_resumed_run_drops_what_it_will_live_again(path: Path) -> None:
    log = Log(path, step=4)
    assert [line["step"] for line in log.evaluations] == [2, 4]
    assert [line["kind"] for line in log.alarms] == ["curve_turned"]
    log.write("start", 4, resumed=True)
    log.write("train", 6, loss=0.5)
    log.close()
    assert told(path) == [
        ("start", 0), ("train", 2), ("evaluate", 2), ("train", 4), ("evaluate", 4), ("alarm", 4),
        ("start", 4), ("train", 6),
    ]  # fmt: skip


def test_stops_and_starts_at_one_step_do_not_pile_up(path: Path) -> None:
    for _ in range(3):
        log = Log(path, step=4)
        log.write("start", 4, resumed=True)
        log.write("end", 4, reason="stopped")
        log.close()
    assert told(path)[-2:] == [("start", 4), ("end", 4)]
    assert sum(event == "start" for event, _ in told(path)) == 2


def test_a_test_split_that_was_told_before_the_end_is_told_again(path: Path) -> None:
    # A kill between the test split's line and the end: the whole end is repeated.
    log = Log(path, step=7)
    log.write("evaluate", 7, split="valid", loss=1.0)
    log.write("start", 7, resumed=True)
    log.write("evaluate", 7, split="test", loss=1.0)
    log.close()
    log = Log(path, step=7)
    assert [line["split"] for line in log.evaluations] == ["valid"] * 4
    log.close()
    assert told(path)[-2:] == [("train", 7), ("evaluate", 7)]


def test_a_fresh_run_begins_an_empty_log(path: Path) -> None:
    Log(path, step=0).close()
    assert path.read_text() == ""


@pytest.mark.parametrize("cut", [1, 2, 10, 40])
def test_a_torn_last_line(path: Path, cut: int) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    log = Log(path, step=100)
    log.write("train", 8, loss=0.0)
    log.close()
    # Without its newline alone a line is whole.
    assert told(path)[-2:] == [("train", 7) if cut == 1 else ("alarm", 4), ("train", 8)]


@pytest.mark.parametrize(
    "tail", [b"\xff\xfe\x00", b"\x00" * 50, b"{}\n", b"17\n", b'{"event": 1, "step": "a"}\n']
)
def test_rubbish_at_the_end(path: Path, tail: bytes) -> None:
    path.write_bytes(path.read_bytes() + tail)
    Log(path, step=100).close()
    assert told(path)[-1] == ("train", 7)
    assert not finished(path)


def test_numbers_that_json_has_no_word_for(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = Log(path, step=0)
    log.write("evaluate", 1, perplexity=math.inf, monitors={"a": math.nan, "b": [-math.inf, 1.0]})
    log.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert line["perplexity"] == "inf"
    assert line["monitors"] == {"a": "nan", "b": ["-inf", 1.0]}
    assert float(line["monitors"]["b"][0]) == -math.inf


def test_floats_come_back_to_the_last_bit(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl", step=0)
    value = 0.1 + 0.2
    log.write("train", 1, loss=value)
    log.close()
    assert lines(log.path)[0]["loss"] == value


def test_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl", step=0)
    log.write("train", 1, loss=1.0)
    assert told(log.path) == [("train", 1)]
    log.close()


def test_finished(path: Path) -> None:
    assert not finished(path)
    assert not finished(path.with_name("none"))
    log = Log(path, step=7)
    log.write("end", 7, reason="stopped")
    assert not finished(path)
    log.write("end", 7, reason="finished")
    assert finished(path)
    log.close()


def test_a_full_disk(path: Path) -> None:
    big = path.with_name("big.jsonl")
    big.write_text(json.dumps({"event": "train", "step": 1, "text": "x" * 10_000}) + "\n")
    log = Log(path, step=7)
    before = lines(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        with pytest.raises(FullrankError, match=r"log\.jsonl cannot be written"):
            log.write("train", 8, loss=1.0)
        # Closing tries nothing again.
        log.close()
        with pytest.raises(FullrankError, match="make room and run the same command again"):
            Log(big, step=100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    Log(path, step=7).close()
    assert lines(path) == before
    assert len(big.read_text()) > 10_000


def test_the_record_reads_what_a_log_writes(path: Path) -> None:
    (path.parent / "run.json").write_text(json.dumps({"version": 1, "config": {}, "data": ""}))
    log = Log(path, step=0)
    log.write(
        "start", 0, resumed=False, config={"recipe": "r"}, parameters=3, vocabulary=4, device="cpu",
        processes=1,
    )  # fmt: skip
    log.write("train", 1, epoch=0.1, tokens=5, loss=math.inf, lr=0.1, gradient_norm=math.nan,
              tokens_per_second=1.0)  # fmt: skip
    log.close()
    record = read_log(path.parent)
    assert math.isinf(record.points[0].loss)
    assert math.isnan(record.points[0].gradient_norm)


def test_tensorboard_holds_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    names = available(("tensorboard",), pytest.fail)
    trackers = Trackers(
        accelerator("cpu", names, str(tmp_path), fsdp=False), names, tmp_path, {"a.b": 1, "c": None}
    )
    trackers.write(3, {"train/loss": 2.5, "monitor/shares": [0.25, 0.75], "flag": True, "word": "x"})
    trackers.write(4, {"train/loss": 2})
    trackers.close()
    files = list((tmp_path / "tensorboard").rglob("events.out.tfevents.*"))
    assert files
    read = EventAccumulator(str(tmp_path / "tensorboard" / "fullrank"))
    read.Reload()
    assert [(one.step, one.value) for one in read.Scalars("train/loss")] == [(3, 2.5), (4, 2.0)]
    assert [one.value for one in read.Scalars("monitor/shares/1")] == [0.75]
    assert set(read.Tags()["scalars"]) == {"train/loss", "monitor/shares/0", "monitor/shares/1"}


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        return None if name in ("tensorboard", "wandb", "trackio") else real(name, package)

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.mark.usefixtures("nothing_installed")
def test_a_default_that_is_missing_is_a_sentence(tmp_path: Path) -> None:
    said: list[str] = []
    assert available(("tensorboard",), said.append) == ()
    assert said == ["tensorboard is not installed: only log.jsonl is written"]
    silent = Trackers(accelerator("cpu", (), str(tmp_path), fsdp=False), (), tmp_path, {})
    silent.write(1, {"loss": 1.0})
    silent.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_wish_that_is_missing_is_an_error(name: str) -> None:
    with pytest.raises(FullrankError, match=f"pip install {name}"):
        available((name,), pytest.fail)


def test_an_unknown_tracker() -> None:
    with pytest.raises(FullrankError, match="no tracker is called 'mlflow'"):
        available(("mlflow",), pytest.fail)
