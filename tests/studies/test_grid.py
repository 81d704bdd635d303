"""Grids of trainings: what is stated, planned, run once, gone on with, and decided."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import pytest
from scipy import stats

from fullrank.errors import FullrankError
from fullrank.results import Grid, load, provenance, save
from fullrank.results.grid import GridAnswer, GridRun, Statement
from fullrank.studies import grid, grid_workers, head_grid, optimiser_grid, width_grid
from fullrank.studies.grid import Study
from fullrank.studies.grid_plan import Done, Extent, Spec, compared, tuned
from fullrank.studies.grid_workers import Place
from fullrank.train.config import override
from fullrank.train.recipes import recipe
from tests.studies.made_runs import decisions, followed, made_by_hand, plain_end

STATEMENT = Statement(
    question="Does it train?", hypothesis="It does.", comparison="One seed against another.", smallest=0.1,
    rule="Whatever.",
)  # fmt: skip
SETTINGS = (
    "body.hidden=16", "body.heads=2", "body.layers=1", "steps=4", "batch=2", "length=16", "evaluate_every=2",
    "evaluate_tokens=64", "final_tokens=64", "data.bpe_size=300",
)  # fmt: skip


def plan(done: Done, extent: Extent) -> list[Spec]:
    """Two runs, and a third that goes on from the first."""
    specs = [
        Spec(
            name=f"seed{seed}", recipe="transformer-tiny", settings=(*SETTINGS, "snapshot_every=2"),
            factors={"arm": "a"}, seed=seed,
        )
        for seed in range(extent.seeds)
    ]  # fmt: skip
    if "seed0" in done:
        specs.append(
            Spec(
                name="branch", recipe="transformer-tiny", head="mos", branch="seed0@2",
                settings=(*SETTINGS, "head.components=2"), factors={"arm": "b"},
            )
        )  # fmt: skip
    return specs


def answers(runs: Sequence[GridRun]) -> tuple[GridAnswer, ...]:
    return (compared("all", [run.valid or 0.0 for run in runs], STATEMENT.smallest),)


STUDY = Study(name="try", statement=STATEMENT, plan=plan, answers=answers)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the {word} of a {word} is no {word}s" for word in range(400)))
    return Place(out=tmp_path / "study", cache=tmp_path / "cache", data=(text,), device="cpu")


def test_a_study_runs_once_goes_on_and_is_drawn(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    # A budget that ends after the first run.
    cut = grid.run(STUDY, dataclasses.replace(place, seconds=1e-9), Extent(seeds=2))
    assert cut.runs == ()
    assert cut.missing == ("seed0", "seed1")
    record = grid.run(STUDY, place, Extent(seeds=2))
    assert [run.name for run in record.runs] == ["seed0", "seed1", "branch"]
    assert record.missing == ()
    for run in record.runs:
        kept = sorted(
            one.name.split("-")[0] for one in (place.out / "runs" / run.name / "checkpoints").iterdir()
        )
        assert kept == ["best"]
        assert not run.failure
        assert not run.after_looking
        assert run.valid is not None
        assert run.curve
        assert "anisotropy" in run.curve[-1].monitors
        assert run.flops > 0
    # Two of its four steps are the parent's.
    assert record.runs[2].curve[0].step > 2
    assert record.runs[2].parameters > record.runs[0].parameters
    assert len(record.answers) == 1
    # Where only the record has travelled nothing is trained again.
    save(record, place.out / "results.json", provenance(seed=None, device="cpu"))
    monkeypatch.setattr(grid, "train", lambda *given: pytest.fail("was trained again"))
    assert grid.run(STUDY, place, Extent(seeds=2)).runs == record.runs
    with pytest.raises(FullrankError, match="not of this study"):
        grid.run(dataclasses.replace(STUDY, name="another"), place, Extent(seeds=2))


def test_runs_after_the_file_has_changed_are_marked(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(spec: Spec, place: Place) -> GridRun:
        (place.out / "runs" / spec.name).mkdir(parents=True)
        return made_by_hand(spec.name, 1.0, arm="a")

    monkeypatch.setattr(grid, "train", train)
    grid.run(STUDY, place, Extent(seeds=1))
    monkeypatch.setattr(Study, "digest", property(lambda self: "another"))
    record = grid.run(STUDY, place, Extent(seeds=2))
    assert {run.name: run.after_looking for run in record.runs} == {
        "seed0": False, "branch": False, "seed1": True,
    }  # fmt: skip
    found, _ = load(place.out / "results.json")
    assert isinstance(found, Grid)
    assert found.runs == record.runs


def test_a_branch_waits_for_the_machine_that_has_its_parent(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "train", lambda spec, place: made_by_hand(spec.name, 1.0, arm="a"))
    record = grid.run(STUDY, place, Extent(seeds=2))
    assert [run.name for run in record.runs] == ["seed0", "seed1"]
    assert record.missing == ("branch",)
    (place.out / "runs" / "seed0").mkdir(parents=True)
    assert grid.run(STUDY, place, Extent(seeds=2)).missing == ()
    with pytest.raises(FullrankError, match="--scale 1, not"):
        grid.run(STUDY, place, Extent(seeds=2, scale=0.5))
    with pytest.raises(FullrankError, match="has runs with no --set"):
        grid.run(STUDY, place, Extent(seeds=2, settings=("optimiser.beta2=0.9",)))


@pytest.mark.parametrize("study", [width_grid.WIDTH, head_grid.HEAD, optimiser_grid.OPTIMISER])
def test_settings_of_all_runs_leave_what_a_study_varies(study: Study) -> None:
    given = ("optimiser.beta1=0.8", "batch=2", "body.hidden=8")
    for spec in study.plan({}, Extent(seeds=1, settings=given)):
        config = override(recipe(spec.recipe, spec.head), spec.settings)
        assert config.optimiser.beta1 == 0.8
        assert config.batch > 2
        assert config.body.hidden > 8


def test_runs_on_another_text_do_not_join_a_record(place: Place, tmp_path: Path) -> None:
    record = grid.run(STUDY, place, Extent(seeds=1))
    assert len({run.data for run in record.runs}) == 1
    assert record.runs[0].data
    save(record, place.out / "results.json", provenance(seed=None, device="cpu"))
    text = tmp_path / "another.txt"
    text.write_text("\n".join(f"no {word} is a {word}" for word in range(400)))
    with pytest.raises(FullrankError, match=r"another text than the runs.*--out"):
        grid.run(STUDY, dataclasses.replace(place, data=(text,)), Extent(seeds=2))
    # Before its first step.
    assert not (place.out / "runs" / "seed1" / "log.jsonl").exists()
    # Nor are the answers of a whole record those of another text, or of none.
    with pytest.raises(FullrankError, match=r"another text than the runs.*--out"):
        grid.run(STUDY, dataclasses.replace(place, data=(text,)), Extent(seeds=1))
    with pytest.raises(FullrankError, match=r"missing\.txt"):
        grid.run(STUDY, dataclasses.replace(place, data=(tmp_path / "missing.txt",)), Extent(seeds=1))
    found, _ = load(place.out / "results.json")
    assert found == record


def test_an_error_of_a_run_that_has_not_begun_is_the_one_that_is_told(place: Place) -> None:
    spec = plan({}, Extent(seeds=1))[0]
    log = place.out / "runs" / spec.name / "log.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text("")
    with pytest.raises(FullrankError, match="is no run and not empty"):
        grid.train(spec, place)


def test_a_run_whose_first_steps_are_no_numbers_is_a_failure_and_ends_no_study(place: Place) -> None:
    first = plan({}, Extent(seeds=1))[0]
    wild = dataclasses.replace(
        first, name="wild", settings=(*first.settings, "optimiser.lr=1e9", "optimiser.warmup=0", "skip=0")
    )
    study = dataclasses.replace(STUDY, plan=lambda done, extent: [wild, first])
    runs = {run.name: run for run in grid.run(study, place, Extent(seeds=1)).runs}
    assert "not finite" in runs["wild"].failure
    assert runs["wild"].valid is None
    assert runs["wild"].curve == ()
    assert runs["seed0"].valid is not None


@pytest.mark.slow(reason="two more processes that import torch; one process is in the default tier")
def test_processes_beside_train_the_same(place: Place) -> None:
    record = grid.run(STUDY, dataclasses.replace(place, processes=2), Extent(seeds=2))
    alone = grid.run(STUDY, dataclasses.replace(place, out=place.out / "alone"), Extent(seeds=2))
    assert {run.name for run in record.runs} == {run.name for run in alone.runs}
    losses = {run.name: run.valid for run in alone.runs}
    for run in record.runs:
        assert run.valid == pytest.approx(losses[run.name], rel=1e-4)


def test_a_process_that_dies_among_others_is_not_waited_for(place: Place) -> None:
    workers = grid_workers._Beside(dataclasses.replace(place, processes=2), grid.train)
    workers.processes = [
        workers.context.Process(target=time.sleep, args=(60,)),
        workers.context.Process(target=os._exit, args=(9,)),
    ]
    for process in workers.processes:
        process.start()
    workers.running["lost"] = Spec(name="lost", recipe="transformer-tiny", factors={})
    with pytest.raises(FullrankError, match=r"without a word.*lost.*--processes"):
        list(workers.finished())
    assert not any(process.is_alive() for process in workers.processes)


def test_the_rule_by_hand() -> None:
    few = compared("x", [0.3], 0.1)
    assert (few.decision, few.seen) == ("undecided", math.inf)
    assert few.sentence == "x: +0.3000 nats per token in one of the seeds, too few to say"
    assert compared("x", [], 0.1).effect is None
    found = compared("x", [-0.21, -0.19, -0.20], 0.1)
    assert found.decision == "better"
    assert found.effect is not None
    assert found.effect.value == pytest.approx(-0.2)
    # Student's t with two degrees of freedom, and a standard error of 0.01 / sqrt(3).
    error = 0.01 / math.sqrt(3)
    assert found.effect.high == pytest.approx(-0.2 + 4.302653 * error, abs=1e-6)
    assert found.seen == pytest.approx((4.302653 + stats.t.ppf(0.8, 2)) * error, abs=1e-6)
    assert compared("x", [0.21, 0.19, 0.20], 0.1).decision == "worse"
    # Sure, and not of interest.
    assert compared("x", [0.021, 0.019, 0.020], 0.1).decision == "no difference of interest"
    assert compared("x", [0.2, -0.1, 0.1], 0.1).decision == "undecided"
    assert compared("x", [], 0.1).effect is None
    # No spread is no knowledge of the noise.
    alike = compared("x", [0.0, 0.0, 0.0], 0.1)
    assert (alike.decision, alike.seen) == ("no difference of interest", math.inf)
    assert "noise is not known" in alike.sentence


def test_a_grid_of_rates_grows_until_its_best_is_inside() -> None:
    own = Spec(name="own", recipe="transformer-tiny", settings=("steps=40",), factors={"width": "8"})
    done: dict[str, GridRun] = {}
    wanted = 8.0
    for _ in range(10):
        best, trials = tuned(done, own, (0.5, 1.0, 2.0))
        if best is not None:
            break
        for trial in trials:
            factor = float(trial.factors["trial"])
            done[trial.name] = made_by_hand(trial.name, abs(math.log(factor / wanted)), **trial.factors)
            assert "steps=10" in trial.settings
    # The recipe's rate is 0.002.
    assert best == ("optimiser.lr=0.016",)
    assert {float(run.factors["trial"]) for run in done.values()} == {0.5, 1.0, 2.0, 4.0, 8.0, 16.0}


def test_a_head_is_held_against_a_softmax_of_as_many_parameters() -> None:
    from fullrank.train.model import build

    def size(spec: Spec) -> int:
        config = override(recipe(spec.recipe, spec.head), spec.settings)
        return sum(parameter.numel() for parameter in build(config, 100).parameters())

    done: dict[str, GridRun] = {}

    def end(spec: Spec) -> GridRun:
        loss = 4.0 if spec.head == "mos" else 4.3 if "_as_" in spec.name else 4.5
        run = made_by_hand(spec.name, loss, **spec.factors)
        # Rates are tried on shorter runs of the same model.
        parameters = 1 if "trial" in spec.factors else size(spec)
        run = dataclasses.replace(run, recipe=spec.recipe, settings=spec.settings, parameters=parameters)
        return done.setdefault(spec.name, run)

    followed(head_grid.HEAD, Extent(small=True, seeds=1), end)
    larger, head, plain = (
        done[f"width16-{name}-seed0"]
        for name in ("softmax_as_mos2-parameters", "mos2-tokens", "softmax-tokens")
    )
    assert plain.parameters < 0.97 * head.parameters
    assert larger.parameters == pytest.approx(head.parameters, rel=0.01)
    found = {answer.label: answer for answer in head_grid.HEAD.answers(tuple(done.values()))}
    effects = {
        label: round(effect.value, 6)
        for label, answer in found.items()
        if (effect := answer.effect) is not None
    }
    assert effects["mos2 at width 16, equal tokens and parameters"] == -0.3
    assert effects["mos2 at width 16, equal tokens"] == -0.5


def test_a_swap_goes_on_for_half_a_run() -> None:
    """In its first form it branched from the last evaluation but one, four steps before the end."""
    from fullrank.studies.grid_plan import steps_of

    extent, done = Extent(seeds=1), dict[str, GridRun]()
    study = head_grid.study(widths=[64], heads=["softmax", "mos4"])
    swaps: list[Spec] = []
    for _ in range(12):
        for spec in study.plan(done, extent):
            steps = range(187, 1500, 187)
            run = made_by_hand(spec.name, 4.0, losses=(1.0,) * 8, **spec.factors)
            curve = [dataclasses.replace(run.curve[0], step=step, loss=5 - step / 1500) for step in steps]
            done[spec.name] = dataclasses.replace(run, curve=(*curve, run.curve[-1]), recipe=spec.recipe)
            swaps += [spec] if spec.branch and spec not in swaps else []
    assert {spec.name for spec in swaps} == {"width64-swap-softmax-seed0", "width64-swap-mos4-seed0"}
    for spec in swaps:
        at = int(spec.branch.partition("@")[2])
        assert at == 1496
        assert steps_of(tuple(reversed(spec.settings))) == at + 750


REFUSALS: dict[str, tuple[Callable[[Place], object], str]] = {
    "no softmax": (lambda place: head_grid.study(heads=["mos4"]), "--heads mos4: expected softmax and any"),
    "no such head": (lambda place: head_grid.study(heads=["softmax", "mos5"]), "mos5: expected.*plif"),
    "a width of 0": (lambda place: head_grid.study(widths=[64, 0]), "--widths 64 0: expected widths of 1"),
    "a name twice": (
        lambda place: grid.run(
            dataclasses.replace(STUDY, plan=lambda done, extent: plan(done, extent) * 2), place,
            Extent(seeds=1),
        ),
        "twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, place: Place) -> None:
    call, words = REFUSALS[case]
    with pytest.raises(FullrankError, match=words):
        call(place)


@pytest.mark.parametrize("study", [width_grid.WIDTH, head_grid.HEAD, optimiser_grid.OPTIMISER])
@pytest.mark.parametrize("small", [False, True])
def test_plans_are_of_settings_that_exist_and_come_to_an_end(study: Study, small: bool) -> None:
    def end(spec: Spec) -> GridRun:
        # The study of widths tests curves of six points and more.
        return dataclasses.replace(plain_end(spec), curve=plain_end(spec).curve * 3)

    followed(study, Extent(small=small, seeds=2), end)


def test_a_factor_is_held_against_its_own_level_over_all_others() -> None:
    """A fall of the rate lowers end and rank, a small batch takes the rise away, the rest does nothing."""
    levels = optimiser_grid.LEVELS
    runs = []
    for number, values in enumerate(itertools.product(("32", "128"), *levels.values())):
        factors = dict(zip(("width", *levels), values, strict=True))
        # What a combination has to itself is the same on both sides of a comparison but for a little.
        noise = 0.001 * (number % 3)
        fallen = factors["schedule"] != "constant"
        end = 3.0 + noise - 0.3 * fallen + 0.1 * float(factors["rate"])
        rise = 0.05 * (factors["batch"] == "16") + noise
        rank = 0.7 + noise - (0.15 if factors["width"] == "32" else 0.03) * fallen
        runs.append(
            made_by_hand(
                str(number), end, losses=(4.0, end - rise, end), monitors={"head_effective_rank_share": rank},
                **factors,
            )
        )  # fmt: skip
    found = optimiser_grid.answers(runs)
    decided = decisions(found)
    assert decided["rise at width 32: batch 4 against 16"] == "smaller"
    assert decided["rise at width 128: decay 0 against 0.1"] == "no difference of interest"
    assert decided["end at width 128: schedule wsd against constant"] == "better"
    assert decided["end at width 32: rate 4 against 1"] == "worse"
    assert decided["effective rank at width 32: schedule cosine against constant"] == "falls"
    effects = {one.label: one for one in found}
    assert effects["effective rank at width 128: schedule wsd against constant"].unit == "share of the width"
    assert effects["effective rank at width 32: schedule wsd against constant"].effect.value == pytest.approx(
        -0.15, abs=0.002
    )
    assert effects["end at width 32: schedule wsd against constant"].seeds == 12


def test_a_memory_is_held_against_the_recipes_with_either_batch_and_factors_with_either_memory() -> None:
    """A small batch lowers the rank by 0.4, of which a longer memory leaves 0.1."""
    made = {spec.name: spec for spec in optimiser_grid.plan({}, Extent(seeds=1))}
    runs = []
    for number, spec in enumerate(made.values()):
        forgets = spec.factors["beta2"] == "0.95"
        assert f"optimiser.beta2={spec.factors['beta2']}" in spec.settings
        rank = 0.8 - (0.4 if forgets else 0.1) * (spec.factors["batch"] == "4") + 0.001 * (number % 3)
        runs.append(
            made_by_hand(spec.name, 3.0, monitors={"head_effective_rank_share": rank}, **spec.factors)
        )
    found = {one.label: one for one in optimiser_grid.answers(runs)}
    for label, value, pairs in (
        ("effective rank at width 32: batch 4 against 16", -0.4, 18),
        ("effective rank at width 32, beta2 0.999: batch 4 against 16", -0.1, 9),
        ("effective rank at width 32, batch 4: beta2 0.999 against 0.95", 0.3, 9),
        ("effective rank at width 128, batch 16: beta2 0.999 against 0.95", 0.0, 9),
    ):
        effect = found[label].effect
        assert effect is not None
        assert effect.value == pytest.approx(value, abs=0.002)
        assert found[label].seeds == pairs


def test_an_end_that_is_the_best_is_no_proof_of_power() -> None:
    """Falling curves rise by 0 in every seed: what would have been seen is the test's, never 0."""
    random = numpy.random.default_rng(0)

    def falling(seed: int, count: int) -> GridRun:
        losses = 3 + numpy.exp(-numpy.arange(count) / 3) + 0.01 * random.standard_normal(count)
        losses[-1] = losses.min() - 0.01
        run = made_by_hand(
            f"{count}-{seed}", 3.0, seed=seed, losses=tuple(losses), width="32", schedule="wsd"
        )
        return dataclasses.replace(run, factors={**run.factors, "width": str(count)})

    long, short = width_grid.answers([falling(seed, count) for count in (20, 6) for seed in range(3)])
    assert long.decision == "not turned"
    assert long.effect is not None
    assert long.effect.value == 0
    assert 0.01 < long.seen < 1
    assert short.seen > long.seen
