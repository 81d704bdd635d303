"""Training on a GPU: bf16, a compiled body, the fused optimiser that leaves bad steps out, and resuming."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fullrank.fit.captured import WARM
from fullrank.train import checkpoint, folder
from fullrank.train.batches import Batch
from fullrank.train.config import Config, override
from fullrank.train.learner import Learner
from fullrank.train.loop import Options, Outcome, Show, train
from fullrank.train.objective import Objective
from fullrank.train.recipes import recipe

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SETTINGS = [
    "data.level=words", "data.vocabulary_from=all", "body.hidden=64", "body.heads=2", "batch=8", "length=32",
    "steps=12", "evaluate_every=6", "checkpoint_every=3", "keep=9", "evaluate_tokens=0", "final_tokens=0",
]  # fmt: skip


def config(*settings: str, head: str = "mos", name: str = "transformer-tiny") -> Config:
    return override(recipe(name, head), [*SETTINGS, *settings])


class StopAt(Show):
    """Asks for an end after some steps, as a signal would."""

    def __init__(self, step: int) -> None:
        self.last = step

    def step(self, done: int, total: int, loss: float, tokens_per_second: float) -> None:
        if done >= self.last:
            import signal

            signal.raise_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu")
    draw = torch.Generator().manual_seed(0)
    for split, lines in (("train", 400), ("valid", 60), ("test", 60)):
        # Every second word follows from the one before it.
        words = torch.randint(0, 30, (lines, 10), generator=draw).tolist()
        rows = [" ".join(f"w{word} v{(7 * word + 3) % 30}" for word in row) for row in words]
        (path / f"{split}.txt").write_text("\n".join(rows) + "\n")
    return path


def run(text: Path, out: Path, settings: Config, show: Show | None = None, device: str = "cuda") -> Outcome:
    options = Options(
        data=(text,), out=out, cache=out.parent / "cache", device=device, trackers=(), monitors=True
    )
    return train(settings, options, show)


def log(out: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / folder.LOG).read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoint.read(checkpoint.path_of(out / folder.CHECKPOINTS, "step", step)).groups["model"]


@pytest.mark.parametrize("head", ["softmax", "mos", "trunk"])
def test_it_learns_in_bf16_with_a_compiled_body(text: Path, tmp_path: Path, head: str) -> None:
    out = tmp_path / "run"
    assert run(text, out, config("steps=60", "optimiser.lr=0.01", head=head)).reason == "finished"
    (start,), lines = log(out, "start"), log(out, "train")
    assert start["precision"] == "bf16"
    assert start["flops_per_token"] > 0
    assert all(line["peak_bytes"] > 0 for line in lines)
    first, *_, last = log(out, "evaluate")
    # Of two words one is certain, the other one of thirty.
    assert last["loss"] < first["loss"] < math.log(62)
    assert last["loss"] == pytest.approx(math.log(30) / 2, abs=0.5)
    assert all(value.dtype == torch.float32 for value in weights(out, 60).values())


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(text: Path, tmp_path: Path, name: str) -> None:
    settings = config(f"optimiser.name={name}", "precision=fp32", "compile=off")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    # Sums of many threads are not always in one order, and Muon makes gradients of low rank orthogonal: what
    # differs in a last bit is another direction a step later. So the order is held.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            run(text, whole, settings)
            assert run(text, parts, settings, StopAt(5)).reason == "stopped"
            assert run(text, parts, settings).reason == "finished"
    finally:
        torch.use_deterministic_algorithms(False)
    for tensor, other in zip(weights(whole, 12).values(), weights(parts, 12).values(), strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-3, atol=1e-4)


def test_a_run_of_a_gpu_goes_on_without_one(text: Path, tmp_path: Path) -> None:
    settings = config("precision=fp32", "compile=off")
    out = tmp_path / "run"
    run(text, out, settings, StopAt(5))
    assert run(text, out, settings, device="cpu").reason == "finished"


@pytest.mark.parametrize("name", ["adamw", "adam", "muon", "nt-asgd"])
def test_a_bad_step_is_left_out(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # A tensor, which a step that is one graph reads at every replay.
    forward, step, seen, spoil = Objective.forward, Learner.step, [0], torch.ones((), device="cuda")

    def spoilt(objective: Objective, *inputs: Any) -> Any:
        found = forward(objective, *inputs)
        return found._replace(value=found.value * spoil)

    def counted(learner: Learner, batch: Batch, rate: float) -> Any:
        seen[0] += 1
        spoil.fill_(math.nan if seen[0] in (6, 7) else 1.0)
        return step(learner, batch, rate)

    monkeypatch.setattr(Objective, "forward", spoilt)
    monkeypatch.setattr(Learner, "step", counted)
    out = tmp_path / "run"
    settings = config(f"optimiser.name={name}", "checkpoint_every=1", "keep=20", "compile=off")
    assert run(text, out, settings).reason == "finished"
    before, after, later = weights(out, 5), weights(out, 7), weights(out, 8)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert any(not torch.equal(after[key], later[key]) for key in after)
    assert sum(line.get("skipped", 0) for line in log(out, "train")) == 2


@pytest.mark.parametrize(
    ("head", "name"),
    [(head, "adamw") for head in ("softmax", "sigsoftmax", "mos", "trunk", "doc", "plif")]
    + [("softmax", "adam")],
)
def test_a_step_as_one_graph_learns_the_same(
    text: Path, tmp_path: Path, replays: list[int], head: str, name: str
) -> None:
    settings = ["precision=fp32", "compile=off", "optimiser.warmup=0.5", f"optimiser.name={name}"]
    run(text, tmp_path / "graph", config(*settings, head=head))
    assert replays[0] == 12 - WARM
    run(text, tmp_path / "plain", config(*settings, "graph=off", head=head))
    assert replays[0] == 12 - WARM
    for event in ("train", "evaluate"):
        pairs = zip(log(tmp_path / "graph", event), log(tmp_path / "plain", event), strict=True)
        for one, other in pairs:
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
    # Sums of many threads differ in a last bit, of which Adam makes a step where a gradient is nearly none:
    # single weights may differ, what was learnt may not.
    ends = weights(tmp_path / "graph", 12), weights(tmp_path / "plain", 12)
    before = weights(tmp_path / "plain", 3)
    apart = sum(float((ends[0][name] - end).square().sum()) for name, end in ends[1].items())
    learnt = sum(float((before[name] - end).square().sum()) for name, end in ends[1].items())
    assert apart < 0.01 * learnt


def test_a_step_of_an_lstm_as_one_graph_carries_its_state(
    text: Path, tmp_path: Path, replays: list[int]
) -> None:
    """Four steps an epoch, the last one short: the graph begins with the fifth and leaves short ones out."""
    settings = [
        "precision=fp32", "head.width=32", "body.last=32", "body.layers=2", "length=300", "body.dropout=0",
        "body.dropout_embedding=0", "body.dropout_input=0", "body.dropout_hidden=0", "body.weight_drop=0",
    ]  # fmt: skip
    for name in ("on", "off"):
        made = config(*settings, f"graph={name}", head="mos", name="awd-lstm")
        run(text, tmp_path / name, made)
        assert replays[0] == 6
    for event in ("train", "evaluate"):
        pairs = zip(log(tmp_path / "on", event), log(tmp_path / "off", event), strict=True)
        for one, other in pairs:
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)


def test_an_average_that_begins_after_the_capture_moves(
    text: Path, tmp_path: Path, replays: list[int]
) -> None:
    """A second stage averages the weights that a graph from the first one updates."""
    settings = [
        "precision=fp32", "compile=off", "steps=0", "epochs=0.25", "optimiser.finetune_epochs=1",
        "optimiser.finetune_lr=1e-2", "evaluate_every=4",
    ]  # fmt: skip
    for name, more in (("graph", ()), ("plain", ("graph=off",))):
        run(text, tmp_path / name, config(*settings, *more, head="softmax"))
        assert replays[0] > 0
    pairs = [
        (one["loss"], other["loss"])
        for one, other in zip(
            log(tmp_path / "graph", "evaluate"), log(tmp_path / "plain", "evaluate"), strict=True
        )
        if one["averaged"] and one["split"] == "valid"
    ]
    assert len({one for one, _ in pairs}) > 1
    for one, other in pairs:
        assert one == pytest.approx(other, rel=1e-3)


def test_a_capture_does_not_mind_a_batch_that_is_pinned_beside_it(text: Path, tmp_path: Path) -> None:
    """The thread that makes batches is slow on a busy machine: it pins memory while the step is captured."""
    done = threading.Event()

    def pin() -> None:
        size = 1
        while not done.is_set():
            # Of a new size, so that memory is asked of the driver and not of what torch keeps.
            torch.empty(size, dtype=torch.uint8).pin_memory()
            size = size * 2 if size < 1 << 28 else 1

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        assert run(text, tmp_path / "run", config("precision=fp32", "compile=off")).reason == "finished"
    finally:
        done.set()
        thread.join()


def test_a_head_that_asks_the_device_trains_without_a_graph(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(text, out, config("steps=60", "optimiser.lr=0.01", head="pointer")).reason == "finished"
    first, *_, last = log(out, "evaluate")
    assert last["loss"] < first["loss"]
    # Whoever draws afterwards in this process.
    assert torch.randn(3, device="cuda").isfinite().all()


def test_an_lstm_carries_its_state(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(text, out, config("body.last=48", "head.width=32", name="awd-lstm")).reason == "finished"
    stored = checkpoint.read(checkpoint.found(out / folder.CHECKPOINTS, "step")[-1])
    assert len(stored.groups["carried"]) == 4
