"""Runs of one and of two processes side by side, for test_processes.py: `many_processes.py FOLDER CASE...`.

Importing torch and accelerate takes long, so one process imports them and forks the others. All in fp64,
where what is left between one process and two is the order of a few sums.

    FOLDER/one/CASE      one process from start to end
    FOLDER/two/CASE      two processes from start to end
    FOLDER/relay/CASE    one process up to step FIRST, two up to step SECOND, one to the end
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as distributed

from fullrank.errors import FullrankError
from fullrank.train import checkpoint, learner, loop, weights
from fullrank.train import processes as between
from fullrank.train.config import Config, override
from fullrank.train.model import build
from fullrank.train.recipes import recipe

PROCESSES = 2
FIRST, SECOND, STEPS = 7, 17, 24
VOCABULARY = 37
"""Words; with <eos> and <unk> an odd number of entries, so that shards differ."""

_LSTM = (
    "body.hidden=12", "body.last=10", "head.width=8", "body.dropout=0", "body.dropout_embedding=0",
    "body.dropout_input=0", "body.dropout_hidden=0", "body.weight_drop=0", "head.components=3", "batch=8",
    "length=8", "jitter=true", "evaluate_every=8", "evaluate_batch=4", f"steps={STEPS}", "keep=9",
    "optimiser.lr=0.03", "optimiser.clip=0.03", "optimiser.warmup=0.03", "activation=0.1", "temporal=0.1",
)  # fmt: skip
_TRANSFORMER = (
    "data.level=words", "body.hidden=16", "body.heads=2", "body.inner=24", "head.components=3", "batch=8",
    "length=8", "evaluate_every=8", "evaluate_tokens=0", "final_tokens=0", "evaluate_batch=4",
    f"steps={STEPS}", "keep=9", "optimiser.clip=0.3",
)  # fmt: skip
_AVERAGED = (
    # As the recipes of this optimiser have it: from equal components SGD moves little in a few steps.
    "head.as_published=true",
    "optimiser.name=nt-asgd", "optimiser.lr=20", "optimiser.schedule=constant", "optimiser.nonmonotone=0",
    "optimiser.finetune_lr=10", "optimiser.finetune_epochs=1", "evaluate_every=3", "steps=0", "epochs=0.5",
)  # fmt: skip
_UNTIED = ("head.tie=false",)
_BALANCED = ("head.balance=3",)


class Case(NamedTuple):
    recipe: str
    head: str
    settings: tuple[str, ...]
    fsdp: bool = False
    vocab_parallel: bool = False

    def config(self) -> Config:
        return override(recipe(self.recipe, self.head), self.settings)


CASES = {
    "softmax": Case("awd-lstm", "softmax", _LSTM),
    "mos": Case("awd-lstm", "mos", (*_LSTM, *_BALANCED, "accumulate=2")),
    "balanced": Case("awd-lstm", "mos", (*_LSTM, *_BALANCED)),
    "transformer": Case("transformer-tiny", "mos", _TRANSFORMER),
    "averaged": Case("awd-lstm", "softmax", (*_LSTM, *_AVERAGED)),
    "fsdp-mos": Case("awd-lstm", "mos", (*_LSTM, *_BALANCED, "accumulate=2"), fsdp=True),
    "fsdp-transformer": Case("transformer-tiny", "mos", _TRANSFORMER, fsdp=True),
    "fsdp-averaged": Case("awd-lstm", "softmax", (*_LSTM, *_AVERAGED), fsdp=True),
    "split-softmax": Case("awd-lstm", "softmax", (*_LSTM, *_UNTIED), vocab_parallel=True),
    "split-mos": Case(
        "awd-lstm", "mos", (*_LSTM, *_UNTIED, *_BALANCED, "accumulate=2"), vocab_parallel=True
    ),
    "split-sigsoftmax": Case(
        "transformer-tiny", "sigsoftmax", (*_TRANSFORMER, *_UNTIED), vocab_parallel=True
    ),
    "split-averaged": Case("awd-lstm", "mos", (*_LSTM, *_UNTIED, *_AVERAGED), vocab_parallel=True),
}  # fmt: skip
RELAYS = ("mos", "averaged", "fsdp-mos", "fsdp-averaged", "split-sigsoftmax", "split-mos", "split-averaged")
QUICK = ("mos",)
"""One case and its relay; FSDP, split vocabularies, averages, other heads and dropout are the slow tier's."""
TIED_HEADS = ("moss", "trunk", "doc", "mixtape", "facets", "plif", "low_rank", "moc", "pointer")
"""Every other head takes a few steps on two processes, to see that all its parameters get gradients."""


def reference(name: str) -> str:
    """The case whose run on one process is what a case's runs are compared with: the same config."""
    return name.removeprefix("fsdp-")


def write_text(folder: Path) -> None:
    """Words with something to learn: each follows from the one before it more often than not."""
    folder.mkdir()
    for name, lines in (("train", 260), ("valid", 14), ("test", 14)):
        draw = random.Random(name)
        text, word = [], 0
        for _ in range(lines):
            words = []
            for _ in range(9):
                word = (3 * word + 1) % VOCABULARY if draw.random() < 0.7 else draw.randrange(VOCABULARY)
                words.append(f"w{word}")
            text.append(" ".join(words))
        (folder / f"{name}.txt").write_text("\n".join(text) + "\n")


class StopAt(loop.Show):
    """Sends this process, and no other, a SIGTERM after some step."""

    def __init__(self, step: int | None) -> None:
        self.at = step

    def step(self, done: int, total: int, loss: float, tokens_per_second: float) -> None:
        if done == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


def options(folder: Path, kind: str, name: str, case: Case, processes: int) -> loop.Options:
    return loop.Options(
        data=(folder / "text",), out=folder / kind / name, cache=folder / "cache", device="cpu", trackers=(),
        monitors=name == "mos", fsdp=case.fsdp and processes > 1,
        # On one process the flag changes nothing: half of the runs of one have it.
        vocab_parallel=case.vocab_parallel and (processes > 1 or kind == "one"),
    )  # fmt: skip


def run(folder: Path, kind: str, name: str, processes: int, stop: int | None = None) -> None:
    case = CASES[name]
    outcome = loop.train(case.config(), options(folder, kind, name, case, processes), StopAt(stop))
    assert (outcome.reason == "stopped") is (stop is not None), outcome
    assert stop is None or outcome.step == stop, outcome


def refusals(folder: Path) -> None:
    """Mistakes that every process sees."""
    wrong = {
        "odd": (Case("awd-lstm", "softmax", (*_LSTM, "batch=7")), "2 processes"),
        "both": (Case("awd-lstm", "softmax", (*_LSTM, *_UNTIED), True, True), "--fsdp"),
        "tied": (Case("awd-lstm", "softmax", _LSTM, False, True), "head.tie=false"),
        "pointer": (Case("awd-lstm", "pointer", (*_LSTM, *_UNTIED), False, True), "cannot be split"),
    }
    for name, (case, expected) in wrong.items():
        with pytest.raises(FullrankError, match=expected):
            loop.train(case.config(), options(folder, "wrong", name, case, PROCESSES))
        assert not (folder / "wrong" / name / "run.json").exists()
    case = CASES["softmax"]
    own = override(case.config(), [f"seed={os.environ['RANK']}"])
    with pytest.raises(FullrankError, match="different config"):
        loop.train(own, options(folder, "wrong", "seed", case, PROCESSES))


def every_head(folder: Path, names: tuple[str, ...]) -> None:
    for head in names:
        settings = [*_LSTM, "steps=1", "evaluate_every=1", "head.components=4", "head.private=2"]
        case = Case("awd-lstm", head, tuple(settings))
        outcome = loop.train(case.config(), options(folder, "heads", head, case, PROCESSES))
        assert outcome.reason == "finished"


def dropped(folder: Path) -> None:
    """With dropout each process draws its own masks, but those inside a head whose W is split."""
    settings = tuple(
        setting.replace("dropout=0", "dropout=0.4").replace("drop=0", "drop=0.4") for setting in _LSTM
    )
    for flags in ((False, False), (True, False), (False, True)):
        case = Case(
            "awd-lstm", "mos", (*settings, *_UNTIED, "head.dropout=0.3", "precision=bf16", "steps=5"), *flags
        )
        assert case.config().body.weight_drop == 0.4
        outcome = loop.train(
            case.config(), options(folder, "dropped", "-".join(map(str, flags)), case, PROCESSES)
        )
        assert outcome.reason == "finished"


class InStep:
    """At every checkpoint, all processes must have the same weights: the main one's alone are written."""

    def __init__(self) -> None:
        self.written, self.looks = loop.Session._checkpoint, 0

    def __call__(self, session: Any) -> None:
        self.written(session)
        learnt = session.learner
        for values in (None, learnt.average.mean if learnt.average else None):
            whole = weights.gather(learnt.bare, values)
            flat = torch.cat([whole[name].flatten() for name in sorted(whole)])
            first = flat.clone()
            distributed.broadcast(first, 0)
            assert torch.equal(first, flat), session.options.out
        self.looks += 1


def alone(folder: Path, phase: int, cases: list[str]) -> None:
    _ready()
    for name in dict.fromkeys(map(reference, cases)) if phase == 0 else ():
        run(folder, "one", name, 1)
    for name in cases:
        if name in RELAYS:
            run(folder, "relay", name, 1, stop=FIRST if phase == 0 else None)
    # A processor never loads the kernels, nor waits for Triton.
    assert "fullrank.ops.triton_base" not in sys.modules


def together(folder: Path, phase: int, rank: int, cases: list[str]) -> None:
    _ready()
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES),
        "LOCAL_WORLD_SIZE": str(PROCESSES),
    }  # fmt: skip
    between.GRACE = 0.0
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / f'meeting-{phase}'}", rank=rank, world_size=PROCESSES,
        timeout=timedelta(seconds=300),
    )  # fmt: skip
    look = InStep()
    loop.Session._checkpoint = lambda session: look(session)  # type: ignore[method-assign]
    for name in cases:
        if phase == 0:
            run(folder, "two", name, PROCESSES)
        elif name in RELAYS:
            run(folder, "relay", name, PROCESSES, stop=SECOND)
    if phase == 0:
        refusals(folder)
        if len(cases) == len(CASES):
            every_head(folder, TIED_HEADS)
            dropped(folder)
        assert look.looks >= 3 * len(cases)
    distributed.barrier()
    distributed.destroy_process_group()


def _ready() -> None:
    torch.set_num_threads(1)
    # A disk that loses power is not what is tested here.
    checkpoint.sync = lambda path: None  # type: ignore[assignment]
    learner.build = lambda config, vocab: build(config, vocab).double()  # type: ignore[assignment]


def main(folder: Path, cases: list[str]) -> int:
    import accelerate  # noqa: F401
    import safetensors.torch  # noqa: F401
    from transformers import GPTNeoXModel  # noqa: F401

    # Nothing here has started a thread that a fork could lose.
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    write_text(folder / "text")
    fork = multiprocessing.get_context("fork")
    phases: list[list[tuple[Any, tuple[Any, ...]]]] = [
        [(alone, (folder, 0, cases)), *((together, (folder, 0, rank, cases)) for rank in range(PROCESSES))],
        [(together, (folder, 1, rank, cases)) for rank in range(PROCESSES)],
        [(alone, (folder, 2, cases))],
    ]
    for phase in phases:
        started = [fork.Process(target=target, args=arguments) for target, arguments in phase]
        for process in started:
            process.start()
        while None in (codes := [process.exitcode for process in started]):
            if any(codes):
                break
            time.sleep(0.02)
        if any(codes):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
