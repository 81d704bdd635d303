"""A comparison of heads on states, killed at random moments and started again until it is done.

    python killed_training.py FOLDER KILLS SEED

Each attempt is a process of its own, forked from one that has computed nothing: heavy imports are paid once.
FOLDER/straight.json and FOLDER/killed.json get all numbers and a digest of the weights; FOLDER/kills.json
how many files each kill left.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import safetensors.torch  # noqa: F401  (here and not in every process, as the next)
import torch
import torch._dynamo

from fullrank.fit import checkpoints, comparison, loop, states, trainee
from fullrank.heads import Head, build

D, V, TIME, WINDOWS = 8, 50, 32, 21
SETTINGS = comparison.Settings(seeds=2, rates=(0.1, 0.4), epochs=3, exact=False, rows=30)
OPTIONS: dict[str, dict[str, Any]] = {"mos": {"components": 2, "dropout": 0.2}, "plif": {}}


def head_of(name: str, weight: torch.nn.Parameter, **options: Any) -> Head:
    torch.manual_seed(5)
    head = build(name, hidden=D, vocab=V, **options)
    head.decoder.weight = weight
    return head


def made_parts() -> states.Parts:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(WINDOWS, TIME, D, generator=generator)
    targets = torch.randint(V, (WINDOWS, TIME), generator=generator)
    blocks = torch.arange(WINDOWS)[:, None].expand(WINDOWS, TIME)
    return states.split(states.Part(states=(hidden,), targets=targets, ids=targets, blocks=blocks))


def work(directory: Path, out: Path) -> None:
    """The whole of it, with a checkpoint wherever one may be."""
    loop.EVERY, loop.DEAREST, trainee.LEAST_BATCH = 0.0, math.inf, 100
    weight = torch.nn.Parameter(0.5 * torch.randn(V, D, generator=torch.Generator().manual_seed(1)))
    heads = {name: head_of(name, weight, **options) for name, options in OPTIONS.items()}
    plain = head_of("softmax", weight)
    setting = comparison.setting_for(list(heads.values()), plain, made_parts(), SETTINGS)
    made = comparison.compare(setting, heads, settings=SETTINGS, directory=directory)
    found = {
        "best": made.best,
        "control": made.control,
        "fits": {
            name: [
                (fit.choose_loss, fit.rate, fit.steps, fit.curve, checkpoints.digest(fit.losses))
                for fit in fits
            ]
            for name, fits in made.fits.items()
        },
        "gain": dataclasses.asdict(made.gain(made.best)),
        "weights": {name: checkpoints.digest(*weights.values()) for name, weights in made.weights.items()},
    }
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    os.replace(partial, out)


def attempt(directory: Path, out: Path, seconds: float) -> bool:
    """Whether a process got to the end within so many seconds; if not, it is killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            work(directory, out)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if status:
                sys.exit(f"status {status}")
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def main(folder: Path, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    begun = time.monotonic()
    attempt(folder / "straight", folder / "straight.json", math.inf)
    took = time.monotonic() - begun
    left = []
    for _ in range(kills):
        if attempt(folder / "killed", folder / "killed.json", draw.uniform(0.1, 1.1) * took / kills):
            break
        left.append(len(list((folder / "killed").rglob("*.safetensors"))))
    attempt(folder / "killed", folder / "killed.json", math.inf)
    (folder / "kills.json").write_text(json.dumps(left))
    print(f"{took:.2f} s, {left}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
