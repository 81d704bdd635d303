"""The loop: a run that is stopped anywhere ends with the bits of one that was not, and other promises."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fullrank.errors import FullrankError
from fullrank.fit.optimiser import first_half_product
from fullrank.models.flops import training_flops
from fullrank.results import read_log
from fullrank.train import batches, checkpoint, folder, loop
from fullrank.train.config import Config, override
from fullrank.train.loop import Options, Outcome, Show, train
from fullrank.train.model import build
from fullrank.train.objective import Objective
from fullrank.train.recipes import recipe

WORDS = 12
SIZES = {"train": 200, "valid": 40, "test": 30}
TIMES = {"time", "tokens_per_second", "monitor_seconds", "evaluate_seconds", "seconds"}
SMALL = [
    "body.hidden=8", "body.last=6", "head.width=6", "head.components=3", "batch=4", "length=5",
    "evaluate_batch=3", "evaluate_every=3", "optimiser.lr=0.02",
]  # fmt: skip
DROPOUTS = [
    "body.dropout=0.3", "body.dropout_embedding=0.2", "body.dropout_input=0.3", "body.dropout_hidden=0.2",
    "body.weight_drop=0.4", "head.dropout=0.2",
]  # fmt: skip
NO_DROPOUT = [setting.partition("=")[0] + "=0" for setting in DROPOUTS]


def small(name: str, head: str, *settings: str) -> Config:
    return override(recipe(name, head), [*SMALL, *settings])


TRANSFORMER = override(
    recipe("transformer-tiny", "mos"),
    ["body.hidden=8", "body.heads=2", "body.inner=12", "body.dropout=0.2", "data.level=words", "batch=4",
     "length=5", "head.components=3", "steps=12", "evaluate_every=3", "evaluate_tokens=0",
     "final_tokens=0", "data.vocabulary_from=all"],
)  # fmt: skip
CASES = {
    "softmax": small("awd-lstm", "softmax", *DROPOUTS, "steps=11"),
    "mos": small("awd-lstm", "mos", *DROPOUTS, "steps=11"),
    # Ten steps an epoch: averaging begins, the second stage begins, and both in the middle of the data.
    "nt-asgd": small(
        "awd-lstm-ptb", "mos", *DROPOUTS, "jitter=false", "epochs=1.3", "optimiser.finetune_epochs=1",
        "optimiser.lr=20", "optimiser.finetune_lr=5", "optimiser.nonmonotone=1", "evaluate_every=2",
    ),
    "jitter": small("awd-lstm-wt2", "softmax", "jitter_longer=9", "epochs=2", "optimiser.finetune_epochs=0"),
    "accumulate": small("awd-lstm", "mos", *DROPOUTS, "accumulate=2", "steps=8"),
    "transformer": TRANSFORMER,
    "muon": override(TRANSFORMER, ["optimiser.name=muon", "steps=7"]),
}  # fmt: skip


class Workshop:
    """A tiny corpus and runs on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        draw = np.random.default_rng(3)
        (path / "text").mkdir()
        for split, count in SIZES.items():
            # Nine words and an <eos> a line.
            words = draw.integers(0, WORDS, (count // 10, 9))
            lines = [" ".join(f"w{word}" for word in row) for row in words]
            if split == "test":
                lines[-1] = lines[-1].rpartition(" ")[0] + " rare"
            (path / "text" / f"{split}.txt").write_text("\n".join(lines) + "\n")

    def run(self, config: Config, out: str, show: Show | None = None, **options: Any) -> Outcome:
        settings: dict[str, Any] = {"device": "cpu", "trackers": (), "monitors": False} | options
        return train(
            config,
            Options(data=(self.path / "text",), out=self.path / out, cache=self.path / "cache", **settings),
            show,
        )

    def log(self, out: str, *, starts: bool = False) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.path / out / "log.jsonl").read_text().splitlines())
        return [timeless(line) for line in lines if starts or line["event"] != "start"]


def timeless(value: Any) -> Any:
    """Without what a clock says."""
    if isinstance(value, dict):
        return {name: timeless(item) for name, item in value.items() if name not in TIMES}
    return value


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Muon would change the bits of later runs: runs of one process are compared here.
    first_half_product()
    yield Workshop(tmp_path_factory.mktemp("loop"))
    torch.set_num_threads(threads)


@pytest.fixture
def out(shop: Workshop, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a run of this test's own."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    yield name
    shutil.rmtree(shop.path / name, ignore_errors=True)


def final(path: Path) -> checkpoint.Stored:
    stored = checkpoint.newest(path / "checkpoints", pytest.fail)
    assert stored is not None
    return stored


def differences(left: Path, right: Path) -> list[str]:
    """Where two runs' last checkpoints, best weights and plain states differ in a bit."""
    found = []
    pairs = [(final(left), final(right))]
    bests = [checkpoint.found(path / "checkpoints", "best")[-1] for path in (left, right)]
    pairs.append((checkpoint.read(bests[0]), checkpoint.read(bests[1])))
    for one, other in pairs:
        if one.step != other.step or timeless(one.state) != timeless(other.state):
            found.append(f"state of {one.path.name} and {other.path.name}")
        if one.groups.keys() != other.groups.keys():
            found.append(f"groups {sorted(one.groups)} and {sorted(other.groups)}")
            continue
        for group, tensors in one.groups.items():
            if tensors.keys() != other.groups[group].keys():
                found.append(f"names in {group}")
            found += [
                f"{group}/{name}"
                for name, tensor in tensors.items()
                # Bits, not values: nan is nan, and 0 is not -0.
                if tensor.numpy().tobytes() != other.groups[group][name].numpy().tobytes()
            ]
    return found


class StopAt(Show):
    """A signal to this very process when a step is told."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.at, self.number = step, number

    def step(self, done: int, total: int, loss: float, tokens_per_second: float) -> None:
        if done == self.at:
            os.kill(os.getpid(), self.number)


class Heard(Show):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, message: str) -> None:
        self.said.append(message)


@pytest.mark.parametrize("given", ["data", "tokens"])
def test_splits_that_were_cut_from_train_are_said_at_every_start(given: str, tmp_path: Path) -> None:
    source, show = tmp_path / "source", Heard()
    source.mkdir()
    (source / "train.txt").write_text("a\n" * 40)
    np.zeros(80, dtype="<u2").tofile(source / "train.bin")
    (source / "tokens.json").write_text('{"vocabulary_size": 257, "end": 256}')
    options = Options(
        data=() if given == "tokens" else (source / "train.txt",), out=tmp_path / "out", cache=tmp_path,
        device="cpu", tokens=source if given == "tokens" else None,
    )  # fmt: skip
    config = override(recipe("transformer-tiny", "softmax"), ["data.level=bytes"])
    for _ in range(2):
        loop._corpus(config, options, show)
    # A document of bytes has an end.
    sizes = (4, 4) if given == "tokens" else (5, 5)
    note = f"valid ({sizes[0]} tokens) and test ({sizes[1]} tokens) were cut from the end of train"
    assert show.said == [note, note]


@pytest.fixture(scope="module")
def whole(shop: Workshop) -> Callable[[str], Path]:
    """A case that was never stopped, trained once."""

    def run(case: str) -> Path:
        name = f"whole-{case}"
        if not (shop.path / name).exists():
            assert shop.run(CASES[case], name).reason == "finished"
        return shop.path / name

    return run


# A softmax is stopped as a mixture is, and again with jitter.
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case == "softmax" else ()) for case in CASES]
)
def test_stopped_after_every_single_step(
    shop: Workshop, whole: Callable[[str], Path], out: str, case: str
) -> None:
    reference = whole(case)
    steps = final(reference).step
    for step in range(1, steps):
        number = (signal.SIGTERM, signal.SIGINT)[step % 2]
        outcome = shop.run(CASES[case], out, StopAt(step, number))
        assert (outcome.reason, outcome.step, outcome.signal) == ("stopped", step, number)
        assert shop.log(out)[-1] == {"event": "end", "step": step, "reason": "stopped"}
    outcome = shop.run(CASES[case], out)
    assert (outcome.reason, outcome.step, outcome.fresh) == ("finished", steps, True)
    assert differences(reference, shop.path / out) == []
    stops = [line for line in shop.log(out) if line.get("reason") != "stopped"]
    assert stops == shop.log(reference.name)


@pytest.mark.slow(reason="every checkpoint of a run is continued, seven seconds; one is in the default tier")
@pytest.mark.parametrize("case", ["mos", "nt-asgd", "transformer"])
def test_continued_from_many_checkpoints(shop: Workshop, out: str, case: str) -> None:
    continued(shop, out, CASES[case], every=4)


def test_lines_about_many_steps_are_the_same(shop: Workshop, out: str) -> None:
    # A line every fourth step: what was counted before a checkpoint between two lines counts on.
    continued(shop, out, small("awd-lstm", "softmax", "steps=23", "evaluate_every=40"), every=10)
    assert [line["step"] for line in shop.log(out) if line["event"] == "train"] == [4, 8, 12, 16, 20, 23]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_continued_from_every_checkpoint(shop: Workshop, out: str, case: str) -> None:
    continued(shop, out, CASES[case], every=1)


def continued(shop: Workshop, out: str, config: Config, *, every: int) -> None:
    config = dataclasses.replace(config, checkpoint_every=1, keep=1000)
    shop.run(config, out)
    reference, lines = shop.path / out, shop.log(out)
    steps = final(reference).step
    again = shop.path / f"{out}-again"
    for step in range(1, steps, every):
        # As a kill leaves it: a log and best weights of a future that no checkpoint knows.
        shutil.copytree(reference, again)
        for path in checkpoint.found(again / "checkpoints", "step"):
            if checkpoint.step_of(path) > step:
                shutil.rmtree(path)
        assert shop.run(config, again.name).fresh
        assert differences(reference, again) == [], f"continued from {step}"
        assert shop.log(again.name) == lines, f"continued from {step}"
        shutil.rmtree(again)


def test_the_case_with_an_average_has_all_it_should(whole: Callable[[str], Path], shop: Workshop) -> None:
    path = whole("nt-asgd")
    state = final(path).state
    averaged = [line["averaged"] for line in shop.log(path.name) if line["event"] == "evaluate"]
    lines = [line for line in shop.log(path.name) if line["event"] == "evaluate" and line["split"] == "valid"]
    before = [line["averaged"] for line in lines if line["step"] <= state["stage_step"]]
    assert state["stage"] == "finetune"
    assert 0 < state["stage_step"] < state["step"]
    # Switched on in the middle of the first stage: plain at first, averaged later.
    assert before[0] is False
    assert before[-1] is True
    assert True in averaged
    groups = final(path).groups
    assert any(not torch.equal(groups["live"][name], groups["model"][name]) for name in groups["live"])
    # Evaluation takes the average, and so does whoever loads the directory.
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint.found(path / "checkpoints", "step")[-1])
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, groups["model"][name])
    assert state["averaged"] == state["step"] - state["stage_step"]
    rates = {line["lr"] for line in shop.log(path.name) if line["event"] == "train"}
    assert rates == {20.0, 5.0}


def test_the_case_with_jitter_has_many_lengths(whole: Callable[[str], Path], shop: Workshop) -> None:
    lines = [line for line in shop.log(whole("jitter").name) if line["event"] == "train"]
    assert len({line["lr"] for line in lines}) > 2
    assert final(whole("jitter")).state["cursor"]["epoch"] == 2


def test_a_second_call_changes_nothing(whole: Callable[[str], Path], shop: Workshop) -> None:
    path = whole("mos")

    def snapshot() -> dict[str, tuple[int, int, bytes]]:
        files = [one for one in path.rglob("*") if one.is_file()]
        return {str(one): (one.stat().st_ino, one.stat().st_mtime_ns, one.read_bytes()) for one in files}

    before = snapshot()
    outcome = shop.run(CASES["mos"], path.name)
    assert (outcome.reason, outcome.fresh, outcome.step) == ("finished", False, 11)
    assert snapshot() == before


def test_every_token_counts_once(whole: Callable[[str], Path], shop: Workshop) -> None:
    for case in CASES:
        lines = shop.log(whole(case).name)
        counted = {(line["split"], line["counted"]) for line in lines if line["event"] == "evaluate"}
        assert counted == {("valid", SIZES["valid"]), ("test", SIZES["test"])}
        end = lines[-1]
        assert (end["event"], end["reason"]) == ("end", "finished")
        assert (end["valid"]["counted"], end["test"]["counted"]) == (SIZES["valid"], SIZES["test"])
        test = [line for line in lines if line.get("split") == "test"]
        assert [line["loss"] for line in test] == [end["test"]["loss"]]


def test_the_best_weights_are_what_is_kept_and_tested(whole: Callable[[str], Path], shop: Workshop) -> None:
    for case in CASES:
        lines = [line for line in shop.log(whole(case).name) if line.get("split") == "valid"]
        least = min(lines, key=lambda line: line["loss"])
        end = shop.log(whole(case).name)[-1]
        assert end["best_step"] == least["step"]
        assert end["valid"]["loss"] == pytest.approx(least["loss"], rel=1e-6)
        best = checkpoint.found(whole(case) / "checkpoints", "best")[-1]
        assert checkpoint.step_of(best) == least["step"]
        test = next(line for line in shop.log(whole(case).name) if line.get("split") == "test")
        assert test["averaged"] == least["averaged"]


def test_monitors_change_no_weight(whole: Callable[[str], Path], shop: Workshop, out: str) -> None:
    for case in ("softmax", "mos", "transformer"):
        shop.run(CASES[case], out, monitors=True)
        assert differences(whole(case), shop.path / out) == []
        lines = [line for line in shop.log(out) if line.get("split") == "valid"]
        assert all(line["monitors"]["head_effective_rank"] > 0 for line in lines)
        record = read_log(shop.path / out)
        if case == "transformer":
            assert record.unmeasured == {}
            assert all(1 <= line["monitors"]["attention_effective_tokens"] <= 5 for line in lines)
            assert all(0 < line["monitors"]["attention_sensitivity"] <= 0.5 for line in lines)
        else:
            assert record.unmeasured == {"attention": "AwdLstmModel has no attention"}
        shutil.rmtree(shop.path / out)


@pytest.mark.parametrize("balance", [0, 3])
def test_a_batch_in_parts_is_the_batch(shop: Workshop, out: str, balance: int) -> None:
    ends = []
    for parts in (1, 2, 4):
        # AdamW would divide the rounding of a gradient that is nearly zero by its own size.
        plain = ("optimiser.name=nt-asgd", "optimiser.lr=1", "steps=9")
        settings = (*plain, f"accumulate={parts}", f"head.balance={balance}")
        config = small("awd-lstm", "mos", *NO_DROPOUT, *settings)
        shop.run(config, f"{out}-{parts}")
        ends.append((final(shop.path / f"{out}-{parts}"), shop.log(f"{out}-{parts}")))
    (one, lines), *others = ends
    for other, told in others:
        for group in ("model", "carried"):
            for name, tensor in one.groups[group].items():
                assert torch.allclose(tensor, other.groups[group][name], rtol=1e-4, atol=1e-6), name
        for left, right in zip(lines, told, strict=True):
            assert left["step"] == right["step"]
            if "loss" in left:
                assert left["loss"] == pytest.approx(right["loss"], rel=1e-5)
            if "gradient_norm" in left:
                assert left["gradient_norm"] == pytest.approx(right["gradient_norm"], rel=1e-4)


def test_what_is_balanced_is_what_the_parts_of_a_batch_use(
    shop: Workshop, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass that measures the use of the components has the dropout masks of the passes with gradients."""
    from fullrank.heads import Head

    seen: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    forward = Head.forward

    def remember(*arguments: Any, **options: Any) -> Any:
        result = forward(*arguments, **options)
        if options.get("return_prior"):
            seen[torch.is_grad_enabled()].append(result[1].exp().mean(0).detach())
        return result

    monkeypatch.setattr(Head, "forward", remember)
    settings = (*DROPOUTS, "head.balance=3", "steps=2")
    shop.run(small("awd-lstm", "mos", *settings, "accumulate=2"), out)
    assert len(seen[True]) == 4
    assert all(map(torch.equal, seen[False], seen[True]))
    assert len(seen[False]) == 4
    # A batch in one part needs no more than its own pass.
    shop.run(small("awd-lstm", "mos", *settings), f"{out}-one")
    assert (len(seen[False]), len(seen[True])) == (4, 6)


def test_the_order_of_a_step_is_sgd_by_hand(shop: Workshop, out: str) -> None:
    """One step of the loop is one step that anyone can write down."""
    from fullrank.train.model import build
    from fullrank.train.objective import Objective

    config = override(
        small("awd-lstm-ptb", "softmax", *NO_DROPOUT, "jitter=false", "steps=2", "evaluate_every=2"),
        ["optimiser.weight_decay=0", "optimiser.lr=0.5", "optimiser.clip=0", "activation=0", "temporal=0"],
    )
    shop.run(config, out)
    model = build(config, WORDS + 2)
    tokens = np.fromfile(next((shop.path / out / "tokens").rglob("train.tokens")), dtype="<u2")
    size = (len(tokens) - 1) // 4
    carried: Any = ()
    for start in (0, 5):
        rows = [tokens[row * size + start : row * size + start + 6].astype(np.int64) for row in range(4)]
        window = torch.from_numpy(np.stack(rows))
        result = Objective(model)(window[:, :-1], window[:, 1:], carried)
        carried = result.carried
        model.zero_grad()
        result.value.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
    stored = final(shop.path / out).groups
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, stored["model"][name], rtol=1e-5, atol=1e-7), name
    for number, tensor in enumerate(carried):
        assert torch.allclose(tensor, stored["carried"][str(number)], rtol=1e-5, atol=1e-7)


def test_the_schedule_is_as_long_as_the_run(shop: Workshop, out: str) -> None:
    # 20 steps are two epochs, and the recipe says one.
    config = small("awd-lstm", "softmax", "epochs=1", "steps=20", "optimiser.final=0.01")
    shop.run(config, out)
    rates = {line["step"]: line["lr"] for line in shop.log(out) if line["event"] == "train"}
    assert rates[11] > 0.4 * 0.02
    assert rates[20] < 0.05 * 0.02


@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
def test_a_damaged_checkpoint_costs_its_steps_alone(
    whole: Callable[[str], Path], shop: Workshop, out: str, how: str
) -> None:
    for case in ("mos", "nt-asgd"):
        place = shop.path / out
        shutil.copytree(whole(case), place)
        # As if killed before the end was told.
        log = place / "log.jsonl"
        log.write_text("\n".join(log.read_text().splitlines()[:-2]) + "\n")
        file = checkpoint.found(place / "checkpoints", "step")[-1] / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        if how == "delete":
            file.unlink()
        else:
            file.write_bytes(data if how == "flip" else data[:-100])
        show = Heard()
        assert shop.run(CASES[case], out, show).reason == "finished"
        assert any("the checkpoint before it is used" in message for message in show.said)
        assert differences(whole(case), place) == []
        assert shop.log(out) == shop.log(whole(case).name)
        shutil.rmtree(place)


def test_damaged_best_weights_are_said(whole: Callable[[str], Path], shop: Workshop, out: str) -> None:
    place = shop.path / out
    shutil.copytree(whole("mos"), place)
    log = place / "log.jsonl"
    log.write_text("\n".join(log.read_text().splitlines()[:-2]) + "\n")
    shutil.rmtree(checkpoint.found(place / "checkpoints", "best")[-1])
    show = Heard()
    assert shop.run(CASES["mos"], out, show).reason == "finished"
    assert any("in place of the best weights" in message for message in show.said)
    assert shop.log(out)[-1]["best_step"] == final(place).step


def test_all_checkpoints_damaged_twice(whole: Callable[[str], Path], shop: Workshop, out: str) -> None:
    place = shop.path / out
    shutil.copytree(whole("mos"), place)
    for path in checkpoint.found(place / "checkpoints", "step"):
        (path / "model.safetensors").write_bytes(b"")
    log = (place / "log.jsonl").read_bytes()
    for _ in range(2):
        with pytest.raises(FullrankError, match="every checkpoint"):
            shop.run(CASES["mos"], out)
    assert (place / "log.jsonl").read_bytes() == log


def finite(path: Path) -> bool:
    found = [one for kind in ("step", "best") for one in checkpoint.found(path / "checkpoints", kind)]
    tensors = [
        one for path in found for group in checkpoint.read(path).groups.values() for one in group.values()
    ]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


@pytest.mark.parametrize(
    "settings",
    [
        ["optimiser.name=nt-asgd", "optimiser.lr=1e6", "optimiser.clip=0", "activation=2"],
        ["optimiser.lr=1e9", "optimiser.warmup=0", "optimiser.clip=0"],
        ["optimiser.name=nt-asgd", "optimiser.lr=1e9", "optimiser.clip=0", "evaluate_every=1"],
        ["optimiser.name=nt-asgd", "optimiser.lr=1e9", "optimiser.clip=0", "checkpoint_every=100"],
    ],
)
def test_no_number_stops_the_run(shop: Workshop, out: str, settings: list[str]) -> None:
    config = small("awd-lstm", "mos", "steps=60", "checkpoint_every=1", *settings)
    with pytest.raises(FullrankError, match="not finite") as caught:
        shop.run(config, out, monitors=True)
    message = str(caught.value)
    *_, alarm, end = shop.log(out)
    assert (end["event"], end["reason"]) == ("end", "nan")
    assert (alarm["event"], alarm["kind"], alarm["message"]) == ("alarm", "nan", message)
    assert "\n" not in message
    assert "--set optimiser.lr" in message
    assert finite(shop.path / out)
    kept = checkpoint.found(shop.path / out / "checkpoints", "step")
    if kept:
        assert f"{kept[-1]} is the last good checkpoint" in message
    else:
        assert "no checkpoint was written yet" in message
    # The named place in the data is that of the named step.
    step = int(message.split(" step ")[1].split()[0])
    epoch = int(message.split("(epoch ")[1].split(",")[0])
    position = int(message.split("position ")[1].split()[0])
    streams = batches.Streams(np.zeros(SIZES["train"], dtype=np.uint16), batch=4, length=5)
    cursor = batches.Cursor()
    for _ in range(step - 1):
        cursor = streams.take(cursor).next
    assert (cursor.epoch, cursor.position) == (epoch, position)
    # The same command ends the same way, and steps never go back in the log.
    with pytest.raises(FullrankError, match="not finite") as again:
        shop.run(config, out, monitors=True)
    assert str(again.value) == message
    steps = [line["step"] for line in shop.log(out, starts=True)]
    assert steps == sorted(steps)


def test_infinite_weights_in_a_checkpoint_stop_at_once(shop: Workshop, out: str) -> None:
    config = small("awd-lstm", "softmax", "steps=9", "checkpoint_every=1", "keep=9")
    shop.run(config, out, StopAt(4))
    path = shop.path / out / "checkpoints"
    stored = checkpoint.read(checkpoint.path_of(path, "step", 4))
    stored.groups["model"]["model.layers.0.weight_input"][0, 0] = math.inf
    checkpoint.write(path, "step", 4, stored.groups, stored.state)
    with pytest.raises(FullrankError, match=r"not finite after step 5 \(epoch 0, position 20 of the data\)"):
        shop.run(config, out)


class SpoilLosses:
    """Makes the losses of some steps no number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
        self.steps, self.seen = steps, 0
        forward = Objective.forward

        def spoilt(objective: Objective, *inputs: Any) -> Any:
            found = forward(objective, *inputs)
            self.seen += 1
            return found._replace(value=found.value * math.nan) if self.seen in self.steps else found

        monkeypatch.setattr(Objective, "forward", spoilt)


@pytest.mark.parametrize("case", ["softmax", "nt-asgd"])
def test_a_bad_step_is_left_out_and_counted(
    shop: Workshop, out: str, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The weights stay as they were before it, and the run goes on."""
    config = dataclasses.replace(CASES[case], steps=6, checkpoint_every=1, keep=9)
    SpoilLosses(monkeypatch, {3, 4})
    said: list[str] = []
    outcome = shop.run(config, out, Told(said))
    assert outcome.reason == "finished"
    places = checkpoint.found(shop.path / out / "checkpoints", "step")
    kept = {checkpoint.step_of(path): checkpoint.read(path) for path in places}
    live = {step: one.groups.get("live", one.groups["model"]) for step, one in kept.items()}
    for name, tensor in live[2].items():
        assert torch.equal(tensor, live[4][name])
    assert any(not torch.equal(live[4][name], live[5][name]) for name in live[4])
    assert kept[6].state["skipped"] == 2
    assert finite(shop.path / out)
    assert sum(line.get("skipped", 0) for line in shop.log(out) if line["event"] == "train") == 2
    assert any("had no finite gradient" in line for line in said)


def test_too_many_in_a_row_stop_it(shop: Workshop, out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(CASES["softmax"], skip=2, checkpoint_every=1)
    SpoilLosses(monkeypatch, {2, 4, 5, 7, 8, 9})
    with pytest.raises(FullrankError, match="not finite 3 times in a row, the last at step 9"):
        shop.run(config, out)
    assert finite(shop.path / out)


class Told(Show):
    def __init__(self, said: list[str]) -> None:
        self.said = said

    def say(self, message: str) -> None:
        self.said.append(message)


def test_snapshots_of_a_run_begun_otherwise_go(
    shop: Workshop, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its first checkpoint, a run may be begun again with other settings."""
    config = override(CASES["softmax"], ["steps=4", "snapshot_every=2"])
    with monkeypatch.context() as patched:
        patched.setattr(loop.Session, "_evaluate", lambda session: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            shop.run(config, out)
    place = shop.path / out / "snapshots"
    before = checkpoint.read(place / "step-00000000").groups["model"]
    shop.run(override(config, ["seed=5", "snapshot_every=3"]), out)
    after = checkpoint.read(place / "step-00000000").groups["model"]
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert [path.name for path in sorted(place.iterdir())] == [f"step-{step:08d}" for step in (0, 1, 2, 3, 4)]


def test_how_a_run_goes_may_change_and_its_end_may_move(shop: Workshop, out: str) -> None:
    """A run to 6 and then on to 12 with other settings of how it goes learns what one to 12 does."""
    settings = ["optimiser.schedule=constant", "optimiser.warmup=0"]
    long = override(CASES["mos"], [*settings, "steps=12", "evaluate_every=3"])
    shop.run(long, f"{out}-long")
    shop.run(override(long, ["steps=6", "accumulate=1", "keep=1"]), out)
    assert final(shop.path / out).step == 6
    outcome = shop.run(override(long, ["keep=3", "evaluate_batch=2", "checkpoint_every=4"]), out)
    assert (outcome.step, outcome.fresh) == (12, True)
    ours, theirs = final(shop.path / out), final(shop.path / f"{out}-long")
    for name, tensor in theirs.groups["model"].items():
        assert torch.equal(tensor, ours.groups["model"][name])
    assert not shop.run(override(long, ["keep=3"]), out).fresh
    shutil.rmtree(shop.path / f"{out}-long")


@pytest.mark.parametrize(("budget", "steps"), [("tokens=130", 6), ("flops=1e12", None)])
def test_a_budget_is_so_many_steps(shop: Workshop, out: str, budget: str, steps: int | None) -> None:
    config = override(CASES["softmax"], [f"budget={budget}", "steps=0"])
    if steps is None:
        # Ten steps at what this model says a token costs.
        cost = training_flops(build(config, WORDS + 2), config.length)
        config = override(config, [f"budget=flops={10.5 * 20 * cost}"])
        steps = 10
    outcome = shop.run(config, out)
    assert outcome.step == outcome.steps == steps


class Clock:
    """Time that only training takes: `early` seconds a step up to a step, `late` ones from there on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, early: float, late: float, turn: int = 60) -> None:
        self.now = 0.0
        step = loop.Session._step

        def timed(session: loop.Session) -> None:
            self.now += early if session.state.step < turn else late
            step(session)

        monkeypatch.setattr(loop.Session, "_step", timed)
        monkeypatch.setattr(loop.time, "perf_counter", lambda: self.now)


@pytest.mark.parametrize("late", [0.1, 0.4, 0.02])
def test_a_budget_of_seconds_is_kept_at_any_pace(
    shop: Workshop, out: str, monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    """Also by a run that is stopped and goes on: the rate has fallen when the seconds are over."""
    clock = Clock(monkeypatch, early=0.1, late=late)
    settings = ["budget=seconds=12", "steps=0", "evaluate_every=20", "optimiser.schedule=cosine"]
    config = override(CASES["softmax"], [*settings, "optimiser.warmup=0", "optimiser.final=0"])
    shop.run(config, out, StopAt(70))
    assert clock.now == pytest.approx(6 + 10 * late)
    outcome = shop.run(config, out)
    assert outcome.step == outcome.steps == pytest.approx(60 + 6 / late, abs=2)
    assert clock.now == pytest.approx(12, abs=2 * late)
    lines = [line for line in shop.log(out) if line["event"] == "train" and line["step"] > 40]
    assert len(lines) > 10
    for line in lines:
        gone = 0.1 * min(line["step"], 60) + late * max(0, line["step"] - 60)
        wanted = config.optimiser.lr * (1 + math.cos(math.pi * gone / 12)) / 2
        assert line["lr"] == pytest.approx(wanted, abs=0.15 * config.optimiser.lr), line["step"]
    assert lines[-1]["lr"] < 0.02 * config.optimiser.lr


def test_snapshots_are_models_that_stay(shop: Workshop, out: str) -> None:
    config = override(CASES["nt-asgd"], ["steps=11", "snapshot_every=10", "keep=1"])
    shop.run(config, out, StopAt(5))
    shop.run(config, out)
    place = shop.path / out / "snapshots"
    assert [path.name for path in sorted(place.iterdir())] == [
        f"step-{step:08d}" for step in (0, 1, 2, 4, 8, 10)
    ]
    last = final(shop.path / out)
    model = AutoModelForCausalLM.from_pretrained(place / "step-00000010")
    start = AutoModelForCausalLM.from_pretrained(place / "step-00000000")
    differ = [
        not torch.equal(one, other) for one, other in zip(model.parameters(), start.parameters(), strict=True)
    ]
    assert any(differ)
    assert last.step == 11


@pytest.mark.parametrize("evaluate_every", [1, 10])
def test_weights_that_no_loss_has_seen_are_not_kept(shop: Workshop, out: str, evaluate_every: int) -> None:
    """Decay with a large rate makes the vector of a word that no training text has infinite."""
    config = small(
        "awd-lstm", "softmax", "steps=9", "checkpoint_every=1", f"evaluate_every={evaluate_every}",
        "head.tie=false", "optimiser.name=nt-asgd", "optimiser.lr=4", "optimiser.weight_decay=2",
        "optimiser.schedule=constant", "optimiser.clip=0.01",
    )  # fmt: skip
    shop.run(config, out, StopAt(4))
    path = shop.path / out / "checkpoints"
    stored = checkpoint.read(checkpoint.path_of(path, "step", 4))
    vocabulary = json.loads(next((shop.path / out / "tokens").rglob("vocabulary.json")).read_text())
    row = vocabulary["words"].index("rare")
    stored.groups["model"]["model.embedding.weight"][row] = 1e38
    checkpoint.write(path, "step", 4, stored.groups, stored.state)
    with pytest.raises(FullrankError, match="not finite after step 5") as caught:
        shop.run(config, out)
    assert "step-00000004 is the last good checkpoint" in str(caught.value)
    assert finite(shop.path / out)


def test_a_run_begun_otherwise_keeps_nothing_of_the_first(shop: Workshop, out: str) -> None:
    # Killed after its first best weights and before its first checkpoint.
    first = small("awd-lstm", "softmax", "steps=9", "body.hidden=10")
    shop.run(first, out)
    for path in checkpoint.found(shop.path / out / "checkpoints", "step"):
        shutil.rmtree(path)
    assert checkpoint.found(shop.path / out / "checkpoints", "best")
    second = small("awd-lstm", "mos", "steps=3", "evaluate_every=3")
    shop.run(second, out)
    assert folder.open_run(shop.path / out).step == 3
    assert {line["step"] for line in shop.log(out, starts=True)} <= {0, 1, 2, 3}


def test_a_state_of_another_version(shop: Workshop, out: str) -> None:
    config = small("awd-lstm", "softmax", "steps=4")
    shop.run(config, out, StopAt(2))
    path = shop.path / out / "checkpoints"
    stored = checkpoint.read(checkpoint.path_of(path, "step", 2))
    for state in ({**stored.state, "novel": 1}, {"step": 2}):
        checkpoint.write(path, "step", 2, stored.groups, state)
        with pytest.raises(FullrankError, match="another version"):
            shop.run(config, out)


def test_a_full_disk_costs_nothing_that_was_there(shop: Workshop, out: str) -> None:
    """A small disk that fills up in the middle of a run; with more room it ends as if nothing had been."""
    config = small("awd-lstm", "mos", *DROPOUTS, "steps=30", "checkpoint_every=1", "keep=1000")
    shop.run(config, f"{out}-reference")
    place = shop.path / out
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(place)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs rights that this process has not")
    try:
        for _ in range(2):
            with pytest.raises(FullrankError, match="run the same command again") as caught:
                shop.run(config, out)
            assert "\n" not in str(caught.value)
        kept = final(place)
        assert 1 < kept.step < 30
        assert not [one for one in (place / "checkpoints").iterdir() if one.name.startswith(".")]
        subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
        assert shop.run(config, out).reason == "finished"
        assert differences(shop.path / f"{out}-reference", place) == []
        assert shop.log(out) == shop.log(f"{out}-reference")
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_text_that_is_too_short(shop: Workshop, out: str) -> None:
    with pytest.raises(FullrankError, match="one batch of 40 sequences of 70 needs 2801"):
        shop.run(small("awd-lstm", "softmax", "batch=40", "length=70"), out)
    assert not (shop.path / out / "run.json").exists()


@pytest.mark.slow
def test_the_resident_size_is_flat(shop: Workshop, out: str) -> None:
    """2,000 steps; what a step leaked, if only its own logits, would show."""

    class Sizes(Show):
        def __init__(self) -> None:
            self.pages: dict[int, int] = {}

        def step(self, done: int, total: int, loss: float, tokens_per_second: float) -> None:
            self.pages[done] = int(Path("/proc/self/statm").read_text().split()[1])

    show = Sizes()
    config = small(
        "awd-lstm", "mos", *DROPOUTS, "steps=2000", "evaluate_every=100", "batch=8", "length=20",
        "body.hidden=64", "body.last=48", "head.width=48",
    )  # fmt: skip
    shop.run(config, out, show, monitors=True, trackers=("tensorboard",))
    page = os.sysconf("SC_PAGESIZE")
    early = max(size for step, size in show.pages.items() if 400 <= step <= 800) * page
    late = max(size for step, size in show.pages.items() if step >= 1600) * page
    # A step's rows alone, 8 x 20 tokens of 3 x 48 floats, leaked 1,200 times, would be 110 MB; the log's
    # evaluations, TensorBoard's queue and the allocator's arenas move by a few MB.
    assert late - early < 16 * 2**20


def test_a_device_without_memory_is_one_sentence_and_the_run_goes_on_in_parts(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small("awd-lstm", "softmax", *NO_DROPOUT, "batch=6", "steps=8")
    update = loop.Learner.step

    def burst(learner: loop.Learner, *given: Any) -> Any:
        if len(steps) == 5:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 1.38 GiB. GPU 0 has a total capacity of 139.80 GiB"
            )
        steps.append(1)
        return update(learner, *given)

    steps: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(loop.Learner, "step", burst)
        with pytest.raises(FullrankError, match=r"allocate 1.38 GiB: .* --set accumulate=2") as caught:
            shop.run(config, "burst")
    assert "\n" not in str(caught.value)
    assert shop.run(override(config, ["accumulate=2"]), "burst").reason == "finished"
