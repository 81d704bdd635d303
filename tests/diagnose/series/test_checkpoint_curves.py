"""Curves from hand-made diagnoses of checkpoints, and the steps in their names."""

import dataclasses
import random
from pathlib import Path

import pytest

from fullrank.diagnose.series import checkpoint_curves, series
from fullrank.results import Diagnosis, Series
from fullrank.results.diagnosis import Anisotropy, LayerGeometry, LogprobRank, Loss, Missing, Spectrum
from tests.diagnosis_records import around, diagnosis

pytestmark = pytest.mark.usefixtures("few_simulations")


def answered(nats: float, rank: float, missing: tuple[Missing, ...] = ()) -> Diagnosis:
    layer = LayerGeometry(
        layer=2, name="last", cosine=around(0.5, 0.1), cosine_centred=around(0.0, 0.0),
        top_variance_share=0.1, effective_rank=9.0, outliers=(), largest_kurtosis=3.0, sinks=1,
    )  # fmt: skip
    point = around(nats, 0.02)
    return diagnosis(
        missing=missing,
        loss=Loss(
            nats_per_token=point, standard_error=0.01, perplexity=point, bits_per_byte=point, tokens=1,
            bytes=1, blocks=1, by_position=(),
        ),
        spectrum=Spectrum(
            singular_values=(), singular_entropy=0.25, effective_rank=rank, random_effective_rank=1.0,
            stable_rank=1.0, participation_ratio=1.0, condition=1.0, numerical_rank=1, noise=0.0,
            noise_origin="",
        ),
        anisotropy=Anisotropy(tokens=1, layers=(layer,)),
        logprob_rank=LogprobRank(
            least_rank=8, gap_rank=8, gap=1.0, noise_floor=0.0, ceiling=8, ceiling_reason="", contexts=1,
            columns=1, method="core", singular_values=(),
        ),
    )  # fmt: skip


NATS = {1000: 4.0, 2000: 3.5, 4000: 3.2, 8000: 3.4, 16000: 3.6, 32000: 3.8}


def diagnosed(
    sources: list[str | Path], revisions: tuple[str, ...] = ()
) -> tuple[Series, list[dict[str, object]]]:
    calls: list[dict[str, object]] = []

    def diagnose(model: str | Path, **rest: object) -> Diagnosis:
        calls.append({"model": model, **rest})
        step = checkpoint_curves.step_of(str(rest["revision"] or Path(model).name))
        return answered(NATS.get(step or 0, 3.0), float(step or 0) or 1.0)

    return series.run(sources, revisions=revisions, text=(Path("t.txt"),), diagnose=diagnose), calls


def test_checkpoint_directories(tmp_path: Path) -> None:
    places = [tmp_path / "run-a" / f"checkpoint-{step}" for step in reversed(NATS)]
    for place in places:
        place.mkdir(parents=True)
    found, calls = diagnosed(list(places))
    assert [call["model"] for call in calls] == places
    assert {call["only"] for call in calls} == {("loss", "spectrum", "anisotropy", "logprob_rank")}
    assert {call["text"] for call in calls} == {(Path("t.txt"),)}
    by_metric = {one.metric: one for one in found.curves}
    assert list(by_metric) == [
        "nats_per_token", "effective_rank", "singular_entropy", "last_layer_cosine", "least_rank",
    ]  # fmt: skip
    nats = by_metric["nats_per_token"]
    assert (nats.model, nats.shots, nats.steps) == ("run-a", None, tuple(NATS))
    assert nats.values == tuple(NATS.values())
    assert nats.standard_errors == pytest.approx([0.01] * 6)
    assert by_metric["effective_rank"].values == tuple(map(float, NATS))
    assert by_metric["effective_rank"].lower_is_better is None
    assert by_metric["last_layer_cosine"].standard_errors == pytest.approx([0.2 / 3.92] * 6)
    (one,) = found.saturation
    assert (one.outcome, one.best_step) == ("undecided", 4000)
    assert found.notes == ()


def test_checkpoints_are_paired_block_by_block(tmp_path: Path) -> None:
    """Blocks that are hard for all checkpoints are no noise of their differences."""
    generator = random.Random(0)
    blocks = [generator.gauss(3.0, 1.0) for _ in range(50)]
    own = {step: [generator.gauss(0.0, 0.01) for _ in blocks] for step in NATS}

    def diagnose(model: str | Path, **rest: object) -> Diagnosis:
        step = checkpoint_curves.step_of(Path(model).name) or 0
        found = answered(NATS[step], 1.0)
        assert found.loss is not None
        sums = [100 * (hard + extra) for hard, extra in zip(blocks, own[step], strict=True)]
        loss = dataclasses.replace(found.loss, block_nats=tuple(sums), block_tokens=(100,) * 50)
        return dataclasses.replace(found, loss=loss)

    places = [tmp_path / "run" / f"step{step}" for step in NATS]
    for place in places:
        place.mkdir(parents=True)
    found = series.run(places, text=(Path("t.txt"),), diagnose=diagnose)
    errors = found.curves[0].paired_errors
    assert errors is not None
    assert len(errors) == len(NATS)
    # sqrt(2) 0.01 over 50 blocks, where one checkpoint by itself has 1.0 over 50 blocks.
    assert errors == pytest.approx([0.002] * len(NATS), rel=0.35)
    assert all(one.paired_errors is None for one in found.curves[1:])
    assert "block" in found.saturation[0].noise_origin


def test_revisions_of_a_hub_model() -> None:
    found, calls = diagnosed(["someone/pythia-70m"], tuple(f"step{step}" for step in NATS))
    assert {call["model"] for call in calls} == {"someone/pythia-70m"}
    assert [call["revision"] for call in calls] == [f"step{step}" for step in NATS]
    assert found.curves[0].steps == tuple(NATS)
    assert found.curves[0].model == "someone/pythia-70m"


def test_names_without_steps_are_taken_in_order(tmp_path: Path) -> None:
    places = [tmp_path / "run" / name for name in ("early", "middle", "late")]
    for place in places:
        place.mkdir(parents=True)
    found, _ = diagnosed(list(places))
    assert found.curves[0].steps == (1, 2, 3)
    assert any("order given" in note for note in found.notes)
    assert found.saturation[0].outcome == "undecided"
    assert "3 usable points" in found.saturation[0].reason


def test_unanswered_questions_are_said(tmp_path: Path) -> None:
    place = tmp_path / "run" / "step5"
    place.mkdir(parents=True)
    empty = dataclasses.replace(
        answered(3.0, 2.0, (Missing(question="loss", reason="no text"),)), loss=None, anisotropy=None
    )
    found = series.run([place], metric="effective_rank", diagnose=lambda model, **rest: empty)
    assert [one.metric for one in found.curves] == ["effective_rank", "singular_entropy", "least_rank"]
    assert any("step5: no loss (no text)" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step1000", 1000),
        ("checkpoint-500", 500),
        ("global_step10", 10),
        ("run2-step_30", 30),
        ("final", None),
    ],
)
def test_steps_in_names(name: str, step: int | None) -> None:
    assert checkpoint_curves.step_of(name) == step
