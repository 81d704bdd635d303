"""Training runs, diagnosed: the loss is that of `fullrank eval`, ranks are what the heads allow."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullrank import results
from fullrank.diagnose.diagnosis import NOT_ASKED, QUICK, Settings
from fullrank.errors import FullrankError
from fullrank.results.diagnosis import QUESTIONS, Diagnosis
from fullrank.text.vocabulary import Words
from fullrank.train import checkpoint, collected, diagnosed
from fullrank.train.config import Config, override
from fullrank.train.diagnosed import diagnose_run
from fullrank.train.evaluate import evaluate, token_losses
from fullrank.train.folder import CHECKPOINTS, open_run
from fullrank.train.loop import Options, train
from fullrank.train.recipes import recipe

WORDS = 60
D = 6
LSTM = [
    "body.hidden=12", "body.last=8", f"head.width={D}", "head.components=3", "head.private=2", "batch=8",
    "length=10", "evaluate_batch=4", "steps=12", "evaluate_every=6", "optimiser.lr=0.02",
]  # fmt: skip
TRANSFORMER = [
    "body.hidden=8", "body.heads=2", "body.inner=12", "data.level=words", "data.vocabulary_from=all",
    "batch=4", "length=16", "head.components=3", "steps=8", "evaluate_every=4",
]  # fmt: skip
SMALL = dataclasses.replace(QUICK, window=32, search_seconds=4.0)
SINGLE = ("softmax", "low_rank", "moc", "sigsoftmax", "plif")
LINEAR_LAYER = {"rank_needed", "better_head", "unreachable", "gradient"}


def config(name: str) -> Config:
    body, _, head = name.partition("-")
    if body == "lstm":
        return override(recipe("awd-lstm", head), LSTM)
    return override(recipe("transformer-tiny", head), TRANSFORMER)


class Shop:
    """A small corpus, and runs on it that are trained when they are first asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        draw = np.random.default_rng(3)
        (path / "text").mkdir()
        for split, lines in {"train": 200, "valid": 30, "test": 60}.items():
            words = np.minimum(draw.geometric(0.06, (lines, 9)), WORDS)
            text = "\n".join(" ".join(f"w{word}" for word in row) for row in words)
            (path / "text" / f"{split}.txt").write_text(text + "\n")

    def run(self, name: str) -> Path:
        out = self.path / name
        if not out.exists():
            options = Options(
                data=(self.path / "text",), out=out, cache=self.path / "cache", device="cpu", trackers=(),
                monitors=False,
            )  # fmt: skip
            train(config(name), options, None)
        return out


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Shop(tmp_path_factory.mktemp("diagnosed"))
    torch.set_num_threads(threads)


def reasons(record: Diagnosis) -> dict[str, str]:
    return {one.question: one.reason for one in record.missing}


# Known truths


@pytest.mark.parametrize("name", ["lstm-softmax", "lstm-mos", "lstm-pointer", "transformer-softmax"])
def test_the_loss_is_that_of_an_evaluation(shop: Shop, name: str) -> None:
    """Of the same tokens: a stream without cold starts, or windows of the context."""
    record = diagnose_run(shop.run(name), settings=SMALL, only=["loss"])
    run = open_run(shop.run(name))
    found = evaluate(
        run.model, run.corpus.splits["test"], eos=run.corpus.vocabulary.eos, batch=1,
        length=run.config.length, limit=record.text.tokens,
    )  # fmt: skip
    assert record.loss is not None
    assert record.loss.nats_per_token.value == pytest.approx(found.loss, abs=1e-6)
    assert record.loss.bits_per_byte.value == pytest.approx(found.bits_per_byte, abs=1e-6)
    assert record.loss.tokens == found.counted == record.text.tokens
    # A window of the context each, or parts of one stream.
    assert record.text.window == (32 if name.startswith("lstm") else 16)
    assert bool(record.loss.by_position) == name.startswith("transformer")


def test_all_tokens_are_used_up_to_a_part_of_a_window(shop: Shop) -> None:
    run = open_run(shop.run("lstm-softmax"))
    total = len(run.corpus.splits["test"].tokens)
    record = diagnose_run(shop.run("lstm-softmax"), settings=SMALL, only=["loss"])
    assert total - 32 < record.text.tokens <= total
    few = diagnose_run(
        shop.run("lstm-softmax"), settings=dataclasses.replace(SMALL, tokens=256), only=["loss"]
    )
    assert few.text.tokens == 256


@pytest.mark.parametrize("head", SINGLE)
def test_the_layer_that_is_asked_is_the_model(shop: Shop, head: str) -> None:
    """f(W x + b) of the rows gives the model's own losses."""
    run = open_run(shop.run(f"lstm-{head}"))
    text = collected.from_split(run, 512)
    states = collected.states_of(run, text, collected.windows_of(run, text, 32), memory=1 << 30)
    assert states.single
    assert states.hidden.shape == (512, D)
    losses = diagnosed._output(run.model.head).losses(states.hidden, states.targets)
    own = token_losses(
        run.model, text.tokens[:512], eos=run.corpus.vocabulary.eos, batch=1, length=run.config.length
    )
    torch.testing.assert_close(losses, torch.from_numpy(own), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["lstm-softmax", "lstm-mos"])
def test_the_spectrum_is_that_of_the_matrix(shop: Shop, name: str) -> None:
    record = diagnose_run(shop.run(name), settings=SMALL, only=["spectrum"])
    weight = open_run(shop.run(name)).model.head.decoder.weight.detach().double()
    expected = torch.linalg.svdvals(weight).tolist()
    assert record.spectrum is not None
    assert record.spectrum.singular_values == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "rank", "ceiling"),
    [
        ("lstm-softmax", D + 1, D + 1),
        # Half of the width, and the bias.
        ("lstm-low_rank", D // 2 + 1, D // 2 + 1),
        ("lstm-moc", D + 1, D + 1),
        ("transformer-softmax", 8, 8),
    ],
)
def test_a_single_softmax_has_the_rank_of_its_rows(shop: Shop, name: str, rank: int, ceiling: int) -> None:
    found = diagnose_run(shop.run(name), settings=SMALL, only=["logprob_rank"]).logprob_rank
    assert found is not None
    assert (found.least_rank, found.ceiling, found.method) == (rank, ceiling, "core")


@pytest.mark.parametrize(
    "name", ["lstm-mos", "lstm-doc", "lstm-sigsoftmax", "lstm-facets", "transformer-mos"]
)
def test_other_heads_go_beyond_their_width(shop: Shop, name: str) -> None:
    found = diagnose_run(shop.run(name), settings=SMALL, only=["logprob_rank"]).logprob_rank
    assert found is not None
    assert found.least_rank > (8 if name.startswith("transformer") else D) + 2
    assert found.method == "columns"
    assert "no ceiling" in found.ceiling_reason


def test_a_mixture_whose_components_agree_has_the_rank_of_one(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is the mixture's own, not one that its name promises."""
    run = open_run(shop.run("lstm-mos"))
    contexts: Any = run.model.head.contexts
    with torch.no_grad():
        for parameter in contexts.differences.parameters():
            parameter.zero_()
    monkeypatch.setattr(diagnosed, "open_run", lambda path, **options: run)
    found = diagnose_run(run.path, settings=SMALL, only=["logprob_rank"]).logprob_rank
    assert found is not None
    assert found.least_rank == D + 1


# What is asked


def test_a_softmax_run_answers_everything(shop: Shop) -> None:
    record = diagnose_run(shop.run("lstm-softmax"), settings=SMALL)
    assert record.missing == ()
    assert record.better_head is not None
    assert record.better_head.original.value == pytest.approx(math.log(WORDS), abs=1.5)


@pytest.mark.parametrize("head", ["sigsoftmax", "plif"])
def test_a_bent_head_answers_all_but_one(shop: Shop, head: str) -> None:
    record = diagnose_run(shop.run(f"lstm-{head}"), settings=SMALL)
    assert set(reasons(record)) == {"better_head"}
    assert f"{head} bends the scores" in reasons(record)["better_head"]


@pytest.mark.parametrize("name", ["lstm-mos", "lstm-doc", "transformer-mos"])
def test_a_mixture_answers_what_is_its_own(shop: Shop, name: str) -> None:
    record = diagnose_run(shop.run(name), settings=SMALL)
    assert set(reasons(record)) == LINEAR_LAYER
    assert all("a mixture of 3 components" in reason for reason in reasons(record).values())
    assert all(getattr(record, question) is not None for question in set(QUESTIONS) - LINEAR_LAYER)


def test_layers_of_any_width(shop: Shop) -> None:
    record = diagnose_run(shop.run("lstm-softmax"), settings=SMALL, only=["anisotropy"])
    assert record.anisotropy is not None
    # The head projects the last layer's state to its width.
    assert [layer.name for layer in record.anisotropy.layers] == ["embedding", "layer 1", "layer 2", "output"]
    record = diagnose_run(shop.run("transformer-softmax"), settings=SMALL, only=["anisotropy"])
    assert record.anisotropy is not None
    assert [layer.name for layer in record.anisotropy.layers] == ["embedding", "layer 1", "layer 2"]
    assert record.model.final_norm == "LayerNorm"


def test_facts(shop: Shop) -> None:
    record = diagnose_run(shop.run("lstm-mos"), settings=SMALL, only=["loss"])
    run = open_run(shop.run("lstm-mos"))
    model = record.model
    assert (model.name, model.source, model.storage, model.dtype) == ("lstm-mos", "run", "float32", "float32")
    assert (model.width, model.vocabulary, model.tied, model.bias) == (
        D,
        run.corpus.vocabulary.size,
        True,
        True,
    )
    assert model.parameters == sum(parameter.numel() for parameter in run.model.parameters())
    best = checkpoint.step_of(checkpoint.found(run.path / CHECKPOINTS, "best")[-1])
    assert any(f"step {best}, the best by validation" in note for note in model.notes)
    assert any("carries its state" in note for note in model.notes)
    assert any("a mixture of 3 components (mos)" in note for note in model.notes)
    assert not any("one dimension more than the width" in note for note in model.notes)
    assert reasons(record)["spectrum"] == NOT_ASKED


def test_earlier_answers_are_kept_for_the_same_run_and_text(shop: Shop, tmp_path: Path) -> None:
    def asked(name: str, question: str, settings: Settings = SMALL) -> Diagnosis:
        record = diagnose_run(shop.run(name), settings=settings, only=[question], out=tmp_path)
        results.save(record, tmp_path / "results.json", results.provenance(seed=0, device="cpu"))
        return record

    first = asked("lstm-mos", "loss")
    assert asked("lstm-mos", "spectrum").loss == first.loss
    assert asked("lstm-mos", "anisotropy", dataclasses.replace(SMALL, tokens=320)).loss is None
    assert asked("lstm-moc", "loss").anisotropy is None


# Text


def test_files_are_read_in_the_runs_vocabulary(shop: Shop, tmp_path: Path) -> None:
    """The test split as a file gives the loss of the test split."""
    path = shop.path / "text" / "test.txt"
    split = diagnose_run(shop.run("lstm-mos"), settings=SMALL, only=["loss"])
    file = diagnose_run(shop.run("lstm-mos"), text=[path], settings=SMALL, only=["loss"])
    assert file.loss is not None
    assert split.loss is not None
    assert file.loss.nats_per_token == split.loss.nats_per_token
    assert file.loss.bits_per_byte.value == pytest.approx(split.loss.bits_per_byte.value, rel=1e-12)
    assert file.text.sources == (path.name,)
    # A long file is read in part, and never in the middle of a word.
    long = tmp_path / "long.txt"
    long.write_text("w1 w2 w3 w4 w5 w6 w7 w8 w9\n" * 5000)
    settings = dataclasses.replace(SMALL, tokens=301)
    cut = diagnose_run(shop.run("lstm-mos"), text=[long], settings=settings, only=["loss"])
    assert cut.text.tokens == 288
    assert cut.text.bytes == pytest.approx(288 * 2.7, abs=4)


def test_words_outside_the_vocabulary(shop: Shop, tmp_path: Path) -> None:
    file = tmp_path / "other.txt"
    file.write_text("w1 w2 other w3\n" * 100)
    with pytest.raises(FullrankError, match=r"'other' in line 1.*use words that it has"):
        diagnose_run(shop.run("lstm-mos"), text=[file], settings=SMALL, only=["loss"])


def test_unknown_words_are_counted_and_said(shop: Shop, tmp_path: Path) -> None:
    file = tmp_path / "other.txt"
    file.write_text("w1 w2 other w3\n" * 100)
    run = open_run(shop.run("lstm-mos"))
    corpus = dataclasses.replace(run.corpus, vocabulary=Words(["<eos>", "<unk>", "w1", "w2", "w3"]))
    text = collected.from_files(dataclasses.replace(run, corpus=corpus), [file], 400)
    assert text.tokens.tolist()[:5] == [2, 3, 1, 4, 0]
    assert text.notes[0].startswith("100 of 500 tokens of the text stand for words outside")


# Mistakes


def test_a_run_without_a_checkpoint(shop: Shop, tmp_path: Path) -> None:
    path = tmp_path / "early"
    shutil.copytree(shop.run("lstm-softmax"), path, ignore=shutil.ignore_patterns(CHECKPOINTS))
    with pytest.raises(FullrankError, match=r"no checkpoint yet: let it train"):
        diagnose_run(path, settings=SMALL)


def test_a_run_with_too_little_text(shop: Shop, tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("w1 w2\n" * 20)
    with pytest.raises(FullrankError, match=r"has 60 tokens in the run's vocabulary, expected 256 or more"):
        diagnose_run(shop.run("lstm-softmax"), text=[file], settings=SMALL)


def test_attention_is_asked_of_transformers_models(shop: Shop) -> None:
    with pytest.raises(FullrankError, match=r"this is a training run: fullrank study attention"):
        diagnose_run(shop.run("lstm-softmax"), settings=SMALL, only=["attention"])


def test_too_little_memory(shop: Shop) -> None:
    with pytest.raises(FullrankError, match=r"states of 576 tokens take .* take fewer --tokens"):
        diagnose_run(shop.run("lstm-softmax"), settings=dataclasses.replace(SMALL, memory=1000))


def test_weights_that_are_no_numbers(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(shop.run("lstm-softmax"))
    with torch.no_grad():
        run.model.head.decoder.weight[0, 0] = math.nan
    monkeypatch.setattr(diagnosed, "open_run", lambda path, **options: run)
    with pytest.raises(FullrankError, match="NaN or infinite numbers: train again"):
        diagnose_run(shop.run("lstm-softmax"), settings=SMALL)
