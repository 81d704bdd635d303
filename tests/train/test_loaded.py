"""A run goes the way of any model: loaded, upgraded, sampled from, diagnosed, collapsed."""

from __future__ import annotations

import functools
import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from fullrank import results
from fullrank.cli import main
from fullrank.errors import FullrankError
from fullrank.models.loading import from_objects, load
from fullrank.models.tokenizer import as_tokenizer
from fullrank.text.vocabulary import Words
from fullrank.train import checkpoint
from fullrank.train.config import override
from fullrank.train.loaded import load_any, load_run
from fullrank.train.loop import Options, train
from fullrank.train.recipes import recipe
from fullrank.upgrade import run as upgrades
from fullrank.upgrade import upgrade
from fullrank.upgrade.plain import plain_model

SETTINGS = [
    "data.bpe_size=300", "body.hidden=16", "body.heads=2", "body.rate_width=16", "length=32", "batch=4",
    "steps=6", "evaluate_every=2", "evaluate_tokens=256", "final_tokens=256", "head.components=2", "keep=9",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loaded")
    draw = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "ate", "best", "of", "all", "fish", "in", "town"]
    for split, lines in (("train", 300), ("valid", 60), ("test", 60)):
        text = "\n".join(" ".join(draw.choices(words, k=9)) for _ in range(lines))
        (path / f"{split}.txt").write_text(text + "\n")
    for head, body in (("softmax", "transformer-tiny"), ("mos", "llama-tiny")):
        options = Options(
            data=(path,), out=path / head, cache=path / "cache", device="cpu", trackers=(), monitors=False
        )
        train(override(recipe(body, head), SETTINGS), options)
    return path


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(60).view(2, 30)).logits.log_softmax(-1)


def test_checkpoints_by_name(place: Path) -> None:
    run = place / "softmax"
    steps = [checkpoint.step_of(one) for one in checkpoint.found(run / "checkpoints", "step")]
    assert steps == [2, 4, 6]
    early, last = load_run(run, checkpoint="2"), load_any(run, checkpoint="last")
    assert any("step 2, as asked" in note for note in early.notes)
    assert not torch.equal(logits(early.model), logits(last.model))
    assert torch.equal(logits(load_any(run).model), logits(load(run).model))
    with pytest.raises(FullrankError, match="keeps no checkpoint '3'"):
        load_any(run, checkpoint="3")
    with pytest.raises(FullrankError, match="is no training run and has no checkpoint '3'"):
        load_any(run / "checkpoints" / "step-00000002", checkpoint="3")


def test_a_softmax_run_is_upgraded_and_goes_on_as_any_model(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = place / "softmax", tmp_path / "upgraded"
    assert main.run(["upgrade", str(run), "--head", "mos", "--components", "3", "--out", str(out)]) == 0
    model = load(out).model
    torch.testing.assert_close(logits(model), logits(load(run).model), rtol=0, atol=1e-5)
    assert model.lm_head.components == 3
    capsys.readouterr()
    texts = []
    for one in (run, out):
        flags = ["--prompt", "the cat", "--tokens", "12", "--temperature", "0", "--device", "cpu"]
        assert main.run(["generate", str(one), *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("the cat")
    flags = ["--only", "loss", "logprob_rank", "--text", str(place / "test.txt"), "--device", "cpu"]
    assert main.run(["diagnose", str(out), *flags, "--tokens", "512", "--out", str(tmp_path / "d")]) == 0


def test_a_run_with_a_mixture_has_a_plain_model_to_collapse_into(place: Path) -> None:
    model: Any = load(place / "mos").model
    plain, _, scale = plain_model(model)
    assert type(plain).__name__ == "LlamaForCausalLM"
    assert scale == 1.0
    with pytest.raises(FullrankError, match="has a mos head already"):
        upgrade(model, "trunk")


def test_an_lstm_has_none(place: Path) -> None:
    from tests import small_models

    with pytest.raises(FullrankError, match="transformers has no plain model with this body, a AwdLstmModel"):
        plain_model(small_models.lstm("mos", vocab=20))
    with pytest.raises(FullrankError, match="a projection before its matrix already"):
        upgrade(small_models.lstm(vocab=20, embedding=4, options={"width": 4}), "mos")


def test_an_lstm_without_a_projection_is_upgraded() -> None:
    from tests import small_models

    torch.manual_seed(0)
    model = small_models.lstm(vocab=70).eval()
    torch.testing.assert_close(logits(upgrade(model, "mos", components=2)), logits(model), rtol=0, atol=1e-5)


def test_a_vocabulary_without_the_default_texts_words_is_upgraded_all_the_same() -> None:
    from tests import small_models

    words = Words(["<eos>", *(f"w{number}" for number in range(30))])
    model = from_objects(small_models.transformer(vocab=words.size, context=20), as_tokenizer(words))
    found = upgrades.run(model, "mos", options={"components": 2})
    assert found.record.preserved.tokens > 400
    assert found.record.preserved.largest < 1e-5


TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
  cache_dir: {cache}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
"""


# datasets leaves its files to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_tasks_of_the_harness(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right where the model's own log-probabilities say so, by hand."""
    for library in ("datasets", "lm_eval"):
        pytest.importorskip(library)
    draw = random.Random(1)
    words = ["cat", "mat", "fish", "town", "zebra", "quark"]
    rows = [
        {"question": f"the {draw.choice(words)} sat on", "choices": draw.sample(words, 3), "answer": 0}
        for _ in range(9)
    ]
    (tmp_path / "rows.json").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "own.yaml").write_text(
        TASK.format(name="own_choice", data=tmp_path / "rows.json", cache=tmp_path / "cache")
    )
    out = tmp_path / "out"
    flags = ["--tasks", "own_choice", "--task-path", str(tmp_path), "--device", "cpu", "--out", str(out)]
    assert main.run(["eval", str(place / "softmax"), *flags]) == 0
    record, _ = results.load(out / "results.json")
    loaded = load_run(place / "softmax")

    def score(question: str, choice: str) -> float:
        ids = loaded.tokenizer(f"{question} {choice}")["input_ids"]
        first = len(loaded.tokenizer(question)["input_ids"])
        with torch.no_grad():
            log_probs = loaded.model(torch.tensor([ids])).logits[0]
        return sum(float(log_probs[at - 1, ids[at]]) for at in range(first, len(ids)))

    right = [
        max(row["choices"], key=lambda one: score(row["question"], one)) == row["choices"][0] for row in rows
    ]
    (found,) = [one for one in record.tasks if one.metric == "acc"]
    assert found.value == pytest.approx(sum(right) / len(rows))
    assert 0 < found.value < 1
    assert "own_choice" in capsys.readouterr().out
    tasks = importlib.import_module("lm_eval.tasks")
    few = functools.partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", few)
    assert main.run(["eval", str(place / "softmax"), "--tasks", "no_such_task", "--device", "cpu"]) == 2
    assert "no_such_task cannot be run" in capsys.readouterr().err


def test_a_directory_that_is_no_run_needs_a_text(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = place / "mos" / "checkpoints" / "step-00000006"
    assert main.run(["eval", str(directory), "--device", "cpu"]) == 2
    assert "give --text FILE or --tasks NAME" in capsys.readouterr().err
    out = tmp_path / "out"
    for one, flags in ((directory, []), (place / "mos", ["--checkpoint", "6"])):
        text = ["--text", str(place / "test.txt"), "--length", "20", "--limit", "400", "--out", str(out)]
        assert main.run(["eval", str(one), *text, *flags, "--device", "cpu"]) == 0
        record, _ = results.load(out / "results.json")
        assert (record.head, record.scores[0].counted) == ("mos", 399)
