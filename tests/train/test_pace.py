"""Steps of a run, and the rows of a batch that each process takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.train import batches
from fullrank.train.config import Config, override
from fullrank.train.pace import Pace, own_rows
from fullrank.train.recipes import recipe


def machine(rank: int = 0, processes: int = 1, device: str = "cpu") -> Any:
    return SimpleNamespace(device=torch.device(device), num_processes=processes, process_index=rank)


def config(*settings: str) -> Config:
    return override(recipe("awd-lstm", "softmax"), ["batch=12", "length=10", "jitter=false", *settings])


def pace(settings: Config, place: Any = None) -> Pace:
    # 12 streams of 250 predictions: 25 steps an epoch.
    tokens = np.zeros(12 * 250 + 1, dtype=np.uint16)
    return Pace.of(settings, batches.for_training(settings, tokens), place or machine())


@pytest.mark.parametrize(("processes", "accumulate"), [(1, 1), (1, 4), (2, 3), (3, 2), (12, 1)])
def test_every_row_is_one_process_s(processes: int, accumulate: int) -> None:
    settings = config(f"accumulate={accumulate}")
    rows = [own_rows(settings, machine(rank, processes)) for rank in range(processes)]
    assert [row for part in rows for row in range(12)[part]] == list(range(12))
    assert {len(range(12)[part]) % accumulate for part in rows} == {0}


def test_rows_that_cannot_be_shared() -> None:
    with pytest.raises(
        FullrankError, match="batch=12 cannot be shared by 2 processes in 4 parts each"
    ) as told:
        own_rows(config("accumulate=4"), machine(0, 2))
    assert "choose a multiple of 8" in str(told.value)


@pytest.mark.parametrize(
    ("settings", "steps", "stage_steps"),
    [
        (("epochs=2",), 50, 50),
        (("epochs=0.2",), 5, 5),
        (("epochs=10.4",), 260, 260),
        (("epochs=2", "steps=7"), 7, 7),
        (("epochs=2", "steps=70"), 70, 70),
        (("epochs=2", "optimiser.finetune_epochs=3"), 125, 50),
        (("epochs=2", "optimiser.finetune_epochs=3", "steps=60"), 60, 50),
        (("epochs=2", "optimiser.finetune_epochs=3", "steps=20"), 20, 20),
    ],
)
def test_steps_of_the_run_and_of_its_first_stage(
    settings: tuple[str, ...], steps: int, stage_steps: int
) -> None:
    found = pace(config("optimiser.name=nt-asgd", "optimiser.finetune_lr=1", *settings))
    assert (found.steps, found.stage_steps) == (steps, stage_steps)


def test_evaluations_and_lines() -> None:
    # A tenth of the run, an epoch at most.
    assert pace(config("epochs=4", "evaluate_every=0")).evaluate_every == 10
    assert pace(config("epochs=40", "evaluate_every=0")).evaluate_every == 25
    found = pace(config("epochs=4", "evaluate_every=37"))
    assert (found.evaluate_every, found.log_every) == (37, 3)
    assert pace(config("steps=3", "evaluate_every=2")).log_every == 1


def test_devices_are_not_held_up_every_step() -> None:
    looks = [
        pace(config(), machine(0, *where)).agree_every for where in ((1, "cuda"), (2, "cpu"), (2, "cuda"))
    ]
    assert looks[:2] == [1, 1]
    assert looks[2] > 1


def test_an_evaluation_takes_a_share_of_the_time_where_nobody_says_how_many_tokens() -> None:
    assert pace(config("steps=20000", "evaluate_every=10000")).evaluate_tokens == 0
    assert pace(config("evaluate_tokens=999")).evaluate_tokens == 999
    asked = config("evaluate_tokens=-1", "steps=200000", "evaluate_every=100000")
    # A step that is one graph takes a fifth of the time of an evaluation of as many tokens.
    assert pace(asked).evaluate_tokens * 5 / (100_000 * 12 * 10) == pytest.approx(0.015)
    assert pace(config("evaluate_tokens=-1")).evaluate_tokens == 16_384


def test_transformers_are_evaluated_on_a_sample() -> None:
    assert recipe("pythia-160m", "softmax").evaluate_tokens == -1
    assert recipe("awd-lstm", "softmax").evaluate_tokens == 0
