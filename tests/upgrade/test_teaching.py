"""An upgrade with a teacher: what is trained, recorded and refused, and that its body is let go."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro

from fullrank import report, results
from fullrank.cli.upgrade import Upgrade, upgrade
from fullrank.errors import FullrankError
from fullrank.fit import collect, loop
from fullrank.fit import states as fit_states
from fullrank.fit.comparison import Settings
from fullrank.models.loading import Loaded, load, quiet
from fullrank.upgrade import run, teaching, whole
from fullrank.upgrade import training as fit
from fullrank.upgrade import upgrade as upgraded

V = 101
SMALL = Settings(tokens=640, window=32, epochs=2, seeds=1, rates=(0.12,))
Make = Callable[..., Path]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    draw = torch.randint(2, 90, (700,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(f"w{number}" for number in draw))
    return tmp_path / "text.txt"


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make(name, ...): the directory of a tiny model with a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    def do(
        name: str, *, width: int = 16, rows: int = V, seed: int = 0, words: str = "w", head: str = "",
        **more: Any,
    ) -> Path:  # fmt: skip
        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=width, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=rows, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
            pad_token_id=None, tie_word_embeddings=False,
        )  # fmt: skip
        model: Any = LlamaForCausalLM(config)
        with torch.no_grad():
            model.lm_head.weight.normal_(std=0.5)
        if head:
            model = upgraded(model, head, **more)
        spoken = {f"{words}{number}": number for number in range(V)}
        tokenizer = Tokenizer(models.WordLevel(spoken, unk_token=f"{words}0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        with quiet():
            model.save_pretrained(tmp_path / name)
            PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / name)
        return tmp_path / name

    return do


def go(
    student: Path, teacher: Path, text: Path, cache: Path, *, settings: Settings = SMALL, head: str = "mos",
    **more: Any,
) -> run.Outcome:  # fmt: skip
    return run.run(
        load(student), head, options={"components": 2} if head == "mos" else {}, train=[text],
        settings=settings, cache=cache, teacher=lambda: load(teacher), **more,
    )  # fmt: skip


@torch.no_grad()
def divergence(ours: Any, teacher: Any, ids: torch.Tensor) -> float:
    """Mean KL(teacher || ours) over the smaller vocabulary, both models run end to end."""
    p = ours(input_ids=ids).logits[:, :-1].double().log_softmax(-1)
    q = teacher(input_ids=ids).logits[:, :-1, : p.shape[-1]].double().log_softmax(-1)
    return float((q.exp() * (q - p)).sum(-1).mean())


def held_out(loaded: Loaded, text: Path) -> torch.Tensor:
    ids = collect.tokenise(loaded.tokenizer, [text], tokens=640, window=32, longest=None).ids
    return ids[fit_states.thirds(len(ids))[2]]


def test_the_command_prints_records_and_saves_the_kl(
    make: Make, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    student, teacher = make("runs/small"), make("runs/large", width=24, rows=V + 3, seed=1)
    out = tmp_path / "runs" / "distilled"
    text.rename(tmp_path / "book.txt")
    text = tmp_path / "book.txt"
    # The command as the page has it, but for its size.
    page = (Path(__file__).parents[2] / "docs" / "upgrade.md").read_text(encoding="utf8")
    (line,) = (one for one in page.splitlines() if one.startswith("fullrank upgrade runs/small --teacher"))
    flags = ["--tokens", "640", "--window", "32", "--epochs", "2", "--seeds", "1", "--cache", "states"]
    monkeypatch.chdir(tmp_path)
    upgrade(tyro.cli(Upgrade, args=[*line.split()[2:], *flags]))
    printed = capsys.readouterr().out
    record, made = results.load(out / "results.json")
    assert isinstance(record, results.Upgrade)
    assert record.training is not None
    taught = record.training.teacher
    assert taught is not None
    assert (taught.model.name, taught.model.vocabulary) == ("large", V + 3)
    ids = held_out(load(student), text)
    large = load(teacher).model
    started = divergence(load(student).model, large, ids)
    for one in record.training.fits:
        assert one.distance is not None
        assert one.distance.before.value == pytest.approx(started, rel=1e-4)
        assert one.distance.after.value < one.distance.before.value - 0.01
        assert f"{one.distance.after.value:.4f}" in printed
        assert f"{one.after.value:.4f}" in printed
    # What was saved is as near as the record says, end to end.
    mos = record.training.fits[-1].distance
    assert mos is not None
    assert divergence(load(out).model, large, ids) == pytest.approx(mos.after_by_seed[0], rel=1e-3)
    assert record.verdict.startswith("In KL from large, mos")
    assert f"{taught.loss.value:.4f}" in printed
    assert "Nearer to the teacher" in report.render(record, made)


def test_records_of_before_still_load() -> None:
    file = Path(__file__).parents[2] / "results" / "upgrade_smollm2_wikitext2.json"
    record, _ = results.load(file)
    assert isinstance(record, results.Upgrade)
    assert record.training is not None
    assert record.training.teacher is None
    assert record.training.fits[0].distance is None


def test_a_model_is_its_own_teacher_at_no_distance(make: Make, text: Path, tmp_path: Path) -> None:
    student = make("small")
    found = go(student, student, text, tmp_path / "states").record
    assert found.training is not None
    assert found.training.teacher is not None
    for one in found.training.fits:
        assert one.distance is not None
        assert 0.0 <= one.distance.before.value < 1e-6
        assert one.distance.after.value < 1e-6
        assert one.after.value == pytest.approx(one.before.value, abs=1e-4)
    assert "mos showed no gain" in found.verdict
    assert not fit.worth_it(found.training)


def test_the_body_is_let_go_and_states_are_read_again(
    make: Make, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher = make("small"), make("large", width=24, seed=1)
    bodies: list[weakref.ref[Any]] = []
    ran: list[int] = []
    stop = True

    def loading() -> Loaded:
        found = load(teacher)
        model: Any = found.model
        bodies.append(weakref.ref(model.model.layers[0].mlp.up_proj.weight))
        model.model.register_forward_hook(lambda *_: ran.append(1))
        return found

    fitted = fit.fit

    def fitting(*arguments: Any, **keywords: Any) -> Any:
        assert bodies[-1]() is None
        if stop:
            raise KeyboardInterrupt
        return fitted(*arguments, **keywords)

    def again() -> Any:
        ran.clear()
        return run.run(
            load(student), options={"components": 2}, train=[text], settings=SMALL, cache=tmp_path / "states",
            teacher=loading,
        ).record.training  # fmt: skip

    monkeypatch.setattr(fit, "fit", fitting)
    # Killed in the middle of the teacher's windows: those that are written stay.
    written = fit_states._write
    with monkeypatch.context() as patched:
        calls: list[int] = []

        def one_file(*arguments: Any) -> None:
            written(*arguments)
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt

        patched.setattr(fit_states, "_write", one_file)
        with pytest.raises(KeyboardInterrupt):
            again()
    with pytest.raises(KeyboardInterrupt):
        again()
    # 20 windows, four a file, two files of which were there; the rest is the probe of its output layer.
    probed = len(ran) - 3
    stop = False
    straight = again()
    assert len(ran) == probed
    assert straight.teacher is not None


# Four seconds; fits that go on where they were are held to their bits in tests/fit, without a teacher.
@pytest.mark.slow
def test_a_killed_distillation_ends_with_the_same_numbers(
    make: Make, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher = make("small"), make("large", width=24, seed=1)
    straight = go(student, teacher, text, tmp_path / "straight").record.training
    ended = loop.fit

    def name(file: Path) -> str:
        return f"{file.parent.name}/{file.stem}"

    def killed(*arguments: Any, **keywords: Any) -> Any:
        if name(keywords["file"]) == "mos/seed0":
            raise KeyboardInterrupt
        return ended(*arguments, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "fit", killed)
        with pytest.raises(KeyboardInterrupt):
            go(student, teacher, text, tmp_path / "killed")
    steps: list[str] = []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        steps.append(name(keywords["file"]))
        return ended(*arguments, **keywords)

    monkeypatch.setattr(loop, "fit", counted)
    again = go(student, teacher, text, tmp_path / "killed").record.training
    assert straight is not None
    assert again is not None
    assert steps == ["mos/seed0"]
    assert again.teacher == straight.teacher
    assert [one.distance for one in again.fits] == [one.distance for one in straight.fits]


@pytest.mark.slow(reason="a teacher of another head, two seconds; what teaches is its log-probabilities")
@pytest.mark.parametrize("head", ["mos", "low_rank"])
def test_our_own_heads_teach(head: str, make: Make, text: Path, tmp_path: Path) -> None:
    options = {"components": 3} if head == "mos" else {"rank": 16}
    teacher = make("large", width=24, seed=1, head=head, **options)
    record = go(make("small"), teacher, text, tmp_path / "states").record
    assert record.training is not None
    far = record.training.fits[0].distance
    ids = held_out(load(tmp_path / "small"), text)
    assert far is not None
    assert far.before.value == pytest.approx(
        divergence(load(tmp_path / "small").model, load(teacher).model, ids), rel=1e-4
    )


@pytest.mark.slow(reason="the same with the body let go, two seconds; its states are read again above")
def test_the_whole_model_is_distilled(make: Make, text: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(whole, "RATES", (2e-3,))
    student, teacher = make("small"), make("large", width=24, seed=1)
    found = go(student, teacher, text, tmp_path / "states", unfreeze=True)
    assert found.record.training is not None
    ids, large = held_out(load(student), text), load(teacher).model
    for one in found.record.training.fits:
        assert one.distance is not None
        assert one.distance.before.value == pytest.approx(
            divergence(load(student).model, large, ids), rel=1e-4
        )
        assert one.distance.after.value < one.distance.before.value - 0.01
    mos = found.record.training.fits[-1].distance
    assert mos is not None
    assert divergence(found.model.eval(), large, ids) == pytest.approx(mos.after_by_seed[0], rel=1e-3)


def test_another_tokenizer_is_refused(make: Make, text: Path, tmp_path: Path) -> None:
    student = make("small")
    with pytest.raises(FullrankError, match="101 of 101 ids differ, the first is 0, 'v0' there") as caught:
        go(student, make("other", words="v"), text, tmp_path / "states")
    assert "\n" not in str(caught.value)
    # Rows that one lacks are padding.
    teaching.check_tokens(load(student), load(make("padded", rows=V + 27)))
    teaching.check_tokens(load(make("padded twice", rows=V + 3)), load(student))


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("not rows over one matrix", {"head": "cache"}),
        ("--memory", {"settings": Settings(tokens=640, window=32, memory=70_000)}),
    ],
)
def test_what_cannot_be_distilled_is_refused(
    words: str, flags: dict[str, Any], make: Make, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(FullrankError, match=words):
        go(make("small"), make("large", width=24, seed=1), text, tmp_path / "states", **flags)


def test_a_teacher_needs_a_text_and_a_head_that_can_be_asked(make: Make, text: Path, tmp_path: Path) -> None:
    student = make("small")
    with pytest.raises(FullrankError, match="give one with --train"):
        run.run(load(student), teacher=lambda: load(student))
    teacher = make("pointing", head="cache")
    with pytest.raises(FullrankError, match="collapse it first"):
        go(student, teacher, text, tmp_path / "states")
