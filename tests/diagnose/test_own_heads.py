"""Diagnoses of models with our heads: the loss is the model's own, ranks are those that the heads allow."""

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

pytestmark = pytest.mark.usefixtures("few_orderings")

WORDS = 60
D = 6
LSTM = [
    "body.hidden=12", "body.last=8", f"head.width={D}", "head.components=3", "head.private=2", "batch=8",
    "length=10", "evaluate_batch=4", "steps=4", "evaluate_every=2", "optimiser.lr=0.02",
]  # fmt: skip
TRANSFORMER = [
    "body.hidden=8", "body.heads=2", "body.inner=12", "data.level=words", "data.vocabulary_from=all",
    "batch=4", "length=16", "head.components=3", "steps=4", "evaluate_every=2",
]  # fmt: skip
SMALL = dataclasses.replace(QUICK, tokens=4096, window=32, search_seconds=4.0, fit_work=1e8)
SINGLE = ("softmax", "low_rank", "moc", "sigsoftmax", "plif")
LINEAR_LAYER = {"rank_needed", "better_head", "unreachable", "gradient"}
ANY_HEAD = sorted(set(QUESTIONS) - LINEAR_LAYER)
ONLY_ANY_HEAD = ("lstm-low_rank", "lstm-moc", "transformer-softmax")


def config(name: str) -> Config:
    body, _, head = name.partition("-")
    if body == "lstm":
        return override(recipe("awd-lstm", head), LSTM)
    return override(recipe("transformer-tiny", head), TRANSFORMER)


class Shop:
    """A small corpus, and runs on it that are trained and diagnosed at the first request."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, Diagnosis] = {}
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

    def record(self, name: str) -> Diagnosis:
        """All questions about a mixture, lstm-softmax and lstm-sigsoftmax; of others those about any head."""
        if name not in self.records:
            only = ANY_HEAD if name in ONLY_ANY_HEAD else ()
            self.records[name] = diagnose_run(self.run(name), settings=SMALL, only=only)
        return self.records[name]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Shop(tmp_path_factory.mktemp("diagnosed"))
    torch.set_num_threads(threads)


def diagnose_run(path: Path, *, text: Any = (), settings: Settings = SMALL, **asked: Any) -> Diagnosis:
    """As the command does it."""
    loaded = load_run(path)
    text = text or held_out_windows(path, loaded, tokens=settings.tokens, window=settings.window)
    return diagnose.run(loaded, text=text, settings=settings, **asked)


def reasons(record: Diagnosis) -> dict[str, str]:
    return {missing.question: missing.reason for missing in record.missing}


# Known truths


@pytest.mark.parametrize("name", ["lstm-softmax", "lstm-mos", "lstm-pointer", "transformer-softmax"])
def test_loss_and_spectrum_are_those_of_the_model(shop: Shop, name: str) -> None:
    record = shop.record(name)
    loaded = load_run(shop.run(name))
    windows = held_out_windows(shop.run(name), loaded, tokens=SMALL.tokens, window=SMALL.window)
    with torch.no_grad():
        log_probs = loaded.model(windows.ids[:, :-1]).logits
    expected = -log_probs.gather(-1, windows.ids[:, 1:, None]).mean()
    assert record.loss.nats_per_token.value == pytest.approx(float(expected), abs=2e-6)
    assert record.loss.tokens == record.text.tokens == windows.sizes.numel()
    assert record.text.window == (32 if name.startswith("lstm") else 16)
    assert record.loss.by_position
    # Of the rows that the tokenizer can name.
    weight = loaded.model.lm_head.decoder.weight.detach()[: record.model.tokens]
    singular = torch.linalg.svdvals(weight.double())
    assert record.spectrum.singular_values == pytest.approx(singular.tolist(), rel=1e-9)


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


def test_an_upgraded_model_is_its_original(shop: Shop, tiny_checkpoint: Any) -> None:
    """Before training: the same losses, and the rank of one softmax."""
    asked: dict[str, Any] = {"text": [shop.path / "text" / "test.txt"], "settings": SMALL, "only": ANY_HEAD}
    original = diagnose.run(tiny_checkpoint("llama"), **asked)
    for head in ("softmax", "mos"):
        plain: Any = loading.load(tiny_checkpoint("llama"))
        found = diagnose.run(from_objects(upgrade(plain, head), plain.tokenizer), **asked)
        assert set(reasons(found)) == set(reasons(original)) == LINEAR_LAYER
        assert found.loss.nats_per_token.value == pytest.approx(original.loss.nats_per_token.value, abs=1e-5)
        assert found.logprob_rank.least_rank == original.logprob_rank.least_rank
        assert found.model.final_norm == original.model.final_norm == "LlamaRMSNorm"
        assert found.model.architecture == f"LlamaModel with {head}"


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
    found = shop.record(name).logprob_rank
    assert (found.least_rank, found.ceiling, found.method) == (rank, ceiling, "core")


@pytest.mark.parametrize(
    "name", ["lstm-mos", "lstm-doc", "lstm-sigsoftmax", "lstm-facets", "transformer-mos"]
)
def test_other_heads_go_beyond_their_width(shop: Shop, name: str) -> None:
    found = shop.record(name).logprob_rank
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
    assert found.least_rank == D + 1


# Which questions are answered


def test_a_softmax_run_answers_everything(shop: Shop) -> None:
    record = shop.record("lstm-softmax")
    assert record.missing == ()
    assert record.better_head.original.value == pytest.approx(math.log(WORDS), abs=1.5)


def test_a_bent_head_answers_all_but_the_gain_of_a_better_head(shop: Shop) -> None:
    record = shop.record("lstm-sigsoftmax")
    assert set(reasons(record)) == {"better_head"}
    assert "sigsoftmax bends the scores" in reasons(record)["better_head"]
    assert record.rank_needed is not None


@pytest.mark.parametrize("name", ["lstm-mos", "lstm-doc", "transformer-mos"])
def test_a_mixture_answers_the_questions_about_any_head(shop: Shop, name: str) -> None:
    record = shop.record(name)
    assert set(reasons(record)) == LINEAR_LAYER
    assert all("a mixture of 3 components" in reason for reason in reasons(record).values())
    assert all(getattr(record, question) is not None for question in ANY_HEAD)


def test_layers_of_any_width(shop: Shop) -> None:
    lstm, transformer = (shop.record(name) for name in ("lstm-softmax", "transformer-softmax"))
    # The head projects the last layer's state to its width.
    assert [layer.name for layer in lstm.anisotropy.layers] == ["embedding", "layer 1", "layer 2", "output"]
    assert [layer.name for layer in transformer.anisotropy.layers] == ["embedding", "layer 1", "layer 2"]
    assert transformer.model.final_norm == "LayerNorm"


def test_facts(shop: Shop) -> None:
    loaded = load_run(shop.run("lstm-mos"))
    model = shop.record("lstm-mos").model
    assert (model.name, model.source, model.storage, model.dtype) == ("lstm-mos", "run", "float32", "float32")
    assert (model.width, model.vocabulary, model.tied, model.bias) == (D, len(loaded.tokenizer), True, True)
    assert model.parameters == loaded.model.num_parameters()
    best = checkpoint.step_of(checkpoint.found(shop.run("lstm-mos") / CHECKPOINTS, "best")[-1])
    assert any(f"step {best}, the best by validation" in note for note in model.notes)
    assert any("a mixture of 3 components (mos)" in note for note in model.notes)
    assert not any("one dimension more than the width" in note for note in model.notes)
    padded = shop.record("transformer-softmax").model
    assert (padded.vocabulary, padded.tokens) == (128, len(loaded.tokenizer))
    assert any("rows of the output matrix are padding" in note for note in padded.notes)


def test_earlier_answers_are_kept_for_the_same_run_and_text(shop: Shop, tmp_path: Path) -> None:
    def ask(name: str, question: str, settings: Settings = SMALL) -> Diagnosis:
        return diagnose_run(shop.run(name), settings=settings, only=[question], out=tmp_path)

    first = ask("lstm-mos", "loss")
    assert reasons(first)["spectrum"] == NOT_ASKED
    assert ask("lstm-mos", "spectrum").loss == first.loss
    with pytest.raises(FullrankError, match="of another text"):
        ask("lstm-mos", "anisotropy", dataclasses.replace(SMALL, tokens=320))
    with pytest.raises(FullrankError, match="of another model, lstm-mos"):
        ask("lstm-moc", "loss")


def test_files_are_read_in_the_runs_vocabulary(shop: Shop) -> None:
    """The test split as a file gives the loss of the test split."""
    path = shop.path / "text" / "test.txt"
    split = shop.record("lstm-mos")
    file = diagnose_run(shop.run("lstm-mos"), text=[path], only=["loss"])
    # Other windows of the same tokens.
    assert file.loss.nats_per_token.value == pytest.approx(split.loss.nats_per_token.value, abs=0.03)
    assert file.loss.bits_per_byte.value == pytest.approx(split.loss.bits_per_byte.value, rel=0.05)
    assert file.text.sources == (path.name,)
    assert file.text.starts_with_bos


@pytest.mark.parametrize(
    ("name", "changes", "asked", "message"),
    [
        ("lstm-softmax", {"tokens": 100}, {}, "test split has 100 tokens, expected 256 or more"),
        ("lstm-softmax", {"memory": 1000}, {}, "states of 589 tokens take .* take fewer --tokens"),
        ("lstm-softmax", {}, {"text": "w1 w2\n" * 20}, "has 60 tokens, expected 256 or more"),
        ("lstm-softmax", {}, {"only": ["attention"]}, "no attention"),
        ("lstm-mos", {}, {"only": ["attention"]}, "one linear output layer"),
        ("without a checkpoint", {}, {}, "no checkpoint yet: let it train"),
    ],
)
def test_refusals(
    name: str, changes: dict[str, Any], asked: dict[str, Any], message: str, shop: Shop, tmp_path: Path
) -> None:
    path, settings = tmp_path / name, dataclasses.replace(SMALL, **changes)
    shutil.copytree(shop.run("lstm-softmax"), path, ignore=shutil.ignore_patterns(CHECKPOINTS))
    if "text" in asked:
        (tmp_path / "short.txt").write_text(asked["text"])
        asked = {"text": [tmp_path / "short.txt"]}
    if name.startswith("lstm"):
        path = shop.run(name)
    with pytest.raises(FullrankError, match=message):
        diagnose_run(path, settings=settings, **asked)


def test_weights_that_are_not_finite_are_refused(shop: Shop) -> None:
    loaded: Any = load_run(shop.run("lstm-softmax"))
    with torch.no_grad():
        loaded.model.model.layers[0].weight_input[0, 0] = math.nan
    with pytest.raises(FullrankError, match="hold NaN or infinity"):
        diagnose.run(loaded, settings=SMALL)
