"""Models with our heads, diagnosed: the loss is the model's own, ranks are what the heads allow."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullrank import diagnose
from fullrank.diagnose.results_file import NOT_ASKED
from fullrank.diagnose.settings import QUICK, Settings
from fullrank.errors import FullrankError
from fullrank.fit.head_states import collect_states
from fullrank.models import loading
from fullrank.models.head_anatomy import output_of
from fullrank.models.loading import from_objects
from fullrank.results.diagnosis import QUESTIONS, Diagnosis
from fullrank.train import checkpoint
from fullrank.train.config import Config, override
from fullrank.train.folder import CHECKPOINTS
from fullrank.train.loaded import held_out_windows, load_run
from fullrank.train.loop import Options, train
from fullrank.train.recipes import recipe
from fullrank.upgrade import upgrade

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
SMALL = dataclasses.replace(QUICK, tokens=4096, window=32, search_seconds=4.0, fit_work=1e8)
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


def diagnose_run(path: Path, *, text: Any = (), settings: Settings, **asked: Any) -> Diagnosis:
    """As the command does it."""
    loaded = load_run(path)
    text = text or held_out_windows(path, loaded, tokens=settings.tokens, window=settings.window)
    return diagnose.run(loaded, text=text, settings=settings, **asked)


def reasons(record: Diagnosis) -> dict[str, str]:
    return {one.question: one.reason for one in record.missing}


# Known truths


@pytest.mark.parametrize("name", ["lstm-softmax", "lstm-mos", "lstm-pointer", "transformer-softmax"])
def test_the_loss_is_that_of_the_models_own_logits(shop: Shop, name: str) -> None:
    record = diagnose_run(shop.run(name), settings=SMALL, only=["loss"])
    loaded = load_run(shop.run(name))
    windows = held_out_windows(shop.run(name), loaded, tokens=SMALL.tokens, window=SMALL.window)
    with torch.no_grad():
        log_probs = loaded.model(windows.ids[:, :-1]).logits
    expected = -log_probs.gather(-1, windows.ids[:, 1:, None]).mean()
    assert record.loss is not None
    assert record.loss.nats_per_token.value == pytest.approx(float(expected), abs=2e-6)
    assert record.loss.tokens == record.text.tokens == windows.sizes.numel()
    assert record.text.window == (32 if name.startswith("lstm") else 16)
    assert record.loss.by_position


def test_all_tokens_are_used_up_to_a_part_of_a_window(shop: Shop) -> None:
    path = shop.run("lstm-softmax")
    loaded = load_run(path)
    windows = held_out_windows(path, loaded, tokens=10**6, window=32)
    tokens = np.fromfile(next((path / "tokens").rglob("test.tokens")), dtype="<u2")
    assert len(tokens) - 31 < windows.ids[:, 1:].numel() <= len(tokens)
    places = [
        int(np.flatnonzero([np.array_equal(tokens[at : at + 31], row) for at in range(len(tokens) - 30)])[0])
        for row in windows.ids[:, 1:].numpy()
    ]
    # From its first token to its last, none twice, and not in order: any part is of all of it.
    ordered = sorted(places)
    assert (ordered[0], ordered[-1]) == (0, len(tokens) - 31)
    assert min(np.diff(ordered)) >= 31
    assert max(places[:4]) - min(places[:4]) > len(tokens) / 2
    assert set(windows.ids[:, 0].tolist()) == {loaded.tokenizer.eos_token_id}
    few = held_out_windows(path, loaded, tokens=256, window=32)
    assert few.ids[:, 1:].numel() == 256 // 31 * 31


@pytest.mark.parametrize("head", SINGLE)
def test_the_layer_that_is_asked_is_the_model(shop: Shop, head: str) -> None:
    """f(W x + b) of the rows gives the model's own losses."""
    path = shop.run(f"lstm-{head}")
    loaded = load_run(path)
    windows = held_out_windows(path, loaded, tokens=512, window=33)
    states = collect_states(loaded.model, windows, memory=1 << 30)
    assert states.single
    assert states.hidden.shape == (512, D)
    losses = output_of(loaded.model.lm_head, WORDS + 1).losses(states.hidden, states.targets)
    torch.testing.assert_close(losses, states.losses, atol=2e-5, rtol=0)


@pytest.mark.parametrize("head", ["softmax", "mos"])
def test_an_upgraded_model(head: str, tiny_checkpoint: Any) -> None:
    """Before training it is its original: the same losses, and the rank of one softmax."""
    original = diagnose.run(tiny_checkpoint("llama"), settings=SMALL, only=["loss", "logprob_rank"])
    plain: Any = loading.load(tiny_checkpoint("llama"))
    model = upgrade(plain, head)
    loaded = from_objects(model, plain.tokenizer)
    found = diagnose.run(loaded, settings=SMALL, only=["loss", "spectrum", "anisotropy", "logprob_rank"])
    assert original.loss is not None
    assert found.loss is not None
    assert found.missing == original.missing == () or all(
        one.reason == NOT_ASKED for one in (*found.missing, *original.missing)
    )
    assert found.loss.nats_per_token.value == pytest.approx(original.loss.nats_per_token.value, abs=1e-5)
    assert original.logprob_rank is not None
    assert found.logprob_rank is not None
    assert found.logprob_rank.least_rank == original.logprob_rank.least_rank
    assert found.model.final_norm == original.model.final_norm == "LlamaRMSNorm"
    assert found.model.architecture == f"LlamaModel with {head}"


@pytest.mark.parametrize("name", ["lstm-softmax", "lstm-mos"])
def test_the_spectrum_is_that_of_the_matrix(shop: Shop, name: str) -> None:
    record = diagnose_run(shop.run(name), settings=SMALL, only=["spectrum"])
    weight = load_run(shop.run(name)).model.lm_head.decoder.weight.detach().double()
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


def test_a_mixture_whose_components_agree_has_the_rank_of_one(shop: Shop) -> None:
    """The rank is the mixture's own, not one that its name promises."""
    path = shop.run("lstm-mos")
    loaded: Any = load_run(path)
    with torch.no_grad():
        for parameter in loaded.model.lm_head.contexts.differences.parameters():
            parameter.zero_()
    windows = held_out_windows(path, loaded, tokens=SMALL.tokens, window=SMALL.window)
    found = diagnose.run(loaded, text=windows, settings=SMALL, only=["logprob_rank"]).logprob_rank
    assert found is not None
    assert found.least_rank == D + 1


# What is asked


def test_a_softmax_run_answers_everything(shop: Shop) -> None:
    record = diagnose_run(shop.run("lstm-softmax"), settings=SMALL)
    assert record.missing == ()
    assert record.better_head is not None
    assert record.better_head.original.value == pytest.approx(math.log(WORDS), abs=1.5)


@pytest.mark.parametrize("head", ["sigsoftmax", "plif"])
def test_a_bent_head_answers_all_but_what_a_better_head_buys(shop: Shop, head: str) -> None:
    record = diagnose_run(shop.run(f"lstm-{head}"), settings=SMALL)
    assert set(reasons(record)) == {"better_head"}
    assert f"{head} bends the scores" in reasons(record)["better_head"]
    assert record.rank_needed is not None


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
    loaded = load_run(shop.run("lstm-mos"))
    model = record.model
    assert (model.name, model.source, model.storage, model.dtype) == ("lstm-mos", "run", "float32", "float32")
    assert (model.width, model.vocabulary, model.tied, model.bias) == (D, len(loaded.tokenizer), True, True)
    assert model.parameters == loaded.model.num_parameters()
    best = checkpoint.step_of(checkpoint.found(shop.run("lstm-mos") / CHECKPOINTS, "best")[-1])
    assert any(f"step {best}, the best by validation" in note for note in model.notes)
    assert any("a mixture of 3 components (mos)" in note for note in model.notes)
    assert not any("one dimension more than the width" in note for note in model.notes)
    assert reasons(record)["spectrum"] == NOT_ASKED
    padded = diagnose_run(shop.run("transformer-softmax"), settings=SMALL, only=["loss"]).model
    assert (padded.vocabulary, padded.tokens) == (128, len(loaded.tokenizer))
    assert any("rows of the output matrix are padding" in note for note in padded.notes)


def test_earlier_answers_are_kept_for_the_same_run_and_text(shop: Shop, tmp_path: Path) -> None:
    def asked(name: str, question: str, settings: Settings = SMALL) -> Diagnosis:
        return diagnose_run(shop.run(name), settings=settings, only=[question], out=tmp_path)

    first = asked("lstm-mos", "loss")
    assert asked("lstm-mos", "spectrum").loss == first.loss
    with pytest.raises(FullrankError, match="of another text"):
        asked("lstm-mos", "anisotropy", dataclasses.replace(SMALL, tokens=320))
    with pytest.raises(FullrankError, match="of another model, lstm-mos"):
        asked("lstm-moc", "loss")


# Text


def test_files_are_read_in_the_runs_vocabulary(shop: Shop, tmp_path: Path) -> None:
    """The test split as a file gives the loss of the test split."""
    path = shop.path / "text" / "test.txt"
    split = diagnose_run(shop.run("lstm-mos"), settings=SMALL, only=["loss"])
    file = diagnose_run(shop.run("lstm-mos"), text=[path], settings=SMALL, only=["loss"])
    assert file.loss is not None
    assert split.loss is not None
    # Other windows of the same tokens.
    assert file.loss.nats_per_token.value == pytest.approx(split.loss.nats_per_token.value, abs=0.03)
    assert file.loss.bits_per_byte.value == pytest.approx(split.loss.bits_per_byte.value, rel=0.05)
    assert file.text.sources == (path.name,)
    assert file.text.starts_with_bos


# Mistakes


def test_a_run_without_a_checkpoint(shop: Shop, tmp_path: Path) -> None:
    path = tmp_path / "early"
    shutil.copytree(shop.run("lstm-softmax"), path, ignore=shutil.ignore_patterns(CHECKPOINTS))
    with pytest.raises(FullrankError, match=r"no checkpoint yet: let it train"):
        diagnose_run(path, settings=SMALL)


def test_a_run_with_too_little_text(shop: Shop, tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("w1 w2\n" * 20)
    with pytest.raises(FullrankError, match=r"has 60 tokens, expected 256 or more"):
        diagnose_run(shop.run("lstm-softmax"), text=[file], settings=SMALL)
    with pytest.raises(FullrankError, match=r"test split has 100 tokens, expected 256 or more"):
        diagnose_run(shop.run("lstm-softmax"), settings=dataclasses.replace(SMALL, tokens=100))


@pytest.mark.parametrize(
    ("name", "reason"), [("lstm-softmax", "no attention"), ("lstm-mos", "one linear output layer")]
)
def test_attention_is_asked_of_what_has_it(shop: Shop, name: str, reason: str) -> None:
    with pytest.raises(FullrankError, match=reason):
        diagnose_run(shop.run(name), settings=SMALL, only=["attention"])


def test_too_little_memory(shop: Shop) -> None:
    with pytest.raises(FullrankError, match=r"states of 589 tokens take .* take fewer --tokens"):
        diagnose_run(shop.run("lstm-softmax"), settings=dataclasses.replace(SMALL, memory=1000))


def test_weights_that_are_no_numbers(shop: Shop) -> None:
    loaded: Any = load_run(shop.run("lstm-softmax"))
    with torch.no_grad():
        loaded.model.model.layers[0].weight_input[0, 0] = math.nan
    with pytest.raises(FullrankError, match="hold NaN or infinity"):
        diagnose.run(loaded, settings=SMALL)
