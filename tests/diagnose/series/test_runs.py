"""Training runs in a series: recognised by their files, tested on their validation loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fullrank.diagnose.series import curves, runs
from fullrank.errors import FullrankError
from fullrank.results import Training, Trainings, read_log

pytestmark = pytest.mark.usefixtures("few_simulations")
Write = Callable[..., Path]


def test_the_curve_is_the_validation_loss_with_its_errors(write_run: Write) -> None:
    run = read_log(write_run("mine"))
    curve = curves.validation(run)
    assert curve.values == tuple(one.loss for one in run.validation())
    assert curve.steps == tuple(range(0, 2401, 200))
    assert set(curve.standard_errors or ()) == {0.012}
    assert (curve.model, curve.unit, curve.lower_is_better) == ("mine", "nats per token", True)


def test_one_run_or_several_each_with_its_verdict(write_run: Write) -> None:
    turned, steady = write_run("turned", turns=True), write_run("steady")
    alone = runs.trainings([turned])
    assert isinstance(alone, Training)
    both = runs.trainings([turned, steady], seed=1)
    assert isinstance(both, Trainings)
    verdicts = [run.saturation.turned for run in both.runs if run.saturation is not None]
    assert verdicts == [True, False]
    assert alone.saturation.best_step == 1200


def test_runs_are_told_from_other_inputs(write_run: Write, tmp_path: Path) -> None:
    run = write_run()
    assert runs.are_runs([run])
    assert not runs.are_runs(["curves.csv", "EleutherAI/pythia-70m"])
    assert not runs.are_runs([])
    # A checkpoint of transformers has a config.json too, but no log.
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    assert not runs.are_runs([tmp_path / "checkpoint"])
    with pytest.raises(FullrankError, match=r"is a training run and curves\.csv is none: pass runs alone"):
        runs.are_runs([run, "curves.csv"])
