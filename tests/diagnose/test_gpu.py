"""A diagnosis on a GPU answers as one on the processor does. Run with `pytest -m gpu`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fullrank.diagnose.diagnosis import run
from fullrank.diagnose.settings import Settings
from fullrank.results import Diagnosis

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"])
def test_answers_do_not_depend_on_the_device(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    directory = tiny_checkpoint(family)

    def found(device: str) -> Diagnosis:
        # A GPU may do a thousand times the work of a fit; here both do the same.
        work = 1e7 if device == "cuda" else 1e10
        settings = Settings(tokens=2048, window=64, heads=("mos",), power=False, fit_work=work)
        return run(directory, settings=settings, skip=["unreachable", "rank_needed"], device=device)

    here, there = found("cpu"), found("cuda")
    assert not [one for one in there.missing if one.question not in ("unreachable", "rank_needed")]
    assert there.loss.nats_per_token.value == pytest.approx(here.loss.nats_per_token.value, abs=1e-4)
    # Under a soft cap the spectrum decays smoothly through the noise floor, and the count there may move.
    loose = 0 if here.logprob_rank.method == "core" else 0.02 * here.logprob_rank.ceiling
    assert there.logprob_rank.least_rank == pytest.approx(here.logprob_rank.least_rank, abs=loose)
    assert there.gradient.kept_norm.value == pytest.approx(here.gradient.kept_norm.value, abs=1e-4)
    assert here.better_head is not None
    assert there.better_head is not None
    # Fits to so few tokens go their own ways: within four standard errors of both.
    gains = [found.better_head.best_gain for found in (here, there)]
    errors = [(gain.high - gain.low) / 3.92 for gain in gains]
    assert abs(gains[0].value - gains[1].value) < 4 * math.hypot(*errors)
