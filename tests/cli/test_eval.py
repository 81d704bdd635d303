"""`fullrank eval`: tables, results.json, and one sentence for what cannot be evaluated."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import tyro

from fullrank import results
from fullrank.cli.eval import Eval, evaluate
from fullrank.errors import FullrankError
from fullrank.results import Evaluated
from fullrank.text.vocabulary import Words
from fullrank.train import folder
from fullrank.train.cache import Cache
from fullrank.train.config import Config
from fullrank.train.dynamic import Dynamic
from fullrank.train.evaluate import evaluate as plainly
from tests import small_models

V = 9


def split(length: int, seed: int) -> SimpleNamespace:
    tokens = np.random.default_rng(seed).integers(0, V, length).astype(np.uint16)
    return SimpleNamespace(tokens=tokens, bytes=4 * length)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run of untrained weights, as `open_run` gives it."""
    torch.manual_seed(0)
    model = small_models.lstm("mos", vocab=V, options={"components": 2}).eval()
    corpus = SimpleNamespace(
        vocabulary=Words(["<eos>", *"abcdefgh"]),
        splits={"train": split(600, 1), "valid": split(150, 2), "test": split(200, 3)},
    )
    made = SimpleNamespace(
        path=tmp_path, model=model, corpus=corpus, config=Config(recipe="awd-lstm", seed=5), step=7
    )
    monkeypatch.setattr(folder, "open_run", lambda path, *, checkpoint, device: made)
    return made


def parsed(*arguments: str) -> Eval:
    return tyro.cli(Eval, args=list(arguments))


def test_plain(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(parsed(str(tmp_path), "--batch", "2", "--device", "cpu"))
    record, made = results.load(tmp_path / "eval" / "results.json")
    assert isinstance(record, Evaluated)
    expected = plainly(run.model, run.corpus.splits["test"], eos=0, batch=2, length=70)
    (score,) = record.scores
    assert score.method == "plain"
    assert score.loss == pytest.approx(expected.loss)
    assert score.bits_per_byte == pytest.approx(expected.bits_per_byte)
    assert (score.counted, record.tokens, record.step, record.split) == (200, 200, 7, "test")
    assert sum(entry.counted for entry in score.frequency) == 200
    total = sum(entry.counted * entry.loss for entry in score.frequency if entry.counted)
    assert total / 200 == pytest.approx(score.loss)
    assert made.seed == 5
    printed = capsys.readouterr().out
    for words in ("plain", f"{score.loss:.4f}", f"{score.perplexity:.2f}", "10 to 99", "results.json"):
        assert words in printed


def test_every_method(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [parameter.clone() for parameter in run.model.parameters()]
    arguments = ["--split", "valid", "--dynamic", "--cache", "--limit", "100", "--segment", "4"]
    arguments += ["--statistics", "3", "--lr", "0", "--window", "40", "--device", "cpu", "--batch", "1"]
    evaluate(parsed(str(tmp_path), *arguments, "--out", str(tmp_path / "there")))
    record, _ = results.load(tmp_path / "there" / "results.json")
    plain, cache, dynamic = record.scores
    assert [one.method for one in record.scores] == ["plain", "cache", "dynamic"]
    assert dynamic.loss == pytest.approx(plain.loss, rel=1e-6)
    assert dynamic.settings["length"] == 4
    assert dynamic.settings["batches"] == 3
    assert dynamic.settings["decay"] == Dynamic().decay
    assert cache.settings == {"weight": Cache.weight, "theta": Cache.theta, "window": 40}
    assert cache.loss != plain.loss
    assert {one.counted for one in record.scores} == {100}
    assert record.tokens == 150
    printed = capsys.readouterr().out
    assert "only the first 100 of 150 tokens" in printed
    assert "not tuned for this run" in printed
    for parameter, old in zip(run.model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def test_tuning_uses_the_validation_split(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.corpus.splits["valid"].tokens = np.tile(run.corpus.splits["valid"].tokens[:30], 5)
    evaluate(parsed(str(tmp_path), "--cache", "--tune", "--device", "cpu"))
    record, _ = results.load(tmp_path / "eval" / "results.json")
    score = record.scores[1]
    assert score.tuned
    assert "chosen on the validation split" in capsys.readouterr().out
    # The test split alone decides nothing: with another one the settings stay.
    run.corpus.splits["test"] = split(90, 8)
    evaluate(parsed(str(tmp_path), "--cache", "--tune", "--device", "cpu"))
    again, _ = results.load(tmp_path / "eval" / "results.json")
    assert again.scores[1].settings == score.settings
    assert math.isfinite(again.scores[1].loss)
    evaluate(parsed(str(tmp_path), "--cache", "--tune", "--split", "valid", "--device", "cpu"))
    assert "on this very text" in capsys.readouterr().out


def test_dynamic_settings_are_chosen_on_the_validation_split(run: Any, tmp_path: Path) -> None:
    run.corpus.splits["valid"].tokens = np.tile(run.corpus.splits["valid"].tokens[:30], 5)
    found = []
    for test in (run.corpus.splits["test"], split(90, 8)):
        run.corpus.splits["test"] = test
        flags = ["--dynamic", "--tune", "--statistics", "1", "--segment", "20", "--limit", "80"]
        evaluate(parsed(str(tmp_path), *flags, "--device", "cpu"))
        record, _ = results.load(tmp_path / "eval" / "results.json")
        assert record.scores[1].tuned
        found.append(record.scores[1].settings)
    assert found[0] == found[1]
    # What repeats itself wants larger steps.
    assert found[0]["lr"] > Dynamic().lr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--split", "exam"], ["'exam'", "valid", "test"]),
        (["--lr", "0.1"], ["--lr", "--dynamic"]),
        (["--tune"], ["--tune", "--cache"]),
        (["--cache", "--tune", "--theta", "1"], ["--tune", "--theta"]),
        (["--dynamic", "--tune", "--decay", "0"], ["--tune", "--decay"]),
        (["--cache", "--weight", "1"], ["weight=1"]),
        (["--dynamic", "--segment", "0"], ["length=0"]),
        (["--limit", "-1"], ["--limit"]),
        (["--stride", "3"], ["stride=3", "leave it out"]),
        (["--device", "abacus"], ["abacus"]),
    ],
    ids=lambda value: "-".join(value),
)
def test_refusals(run: Any, tmp_path: Path, flags: list[str], words: list[str]) -> None:
    with pytest.raises(FullrankError) as found:
        evaluate(parsed(str(tmp_path), *flags))
    for word in words:
        assert word in str(found.value)
    assert not (tmp_path / "eval").exists()


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(FullrankError, match="no run directory"):
        evaluate(parsed(str(tmp_path), "--device", "cpu"))
    assert list(tmp_path.iterdir()) == []
