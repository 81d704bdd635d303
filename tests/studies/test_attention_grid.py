"""The study of temperatures and normalisers: its plan, its rule on known runs, its page, what it refuses."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest

from fullrank.cli.main import run as command
from fullrank.errors import FullrankError
from fullrank.results import Grid, load
from fullrank.results.grid import GridPoint, GridRun
from fullrank.studies import attention_grid
from fullrank.studies.attention_grid import STATEMENT, study
from fullrank.studies.grid_plan import Extent
from tests.studies.made_runs import decisions, followed, made_by_hand, plain_end

NOISE = (0.0, 0.001, -0.001)


@pytest.mark.parametrize("small", [False, True])
def test_the_plan_is_every_normaliser_at_every_temperature(small: bool) -> None:
    made = followed(study(), Extent(small=small, seeds=2), plain_end)
    whole = [spec for spec in made.values() if "trial" not in spec.factors]
    names, heat = (
        (attention_grid.SMALL_USED, attention_grid.SMALL_TEMPERATURES)
        if small
        else (attention_grid.USED, attention_grid.TEMPERATURES)
    )
    wanted = {(name, f"{one:g}", seed) for name in names for one in heat for seed in (0, 1)}
    found = {(spec.factors["normaliser"], spec.factors["temperature"], spec.seed) for spec in whole}
    assert found == wanted
    for spec in made.values():
        assert f"body.normaliser={spec.factors['normaliser']}" in spec.settings
        assert f"body.attention_temperature={spec.factors['temperature']}" in spec.settings
    # All else is the same, but for the rate that each pair was tuned to.
    own = ("body.normaliser", "body.attention_temperature", "optimiser.lr")
    shared = {tuple(one for one in spec.settings if not one.startswith(own)) for spec in whole}
    assert len(shared) == 1
    assert all(sum(one.startswith("optimiser.lr=") for one in spec.settings) == 1 for spec in whole)


def test_what_is_asked_for_is_planned() -> None:
    made = followed(study(("softmax", "sink"), (0.1, 1)), Extent(small=True, seeds=1), plain_end)
    assert {spec.factors["normaliser"] for spec in made.values()} == {"softmax", "sink"}
    assert {spec.factors["temperature"] for spec in made.values()} == {"0.1", "1"}


def run(seed: int, name: str, temperature: str, loss: float | None, gradient: float = 1.0) -> GridRun:
    monitors = {"gradient_norm": gradient, "attention_sensitivity": 0.1 / float(temperature)}
    made = made_by_hand(
        f"{name}-t{temperature}-seed{seed}", loss, seed=seed, monitors=monitors, normaliser=name,
        temperature=temperature,
    )  # fmt: skip
    return made if loss is not None else dataclasses.replace(made, failure="not finite")


def known() -> list[GridRun]:
    runs = []
    for seed, noise in enumerate(NOISE):
        runs += [
            run(seed, "softmax", "1", 4.0),
            run(seed, "softmax", "2", 4.0 + noise),
            run(seed, "softmax", "0.5", 4.1 + noise, 2.0 + noise),
            run(seed, "softmax", "0.25", 4.3 + noise, 1.0 + noise),
            # Bears it: below softmax where softmax is hurt.
            run(seed, "sigmoid", "1", 4.0 + noise),
            run(seed, "sigmoid", "0.5", 4.0 + noise),
            run(seed, "sigmoid", "0.25", 4.0 + noise),
            # Hurt at the lower of two alone.
            run(seed, "sink", "1", 4.0),
            run(seed, "sink", "0.5", 4.0 + 50 * noise),
            run(seed, "sink", "0.25", 4.2 + noise),
            # Most of its seeds burst.
            run(seed, "sparsemax", "1", 4.0),
            run(seed, "sparsemax", "0.25", None if seed else 4.0),
        ]
    return runs


def test_what_is_known_is_found() -> None:
    found = decisions(study().answers(tuple(known())))
    assert {name: found[name] for name in found if "against 1" in name and name.startswith("s")} == {
        "softmax: T 2 against 1": "no difference of interest",
        "softmax: T 0.5 against 1": "worse",
        "softmax: T 0.25 against 1": "worse",
        "sigmoid: T 0.5 against 1": "no difference of interest",
        "sigmoid: T 0.25 against 1": "no difference of interest",
        "sink: T 0.5 against 1": "undecided",
        "sink: T 0.25 against 1": "worse",
        "sparsemax: T 0.25 against 1": "worse",
        "sensitivity of softmax: T 2 against 1": "falls",
        "sensitivity of softmax: T 0.5 against 1": "rises",
        "sensitivity of softmax: T 0.25 against 1": "rises",
    }
    assert {name: found[name] for name in found if "low" in name} == {
        "softmax: low temperatures": "hurts from T 0.5 down",
        "sigmoid: low temperatures": "hurts nowhere down to T 0.25",
        "sink: low temperatures": "hurts from T 0.25 down",
        "sparsemax: low temperatures": "hurts from T 0.25 down",
    }
    assert found["sigmoid against softmax: T 0.25"] == "better"
    assert found["sigmoid against softmax: T 1"] == "no difference of interest"
    assert found["gradient of softmax: T 0.5 against 1"] == "rises"
    assert found["gradient of softmax: T 0.25 against 1"] == "no difference of interest"


def test_few_runs_decide_nothing() -> None:
    one = [each for each in known() if each.seed == 0]
    said = decisions(study().answers(one))
    assert set(said.values()) == {"undecided"}
    assert study().answers(()) == ()
    answers = study().answers(tuple(known()))
    assert all(answer.sentence for answer in answers)
    seen = next(answer.seen for answer in answers if answer.label == "softmax: T 0.5 against 1")
    assert 0 < seen < STATEMENT.smallest


@pytest.mark.parametrize(
    ("normalisers", "temperatures", "message"),
    [
        (("sink",), (), "softmax among them"),
        (("softmax", "softmax"), (), "expected different ones"),
        (("softmax", "sigmod"), (), "did you mean 'sigmoid'"),
        ((), (0.5, 2.0), "1 among them"),
        ((), (1.0, 1.0), "expected different ones"),
        ((), (0.0, 1.0), "expected a finite number above 0"),
        ((), (1.0, -2.0), "expected a finite number above 0"),
        ((), (1.0, math.nan), "expected a finite number above 0"),
    ],
)
def test_impossible_choices_are_refused(
    normalisers: tuple[str, ...], temperatures: tuple[float, ...], message: str
) -> None:
    with pytest.raises(FullrankError, match=message):
        study(normalisers, temperatures)


@pytest.mark.slow(reason="trains and draws for eight seconds; the command of a grid is in the default tier")
def test_the_command_trains_goes_on_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULLRANK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    draw = random.Random(0)
    words = [" ".join(draw.choices(["ab", "cd", "efg", "hi"], k=6)) for _ in range(3000)]
    (tmp_path / "text.txt").write_text("\n".join(words))
    asked = ["study", "attention", "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
    asked += ["--small", "--seeds", "1", "--scale", "0.1", "--device", "cpu"]
    asked += ["--normalisers", "softmax", "--temperatures", "1"]
    assert command(asked) == 0
    made, _ = load(tmp_path / "out" / "results.json")
    assert isinstance(made, Grid)
    whole = [one for one in made.runs if "trial" not in one.factors]
    assert len(whole) == 1
    for point in whole[0].curve:
        assert isinstance(point, GridPoint)
        assert point.monitors["gradient_norm"] > 0
        assert 0 < point.monitors["attention_sensitivity"] <= 0.5
        assert point.monitors["attention_effective_tokens"] > 1
    assert "Loss over temperatures" in (tmp_path / "out" / "report.html").read_text()
    capsys.readouterr()
    assert command([*asked[:-1], "0"]) == 2
    assert "expected a finite number above 0" in capsys.readouterr().err
