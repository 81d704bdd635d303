"""`fullrank upgrade` and `fullrank collapse`: what is printed and written, and what a failure leaves."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tyro

from fullrank import report, results
from fullrank.cli.collapse import Collapse, collapse
from fullrank.cli.upgrade import Upgrade, upgrade
from fullrank.errors import FullrankError
from fullrank.fit import comparison
from fullrank.fit.collect import tokenise
from fullrank.models.loading import load, quiet
from fullrank.upgrade import collapse as collapse_model
from fullrank.upgrade import run
from fullrank.upgrade import training as fit

SENTENCE = "the shells that she sells are sea shells for sure when a model is small and language large"
SMALL = ["--tokens", "1024", "--window", "64", "--epochs", "2", "--seeds", "2"]
SHORT = [*SMALL[:4], "--epochs", "1", "--seeds", "1"]
"""Where it does not matter what is learnt."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    draw = random.Random(0)
    path.write_text(" ".join(draw.choice(SENTENCE.split()) for _ in range(800)), encoding="utf8")
    return path


def save(model: Any, directory: Path) -> Path:
    """The model with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    with quiet():
        model.save_pretrained(directory)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 256, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    return save(made, tmp_path_factory.mktemp("models") / "tiny")


Run = Callable[..., Path]


@pytest.fixture
def upgraded(model: Path, tmp_path: Path) -> Run:
    """upgraded(*flags): the output directory of an upgrade of the tiny model."""

    def do(*flags: str, model: Path | str = model, out: Path = tmp_path / "out") -> Path:
        arguments = [str(model), "--out", str(out), "--cache", str(tmp_path / "states"), *flags]
        upgrade(tyro.cli(Upgrade, args=arguments))
        return out

    return do


def logits(directory: Path, ids: torch.Tensor | None = None) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    import fullrank.models.causal_lm  # noqa: F401

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(directory).eval()
    if ids is None:
        ids = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=ids).logits, dim=-1)


def left(directory: Path) -> list[str]:
    """What a failure has left, but for the states that the next run uses."""
    return sorted(path.name for path in directory.iterdir() if path.name != "states")


def test_without_text_only_the_head_changes(
    upgraded: Run, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = upgraded("--head", "trunk", "--components", "3", "--set", "private=5")
    printed = capsys.readouterr().out
    record, _ = results.load(out / "results.json")
    assert isinstance(record, results.Upgrade)
    assert record.training is None
    assert abs(record.preserved.kl.value) < 1e-6
    assert record.preserved.largest < 1e-4
    assert record.options["private"] == "5"
    assert record.parameters == record.model.parameters + 3 * 16 * 5 + 3 * 5 + 3 * 16
    assert "before training: KL" in printed
    torch.testing.assert_close(logits(out), logits(model), atol=1e-4, rtol=0)
    expected = {"config.json", "model.safetensors", "tokenizer.json", "report.html", "README.md"}
    assert expected <= set(left(out))


def test_training_prints_controls_and_saves_what_was_judged(
    upgraded: Run, model: Path, text: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = logits(model)
    out = upgraded("--components", "2", "--train", str(text), *SMALL)
    printed = capsys.readouterr().out
    record, made = results.load(out / "results.json")
    found = record.training
    assert [one.head for one in found.fits] == ["softmax", "softmax_equal", "mos"]
    for one in found.fits:
        assert f"{one.after.value:.4f}" in printed
        assert one.after.value < one.before.value
    assert record.verdict in printed.replace("\n", " ")
    assert found.untied
    assert not torch.allclose(logits(out), before, atol=1e-3)
    # The body is as it was: only the head was trained, and the matrix left the embedding.
    from transformers import AutoModelForCausalLM

    with quiet():
        loaded = AutoModelForCausalLM.from_pretrained(out)
        original = AutoModelForCausalLM.from_pretrained(model)
    assert torch.equal(loaded.get_input_embeddings().weight, original.get_input_embeddings().weight)
    assert not torch.equal(loaded.get_input_embeddings().weight, loaded.lm_head.decoder.weight)
    # The saved weights are those whose loss the record gives: on the same held-out windows.
    again = load(out)
    seen = fit.read_text(
        again.model, again.tokenizer, [text], settings=fit.Settings(tokens=1024, window=64),
        cache=tmp_path / "states", fingerprint="judged again",
    )  # fmt: skip
    part = seen.parts.held_out
    with torch.no_grad():
        loss = again.model.lm_head(list(part.states), part.targets)
    assert loss.item() == pytest.approx(found.saved_loss, abs=1e-5)
    page = (out / "report.html").read_text(encoding="utf8")
    assert "Before and after training" in page
    assert len(report.render(record, made)) == pytest.approx(len(page), rel=0.01)


def test_a_tied_matrix_stays_tied_where_asked(upgraded: Run, text: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = upgraded("--train", str(text), "--keep-tied", *SHORT)
    with quiet():
        loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.get_input_embeddings().weight is loaded.lm_head.decoder.weight
    assert not results.load(out / "results.json")[0].training.untied


def test_the_whole_model_can_be_trained(upgraded: Run, text: Path, model: Path, tmp_path: Path) -> None:
    flags = ["--tokens", "512", "--window", "64", "--epochs", "1", "--seeds", "1"]
    out = upgraded("--train", str(text), "--unfreeze", *flags)
    record, _ = results.load(out / "results.json")
    assert record.training.unfrozen
    assert not record.training.untied
    from transformers import AutoModelForCausalLM

    with quiet():
        loaded = AutoModelForCausalLM.from_pretrained(out)
        original = AutoModelForCausalLM.from_pretrained(model)
    assert loaded.get_input_embeddings().weight is loaded.lm_head.decoder.weight
    name = "layers.0.mlp.up_proj.weight"
    assert not torch.equal(loaded.model.get_parameter(name), original.model.get_parameter(name))
    # Checkpoints were for a crash, and there was none.
    assert list((tmp_path / "states").iterdir()) == []


def test_the_model_has_a_card(upgraded: Run, model: Path, text: Path, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    origin = tmp_path / "nameless"
    shutil.copytree(model, origin)
    (origin / "README.md").write_text("---\nlicense: cc-by-4.0\nbase_model: /home/x\n---\n# Mine\n")
    flags = ["--head", "trunk", "--components", "2", "--set", "private=5"]
    out = upgraded(*flags, "--train", str(text), *SHORT, model=origin)
    record, _ = results.load(out / "results.json")
    card = ModelCard.load(out / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["fullrank", "trunk"],
        "license": "cc-by-4.0",
    }  # fmt: skip
    assert record.verdict in card.text
    for one in record.training.fits:
        assert f"{one.after.value:.4f} ({one.after.low:.4f} to {one.after.high:.4f})" in card.text
    assert "`prose.txt`" in card.text
    given = "--head trunk --components 2 --set private=5 --seeds 1 --tokens 1024 --window 64 --epochs 1"
    assert f"`fullrank upgrade {given}`" in card.text
    plain = tmp_path / "plain"
    arguments = [str(out), "--out", str(plain), "--cache", str(tmp_path / "states"), "--text", str(text)]
    collapse(tyro.cli(Collapse, args=[*arguments, "--tokens", "1024", "--window", "64", "--epochs", "1"]))
    record, _ = results.load(plain / "results.json")
    last = ModelCard.load(plain / "README.md")
    assert last.data.to_dict()["license"] == "cc-by-4.0"
    assert f"{record.cost.value:.4f} ({record.cost.low:.4f} to {record.cost.high:.4f})" in last.text
    for text_of in (card.text, last.text, (out / "config.json").read_text()):
        assert str(tmp_path) not in text_of
    assert "nameless" not in card.text + last.text
    # What was upgraded is known by its name, where that is one on the hub.
    (out / "config.json").write_text(
        (out / "config.json").read_text().replace('"source": "directory"', '"source": "hub"')
    )
    again = load(out)
    _, found = collapse_model(
        again.model, again.tokenizer, [text], settings=fit.Settings(tokens=512, window=64, epochs=1),
        cache=tmp_path / "states", name="out", source="directory",
    )  # fmt: skip
    assert found.base_model == "nameless"


@pytest.mark.slow(reason="trains every head of auto, five seconds")
def test_auto_says_when_no_head_is_worth_it(
    upgraded: Run, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison, "candidates", lambda: ("mos", "plif"))
    monkeypatch.setattr(fit, "worth_it", lambda record: False)
    out = upgraded("--head", "auto", "--train", str(text), *SMALL)
    assert left(out) == ["report.html", "results.json"]
    record, _ = results.load(out / "results.json")
    assert not record.saved
    assert [one.head for one in record.training.candidates] == ["mos", "plif"]
    printed = capsys.readouterr().out
    assert "No head is worth it" in printed
    assert "tried plif" in printed
    # Of a model that was not written.
    assert "one of its own now" not in printed
    monkeypatch.setattr(fit, "worth_it", lambda record: True)
    out = upgraded("--head", "auto", "--train", str(text), *SMALL, out=out.parent / "other")
    assert "model.safetensors" in left(out)


def test_auto_trains_a_whole_model_with_the_options_that_the_best_head_has(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "candidates", lambda: ("mos", "sigsoftmax"))
    monkeypatch.setattr(fit, "fit", lambda *_, **__: ("sigsoftmax", SimpleNamespace(candidates=())))
    settings = fit.Settings(tokens=512, window=64, epochs=1, seeds=1, rates=(0.1,))
    record = run.run(
        load(model), "auto", options={"components": 2}, train=[text], unfreeze=True, settings=settings,
        cache=tmp_path / "states",
    ).record  # fmt: skip
    assert record.head == "sigsoftmax"
    assert "sigsoftmax has no option components: it was trained without." in record.notes


# Three seconds for one more family of heads: auto itself is tested above.
@pytest.mark.slow
def test_auto_tries_bent_heads_over_a_soft_cap_too(text: Path, tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **SIZES, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=5.0
    )
    loaded = load(save(Gemma2ForCausalLM(config), tmp_path / "gemma"))
    settings = fit.Settings(tokens=512, window=64, epochs=1, seeds=1, rates=(0.1,))
    found = run.run(loaded, "auto", train=[text], settings=settings, cache=tmp_path / "states")
    reasons = {one.head: one.reason for one in found.record.training.candidates}
    assert set(reasons) == set(comparison.candidates())
    assert not any(reasons.values())


def test_collapse_writes_a_plain_model(
    upgraded: Run, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = upgraded("--components", "2", "--train", str(text), *SMALL[:-2], "--seeds", "1")
    out = tmp_path / "plain"
    flags = ["--tokens", "1024", "--window", "64", "--epochs", "2", "--cache", str(tmp_path / "states")]
    collapse(tyro.cli(Collapse, args=[str(source), "--text", str(text), "--out", str(out), *flags]))
    record, made = results.load(out / "results.json")
    assert isinstance(record, results.Collapse)
    assert record.architecture == "LlamaForCausalLM"
    assert record.model == source.name
    assert "KL(upgraded || plain)" in capsys.readouterr().out
    assert "What it costs" in report.render(record, made)
    # End to end on the held-out windows the cost is what the record says.
    windows = tokenise(load(source).tokenizer, [text], tokens=1024, window=64, longest=None).ids[11:]
    assert windows[:, 1:].numel() == record.text.held_out_tokens
    ours, plain = logits(source, windows)[:, :-1], logits(out, windows)[:, :-1]
    cost = (ours.exp() * (ours - plain)).sum(dim=-1).mean().item()
    assert cost == pytest.approx(record.cost.value, rel=1e-3)
    assert record.cost.value < record.start.value


def test_an_interrupted_training_leaves_the_states_alone(
    upgraded: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: Any, **keywords: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(fit, "fit", stop)
        with pytest.raises(KeyboardInterrupt):
            upgraded("--train", str(text), *SHORT)
    assert left(tmp_path) == []
    kept = sorted((tmp_path / "states").rglob("*.safetensors"))
    times = [path.stat().st_mtime_ns for path in kept]
    assert kept
    upgraded("--train", str(text), *SHORT)
    assert [path.stat().st_mtime_ns for path in kept] == times


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--head", "mso"], "did you mean 'mos'"),
        (["--head", "mixtape"], "tanh"),
        (["--head", "sigsoftmax", "--components", "4"], "no option components"),
        (["--head", "auto"], "give one with --train"),
        (["--head", "auto", "--set", "bad=3", "--train-default"], "no head that --head auto tries"),
        (["--train", "nowhere.txt"], "no such text"),
        (["--unfreeze"], "give one with --train"),
        (["--teacher", "nowhere"], "give one with --train"),
        (["--unfreeze", "--keep-tied", "--train-default"], "leave --keep-tied out"),
        (["--set", "private"], "NAME=VALUE"),
        (["--set", "private=abc"], "no number"),
        (["--components", "0"], "expected 1 or more"),
        (["--memory", "0.01"], "0.1 or more"),
        (["--seeds", "0", "--train-default"], "expected 1 or more"),
        (["--head", "softmax", "--train-default", "--tokens", "512", "--window", "64"], "held against"),
        (["--train-default", "--dtype", "bfloat16"], "needs float32"),
        (["--device", "warp"], "no device"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    flags: list[str], words: str, upgraded: Run, tmp_path: Path
) -> None:
    with pytest.raises(FullrankError, match=words) as caught:
        upgraded(*flags)
    assert "\n" not in str(caught.value)
    assert left(tmp_path) == []


def test_a_short_text_is_refused_in_the_words_of_the_command(upgraded: Run, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short", encoding="utf8")
    with pytest.raises(FullrankError, match="--train"):
        upgraded("--train", str(short))
    assert left(tmp_path) == ["short.txt"]


def test_nothing_is_overwritten(upgraded: Run, model: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("mine")
    with pytest.raises(FullrankError, match="not empty"):
        upgraded(out=full)
    with pytest.raises(FullrankError, match="not empty"):
        collapse(tyro.cli(Collapse, args=[str(model), "--out", str(full)]))
    assert left(full) == ["mine"]


def test_models_of_another_kind_are_refused(upgraded: Run, model: Path, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

    sizes = {name: size for name, size in SIZES.items() if not name.endswith("token_id")}
    bert = save(BertForMaskedLM(BertConfig(**sizes)), tmp_path / "bert")
    t5 = T5Config(
        vocab_size=256, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    other = save(T5ForConditionalGeneration(t5), tmp_path / "t5")
    for directory in (bert, other):
        with pytest.raises(FullrankError, match="causal language model"):
            upgraded(model=directory)
    with pytest.raises(FullrankError, match="expected an upgraded model"):
        collapse(tyro.cli(Collapse, args=[str(model), "--out", str(tmp_path / "plain")]))
    assert left(tmp_path) == ["bert", "t5"]


def test_out_of_memory_is_one_sentence(
    upgraded: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(*arguments: Any, **keywords: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20.00 GiB")

    monkeypatch.setattr(fit, "fit", burst)
    with pytest.raises(FullrankError, match="fewer --tokens") as caught:
        upgraded("--train", str(text), *SMALL)
    assert "\n" not in str(caught.value)
    assert left(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--unfreeze"]], ids=["frozen", "unfrozen"])
def test_a_cache_is_trained_aligned_and_saved(
    flags: list[str], upgraded: Run, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    small = [*SMALL[:-1], "1"]
    out = upgraded("--head", "cache", "--align", "--train", str(text), *small, *flags)
    printed = capsys.readouterr().out
    assert "cache" in printed
    assert "softmax_equal (control)" in printed
    assert "HistAlign's ranking loss" in printed
    record, _ = results.load(out / "results.json")
    assert record.head == "cache"
    assert record.preserved.kl.value < 1e-4
    with quiet():
        again = AutoModelForCausalLM.from_pretrained(out)
    assert again.lm_head.name == "cache"
    assert again.lm_head.memory_weight.item() != pytest.approx(again.config.head["memory_weight"], abs=1e-6)
    ids = torch.arange(12)[None]
    assert again.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (1, 16)
