"""A diagnosis from end to end on tiny models: all answers, kept answers, interruptions, and failures."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fullrank import results
from fullrank.diagnose.answers import Answers
from fullrank.diagnose.diagnosis import Interrupted, run
from fullrank.diagnose.questions import spectrum
from fullrank.diagnose.results_file import INTERRUPTED, NOT_ASKED
from fullrank.diagnose.settings import (
    LEAST_TOKENS,
    QUICK,
    THOROUGH,
    USUAL,
    Settings,
    default_memory,
    tokens_for,
)
from fullrank.errors import FullrankError
from fullrank.fit import collect, comparison
from fullrank.models import anatomy
from fullrank.models.loading import load, quiet
from fullrank.models.output_layer import OutputLayer
from fullrank.results import Diagnosis
from fullrank.results.diagnosis import BY_NAME, QUESTIONS
from tests.peak_memory import peak_bytes

pytestmark = pytest.mark.usefixtures("few_orderings")

Build = Callable[..., Path]
SENTENCE = "the shells that she sells are sea shells for sure when a model is small and language large"
FAST = ("loss", "spectrum", "gradient")
FITS = ("rank_needed", "better_head")
SMALL = Settings(
    tokens=1024,
    window=64,
    heads=("mos",),
    components=2,
    seeds=1,
    fit_work=1e9,
    search_seconds=60.0,
    gradient_tokens=128,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    draw = random.Random(0)
    path.write_text(" ".join(draw.choice(SENTENCE.split()) for _ in range(1500)), encoding="utf8")
    return path


@pytest.fixture(scope="module")
def directory(tiny_checkpoint: Build) -> Path:
    return tiny_checkpoint("llama", tie_word_embeddings=False)


Said = list[tuple[str, float]]


@pytest.fixture(scope="module")
def told(directory: Path, text: Path, few_orderings: None) -> tuple[Diagnosis, Said]:
    """All eight questions, and what was said of their progress."""
    said: Said = []
    found = run(
        directory, text=[text], settings=SMALL, progress=lambda stage, share: said.append((stage, share))
    )
    return found, said


@pytest.fixture(scope="module")
def whole(told: tuple[Diagnosis, Said]) -> Diagnosis:
    return told[0]


@pytest.fixture
def provenance() -> results.Provenance:
    return results.provenance(seed=0, device="cpu")


def timeless(record: Diagnosis) -> Diagnosis:
    found = record.unreachable
    found = None if found is None else dataclasses.replace(found, seconds=0.0)
    return dataclasses.replace(record, seconds={}, unreachable=found, answered={})


def values(record: object) -> Iterator[tuple[str, Any]]:
    """Every plain value of a record, with its path."""
    if dataclasses.is_dataclass(record):
        for field in dataclasses.fields(record):
            for name, value in values(getattr(record, field.name)):
                yield f"{field.name}.{name}", value
    elif isinstance(record, tuple):
        for place, item in enumerate(record):
            for name, value in values(item):
                yield f"{place}.{name}", value
    else:
        yield "", record


def test_all_questions_are_answered(whole: Diagnosis) -> None:
    assert whole.missing == ()
    for name in QUESTIONS:
        assert getattr(whole, name) is not None, name
    assert tuple(whole.seconds) == QUESTIONS
    assert all(seconds > 0 for seconds in whole.seconds.values())
    for path, value in values(whole):
        # So little text may not show what is planted, and then there is no end to what may be there.
        if isinstance(value, float) and not path.startswith(("better_head.power.smallest", "verdict.")):
            assert math.isfinite(value), path
        # The refit has its learning rate for refitted ranks only, a llama has no cap, and attention is asked
        # by name.
        if value is None:
            known = ("refitted", "learning_rate", "softcap", "attention")
            assert any(name in path for name in known), path


def test_the_facts_fit_together(whole: Diagnosis, text: Path) -> None:
    assert whole.text.sources == (text.name,)
    assert (whole.text.windows, whole.text.window) == (16, 64)
    assert whole.text.tokens == 16 * 63
    assert not whole.text.starts_with_bos
    parts = (whole.text.fit_tokens, whole.text.choose_tokens, whole.text.held_out_tokens)
    assert parts == (9 * 63, 2 * 63, 5 * 63)
    assert whole.loss is not None
    assert (whole.loss.tokens, whole.loss.bytes) == (whole.text.tokens, whole.text.bytes)
    # Untrained: near the loss of a guess.
    assert whole.loss.nats_per_token.value == pytest.approx(math.log(300), abs=0.2)
    assert whole.logprob_rank is not None
    assert whole.logprob_rank.least_rank == whole.logprob_rank.ceiling == 32
    assert whole.logprob_rank.contexts == whole.text.tokens
    assert whole.anisotropy is not None
    assert [layer.name for layer in whole.anisotropy.layers] == ["embedding", "block 1", "block 2", "output"]
    assert whole.better_head is not None
    assert [fit.head for fit in whole.better_head.fits] == ["softmax", "softmax_equal", "mos"]
    assert whole.better_head.held_out_tokens == whole.text.held_out_tokens
    assert whole.rank_needed is not None
    assert whole.rank_needed.points[-1].rank == 32
    assert whole.unreachable is not None
    assert whole.unreachable.argmaxable + len(whole.unreachable.never) + whole.unreachable.undecided == 300
    assert whole.gradient is not None
    assert 128 <= whole.gradient.tokens < 256


def test_the_loss_is_that_of_the_model(whole: Diagnosis, directory: Path, text: Path) -> None:
    loaded = load(directory)
    windows = collect.tokenise(loaded.tokenizer, [text], tokens=1024, window=64, longest=None)
    with torch.no_grad():
        found = loaded.model(input_ids=windows.ids, labels=windows.ids).loss
    assert whole.loss is not None
    assert whole.loss.nats_per_token.value == pytest.approx(float(found), rel=1e-5)
    bits = float(found) * windows.ids[:, 1:].numel() / math.log(2) / whole.text.bytes
    assert whole.loss.bits_per_byte.value == pytest.approx(bits, rel=1e-5)


def test_the_record_survives_its_file(
    whole: Diagnosis, tmp_path: Path, provenance: results.Provenance
) -> None:
    path = tmp_path / "results.json"
    results.save(whole, path, provenance)
    record, made = results.load(path)
    assert record == whole
    assert made == provenance
    document = json.loads(path.read_text())
    assert document["kind"] == "diagnosis"
    assert document["logprob_rank"]["least_rank"] == 32


@pytest.mark.slow(reason="a diagnosis once more; models that came otherwise, below, get these very answers")
def test_two_runs_agree(whole: Diagnosis, directory: Path, text: Path) -> None:
    assert timeless(run(directory, text=[text], settings=SMALL)) == timeless(whole)


def test_another_seed_draws_otherwise(whole: Diagnosis, directory: Path, text: Path) -> None:
    settings = dataclasses.replace(SMALL, seed=1)
    other = run(directory, text=[text], settings=settings, only=["anisotropy", "loss"])
    assert other.loss == whole.loss
    assert other.anisotropy != whole.anisotropy


FAMILIES = ("gpt2", "gemma2", "phi", "opt", "padded", "mamba")


@pytest.mark.parametrize(
    ("family", "fits"),
    [
        *((family, False) for family in FAMILIES),
        # Fits see states and an output layer, whatever the body: the family of all other tests has them.
        *(pytest.param(family, True, marks=pytest.mark.slow) for family in FAMILIES),
    ],
)
def test_other_families_are_answered_in_full(
    family: str, fits: bool, tiny_checkpoint: Build, text: Path
) -> None:
    changes: dict[str, Any] = {"opt": {"word_embed_proj_dim": 16}, "padded": {"vocab_size": 320}}.get(
        family, {}
    )
    directory = tiny_checkpoint("llama" if family == "padded" else family, **changes)
    settings = dataclasses.replace(SMALL, tokens=512, power=False)
    skipped = {"unreachable", *(() if fits else FITS)}
    found = run(directory, text=[text], settings=settings, skip=sorted(skipped))
    assert {one.question for one in found.missing} == skipped
    assert found.logprob_rank is not None
    assert found.logprob_rank.method == ("columns" if family == "gemma2" else "core")
    if family == "padded":
        assert found.logprob_rank.columns == 300
        assert found.model.vocabulary == 320


# Which questions


def test_only_and_skip(directory: Path, text: Path) -> None:
    only = run(directory, text=[text], settings=SMALL, only=["loss", "spectrum"], skip=["spectrum"])
    assert [name for name in QUESTIONS if getattr(only, name) is not None] == ["loss"]
    assert {one.question: one.reason for one in only.missing} == {
        name: NOT_ASKED for name in QUESTIONS if name != "loss"
    }
    assert tuple(only.seconds) == ("loss",)


def test_unknown_questions_and_none_at_all_are_refused(directory: Path, text: Path) -> None:
    with pytest.raises(FullrankError, match=r"no question is called speed: expected some of loss, spectrum"):
        run(directory, text=[text], only=["speed"])
    with pytest.raises(FullrankError, match="no question is called pace"):
        run(directory, text=[text], skip=["pace"])
    with pytest.raises(FullrankError, match="leave no question"):
        run(directory, text=[text], only=["loss"], skip=["loss"])


def test_the_questions_of_the_command_line_are_those_of_the_record() -> None:
    import typing

    from fullrank.cli.diagnose import _ANSWERS, Question

    assert typing.get_args(Question) == (*QUESTIONS, *BY_NAME)
    assert tuple(_ANSWERS) == (*QUESTIONS, *BY_NAME)


def test_too_little_of_anything_is_refused(directory: Path, text: Path) -> None:
    for changes, words in (
        ({"tokens": 100}, "expected 256 or more"),
        ({"window": 4}, "expected 8 or more"),
        ({"memory": 1000}, "--memory"),
    ):
        with pytest.raises(FullrankError, match=words):
            run(directory, text=[text], settings=dataclasses.replace(SMALL, **changes))


def test_few_tokens_answer_what_they_can(directory: Path, text: Path) -> None:
    few = dataclasses.replace(SMALL, tokens=256, window=32)
    found = run(directory, text=[text], settings=few, skip=["unreachable"])
    reasons = {one.question: one.reason for one in found.missing}
    assert set(reasons) == {"rank_needed", "better_head", "unreachable"}
    assert "too few to fit" in reasons["better_head"]
    assert found.loss is not None


# Earlier answers


def test_every_answer_is_on_disk_before_the_next_question(
    directory: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def look(self: Answers, progress: object) -> object:
        seen.append(results.load(tmp_path / "results.json"))
        raise FullrankError("looked")

    monkeypatch.setattr(Answers, "spectrum", look)
    monkeypatch.setattr(Answers, "gradient", look)
    final = run(directory, text=[text], settings=SMALL, out=tmp_path, only=FAST)
    (first, made), (second, _) = seen
    assert first.loss == final.loss
    assert {one.question: one.reason for one in first.missing} == {
        name: INTERRUPTED if name in FAST else NOT_ASKED for name in QUESTIONS if name != "loss"
    }
    assert {one.question: one.reason for one in second.missing}["spectrum"] == "looked"
    answered = first.answered["loss"]
    assert (answered.settings, answered.text) == ({}, final.text.sha256)
    assert (answered.made.seed, answered.made.command) == (0, made.command)
    assert results.load(tmp_path / "results.json")[0] == final


def test_an_answer_names_the_settings_that_it_reads(whole: Diagnosis) -> None:
    assert tuple(whole.answered) == QUESTIONS
    assert whole.answered["gradient"].settings == {"gradient_tokens": "128"}
    assert whole.answered["unreachable"].settings == {"seed": "0", "search_seconds": "60.0"}
    fits = whole.answered["better_head"].settings
    # Every setting is read by some question, or says how much text there is, or how much memory.
    every = {name for one in whole.answered.values() for name in one.settings}
    every |= {"tokens", "body_work", "most_tokens", "window", "memory", "attention_loss_tokens"}
    assert every == {field.name for field in dataclasses.fields(Settings)}
    assert fits["heads"] == "mos"
    assert not {"tokens", "memory", "search_seconds", "gradient_tokens"} & set(fits)


def test_earlier_answers_of_the_same_model_and_text_are_kept(
    directory: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(directory, text=[text], settings=SMALL, out=tmp_path, only=["loss", "spectrum"])
    monkeypatch.setattr(collect, "states", None)  # the states are kept as well
    said: list[str] = []
    second = run(
        directory, text=[text], settings=SMALL, out=tmp_path, only=["spectrum", "gradient"], say=said.append
    )
    assert (second.loss, second.spectrum) == (first.loss, first.spectrum)
    assert second.gradient is not None
    assert second.seconds["loss"] == first.seconds["loss"]
    assert second.answered["spectrum"] == first.answered["spectrum"]
    assert {one.question for one in second.missing} == set(QUESTIONS) - set(FAST)
    assert second.findings == first.findings
    (line,) = said
    assert line.endswith("on the same model and text: spectrum (--fresh asks anew)")


def test_nothing_is_run_where_everything_is_known(
    directory: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(directory, text=[text], settings=SMALL, out=tmp_path, only=FAST)
    monkeypatch.setattr(collect, "collect", None)
    assert run(directory, text=[text], settings=SMALL, out=tmp_path, only=FAST) == first


def test_fresh_asks_anew(directory: Path, text: Path, tmp_path: Path) -> None:
    first = run(directory, text=[text], settings=SMALL, out=tmp_path, only=["loss", "spectrum"])
    again = run(directory, text=[text], settings=SMALL, out=tmp_path, only=["loss"], fresh=True)
    assert again.seconds["loss"] != first.seconds["loss"]
    assert again.seconds["spectrum"] == first.seconds["spectrum"]
    assert again.loss == first.loss


def test_answers_of_other_settings_are_asked_for_again(directory: Path, text: Path, tmp_path: Path) -> None:
    first = run(directory, text=[text], settings=SMALL, out=tmp_path, only=FAST)
    other = dataclasses.replace(SMALL, gradient_tokens=64)
    with pytest.raises(
        FullrankError,
        match=r"answer to gradient with other settings \(gradient_tokens 128, now 64\), which this run would",
    ):
        run(directory, text=[text], settings=other, out=tmp_path, only=["loss"])
    second = run(directory, text=[text], settings=other, out=tmp_path, only=FAST)
    assert (second.seconds["loss"], second.loss) == (first.seconds["loss"], first.loss)
    assert first.gradient is not None
    assert second.gradient is not None
    assert second.gradient.tokens < first.gradient.tokens
    replaced = run(directory, text=[text], settings=SMALL, out=tmp_path, only=["loss"], replace=True)
    assert replaced.gradient is None
    assert replaced.seconds["loss"] == first.seconds["loss"]


def test_answers_of_another_version_are_asked_for_again(
    directory: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(directory, text=[text], settings=SMALL, out=tmp_path, only=["loss"])
    monkeypatch.setattr("fullrank.diagnose.results_file.__version__", "9.9")
    assert run(directory, text=[text], settings=SMALL, out=tmp_path, only=["loss"]).seconds != first.seconds


def test_results_of_another_text_model_or_size_are_not_replaced_in_silence(
    directory: Path, text: Path, tiny_checkpoint: Build, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text.read_text(encoding="utf8")[::-1], encoding="utf8")
    # The text is the same to its end, only less of it is used.
    fewer = dataclasses.replace(SMALL, tokens=960)
    mistral = tiny_checkpoint("mistral")
    for words, model, changes in (
        ("another text, 16 windows of 64 tokens from prose.txt", directory, {"text": [other]}),
        ("another model, llama", mistral, {}),
        ("15 windows", directory, {"settings": fewer}),
        ("this model in float32, not in float64", directory, {"dtype": torch.float64}),
    ):
        options: dict[str, Any] = {"text": [text], "settings": SMALL, "out": tmp_path / words[:12]}
        run(directory, **options, only=["loss"])
        before = {path: path.read_bytes() for path in options["out"].rglob("*") if path.is_file()}
        with pytest.raises(FullrankError, match=f"{words}.*choose another --out, or --replace"):
            run(model, **options | changes, only=["spectrum"])
        assert {path: path.read_bytes() for path in options["out"].rglob("*") if path.is_file()} == before
        second = run(model, **options | changes, only=["spectrum"], replace=True)
        assert second.loss is None, words
        assert second.spectrum is not None


def test_results_that_cannot_be_read_are_not_replaced_in_silence(
    directory: Path, text: Path, tmp_path: Path
) -> None:
    for content in ("{", '{"kind": "diagnosis", "version": 99, "made": {}}'):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(FullrankError, match="choose another --out"):
            run(directory, text=[text], settings=SMALL, out=tmp_path, only=["loss"])
        options: dict[str, Any] = {"settings": SMALL, "out": tmp_path, "only": ["loss"], "replace": True}
        assert run(directory, text=[text], **options).loss is not None


# What goes wrong


def patch_question(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    def fail(self: object, progress: object) -> object:
        raise error

    monkeypatch.setattr(Answers, name, fail)


def test_an_interruption_keeps_what_is_finished(
    directory: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_question(monkeypatch, "anisotropy", KeyboardInterrupt())
    with pytest.raises(Interrupted) as caught:
        run(directory, text=[text], settings=SMALL, skip=["better_head"])
    record = caught.value.record
    assert record.loss is not None
    assert record.spectrum is not None
    reasons = {one.question: one.reason for one in record.missing}
    assert reasons == {
        "anisotropy": INTERRUPTED,
        "logprob_rank": INTERRUPTED,
        "rank_needed": INTERRUPTED,
        "better_head": NOT_ASKED,
        "unreachable": INTERRUPTED,
        "gradient": INTERRUPTED,
    }
    assert tuple(record.seconds) == ("loss", "spectrum")


def test_an_interruption_does_not_lose_earlier_answers(
    directory: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(directory, text=[text], settings=SMALL, out=tmp_path, only=["loss", "spectrum"])
    patch_question(monkeypatch, "loss", KeyboardInterrupt())
    with pytest.raises(Interrupted) as caught:
        run(directory, text=[text], settings=SMALL, out=tmp_path, only=FAST, fresh=True)
    record = caught.value.record
    assert (record.loss, record.spectrum) == (first.loss, first.spectrum)
    assert record.seconds == first.seconds
    assert {one.question for one in record.missing if one.reason == INTERRUPTED} == {"gradient"}


def test_an_interruption_between_two_questions_keeps_what_is_finished(directory: Path, text: Path) -> None:
    def progress(stage: str, share: float) -> None:
        if stage == "gradient":
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        run(directory, text=[text], settings=SMALL, only=FAST, progress=progress)
    assert caught.value.record.loss is not None
    assert {one.question for one in caught.value.record.missing if one.reason == INTERRUPTED} == {"gradient"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FullrankError("came X, expected Y: do Z"), "came X, expected Y: do Z"),
        (MemoryError(), "MemoryError"),
        (torch.OutOfMemoryError("too much\nand a page of statistics"), "too much"),
        (torch.linalg.LinAlgError("did not converge"), "did not converge"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_question_that_fails_is_listed_and_the_others_are_there(
    error: Exception, reason: str, directory: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_question(monkeypatch, "spectrum", error)
    found = run(directory, text=[text], settings=SMALL, only=FAST)
    assert {one.question: one.reason for one in found.missing}["spectrum"] == reason
    assert found.spectrum is None
    assert found.loss is not None
    assert found.gradient is not None
    assert tuple(found.seconds) == ("loss", "gradient")


def test_our_own_mistake_is_not_hidden(directory: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_question(monkeypatch, "spectrum", TypeError("ours"))
    with pytest.raises(TypeError, match="ours"):
        run(directory, text=[text], settings=SMALL, only=FAST)


# The model


# Both fits see the same states and matrix; that of heads takes five seconds.
fit = pytest.mark.parametrize("fit", ["rank_needed", pytest.param("better_head", marks=pytest.mark.slow)])


@fit
def test_a_loaded_model_stays_usable(fit: str, directory: Path, text: Path, whole: Diagnosis) -> None:
    loaded = load(directory)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        before = loaded.model(input_ids=ids).logits
    found = run(loaded, text=[text], settings=SMALL, only=["loss", fit])
    with torch.no_grad():
        assert torch.equal(loaded.model(input_ids=ids).logits, before)
    assert getattr(found, fit) == getattr(whole, fit)
    generated = loaded.model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 43)


@fit
def test_a_model_in_memory(fit: str, directory: Path, text: Path, whole: Diagnosis) -> None:
    loaded = load(directory)
    model = loaded.model.train().requires_grad_(True)
    model.lm_head.eval()
    options: dict[str, Any] = {"text": [text], "settings": SMALL}
    torch.manual_seed(7)
    before = torch.get_rng_state()
    found = run(model, tokenizer=loaded.tokenizer, **options, only=["loss", fit, "spectrum"])
    assert (found.loss, found.spectrum) == (whole.loss, whole.spectrum)
    assert getattr(found, fit) == getattr(whole, fit)
    assert found.model.source == "object"
    # The caller goes on with it as it was.
    assert model.training
    assert not model.lm_head.training
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(FullrankError, match=r"in memory \(LlamaForCausalLM\) needs its tokenizer"):
        run(model, **options)
    with pytest.raises(FullrankError, match="leave it out"):
        run(directory, tokenizer=loaded.tokenizer, **options)
    with pytest.raises(FullrankError, match="got a dict, expected a transformers PreTrainedModel"):
        run({}, tokenizer=loaded.tokenizer, **options)


@pytest.mark.parametrize("where", [{"": "disk"}, {"model": "cpu", "lm_head": "disk"}], ids=["all", "matrix"])
def test_a_model_that_is_offloaded(
    where: dict[str, str], directory: Path, text: Path, whole: Diagnosis
) -> None:
    asked: dict[str, Any] = {"text": [text], "settings": SMALL, "only": [*FAST, "logprob_rank", "anisotropy"]}
    found = run(directory, device_map=where, **asked)
    for name in asked["only"]:
        assert getattr(found, name) == getattr(whole, name), name
    assert found.model == whole.model
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(directory, device_map=where, dtype=torch.float32)
    assert any(weight.is_meta for weight in model.parameters())
    tokenizer = load(directory).tokenizer
    assert run(model, tokenizer=tokenizer, **asked).loss == whole.loss


def test_the_body_is_let_go_before_the_questions(
    directory: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is needed; what is left of the model is its output layer."""
    bodies: list[weakref.ref[torch.nn.Module]] = []
    alive: list[bool] = []
    plain, asked = anatomy.examine, spectrum.spectrum

    def examine(loaded: Any) -> anatomy.Anatomy:
        bodies.append(weakref.ref(loaded.model.model.layers[0].mlp))
        return plain(loaded)

    def ask(*arguments: Any) -> object:
        gc.collect()
        alive.append(bodies[0]() is not None)
        return asked(*arguments)

    monkeypatch.setattr(anatomy, "examine", examine)
    monkeypatch.setattr(spectrum, "spectrum", ask)
    run(directory, text=[text], settings=SMALL, only=["spectrum"])
    assert alive == [False]


def test_nothing_is_left_behind_without_a_directory(
    directory: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run(directory, text=[text], settings=SMALL, only=["loss"])
    patch_question(monkeypatch, "loss", KeyboardInterrupt())
    with contextlib.suppress(Interrupted):
        run(directory, text=[text], settings=SMALL, only=["loss"])
    assert list(tmp_path.iterdir()) == []


def test_the_window_keeps_to_the_models_positions(tiny_checkpoint: Build, text: Path) -> None:
    found = run(
        tiny_checkpoint("gpt2", n_positions=40),
        text=[text],
        settings=dataclasses.replace(SMALL, window=512),
        only=["loss"],
    )
    assert found.text.window == 40


def test_progress_names_the_stages_and_rises(told: tuple[Diagnosis, Said]) -> None:
    _, said = told
    stages = list(dict.fromkeys(stage.split(":")[0] for stage, _ in said))
    assert stages[0] == "loading the model"
    assert stages[-9:] == ["running the model", *QUESTIONS]
    assert any(stage == "better_head: fitting mos" for stage, _ in said)
    assert any(stage == "better_head: planted gain: mos" for stage, _ in said)
    for name in stages:
        shares = [share for stage, share in said if stage.split(":")[0] == name]
        assert all(0 <= share <= 1 for share in shares)
        assert shares == sorted(shares), name


def test_quick_is_less_of_everything() -> None:
    usual = Settings()
    for name in ("body_work", "most_tokens", "fit_work", "search_seconds", "gradient_tokens"):
        assert getattr(QUICK, name) < getattr(usual, name)
    assert QUICK.power < usual.power
    assert set(QUICK.heads) < set(THOROUGH.heads) <= set(comparison.candidates())


def test_tokens_go_by_the_size_of_the_model() -> None:
    weight = torch.zeros(300, 8)
    assert tokens_for(dataclasses.replace(USUAL, tokens=700), 10**9, weight) == 700
    small, middle, large = (tokens_for(USUAL, size, weight) for size in (10**5, 10**8, 10**12))
    assert small == USUAL.most_tokens > middle > large == LEAST_TOKENS
    assert tokens_for(USUAL, 2 * 10**8, weight) == pytest.approx(middle / 2, abs=1)


def test_tokens_go_by_the_vocabulary_where_every_score_is_made() -> None:
    """Three passes of either part of a fit fit into its work, up to where normalisers are estimated."""
    found = [tokens_for(USUAL, 10**5, torch.zeros(V, 32)) for V in (300, 2048, 4096)]
    assert found[0] == USUAL.most_tokens > found[1] > found[2] > LEAST_TOKENS
    assert found[1] == pytest.approx(2 * found[2], rel=0.01)
    # Four components, 692 multiplications a score, four sevenths of the tokens.
    assert 6 * 4 * 4096 * 692 * found[2] * 4 / 7 < USUAL.fit_work
    assert tokens_for(USUAL, 10**5, torch.zeros(4097, 32)) == USUAL.most_tokens


def test_the_function_is_not_hidden_by_a_module() -> None:
    import fullrank

    assert callable(fullrank.diagnose.run)
    assert fullrank.diagnose.run is run


@pytest.mark.parametrize(
    ("question", "biased"),
    [
        *((name, False) for name in QUESTIONS if name not in (*FITS, "unreachable")),
        # Four to eight seconds each.
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in (*FITS, "unreachable")),
        ("logprob_rank", True),
    ],
)
def test_a_question_takes_no_more_memory_than_it_says(question: str, biased: bool, whole: Diagnosis) -> None:
    """And that is within --memory, or it is not asked."""
    V, D, N = 8192, 64, 512
    generator = torch.Generator().manual_seed(0)
    output = OutputLayer(
        weight=torch.randn(V, D, generator=generator) / 8,
        bias=torch.randn(V, generator=generator) if biased else None,
        tokens=V,
    )
    facts = dataclasses.replace(whole.model, width=D, vocabulary=V, tokens=V, bias=biased)
    window = torch.arange(N) // 64
    sampled = torch.randn(4, 512, D, generator=generator)
    places = torch.arange(512)
    states = collect.States(
        hidden=torch.randn(N, D, generator=generator), targets=torch.randint(V, (N,), generator=generator),
        sizes=torch.ones(N), positions=torch.arange(N) % 64, blocks=window, windows=window, layers=sampled,
        layer_names=("embedding", "block 1", "block 2", "output"), layer_positions=places % 63 + 1,
        layer_blocks=places // 63,
    )  # fmt: skip
    build = anatomy.Anatomy(output=output, facts=facts, states_rank=D, blocks=())
    # The search has a buffer that does not shrink with what it may take.
    memory = 640 << 20 if question == "unreachable" else 64 << 20
    # More passes of a fit take no more memory at once.
    settings = dataclasses.replace(SMALL, memory=memory, search_seconds=2.0, fit_work=0.0)
    answers = Answers(build, states, settings, str)
    answers.check_memory(question)
    peak = peak_bytes(lambda: getattr(answers, question)(lambda label, share: None))
    assert peak <= answers.needs(question) <= memory - answers.held


def test_a_search_that_would_not_fit_is_left_out_with_its_price(directory: Path, text: Path) -> None:
    tight = dataclasses.replace(SMALL, tokens=256, memory=600_000)
    found = run(directory, text=[text], settings=tight, only=["spectrum", "unreachable"])
    reasons = {one.question: one.reason for one in found.missing}
    assert found.spectrum is not None
    assert "more than --memory" in reasons["unreachable"]


@pytest.mark.parametrize(
    ("V", "D", "tokens"),
    [(300, 32, 512), (49_152, 576, 1 << 20), (128_256, 4096, 3072), (256_000, 2048, 1 << 18)],
)
def test_by_default_every_question_has_the_memory_it_needs(
    V: int, D: int, tokens: int, whole: Diagnosis
) -> None:
    """A million tokens of a small model as well as a few of one with a large vocabulary."""
    weight, number = torch.empty(V, D, device="meta"), torch.empty(tokens, device="meta")
    sampled = torch.empty(31, 2048, D, device="meta")
    states = collect.States(
        hidden=torch.empty(tokens, D, device="meta"), targets=number, sizes=number, positions=number,
        blocks=number, windows=number, layers=sampled, layer_names=(), layer_positions=sampled[0, :, 0],
        layer_blocks=sampled[0, :, 0],
    )  # fmt: skip
    build = anatomy.Anatomy(
        output=OutputLayer(weight=weight, bias=None, tokens=V), facts=whole.model, states_rank=D, blocks=()
    )
    settings = dataclasses.replace(USUAL, memory=default_memory(tokens, weight))
    answers = Answers(build, states, settings, str)
    collect.check_memory(tokens, answers.held, settings.memory)
    for question in QUESTIONS:
        answers.check_memory(question)
