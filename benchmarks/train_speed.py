"""`fullrank train` against a bare loop around the same compiled model, in tokens a second.

    python -m benchmarks.train_speed --device cuda --out results/train_speed.json

Both train on random tokens in one process, one after the other, for every case: a body of GPT-2 small's size
with V = 50,304 and 16k tokens a step under softmax, trunk and mos, and a 14m one with V = 16,384. The bare
loop has a fixed batch on the device, bf16 autocast, clipping and fused AdamW, and nothing else. The run is
the command's own, with its reading, its log, its evaluations with monitors and its checkpoints; its speed is
that of the lines of its log, and beside it stands the share of time that its ten evaluations with their
monitors take, as its recipe has them: smaller the longer a run is, for monitors cost the same at any length.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from fullrank.fit import optimiser
from fullrank.results import provenance, write_whole
from fullrank.results.training_log import read_log
from fullrank.train.config import Config, override
from fullrank.train.learner import precision_of
from fullrank.train.loop import Options, train
from fullrank.train.model import build
from fullrank.train.objective import Objective
from fullrank.train.recipes import recipe


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    recipe: str
    vocab: int
    settings: tuple[str, ...]
    heads: tuple[tuple[str, int], ...]
    """(head, components)"""


GPT2 = Case(
    name="gpt-2 small",
    recipe="pythia-160m",
    vocab=50304,
    settings=("batch=16", "length=1024", "body.rate_width=0"),
    heads=(("softmax", 1), ("trunk", 10), ("mos", 4)),
)
SMALL = Case(
    name="14m",
    recipe="pythia-14m",
    vocab=16384,
    settings=("batch=128", "length=512"),
    heads=(("softmax", 1),),
)
TINY = Case(
    name="tiny",
    recipe="transformer-tiny",
    vocab=256,
    settings=("batch=2", "length=16", "body.hidden=16", "body.heads=2", "body.rate_width=0"),
    heads=(("softmax", 1), ("mos", 2)),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time the engine and a bare loop side by side."""

    device: str = "cuda"
    out: Path = Path("results/train_speed.json")
    steps: int = 150
    """Of the run; the bare loop has a third of them, a hundred at most."""
    cases: tuple[Literal["gpt-2 small", "14m", "tiny"], ...] = ("gpt-2 small", "14m")
    """`tiny` has no meaning: it shows anywhere that this runs."""
    heads: tuple[str, ...] = ()
    """Only these; all without any."""


def config_of(case: Case, head: str, components: int, steps: int) -> Config:
    settings = [
        *case.settings, f"steps={steps}", f"head.components={components}", "final_tokens=1024",
        f"data.vocabulary_size={case.vocab}", "data.level=bpe", "head.tie=false",
    ]  # fmt: skip
    if head == "trunk":
        settings.append("head.private=64")
    return override(recipe(case.recipe, head), settings)


def bare(config: Config, vocab: int, device: torch.device, steps: int) -> float:
    """Tokens a second."""
    model = build(config, vocab)
    torch.nn.Module.to(model, device)
    objective = Objective(model).train()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        model.model.compile(dynamic=False)
    update = optimiser.make(model, config.optimiser, device)
    half = precision_of(config.precision, device) == "bf16"
    shape = (config.batch, config.length)
    ids, targets = (torch.randint(vocab, shape, device=device) for _ in range(2))

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = objective(ids, targets).value
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
        update.zero_grad(set_to_none=True)

    for _ in range(5):
        step()
    _wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    return steps * config.batch * config.length / (time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_tokens(place: Path, vocab: int, *, train: int, valid: int) -> Path:
    """A directory of tokens to train on, made once."""
    tokens = place / "tokens"
    if not tokens.exists():
        tokens.mkdir()
        draw = np.random.default_rng(0)
        for name, count in (("train", train), ("val", valid), ("test", 1 << 16)):
            draw.integers(0, vocab, count, dtype=np.uint16).tofile(tokens / f"{name}.bin")
        (tokens / "tokens.json").write_text(json.dumps({"vocabulary_size": vocab, "dtype": "uint16"}))
    return tokens


def through_the_engine(config: Config, vocab: int, device: str, place: Path) -> dict[str, Any]:
    tokens = random_tokens(place, vocab, train=1 << 25, valid=1 << 20)
    out = Path(tempfile.mkdtemp(dir=place, prefix="run-"))
    options = Options(
        data=(), tokens=tokens, out=out, cache=place / "cache", device=device, trackers=(), monitors=True
    )
    train(config, options)
    record = read_log(out)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["event"] == "train"]
    later = trained[len(trained) // 2 :]
    evaluations = [line for line in lines if line["event"] == "evaluate" and line["split"] == "valid"]
    half = [line for line in evaluations if line["step"] > evaluations[-1]["step"] // 2]
    spent = sum(line["evaluate_seconds"] + line["monitor_seconds"] for line in half)
    taken = sum(
        (line["step"] - before["step"]) * config.batch * config.length / line["tokens_per_second"]
        for before, line in itertools.pairwise(trained)
        if line["step"] > evaluations[-1]["step"] // 2
    )
    return {
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in later),
        "mfu": later[-1].get("mfu"),
        "peak_bytes": later[-1].get("peak_bytes"),
        "evaluation_share": spent / (spent + taken),
        "evaluations": len(evaluations),
        "steps": record.evaluations[-1].step,
    }


def main(settings: Settings) -> None:
    rows: list[dict[str, Any]] = []
    device = torch.device(settings.device)
    with tempfile.TemporaryDirectory() as folder:
        for case in (case for case in (GPT2, SMALL, TINY) if case.name in settings.cases):
            place = Path(folder) / case.name.replace(" ", "-")
            place.mkdir()
            for head, components in case.heads:
                if settings.heads and head not in settings.heads:
                    continue
                config = config_of(case, head, components, settings.steps)
                speed = bare(config, case.vocab, device, max(2, min(100, settings.steps // 3)))
                torch._dynamo.reset()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                found = through_the_engine(config, case.vocab, settings.device, place)
                rows.append(
                    {
                        "case": case.name, "head": head, "components": components,
                        "bare_tokens_per_second": speed, **found,
                        "engine_over_bare": found["tokens_per_second"] / speed,
                    }
                )  # fmt: skip
                torch._dynamo.reset()
                write_whole(settings.out, json.dumps(_document(settings, rows), indent=1) + "\n")
    drawn = Table(title=f"tokens a second on {settings.device}")
    for header in ("case", "head", "K", "bare", "engine", "engine / bare", "evaluation", "MFU"):
        drawn.add_column(header, justify="left" if header in ("case", "head") else "right")
    for row in rows:
        mfu = "" if row["mfu"] is None else f"{row['mfu']:.2f}"
        drawn.add_row(
            row["case"], row["head"], str(row["components"]), f"{row['bare_tokens_per_second']:,.0f}",
            f"{row['tokens_per_second']:,.0f}", f"{row['engine_over_bare']:.3f}",
            f"{row['evaluation_share']:.1%}", mfu,
        )  # fmt: skip
    Console().print(drawn)


def _document(settings: Settings, rows: list[dict[str, Any]]) -> dict[str, Any]:
    made = dataclasses.asdict(provenance(seed=0, device=settings.device))
    return {"kind": "train_speed", "version": 1, "made": made, "rows": rows}


if __name__ == "__main__":
    main(tyro.cli(Settings))
