"""The record of the trained normalisers: means, spread and differences by seed, and failures left out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fullrank import results
from fullrank.results import AttentionStudy, Estimate, Provenance
from fullrank.results.attention_study import AttentionLayer, AttentionRun


def layer(learnt: tuple[float, ...] = ()) -> AttentionLayer:
    return AttentionLayer(
        effective_tokens=12.5, first_mass=0.25, mass=1.0, zeros=0.0, separable=0.7, separable_random=0.1,
        learnt=learnt,
    )  # fmt: skip


def run(name: str, seed: int, valid: float | None, failure: str = "") -> AttentionRun:
    loss = None if valid is None else Estimate(value=valid, low=valid - 0.1, high=valid + 0.1)
    return AttentionRun(
        normaliser=name, seed=seed, parameters=1000, steps=(10, 20), losses=(6.0, 5.5), valid=loss, test=loss,
        seconds=3.5, layers=() if valid is None else (layer(), layer((0.1, -0.2))), failure=failure,
    )  # fmt: skip


def study(*runs: AttentionRun) -> AttentionStudy:
    return AttentionStudy(
        recipe="transformer-tiny", config={"steps": "20"}, data={"digest": "abc"}, vocabulary=300, context=16,
        training_steps=20, training_tokens=640, evaluated_tokens=512, queries=128, set_size=8, device="cpu",
        runs=runs,
    )  # fmt: skip


def test_differences_are_taken_seed_by_seed() -> None:
    softmax = [run("softmax", seed, loss) for seed, loss in enumerate((5.0, 5.5, 6.0))]
    # Seeds lie far apart, and the difference is always nearly the same.
    sink = [run("sink", seed, loss) for seed, loss in enumerate((4.9, 5.38, 5.92))]
    record = study(*softmax, *sink)
    first, second = record.compared()
    assert (first.normaliser, first.seeds, first.difference) == ("softmax", 3, None)
    assert first.valid == pytest.approx(5.5)
    assert first.spread == pytest.approx(0.5)
    assert second.difference is not None
    assert second.difference.value == pytest.approx(-0.1)
    # Student's t with two degrees of freedom: 4.3027 times 0.02 / sqrt(3).
    half = 4.302653 * 0.02 / math.sqrt(3)
    assert second.difference.low == pytest.approx(-0.1 - half, rel=1e-5)
    assert second.difference.high == pytest.approx(-0.1 + half, rel=1e-5)


def test_failed_runs_and_single_seeds() -> None:
    record = study(
        run("softmax", 0, 5.0), run("softmax", 1, 5.2), run("sparsemax", 0, None, "no number"),
        run("sparsemax", 1, 5.3), run("sigmoid", 0, None, "no number"),
    )  # fmt: skip
    _, one, none = record.compared()
    assert (one.seeds, one.failed, one.difference) == (1, 1, None)
    assert math.isnan(one.spread)
    assert one.valid == 5.3
    assert (none.seeds, none.failed) == (0, 1)
    assert math.isnan(none.valid)


def test_it_is_written_and_read_back(tmp_path: Path) -> None:
    record = study(run("softmax", 0, 5.0), run("sparsemax", 0, None, "no number"))
    made = Provenance(command="c", commit="", time="t", device="cpu", seed=None, versions={})
    results.save(record, tmp_path / "results.json", made)
    assert results.load(tmp_path / "results.json") == (record, made)
