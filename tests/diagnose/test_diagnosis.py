"""Diagnoses of tiny models: all answers, earlier answers, interruptions, and failures."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import math
import shutil
import tempfile
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
Ask = Callable[..., Diagnosis]
Earlier = tuple[Path, Diagnosis]
Reported = tuple[Diagnosis, list[tuple[str, float]]]
Patch = pytest.MonkeyPatch
FAST = ("loss", "spectrum", "gradient")
FITS = ("rank_needed", "better_head")
SMALL = Settings(
    tokens=1024, window=64, heads=("mos",), components=2, seeds=1, fit_work=1e9, search_seconds=60.0,
    gradient_tokens=128,
)  # fmt: skip


@pytest.fixture(scope="module")
def directory(tiny_checkpoint: Build) -> Path:
    return tiny_checkpoint("llama", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def ask(directory: Path, text: Path) -> Ask:
    """ask(**options): a diagnosis of the tiny model on the text, with SMALL for settings."""
    return functools.partial(run, directory, text=[text], settings=SMALL)


@pytest.fixture(scope="module")
def reported(ask: Ask, few_orderings: None) -> Reported:
    """All eight questions, and the reports of progress."""
    reports: list[tuple[str, float]] = []
    return ask(progress=lambda stage, share: reports.append((stage, share))), reports


@pytest.fixture(scope="module")
def whole(reported: Reported) -> Diagnosis:
    return reported[0]


@pytest.fixture(scope="module")
def finished(ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the answers to FAST."""
    out = tmp_path_factory.mktemp("finished")
    ask(out=out, only=FAST)
    return out


@pytest.fixture
def earlier(finished: Path, tmp_path: Path) -> Earlier:
    """A copy of it, and its record."""
    shutil.copytree(finished, tmp_path / "earlier")
    return tmp_path / "earlier", record_in(finished)


def record_in(out: Path) -> Diagnosis:
    record, _ = results.load(out / "results.json")
    assert isinstance(record, Diagnosis)
    return record


def reasons(record: Diagnosis) -> dict[str, str]:
    return {missing.question: missing.reason for missing in record.missing}


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
    assert (whole.loss.tokens, whole.loss.bytes) == (whole.text.tokens, whole.text.bytes)
    # Untrained: near the loss of a guess.
    assert whole.loss.nats_per_token.value == pytest.approx(math.log(300), abs=0.2)
    assert whole.logprob_rank.least_rank == whole.logprob_rank.ceiling == 32
    assert whole.logprob_rank.contexts == whole.text.tokens
    assert [layer.name for layer in whole.anisotropy.layers] == ["embedding", "block 1", "block 2", "output"]
    assert [fit.head for fit in whole.better_head.fits] == ["softmax", "softmax_equal", "mos"]
    assert whole.better_head.held_out_tokens == whole.text.held_out_tokens
    assert whole.rank_needed.points[-1].rank == 32
    assert whole.unreachable.argmaxable + len(whole.unreachable.never) + whole.unreachable.undecided == 300
    assert 128 <= whole.gradient.tokens < 256


def test_the_loss_is_that_of_the_model(whole: Diagnosis, directory: Path, text: Path) -> None:
    loaded = load(directory)
    windows = collect.tokenise(loaded.tokenizer, [text], tokens=1024, window=64, longest=None)
    with torch.no_grad():
        found = loaded.model(input_ids=windows.ids, labels=windows.ids).loss
    assert whole.loss.nats_per_token.value == pytest.approx(float(found), rel=1e-5)
    bits = float(found) * windows.ids[:, 1:].numel() / math.log(2) / whole.text.bytes
    assert whole.loss.bits_per_byte.value == pytest.approx(bits, rel=1e-5)


def test_the_record_survives_its_file(whole: Diagnosis, tmp_path: Path) -> None:
    made = results.provenance(seed=0, device="cpu")
    results.save(whole, tmp_path / "results.json", made)
    assert results.load(tmp_path / "results.json") == (whole, made)
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["kind"] == "diagnosis"
    assert document["logprob_rank"]["least_rank"] == 32


def test_another_seed_draws_otherwise(whole: Diagnosis, ask: Ask) -> None:
    other = ask(settings=dataclasses.replace(SMALL, seed=1), only=["anisotropy", "loss"])
    assert other.loss == whole.loss
    assert other.anisotropy != whole.anisotropy


@pytest.mark.parametrize(
    ("family", "fits"),
    [
        *((family, False) for family in ("gemma2", "phi", "opt", "padded", "mamba")),
        # Fits see states and an output layer, of any body: only a soft cap is another path.
        pytest.param("gemma2", True, marks=pytest.mark.slow),
    ],
)
def test_other_families_are_answered_in_full(
    family: str, fits: bool, tiny_checkpoint: Build, text: Path
) -> None:
    changes = {"opt": {"word_embed_proj_dim": 16}, "padded": {"vocab_size": 320}}.get(family, {})
    directory = tiny_checkpoint("llama" if family == "padded" else family, **changes)
    settings = dataclasses.replace(SMALL, tokens=512, power=False)
    skipped = {"unreachable", *(() if fits else FITS)}
    found = run(directory, text=[text], settings=settings, skip=sorted(skipped))
    assert set(reasons(found)) == skipped
    assert found.logprob_rank.method == ("columns" if family == "gemma2" else "core")
    if family == "padded":
        assert found.logprob_rank.columns == 300
        assert found.model.vocabulary == 320


# Which questions


def test_only_and_skip(ask: Ask) -> None:
    found = ask(only=["loss", "spectrum"], skip=["spectrum"])
    assert [name for name in QUESTIONS if getattr(found, name) is not None] == ["loss"]
    assert reasons(found) == {name: NOT_ASKED for name in QUESTIONS if name != "loss"}
    assert tuple(found.seconds) == ("loss",)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"only": ["speed"]}, {}, "no question is called speed: expected some of loss, spectrum"),
        ({"skip": ["pace"]}, {}, "no question is called pace"),
        ({"only": ["loss"], "skip": ["loss"]}, {}, "leave no question"),
        ({}, {"tokens": 100}, "expected 256 or more"),
        ({}, {"window": 4}, "expected 8 or more"),
        ({}, {"memory": 1000}, "--memory"),
    ],
)
def test_refusals(options: dict[str, Any], changes: dict[str, Any], message: str, ask: Ask) -> None:
    settings = dataclasses.replace(SMALL, **changes)
    with pytest.raises(FullrankError, match=message):
        ask(settings=settings, **options)


def test_the_questions_of_the_command_line_are_those_of_the_record() -> None:
    import typing

    from fullrank.cli.diagnose import _ANSWERS, Question

    assert typing.get_args(Question) == (*QUESTIONS, *BY_NAME)
    assert tuple(_ANSWERS) == (*QUESTIONS, *BY_NAME)


def test_few_tokens_answer_what_they_can(ask: Ask) -> None:
    found = ask(settings=dataclasses.replace(SMALL, tokens=256, window=32), skip=["unreachable"])
    assert set(reasons(found)) == {"rank_needed", "better_head", "unreachable"}
    assert "too few to fit" in reasons(found)["better_head"]
    assert found.loss is not None


# Earlier answers


def test_every_answer_is_on_disk_before_the_next_question(
    ask: Ask, tmp_path: Path, monkeypatch: Patch
) -> None:
    seen = []

    def look(self: Answers, progress: object) -> object:
        seen.append(results.load(tmp_path / "results.json"))
        raise FullrankError("looked")

    monkeypatch.setattr(Answers, "spectrum", look)
    monkeypatch.setattr(Answers, "gradient", look)
    final = ask(out=tmp_path, only=FAST)
    (first, made), (second, _) = seen
    assert first.loss == final.loss
    assert reasons(first) == {
        name: INTERRUPTED if name in FAST else NOT_ASKED for name in QUESTIONS if name != "loss"
    }
    assert reasons(second)["spectrum"] == "looked"
    answered = first.answered["loss"]
    assert (answered.settings, answered.text) == ({}, final.text.sha256)
    assert (answered.made.seed, answered.made.command) == (0, made.command)
    assert record_in(tmp_path) == final


def test_an_answer_names_the_settings_that_it_reads(whole: Diagnosis) -> None:
    assert tuple(whole.answered) == QUESTIONS
    assert whole.answered["gradient"].settings == {"gradient_tokens": "128"}
    assert whole.answered["unreachable"].settings == {"seed": "0", "search_seconds": "60.0"}
    fits = whole.answered["better_head"].settings
    # Every setting is read by some question, or says how much text there is, or how much memory.
    every = {name for answered in whole.answered.values() for name in answered.settings}
    every |= {"tokens", "body_work", "most_tokens", "window", "memory", "attention_loss_tokens"}
    assert every == {field.name for field in dataclasses.fields(Settings)}
    assert fits["heads"] == "mos"
    assert not {"tokens", "memory", "search_seconds", "gradient_tokens"} & set(fits)


def test_earlier_answers_of_the_same_model_and_text_are_kept(
    ask: Ask, earlier: Earlier, monkeypatch: Patch
) -> None:
    out, first = earlier
    monkeypatch.setattr(collect, "states", None)  # the states are kept as well
    lines: list[str] = []
    second = ask(out=out, only=["spectrum", "anisotropy"], say=lines.append)
    for name in FAST:
        assert getattr(second, name) == getattr(first, name)
        assert second.answered[name] == first.answered[name]
        assert second.seconds[name] == first.seconds[name]
    assert second.anisotropy is not None
    assert set(reasons(second)) == set(QUESTIONS) - {*FAST, "anisotropy"}
    assert set(first.findings) <= set(second.findings)
    (line,) = lines
    assert line.endswith("on the same model and text: spectrum (--fresh asks anew)")


def test_nothing_is_run_where_every_answer_is_on_disk(ask: Ask, earlier: Earlier, monkeypatch: Patch) -> None:
    out, first = earlier
    monkeypatch.setattr(collect, "collect", None)
    assert ask(out=out, only=FAST) == first


def test_fresh_asks_anew(ask: Ask, earlier: Earlier) -> None:
    out, first = earlier
    again = ask(out=out, only=["loss"], fresh=True)
    assert again.seconds["loss"] != first.seconds["loss"]
    assert again.seconds["spectrum"] == first.seconds["spectrum"]
    assert again.loss == first.loss


def test_answers_of_other_settings_are_asked_for_again(ask: Ask, earlier: Earlier) -> None:
    out, first = earlier
    other = dataclasses.replace(SMALL, gradient_tokens=64)
    with pytest.raises(
        FullrankError,
        match=r"answer to gradient with other settings \(gradient_tokens 128, now 64\), which this run would",
    ):
        ask(settings=other, out=out, only=["loss"])
    second = ask(settings=other, out=out, only=FAST)
    assert (second.seconds["loss"], second.loss) == (first.seconds["loss"], first.loss)
    assert second.gradient.tokens < first.gradient.tokens
    replaced = ask(out=out, only=["loss"], replace=True)
    assert replaced.gradient is None
    assert replaced.seconds["loss"] == first.seconds["loss"]


def test_answers_of_another_version_are_asked_for_again(
    ask: Ask, earlier: Earlier, monkeypatch: Patch
) -> None:
    out, first = earlier
    monkeypatch.setattr("fullrank.diagnose.results_file.__version__", "9.9")
    assert ask(out=out, only=["loss"], replace=True).seconds["loss"] != first.seconds["loss"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("text", "another text, 16 windows of 64 tokens from prose.txt"),
        ("model", "another model, llama"),
        # The text is the same to its end, only less of it is used.
        ("tokens", "15 windows"),
        ("dtype", "this model in float32, not in float64"),
    ],
)
def test_results_of_another_text_model_or_size_are_replaced_on_request_only(
    changed: str, message: str, ask: Ask, text: Path, tiny_checkpoint: Build,
    earlier: Earlier,
) -> None:  # fmt: skip
    out, _ = earlier
    changes: dict[str, Any] = {"text": [text], "settings": SMALL}
    if changed == "text":
        changes["text"] = [out.parent / "other.txt"]
        changes["text"][0].write_text(text.read_text(encoding="utf8")[::-1], encoding="utf8")
    elif changed == "tokens":
        changes["settings"] = dataclasses.replace(SMALL, tokens=960)
    elif changed == "dtype":
        changes["dtype"] = torch.float64
    else:
        ask = functools.partial(run, tiny_checkpoint("mistral"))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(FullrankError, match=f"{message}.*choose another --out, or --replace"):
        ask(**changes, out=out, only=["spectrum"])
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    second = ask(**changes, out=out, only=["spectrum"], replace=True)
    assert second.loss is None
    assert second.spectrum is not None


@pytest.mark.parametrize("content", ["{", '{"kind": "diagnosis", "version": 99, "made": {}}'])
def test_unreadable_results_are_replaced_on_request_only(content: str, ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(FullrankError, match="choose another --out"):
        ask(out=tmp_path, only=["loss"])
    assert ask(out=tmp_path, only=["loss"], replace=True).loss is not None


# What goes wrong


def patch_question(monkeypatch: Patch, name: str, error: BaseException) -> None:
    def fail(self: object, progress: object) -> object:
        raise error

    monkeypatch.setattr(Answers, name, fail)


def test_an_interruption_does_not_lose_earlier_answers(
    ask: Ask, earlier: Earlier, monkeypatch: Patch
) -> None:
    out, first = earlier
    patch_question(monkeypatch, "loss", KeyboardInterrupt())
    with pytest.raises(Interrupted) as caught:
        ask(out=out, only=[*FAST, "anisotropy"], fresh=True)
    record = caught.value.record
    assert (record.loss, record.spectrum, record.seconds) == (first.loss, first.spectrum, first.seconds)
    assert reasons(record)["anisotropy"] == INTERRUPTED
    assert record_in(out).loss == first.loss


def test_an_interruption_between_two_questions_keeps_the_finished_answers(ask: Ask) -> None:
    def progress(stage: str, share: float) -> None:
        if stage == "gradient":
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        ask(only=FAST, progress=progress)
    assert caught.value.record.loss is not None
    assert [name for name, reason in reasons(caught.value.record).items() if reason == INTERRUPTED] == [
        "gradient"
    ]


def test_questions_that_fail_are_listed_and_the_others_are_answered(ask: Ask, monkeypatch: Patch) -> None:
    failures = {
        "loss": (FullrankError("came X, expected Y: do Z"), "came X, expected Y: do Z"),
        "anisotropy": (MemoryError(), "MemoryError"),
        "logprob_rank": (torch.OutOfMemoryError("too much\nand a page of statistics"), "too much"),
        "gradient": (torch.linalg.LinAlgError("did not converge"), "did not converge"),
    }
    for question, (error, _) in failures.items():
        patch_question(monkeypatch, question, error)
    found = ask(only=[*failures, "spectrum"])
    for question, (_, reason) in failures.items():
        assert reasons(found)[question] == reason
        assert getattr(found, question) is None
    assert found.spectrum is not None
    assert tuple(found.seconds) == ("spectrum",)


def test_our_own_mistake_is_not_hidden(ask: Ask, monkeypatch: Patch) -> None:
    patch_question(monkeypatch, "spectrum", TypeError("ours"))
    with pytest.raises(TypeError, match="ours"):
        ask(only=FAST)


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


def test_the_body_is_let_go_before_the_questions(directory: Path, text: Path, monkeypatch: Patch) -> None:
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


def test_nothing_is_left_behind_without_a_directory(ask: Ask, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ask(only=["loss"])
    patch_question(monkeypatch, "loss", KeyboardInterrupt())
    with contextlib.suppress(Interrupted):
        ask(only=["loss"])
    assert list(tmp_path.iterdir()) == []


def test_the_window_keeps_to_the_models_positions(tiny_checkpoint: Build, text: Path) -> None:
    settings = dataclasses.replace(SMALL, window=512)
    found = run(tiny_checkpoint("gpt2", n_positions=40), text=[text], settings=settings, only=["loss"])
    assert found.text.window == 40


def test_progress_names_the_stages_and_rises(reported: Reported) -> None:
    _, reports = reported
    stages = list(dict.fromkeys(stage.split(":")[0] for stage, _ in reports))
    assert stages[0] == "loading the model"
    assert stages[-9:] == ["running the model", *QUESTIONS]
    labels = {stage for stage, _ in reports}
    assert {"better_head: fitting mos", "better_head: planted gain: mos"} <= labels
    for name in stages:
        shares = [share for stage, share in reports if stage.split(":")[0] == name]
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


def test_a_search_that_would_not_fit_is_left_out_with_its_price(ask: Ask) -> None:
    tight = dataclasses.replace(SMALL, tokens=256, memory=600_000)
    found = ask(settings=tight, only=["spectrum", "unreachable"])
    assert found.spectrum is not None
    assert "more than --memory" in reasons(found)["unreachable"]


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
