"""Runs that are killed without warning, at any moment, also in the middle of a write, end with the same bits.

Two ways. Real commands are killed a few times, because each takes seconds to start. Beside them, this very
file is run as a program: it imports everything once, then forks a child a run, and kills that one after some
milliseconds, many times over. The program, not pytest, forks: its process has one thread.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullrank.train import checkpoint
from fullrank.train.config import Config, lines, override
from fullrank.train.loop import Options, train
from fullrank.train.recipes import recipe

SETTINGS = [
    "body.hidden=8", "body.last=6", "head.width=6", "head.components=3", "batch=4", "length=5",
    "evaluate_batch=3", "evaluate_every=4", "checkpoint_every=1", "optimiser.lr=0.02",
]  # fmt: skip


CASES = {
    "adamw": override(recipe("awd-lstm", "mos"), [*SETTINGS, "steps=40"]),
    # With an average, a second stage, and steps of many lengths.
    "nt-asgd": override(
        recipe("awd-lstm-ptb", "mos"),
        [*SETTINGS, "epochs=0.8", "optimiser.finetune_epochs=1", "optimiser.finetune_lr=5",
         "optimiser.lr=20", "optimiser.nonmonotone=1", "jitter_longer=4"],
    ),
}  # fmt: skip


def train_into(out: Path, config: Config, text: Path) -> None:
    train(
        config,
        Options(
            data=(text,), out=out, cache=out.parent / "cache", device="cpu", trackers=(), monitors=False
        ),
    )  # fmt: skip


def texts(path: Path) -> Path:
    draw = np.random.default_rng(5)
    path.mkdir()
    for split, count in (("train", 60), ("valid", 6), ("test", 5)):
        rows = draw.integers(0, 12, (count, 9))
        text = [" ".join(f"w{word}" for word in row) for row in rows]
        (path / f"{split}.txt").write_text("\n".join(text) + "\n")
    return path


def tensors(run: Path) -> dict[str, bytes]:
    """The files of the last checkpoint and of the best weights."""
    places = [sorted((run / "checkpoints").glob(f"{kind}-*"))[-1] for kind in ("step", "best")]
    return {
        f"{place.name}/{file.name}": file.read_bytes()
        for place in places
        for file in place.glob("*.safetensors")
    }


def events(run: Path) -> list[dict[str, Any]]:
    """The log without clocks, and without the starts that a killed run has more of."""
    clocks = {"time", "tokens_per_second", "monitor_seconds", "evaluate_seconds", "seconds"}

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: timeless(item) for name, item in value.items() if name not in clocks}
        return value

    told = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [timeless(line) for line in told if line["event"] != "start" and line.get("reason") != "stopped"]


def read_lines(run: Path) -> list[dict[str, Any]]:
    try:
        text = (run / "log.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1]]


class Commands:
    """`fullrank train` as a user calls it."""

    def __init__(self, path: Path, steps: int) -> None:
        self.path = path
        self.config = override(recipe("awd-lstm", "mos"), [*SETTINGS, f"steps={steps}"])
        self.text = texts(path / "text")
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "FULLRANK_CACHE": str(path / "cache")}

    def start(self, out: str) -> subprocess.Popen[str]:
        # Every setting, so that what trains in this process has the very same ones.
        settings = [word for setting in lines(self.config) for word in ("--set", setting)]
        return subprocess.Popen(
            [sys.executable, "-m", "fullrank.cli.main", "train", "awd-lstm", "--head", "mos", "--data",
             str(self.text), "--out", str(self.path / out), "--device", "cpu", "--track", "none",
             "--no-monitors", *settings],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def finish(self, out: str) -> str:
        process = self.start(out)
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
        return said

    def send(self, out: str, number: int, *, steps: int, delay: float) -> tuple[int, str] | None:
        """Send a signal once some more steps were told; None where the run was faster."""
        before = len(read_lines(self.path / out))
        process = self.start(out)
        limit = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < limit:
            told = read_lines(self.path / out)
            if len(told) != before and told and told[-1]["event"] != "start":
                first = max(line["step"] for line in told if line["event"] == "start")
                if told[-1]["step"] >= first + steps:
                    break
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(number)
        said, _ = process.communicate(timeout=300)
        return None if process.returncode == 0 else (process.returncode, said)


STOPS = ((signal.SIGTERM, 143), (signal.SIGINT, 130))


@pytest.mark.slow(reason="four processes that import torch; tests/train/test_loop.py sends signals to itself")
def test_signals_to_the_real_command(tmp_path: Path) -> None:
    commands = Commands(tmp_path, steps=60)
    run = tmp_path / "run"

    for number, code in STOPS:
        sent = commands.send("run", number, steps=3, delay=0.0)
        assert sent is not None
        assert sent[0] == code, sent[1]
        last = read_lines(run)[-1]
        assert (last["event"], last["reason"]) == ("end", "stopped")
        newest = sorted((run / "checkpoints").glob("step-*"))[-1]
        assert newest.name == f"step-{last['step']:08d}"
        assert f"stopped at step {last['step']:,} of 60; run the same command to continue" in sent[1]
        assert "Traceback" not in sent[1]

    sent = commands.send("run", signal.SIGKILL, steps=5, delay=0.005)
    assert sent is not None
    assert sent[0] == -signal.SIGKILL
    commands.finish("run")
    # This process need not start: one thread, as the commands have.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train_into(tmp_path / "reference", commands.config, commands.text)
    finally:
        torch.set_num_threads(threads)
    assert [line["resumed"] for line in read_lines(run) if line["event"] == "start"][:1] == [False]
    assert sum(line["event"] == "start" for line in read_lines(run)) == len(STOPS) + 2
    assert tensors(run) == tensors(tmp_path / "reference")
    assert events(run) == events(tmp_path / "reference")


@pytest.mark.slow
def test_the_real_command_killed_many_times(tmp_path: Path) -> None:
    commands = Commands(tmp_path, steps=400)
    commands.finish("reference")
    draw = random.Random(7)
    kills = 0
    for _ in range(16):
        sent = commands.send("run", signal.SIGKILL, steps=draw.randrange(1, 20), delay=draw.uniform(0, 0.03))
        if sent is None:
            break
        kills += 1
    assert kills >= 15
    said = commands.finish("run")
    assert "perplexity" in said
    assert tensors(tmp_path / "run") == tensors(tmp_path / "reference")
    assert events(tmp_path / "run") == events(tmp_path / "reference")


def program(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_training(tmp_path: Path, *, kills: int, seed: int) -> None:
    text = texts(tmp_path / "text")
    found = program(tmp_path, "--kills", str(kills), "--seed", str(seed), "--text", str(text))
    assert found["kills"] == dict.fromkeys(CASES, kills)
    # Some came in the middle of a write: what they left was there to be removed.
    assert found["unfinished"] > 0
    writes = found["writes"]
    assert writes["damaged"] == []
    assert writes["leftovers"] == []
    assert writes["unfinished"] > 5
    assert writes["checkpoints"] > 20
    for case in CASES:
        run, reference = tmp_path / case, tmp_path / f"{case}-reference"
        assert leftovers(run) == []
        assert tensors(run) == tensors(reference)
        assert events(run) == events(reference)


@pytest.mark.slow(reason="fifteen seconds of starting and killing")
def test_killed_within_milliseconds(tmp_path: Path) -> None:
    check_training(tmp_path, kills=12, seed=1)


@pytest.mark.slow
def test_killed_within_milliseconds_very_often(tmp_path: Path) -> None:
    check_training(tmp_path, kills=150, seed=2)


# What follows runs in the program.


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def leftovers(run: Path) -> list[str]:
    places = (run, run / "checkpoints")
    names = [path.name for place in places if place.exists() for path in place.iterdir()]
    return [name for name in names if name.startswith(".") and name != ".lock"]


def await_moment(run: Path, child: int, draw: random.Random) -> None:
    """A moment to kill: while a run starts, while it trains, or while it writes."""
    kind = draw.choice(["start", "training", "writing"])
    if kind == "start":
        time.sleep(draw.uniform(0.0, 0.1))
        return

    def alive() -> bool:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    before = set(os.listdir(run / "checkpoints")) if (run / "checkpoints").exists() else set()

    def names() -> set[str]:
        try:
            return set(os.listdir(run / "checkpoints")) - before
        except FileNotFoundError:
            return set()

    # The run has begun when it has a checkpoint of its own.
    while alive() and not any(name.startswith("step-") for name in names()):
        time.sleep(0.001)
    if kind == "training":
        time.sleep(draw.uniform(0.0, 0.05))
        return
    for _ in range(draw.randrange(1, 4)):
        while alive() and any(name.startswith(".") for name in names()):
            pass
        while alive() and not any(name.startswith(".") for name in names()):
            pass
    # A write takes a few milliseconds, most of them waiting for the disk.
    time.sleep(draw.uniform(0.0, 0.003))


def train_program(base: Path, options: Any) -> dict[str, Any]:
    draw = random.Random(options.seed)
    kills, unfinished = dict.fromkeys(CASES, 0), 0
    for case, config in CASES.items():
        run, text = base / case, Path(options.text)
        # In this process: a child would import again what only training imports.
        train_into(base / f"{case}-reference", config, text)
        work = partial(train_into, run, config, text)
        while kills[case] < options.kills:
            child = fork(work)
            await_moment(run, child, draw)
            os.kill(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code == 0:
                # Finished before the kill came: once more from the beginning.
                shutil.rmtree(run)
                continue
            if code != -signal.SIGKILL:
                raise SystemExit(f"a run ended with {code}")
            kills[case] += 1
            unfinished += bool(leftovers(run))
        work()
    return {"kills": kills, "unfinished": unfinished, "writes": write_program(base / "writes", draw)}


def write_program(base: Path, draw: random.Random) -> dict[str, Any]:
    """A writer that is killed leaves whole checkpoints, and nothing that cannot be cleaned."""
    place = base / "checkpoints"
    weights = {name: {"a": torch.arange(20_000.0), "b": torch.ones(7)} for name in ("model", "optimiser")}

    def work() -> None:
        paths = checkpoint.found(place, "step")
        step = checkpoint.step_of(paths[-1]) if paths else 0
        while True:
            step += 1
            # The same best again and again: replacing must be as safe as writing.
            checkpoint.write(place, "best", 1, weights, {"loss": 1.0})
            checkpoint.write(place, "step", step, weights, {"step": step, "best_step": 1})
            checkpoint.prune(place, 3)

    damaged, unfinished, most = [], 0, 0
    for _ in range(30):
        child = fork(work)
        await_moment(base, child, draw)
        os.kill(child, signal.SIGKILL)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL:
            raise SystemExit("the writer failed by itself")
        unfinished += bool(leftovers(base))
        for kind in ("step", "best"):
            for path in checkpoint.found(place, kind):
                most = max(most, checkpoint.step_of(path))
                try:
                    checkpoint.read(path)
                except checkpoint.Damaged as error:
                    damaged.append(str(error))
        checkpoint.clean(place)
    return { "damaged": damaged, "unfinished": unfinished, "leftovers": leftovers(base),
        "checkpoints": most,
    }  # fmt: skip


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("--text", default="")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(train_program(options.base, options)))


if __name__ == "__main__":
    main()
