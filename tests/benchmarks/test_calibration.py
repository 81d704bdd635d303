"""What planted models say of themselves is true, and how a calibration reads and judges a diagnosis."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fullrank.models import loading
from fullrank.models.anatomy import states

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks are not installed: they run from the source tree."""
    monkeypatch.syspath_prepend(str(ROOT))


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def words(planted: Any) -> torch.Tensor:
    return torch.tensor([int(word[1:]) for word in planted.text.read_text(encoding="utf8").split()])


def losses(planted: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of the model in the directory, for every word but the first of its window."""
    loaded = loading.load(planted.model)
    windows = ids[: len(ids) // 64 * 64].view(-1, 64)
    with torch.no_grad():
        scores = loaded.model(windows).logits[:, :-1].double()
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten(), reduction="none")


def agree(sample: torch.Tensor, expected: float) -> None:
    """Within four standard errors, over blocks because words of a chain hang together."""
    blocks = sample[: len(sample) // 50 * 50].view(50, -1).mean(1)
    assert abs(float(sample.mean()) - expected) < 4 * float(blocks.std()) / math.sqrt(50)


CASES = {
    "plain": {"components": 2, "gain": 0.1},
    "classes in bf16": {"components": 3, "gain": 0.1, "contexts": 48, "dtype": "bfloat16"},
    "tied": {"components": 3, "gain": 0.04, "tied": True},
    "LayerNorm": {"components": 2, "gain": 0.1, "family": "gpt_neox", "dtype": "float16"},
    "layers": {"components": 2, "gain": 0.1, "layers": 2},
    "quantised": {"components": 2, "gain": 0.1, "bits": 4, "dtype": "float16"},
    "bent": {"components": 3, "gain": 0.06, "bent": True},
    "healthy": {},
    "healthy, heavy tails": {"tails": True, "dtype": "bfloat16"},
    "healthy, shifted": {"shift": 0.3},
}


USUAL = ("healthy, shifted",)
"""The others take as long, and what they have of their own is a family, a dtype or layers."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in CASES]
)
def test_truth_and_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planting = module("planted")
    monkeypatch.setattr(planting, "SAMPLED", 8192)
    monkeypatch.setattr(planting, "SEARCHED", 4096)
    case = planting.Case(vocab=64, width=8, tokens=20_000, **CASES[name])
    planted = planting.plant(tmp_path, case)
    if case.components > 1:
        assert planted.gain == pytest.approx(case.gain, rel=0.1)
        assert planted.gradient < 1e-6
        assert planted.gain >= planted.gain_over_equal - 1e-4
        assert planted.gain >= planted.gain_over_rows > 0
        assert (0 < planted.gain_of_mixture < 0.98 * planted.gain) == case.bent
        # Rounding is all that stands between the stored matrix and the best one.
        assert abs(planted.refit_gain) < (0.03 if case.bits else 1e-3)
    else:
        assert planted.gain == planted.gain_over_equal == planted.gain_over_rows == 0
        assert (planted.refit_gain > 0.01) == (case.shift > 0)
        assert planted.refit_gain > -1e-12
    ids = words(planted)
    assert len(ids) == case.tokens
    assert int(ids.max()) < case.vocab
    agree(losses(planted, ids), planted.loss)
    assert loading.load(planted.model).storage == case.dtype
    facts = json.loads((tmp_path / "truth.json").read_text(encoding="utf8"))
    assert facts["gain"] == planted.gain
    assert str(tmp_path) not in json.dumps(facts)


@pytest.mark.slow(reason="draws a text for three seconds, of a benchmark that runs by itself")
def test_the_text_is_drawn_from_the_mixture(tmp_path: Path) -> None:
    """Its loss under the truth, made again from the seed and the spread, is the entropy."""
    planting = module("planted")
    case = planting.Case(vocab=64, width=8, components=3, gain=0.2, tokens=40_000)
    planted = planting.plant(tmp_path, case, seed=3)
    generator = torch.Generator().manual_seed(3)
    planting._body(case, generator)
    truth = planting._truth(case, generator).spread(planted.spread)
    ids = words(planted)
    hidden = states(loading.load(planted.model).model, torch.arange(case.vocab)[:, None])[:, 0].double()
    agree(-truth.log_probs(hidden)[ids[:-1], ids[1:]], planted.entropy)


def test_a_seed_makes_the_same_files(tmp_path: Path) -> None:
    planting = module("planted")
    case = planting.Case(vocab=64, width=8, tokens=1000)
    made = [
        planting.plant(tmp_path / place, case, seed=seed) for place, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    texts = [one.text.read_text(encoding="utf8") for one in made]
    assert texts[0] == texts[1] != texts[2]


def test_readings_and_judgement() -> None:
    calibration, planting = module("calibration"), module("planted")
    planted = planting.Planted(
        model=Path(), text=Path(), gain=0.2, gain_over_equal=0.15, gain_over_rows=0.1, gain_of_mixture=0.2,
        refit_gain=0.0, entropy=4.0, loss=4.2, spread=1.0, gradient=0.0,
    )  # fmt: skip
    healthy = dataclasses.replace(planted, gain=0.0, gain_over_equal=0.0)
    today = {
        "better_head": {"best_gain": {"value": 0.12, "low": 0.1, "high": 0.14}},
        "loss": {"nats_per_token": {"value": 4.2}, "standard_error": 0.01},
    }
    found = calibration.reading(today)
    assert (found.gain, found.low, found.high, found.verdict) == (0.12, 0.1, 0.14, "held back")
    assert (found.smallest, found.loss, found.standard_error) == (None, 4.2, 0.01)
    assert calibration.judged(planted, found) == calibration.Judged(covers=False, near=True, right=True)
    assert calibration.judged(healthy, found) == calibration.Judged(covers=False, near=None, right=False)
    verdict = {"outcome": "undecided", "gain": {"value": 0.0, "low": -0.1, "high": 0.1}, "smallest": 0.3}
    found = calibration.reading(today | {"verdict": verdict})
    assert (found.gain, found.verdict, found.smallest) == (0.0, "undecided", 0.3)
    assert calibration.judged(healthy, found) == calibration.Judged(covers=True, near=None, right=None)
    assert calibration.reading({"better_head": None}).gain is None
    assert calibration.reading({"better_head": {"best_gain": {"value": "nan"}}}).gain is None


def test_rows_of_the_same_commit_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibration = module("calibration")
    made = calibration.provenance(seed=None, device="cpu")
    monkeypatch.setattr(
        calibration, "provenance", lambda **options: dataclasses.replace(made, commit="a" * 40)
    )
    runs: list[tuple[str, int]] = []

    def run_case(name: str, seed: int, config: Any) -> dict[str, Any]:
        runs.append((name, seed))
        row = {"case": name, "seed": seed, "device": config.device, "truth": {"gain": 0.0}}
        return row | {"failed": "not run", "seconds": 0.0}

    monkeypatch.setattr(calibration, "run_case", run_case)
    for seeds in (1, 2, 2):
        calibration.main(calibration.Config(cases=("small",), seeds=seeds, out=tmp_path / "found.json"))
    assert runs == [("small", 0), ("small", 1)]
    monkeypatch.setattr(
        calibration, "provenance", lambda **options: dataclasses.replace(made, commit="b" * 40)
    )
    calibration.main(calibration.Config(cases=("small",), out=tmp_path / "found.json"))
    assert runs[2:] == [("small", 0)]
    # The row that was not run anew stays, and says of which commit it is.
    rows = json.loads((tmp_path / "found.json").read_text())["data"]["rows"]
    assert [(row["seed"], row["commit"][0]) for row in rows] == [(0, "b"), (1, "a")]
