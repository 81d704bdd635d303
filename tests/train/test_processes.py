"""One process against two: the same losses and weights, checkpoints that go back and forth; launchers."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.train import checkpoint, processes

SECONDS = 300
STARTED = pytest.mark.slow(
    reason="two processes import torch for fifteen seconds: make test-processes, in CI"
)
SCRIPT = Path(__file__).with_name("many_processes.py")
_specification = importlib.util.spec_from_file_location("many_processes", SCRIPT)
assert _specification is not None
assert _specification.loader is not None
many = importlib.util.module_from_spec(_specification)
_specification.loader.exec_module(many)
SMALL = (
    "awd-lstm", "--device", "cpu", "--set", "body.hidden=12", "--set", "body.last=10", "--width", "8",
    "--set", "batch=8", "--set", "length=8", "--set", "evaluate_every=10",
)  # fmt: skip


def wait(parent: subprocess.Popen[bytes], seconds: float = SECONDS) -> int | None:
    """The exit code, None after a hang; nothing of its session is left running."""
    try:
        code: int | None = parent.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()
    return code


def trained(folder: Path, cases: tuple[str, ...]) -> Path:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "said.txt").open("w") as said:
        parent = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), *cases], env=environment, stdout=said, stderr=said,
            start_new_session=True,
        )  # fmt: skip
    code = wait(parent)
    said = (folder / "said.txt").read_text()
    assert code == 0, f"exit code {code}\n{said}"
    assert not said
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs"), many.QUICK)


@pytest.fixture(scope="module")
def every_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case, not only the quick ones: the slow tier's."""
    return trained(tmp_path_factory.mktemp("every_run"), tuple(many.CASES))


def lines(run: Path, *events: str) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line for line in every if line["event"] in events]


def last(run: Path) -> checkpoint.Stored:
    return checkpoint.read(checkpoint.found(run / "checkpoints", "step")[-1])


def compare(run: Path, expected: Path) -> None:
    own, reference = lines(run, "train", "evaluate"), lines(expected, "train", "evaluate")
    assert [(line["event"], line["step"]) for line in own] == [
        (line["event"], line["step"]) for line in reference
    ]
    for line, other in zip(own, reference, strict=True):
        for name in {"loss", "gradient_norm", "lr", "epoch", "standard_error"} & line.keys():
            assert line[name] == pytest.approx(other[name], rel=1e-9, abs=1e-12), (name, line["step"])
        for name in {"tokens", "counted", "split", "averaged"} & line.keys():
            assert line[name] == other[name], (name, line["step"])
    stored, other = last(run), last(expected)
    for name in ("step", "cursor", "stage", "stage_step", "averaged", "best_step", "ended"):
        assert stored.state[name] == other.state[name], name
    assert stored.groups.keys() == other.groups.keys()
    for group, tensors in stored.groups.items():
        assert tensors.keys() == other.groups[group].keys()
        for name, tensor in tensors.items():
            # AdamW divides a gradient by its size: of one that is nearly zero, an update is all rounding.
            torch.testing.assert_close(
                tensor,
                other.groups[group][name],
                rtol=1e-7,
                atol=1e-9,
                msg=lambda text, of=name: f"{of}: {text}",
            )


@STARTED
@pytest.mark.parametrize("name", many.QUICK)
def test_two_processes_learn_what_one_does(runs: Path, name: str) -> None:
    compare(runs / "two" / name, runs / "one" / many.reference(name))
    assert lines(runs / "two" / name, "start")[0]["processes"] == 2


@STARTED
@pytest.mark.parametrize("name", many.QUICK)
def test_a_run_goes_from_one_process_to_two_and_back(runs: Path, name: str) -> None:
    compare(runs / "relay" / name, runs / "one" / many.reference(name))
    assert [line["processes"] for line in lines(runs / "relay" / name, "start")] == [1, 2, 1]


@pytest.mark.slow(reason="18 runs take a minute; the quick one shares a batch, and goes back and forth")
def test_every_case_and_relay_learns_what_one_process_does(every_run: Path) -> None:
    for name in many.CASES:
        compare(every_run / "two" / name, every_run / "one" / many.reference(name))
    for name in many.RELAYS:
        compare(every_run / "relay" / name, every_run / "one" / many.reference(name))
        assert [line["processes"] for line in lines(every_run / "relay" / name, "start")] == [1, 2, 1]
    for head in many.TIED_HEADS:
        assert lines(every_run / "heads" / head, "end")[-1]["reason"] == "finished"
    check_that_runs_differ(every_run, tuple(many.CASES))
    check_that_tied_weights_are_one(every_run, "fsdp-averaged", "embedding")
    check_that_tied_weights_are_one(every_run, "fsdp-transformer", "embed_in")


@STARTED
def test_the_comparison_sees_what_it_should(runs: Path) -> None:
    check_that_runs_differ(runs, many.QUICK)


def check_that_runs_differ(runs: Path, cases: tuple[str, ...]) -> None:
    """The runs above learn, clip, carry a state and average: else equal numbers would mean little."""
    for name in dict.fromkeys(map(many.reference, cases)):
        trained = lines(runs / "one" / name, "train")
        first = many.build(many.CASES[name].config(), lines(runs / "one" / name, "start")[0]["vocabulary"])
        learnt = last(runs / "one" / name).groups["model"]
        for of, parameter in first.named_parameters():
            if parameter.ndim > 1:
                # A thousand times the tolerance.
                assert (learnt[of] - parameter).abs().max() > 1e-6, (name, of)
        norms = [line["gradient_norm"] for line in trained]
        clip = many.CASES[name].config().optimiser.clip
        assert max(norms) > 1.5 * clip, name
        carried = last(runs / "one" / name).groups["carried"]
        if many.CASES[name].recipe == "awd-lstm" and not name.endswith("averaged"):
            # Rows differ by far more than the tolerance: rows in another order would be seen.
            assert all(tensor.shape[0] == 8 and tensor.std(0).max() > 1e-3 for tensor in carried.values())
        if name.endswith("averaged"):
            assert "live" in last(runs / "one" / name).groups
            assert any(line["averaged"] for line in lines(runs / "one" / name, "evaluate"))
    assert last(runs / "one" / "mos").step == many.STEPS


def check_that_tied_weights_are_one(runs: Path, name: str, embedding: str) -> None:
    groups = last(runs / "two" / name).groups
    assert f"model.{embedding}.weight" in groups["model"]
    assert "lm_head.decoder.weight" not in groups["model"]


@STARTED
def test_monitors_see_the_whole_model(runs: Path) -> None:
    own, reference = (lines(runs / kind / "mos", "evaluate")[0]["monitors"] for kind in ("two", "one"))
    assert own.keys() == reference.keys()
    assert len(own) > 5
    assert own["head_effective_rank"] == pytest.approx(reference["head_effective_rank"], rel=1e-6)


# Launchers.


@pytest.fixture
def text(tmp_path: Path) -> Path:
    many.write_text(tmp_path / "text")
    return tmp_path / "text"


@contextlib.contextmanager
def launched(text: Path, out: Path, *arguments: str, launcher: str = "torchrun") -> Iterator[Any]:
    """The command under a launcher, in a session of its own; stdout and stderr go to files beside `out`."""
    launchers = {
        "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        "accelerate": (
            "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
            "--mixed_precision", "no", "--dynamo_backend", "no",
        ),
    }  # fmt: skip
    command = [
        sys.executable, *launchers[launcher], "-m", "fullrank.cli.main", "train", *SMALL, "--data", str(text),
        "--out", str(out), *arguments,
    ]  # fmt: skip
    cache = str(out.parent / "cache")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FULLRANK_CACHE": cache, "COLUMNS": "200"}
    with out.with_suffix(".out").open("w") as said, out.with_suffix(".err").open("w") as complained:
        parent = subprocess.Popen(
            command, env=environment, stdout=said, stderr=complained, start_new_session=True
        )
    try:
        yield parent
    finally:
        # They are in sessions of their own, and would train for ever.
        for process in workers(parent.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        wait(parent, 0)


def until_step(run: Path, step: int, parent: subprocess.Popen[bytes], *, starts: int = 1) -> None:
    """Of the last of so many starts: a log keeps the lines of those before."""
    for _ in range(20 * 120):
        assert parent.poll() is None, run.with_suffix(".err").read_text()
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            own = lines(run, "start", "train")
            begun = [place for place, line in enumerate(own) if line["event"] == "start"]
            if len(begun) == starts and any(line["step"] >= step for line in own[begun[-1] + 1 :]):
                return
        time.sleep(0.05)
    raise AssertionError("no progress")


def workers(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                found.append(int(path.parent.name))
    return sorted(found)


@pytest.mark.slow(reason="a launcher and two workers import torch for 14 s; relays above stop by SIGTERM too")
def test_sigterm_to_the_launcher_saves_and_stops_both(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with launched(text, run, "--set", "steps=100000") as parent:
        until_step(run, 12, parent)
        started = workers(parent.pid)
        assert len(started) == 2
        parent.send_signal(signal.SIGTERM)
        assert wait(parent, 60) not in (None, 0)
        assert not any(Path(f"/proc/{process}").exists() for process in started)
    said = run.with_suffix(".out").read_text()
    assert len(re.findall(r"^step +10 of", said, re.M)) == 1
    stopped = re.findall(r"^stopped at step ([\d,]+) of 100,000", said, re.M)
    end = lines(run, "end")[-1]
    assert end["reason"] == "stopped"
    assert [int(one.replace(",", "")) for one in stopped] == [end["step"]]
    assert last(run).step == end["step"]


@pytest.mark.slow
def test_ctrl_c_reaches_the_workers_twice_and_still_saves(text: Path, tmp_path: Path) -> None:
    """A terminal gives Ctrl-C to all, and torchrun passes it on once more."""
    run = tmp_path / "run"
    with launched(text, run, "--set", "steps=100000") as parent:
        until_step(run, 3, parent)
        os.killpg(parent.pid, signal.SIGINT)
        assert wait(parent, 60) not in (None, 0)
    end = lines(run, "end")[-1]
    assert end["reason"] == "stopped"
    assert last(run).step == end["step"]


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_and_it_continues(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with launched(text, run, "--set", "steps=100000") as parent:
        until_step(run, 12, parent)
        os.kill(workers(parent.pid)[1], signal.SIGKILL)
        assert wait(parent, 60) not in (None, 0)
    step = last(run).step
    assert step
    assert step % 10 == 0
    with launched(text, run, "--set", "steps=100000") as parent:
        until_step(run, step + 5, parent, starts=2)
    assert lines(run, "start")[-1]["step"] == step


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_launchers_finish(text: Path, tmp_path: Path, launcher: str) -> None:
    run = tmp_path / "run"
    with launched(text, run, "--set", "steps=20", launcher=launcher) as parent:
        assert wait(parent, 120) == 0, run.with_suffix(".err").read_text()
    assert lines(run, "start")[0]["processes"] == 2
    assert (run / "results.json").exists()
    assert (run / "report.html").exists()
    said = run.with_suffix(".out").read_text()
    assert len(re.findall(r"^test ", said, re.M)) == 1
    assert "fullrank" not in run.with_suffix(".err").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--set", "batch=7"), "batch=7 cannot be shared by 2 processes"),
        (("--vocab-parallel",), "--set head.tie=false"),
        (("--vocab-parallel", "--set", "head.tie=false", "--fsdp"), "pass one of them"),
        (("--set", "optimiser.lr=1e9", "--set", "optimiser.clip=0"), "not finite 6 times in a row"),
        (("--data", "nowhere"), "cannot be read"),
    ],
)
def test_a_mistake_is_one_sentence(
    text: Path, tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    run = tmp_path / "run"
    with launched(text, run, *arguments) as parent:
        assert wait(parent, 60) == 1  # torchrun's own
    complained = run.with_suffix(".err").read_text()
    sentences = [line for line in complained.splitlines() if line.startswith("fullrank: ")]
    assert len(sentences) == 1, complained
    assert expected in sentences[0]
    assert "exitcode  : 2" in complained


# What needs no second process.


def test_a_second_signal_under_a_launcher_waits_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    # A shell starts what goes to the background with Ctrl-C ignored, and these tests may be among it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with processes.Stop() as stop:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert stop.received == signal.SIGINT
            monkeypatch.setattr(processes, "TOGETHER", -1.0)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_lost_process_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FullrankError, match="another process of this run has ended"), processes.one_voice():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    with pytest.raises(RuntimeError, match="ours"), processes.one_voice():
        raise RuntimeError("ours")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(FullrankError, match="wrong"), processes.one_voice():
        raise FullrankError("wrong")
    assert slept == [processes.GRACE]
