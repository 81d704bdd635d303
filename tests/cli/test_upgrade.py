"""`fullrank upgrade` and `fullrank collapse`: what is printed and written, and what a failure leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import io
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
from tests.cli.conftest import SIZES, save_with_bytes

SMALL = ["--tokens", "1024", "--window", "64", "--epochs", "2", "--seeds", "2"]
SHORT = [*SMALL[:4], "--epochs", "1", "--seeds", "1"]
"""Where it does not matter what is learnt."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied llama without a name on the hub, and with a licence."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tied = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    directory = save_with_bytes(tied, tmp_path_factory.mktemp("models") / "nameless")
    (directory / "README.md").write_text("---\nlicense: cc-by-4.0\nbase_model: /home/x\n---\n# Mine\n")
    return directory


@dataclasses.dataclass(frozen=True)
class Written:
    """The directory of an upgraded or collapsed model, and what the command printed."""

    out: Path
    printed: str

    @property
    def record(self) -> Any:
        return results.load(self.out / "results.json")[0]


@pytest.fixture(scope="module")
def trained(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The tiny model with two components of mos, trained on the text."""
    place, stream = tmp_path_factory.mktemp("trained"), io.StringIO()
    arguments = [str(model), "--out", str(place / "out"), "--cache", str(place / "states")]
    with contextlib.redirect_stdout(stream):
        upgrade(tyro.cli(Upgrade, args=[*arguments, "--components", "2", "--train", str(text), *SMALL]))
    return Written(place / "out", stream.getvalue())


@pytest.fixture(scope="module")
def plain(trained: Written, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The trained model, collapsed to one softmax."""
    place, stream = tmp_path_factory.mktemp("plain"), io.StringIO()
    arguments = [str(trained.out), "--text", str(text), "--out", str(place / "out"), *SMALL[:-2]]
    with contextlib.redirect_stdout(stream):
        collapse(tyro.cli(Collapse, args=[*arguments, "--cache", str(place / "states")]))
    return Written(place / "out", stream.getvalue())


Run = Callable[..., Path]


@pytest.fixture
def upgraded(model: Path, tmp_path: Path) -> Run:
    """upgraded(*flags): the output directory of an upgrade of the tiny model."""

    def do(*flags: str, model: Path | str = model, out: Path = tmp_path / "out") -> Path:
        arguments = [str(model), "--out", str(out), "--cache", str(tmp_path / "states"), *flags]
        upgrade(tyro.cli(Upgrade, args=arguments))
        return out

    return do


def in_transformers(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    import fullrank.models.causal_lm  # noqa: F401

    with quiet():
        return AutoModelForCausalLM.from_pretrained(directory).eval()


def logits(directory: Path, ids: torch.Tensor | None = None) -> torch.Tensor:
    if ids is None:
        ids = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return torch.log_softmax(in_transformers(directory)(input_ids=ids).logits, dim=-1)


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
    command = "`fullrank upgrade --head trunk --components 3 --set private=5`"
    assert command in (out / "README.md").read_text(encoding="utf8")
    assert record.parameters == record.model.parameters + 3 * 16 * 5 + 3 * 5 + 3 * 16
    assert "before training: KL" in printed
    torch.testing.assert_close(logits(out), logits(model), atol=1e-4, rtol=0)
    expected = {"config.json", "model.safetensors", "tokenizer.json", "report.html", "README.md"}
    assert expected <= set(left(out))


def test_training_prints_controls_and_saves_the_judged_model(
    trained: Written, model: Path, text: Path, tmp_path: Path
) -> None:
    record, found = trained.record, trained.record.training
    assert [fit.head for fit in found.fits] == ["softmax", "softmax_equal", "mos"]
    for fitted in found.fits:
        assert f"{fitted.after.value:.4f}" in trained.printed
        assert fitted.after.value < fitted.before.value
    assert record.verdict in trained.printed.replace("\n", " ")
    assert found.untied
    assert not torch.allclose(logits(trained.out), logits(model), atol=1e-3)
    # Only the head was trained, and its matrix is no longer the embedding.
    loaded, original = in_transformers(trained.out), in_transformers(model)
    assert torch.equal(loaded.get_input_embeddings().weight, original.get_input_embeddings().weight)
    assert not torch.equal(loaded.get_input_embeddings().weight, loaded.lm_head.decoder.weight)
    # The saved weights are those whose loss the record gives: on the same held-out windows.
    again = load(trained.out)
    seen = fit.read_text(
        again.model, again.tokenizer, [text], settings=fit.Settings(tokens=1024, window=64),
        cache=tmp_path / "states", fingerprint="judged again",
    )  # fmt: skip
    part = seen.parts.held_out
    with torch.no_grad():
        loss = again.model.lm_head(list(part.states), part.targets)
    assert loss.item() == pytest.approx(found.saved_loss, abs=1e-5)
    page = (trained.out / "report.html").read_text(encoding="utf8")
    assert "Before and after training" in page


def test_a_tied_matrix_stays_tied_where_asked(upgraded: Run, text: Path) -> None:
    out = upgraded("--train", str(text), "--keep-tied", *SHORT, "--tokens", "512")
    loaded = in_transformers(out)
    assert loaded.get_input_embeddings().weight is loaded.lm_head.decoder.weight
    assert not results.load(out / "results.json")[0].training.untied


def test_the_whole_model_can_be_trained(upgraded: Run, text: Path, model: Path, tmp_path: Path) -> None:
    out = upgraded("--train", str(text), "--unfreeze", *SHORT, "--tokens", "512")
    record, _ = results.load(out / "results.json")
    assert record.training.unfrozen
    assert not record.training.untied
    loaded, original = in_transformers(out), in_transformers(model)
    assert loaded.get_input_embeddings().weight is loaded.lm_head.decoder.weight
    name = "layers.0.mlp.up_proj.weight"
    assert not torch.equal(loaded.model.get_parameter(name), original.model.get_parameter(name))
    # Checkpoints were for a crash, and there was none.
    assert list((tmp_path / "states").iterdir()) == []


def test_upgraded_and_collapsed_models_have_a_card(
    trained: Written, plain: Written, text: Path, tmp_path: Path
) -> None:
    from huggingface_hub import ModelCard

    card, last = (ModelCard.load(written.out / "README.md") for written in (trained, plain))
    assert card.data.to_dict() == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["fullrank", "mos"],
        "license": "cc-by-4.0",
    }  # fmt: skip
    assert trained.record.verdict in card.text
    for fitted in trained.record.training.fits:
        after = fitted.after
        assert f"{after.value:.4f} ({after.low:.4f} to {after.high:.4f})" in card.text
    assert "`prose.txt`" in card.text
    flags = "--components 2 --seeds 2 --tokens 1024 --window 64 --epochs 2"
    assert f"`fullrank upgrade {flags}`" in card.text
    assert last.data.to_dict()["license"] == "cc-by-4.0"
    cost = plain.record.cost
    assert f"{cost.value:.4f} ({cost.low:.4f} to {cost.high:.4f})" in last.text
    for words in (card.text, last.text, (trained.out / "config.json").read_text()):
        assert str(trained.out.parents[1]) not in words
    assert "nameless" not in card.text + last.text
    # The name of the original is given where it is a name on the hub.
    named = tmp_path / "named"
    shutil.copytree(trained.out, named)
    config = (named / "config.json").read_text()
    (named / "config.json").write_text(config.replace('"source": "directory"', '"source": "hub"'))
    again = load(named)
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
    loaded = load(save_with_bytes(Gemma2ForCausalLM(config), tmp_path / "gemma"))
    settings = fit.Settings(tokens=512, window=64, epochs=1, seeds=1, rates=(0.1,))
    found = run.run(loaded, "auto", train=[text], settings=settings, cache=tmp_path / "states")
    reasons = {one.head: one.reason for one in found.record.training.candidates}
    assert set(reasons) == set(comparison.candidates())
    assert not any(reasons.values())


def test_collapse_writes_a_plain_model(trained: Written, plain: Written, text: Path) -> None:
    record, made = results.load(plain.out / "results.json")
    assert isinstance(record, results.Collapse)
    assert record.architecture == "LlamaForCausalLM"
    assert record.model == trained.out.name
    assert "KL(upgraded || plain)" in plain.printed
    assert "What it costs" in report.render(record, made)
    # End to end on the held-out windows the cost is that of the record.
    windows = tokenise(load(trained.out).tokenizer, [text], tokens=1024, window=64, longest=None).ids[11:]
    assert windows[:, 1:].numel() == record.text.held_out_tokens
    mixed, single = (logits(written.out, windows)[:, :-1] for written in (trained, plain))
    cost = (mixed.exp() * (mixed - single)).sum(dim=-1).mean().item()
    assert cost == pytest.approx(record.cost.value, rel=1e-3)
    assert record.cost.value < record.start.value


def test_an_interrupted_training_leaves_the_states_alone(
    upgraded: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: Any, **keywords: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(fit, "fit", stop)
    times = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            upgraded("--train", str(text), *SHORT)
        assert left(tmp_path) == []
        states = sorted((tmp_path / "states").rglob("*.safetensors"))
        times.append([path.stat().st_mtime_ns for path in states])
    assert times[0]
    assert times[0] == times[1]


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
        (["--train", "{short}"], "--train"),
    ],
)
def test_refusals(flags: list[str], words: str, upgraded: Run, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short", encoding="utf8")
    with pytest.raises(FullrankError, match=words) as caught:
        upgraded(*[flag.format(short=tmp_path / "short.txt") for flag in flags])
    assert "\n" not in str(caught.value)
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
    bert = save_with_bytes(BertForMaskedLM(BertConfig(**sizes)), tmp_path / "bert")
    t5 = T5Config(
        vocab_size=256, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    other = save_with_bytes(T5ForConditionalGeneration(t5), tmp_path / "t5")
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
    small = [*SMALL[:-1], "1"]
    out = upgraded("--head", "cache", "--align", "--train", str(text), *small, *flags)
    printed = capsys.readouterr().out
    assert "cache" in printed
    assert "softmax_equal (control)" in printed
    assert "HistAlign's ranking loss" in printed
    record, _ = results.load(out / "results.json")
    assert record.head == "cache"
    assert record.preserved.kl.value < 1e-4
    again = in_transformers(out)
    assert again.lm_head.name == "cache"
    assert again.lm_head.memory_weight.item() != pytest.approx(again.config.head["memory_weight"], abs=1e-6)
    ids = torch.arange(12)[None]
    assert again.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (1, 16)
