"""Files that version 0.2.0 wrote still load, and say the same: models, a checkpoint, records, pages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fullrank import results
from fullrank.cli.main import run as command
from fullrank.train.config import override
from fullrank.train.folder import config_of
from fullrank.train.loop import Options, train

GOLDEN = Path(__file__).parent / "golden" / "0.2.0"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text(encoding="utf8"))
ROUNDING = 1e-4
"""Nats by which products in fp32 may differ between processors; the models' log-probabilities reach -12."""


@pytest.mark.parametrize("name", ["run", "upgraded"])
def test_a_model_gives_the_same_log_probabilities(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / name)
    ids = torch.tensor([EXPECTED["ids"]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
        loss = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(logits, torch.tensor(EXPECTED[name]["logits"]), rtol=0, atol=ROUNDING)
    assert loss.item() == pytest.approx(EXPECTED[name]["loss"], abs=ROUNDING)


def test_a_tokenizer_gives_the_same_ids() -> None:
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "upgraded")
    assert tokenizer(EXPECTED["text"]).input_ids == EXPECTED["ids"]
    # The first id is the end of the text before.
    assert tokenizer.decode(EXPECTED["ids"][1:]) == EXPECTED["text"]


def test_a_checkpoint_trains_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN / "run", run)
    options = Options(
        data=(GOLDEN / "text",), out=run, cache=tmp_path / "cache", device="cpu", trackers=(), monitors=False
    )
    train(override(config_of(run), ["steps=22"]), options)
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf8").splitlines()]
    start = [line for line in lines if line["event"] == "start"][-1]
    assert (start["step"], start["resumed"]) == (20, True)
    end = lines[-1]
    assert (end["event"], end["step"]) == ("end", 22)
    # Weights, moments, batches and schedule go on from where they stood.
    assert end["valid"]["loss"] == pytest.approx(EXPECTED["resumed"]["valid"], abs=ROUNDING)


def test_the_record_of_a_run() -> None:
    record, made = results.load(GOLDEN / "run" / "results.json")
    expected = EXPECTED["run"]
    assert made.versions["fullrank"] == "0.2.0"
    assert (record.head, record.parameters, record.steps) == ("mos", expected["parameters"], 20)
    assert (record.valid.value, record.test.value) == (expected["valid"], expected["test"])
    assert [evaluation.loss for evaluation in record.evaluations] == expected["evaluations"]


def test_the_record_of_an_upgrade() -> None:
    record, _ = results.load(GOLDEN / "upgraded" / "results.json")
    expected = EXPECTED["upgraded"]
    assert record.preserved.largest < 1e-5
    assert {fit.head: fit.after.value for fit in record.training.fits} == expected["after"]
    assert record.training.gain.value == expected["gain"]


def test_the_record_of_a_diagnosis() -> None:
    record, _ = results.load(GOLDEN / "diagnosis" / "results.json")
    expected = EXPECTED["diagnosis"]
    assert record.verdict.outcome == expected["outcome"]
    assert record.verdict.gain.value == expected["gain"]
    # JSON has no word for infinity.
    assert record.verdict.gain.high == float("inf")
    assert record.loss.nats_per_token.value == expected["loss"]
    assert record.spectrum.effective_rank == expected["effective_rank"]
    assert record.logprob_rank.least_rank == 16
    assert not record.missing


def test_the_record_of_an_evaluation() -> None:
    record, _ = results.load(GOLDEN / "evaluation" / "results.json")
    assert {score.method: score.loss for score in record.scores} == EXPECTED["evaluation"]
    assert [bin.counted for bin in record.scores[0].frequency] == [0, 640, 960, 0, 0]


def test_the_record_of_a_corpus() -> None:
    record, _ = results.load(GOLDEN / "corpus" / "results.json")
    assert (record.tokens, record.vocabulary) == (4800, 33)
    assert {curve.construction: curve.dimensions for curve in record.curves} == EXPECTED["corpus"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("diagnosis", "another output layer would take at least 1.0% off the perplexity of plain"),
        ("corpus", "4,800"),
        ("upgraded", "mos showed no gain over softmax_equal"),
        ("run", "2.46"),
    ],
)
def test_a_page_is_drawn(name: str, sentence: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert command(["report", str(GOLDEN / name), "--out", str(page)]) == 0
    assert sentence in page.read_text(encoding="utf8")
