"""`fullrank diagnose`: exit codes, what is printed and written, and what is left alone on a failure."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullrank import results
from fullrank.cli import main
from fullrank.cli.diagnose import Diagnose, _dtype, _settings
from fullrank.diagnose.answers import Answers
from fullrank.diagnose.settings import QUICK, THOROUGH
from fullrank.errors import FullrankError
from fullrank.fit import collect
from fullrank.results import Diagnosis
from fullrank.results.diagnosis import QUESTIONS
from tests.prose import WORDS

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
SMALL = ["--tokens", "512", "--window", "64"]
FAST = ["--only", "loss", "spectrum"]


Run = Callable[..., int]


@pytest.fixture
def diagnose(byte_llama: Path, text: Path, tmp_path: Path) -> Run:
    """diagnose(*flags): the exit code of a small diagnosis into tmp_path / out."""

    def run(
        *flags: str, model: Path | str = byte_llama, text: Path | str = text, which: list[str] = FAST
    ) -> int:
        arguments = [str(model), "--text", str(text), "--out", str(tmp_path / "out")]
        return main.run(["diagnose", *arguments, *SMALL, *which, *flags])

    return run


def written(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())


def contents(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in written(out)}


def record_in(out: Path) -> Diagnosis:
    record, _ = results.load(out / "results.json")
    assert isinstance(record, Diagnosis)
    return record


def interrupt(monkeypatch: Patch, question: str, error: BaseException) -> None:
    def stop(self: object, progress: object) -> object:
        raise error

    monkeypatch.setattr(Answers, question, stop)


# Done


@pytest.mark.usefixtures("pictures")
def test_results_page_and_table(diagnose: Run, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    assert diagnose(which=["--skip", "better_head", "unreachable", "rank_needed"]) == 0
    printed = capsys.readouterr()
    # Not a terminal.
    assert all(code not in printed.out for code in ("\x1b", "\r", "0:00"))
    record, made = results.load(out / "results.json")
    assert isinstance(record, Diagnosis)
    assert made.seed == 0
    assert "cpu" in made.device
    assert record.logprob_rank is not None
    assert json.loads((out / "results.json").read_text())["logprob_rank"]["least_rank"] == 16
    for question in QUESTIONS:
        assert question in printed.out
    assert f"{record.loss.nats_per_token.value:.3f}" in printed.out
    assert "least rank 16" in printed.out
    # The verdict comes first, and names the reason why there is none.
    assert printed.out.startswith(
        "Undecided: what a better head would buy was not measured.\nThe reason: not asked"
    )
    assert printed.out.count("not asked for") == 1 + 3
    # Weights at random: the other answers are about nothing.
    assert "is near that of a uniform guess, 5.55" in printed.out
    assert str(out / "results.json") in printed.out
    assert str(out / "report.html") in printed.out
    page = (out / "report.html").read_text(encoding="utf8")
    assert "</html>" in page
    assert "tiny" in page
    stages = [line.split(" s  ")[1] for line in printed.err.splitlines()]
    assert stages == [
        "loading the model", "loading tiny", "running the model", "loss", "spectrum", "anisotropy",
        "logprob_rank", "gradient",
    ]  # fmt: skip


@pytest.mark.slow(
    reason="a whole diagnosis in a process of its own, ten seconds; the command itself runs in this one"
)
def test_as_a_process_with_a_pipe(byte_llama: Path, text: Path, tmp_path: Path) -> None:
    """Nothing of transformers' or torch's own chatter comes through either."""
    out = tmp_path / "out"
    arguments = [str(byte_llama), "--text", str(text), "--out", str(out), *SMALL, *FAST]
    done = subprocess.run(
        [sys.executable, "-m", "fullrank.cli.main", "diagnose", *arguments],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0
    assert all(line[6:10] == " s  " for line in done.stderr.splitlines())
    assert "\x1b" not in done.stdout
    assert done.stdout.startswith("Undecided: ")
    assert "tiny: width 16, vocabulary 256" in done.stdout
    assert done.stdout.splitlines()[-1] == f"page    {out / 'report.html'}"


def test_a_name_that_reads_like_markup_and_half_precision(
    diagnose: Run, byte_llama: Path, tmp_path: Path, capsys: Capture
) -> None:
    odd = tmp_path / "[red]a[bold]<script>"
    shutil.copytree(byte_llama, odd)
    assert diagnose("--dtype", "bfloat16", model=odd) == 0
    assert "[red]a[bold]<script>: width 16" in capsys.readouterr().out
    assert "<script>" not in (tmp_path / "out" / "report.html").read_text(encoding="utf8")
    facts = record_in(tmp_path / "out").model
    assert (facts.dtype, facts.storage) == ("bfloat16", "float32")


def test_quick(diagnose: Run, tmp_path: Path) -> None:
    """All questions, of which every one is answered."""
    assert diagnose("--quick", "--search-seconds", "60", which=[]) == 0
    record = record_in(tmp_path / "out")
    assert record.missing == ()
    assert [fit.head for fit in record.better_head.fits] == ["softmax", "softmax_equal", *QUICK.heads]
    assert record.better_head.seeds == 1
    assert record.unreachable.undecided == 0


def test_flags_reach_the_settings() -> None:
    settings = _settings(
        Diagnose(
            tokens=4096, window=128, memory=0.5, components=3, seeds=4, search_seconds=9.0, seed=7, quick=True
        )
    )
    assert (settings.tokens, settings.window, settings.memory) == (4096, 128, 1 << 29)
    assert (settings.components, settings.seeds, settings.search_seconds) == (3, 4, 9.0)
    assert (settings.seed, settings.heads, settings.fit_work) == (7, QUICK.heads, QUICK.fit_work)
    assert _settings(Diagnose(thorough=True)) == THOROUGH
    with pytest.raises(FullrankError, match="--quick and --thorough"):
        _settings(Diagnose(quick=True, thorough=True))


def test_the_dtype_goes_by_the_device(monkeypatch: Patch) -> None:
    assert _dtype("auto", "cpu") == _dtype("auto", "mps") == torch.float32
    assert _dtype("float16", "cpu") == torch.float16
    for has_it, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has_it=has_it, **options: has_it)
        assert _dtype("auto", "cuda:1") == expected
        assert _dtype("float32", "cuda:1") == torch.float32


# The user's mistakes


def refused(code: int, capsys: Capture, out: Path, *words: str) -> None:
    assert code == 2
    printed = capsys.readouterr()
    *before, sentence = printed.err.splitlines()
    assert sentence.startswith("fullrank: ")
    # Nothing but progress comes before it.
    assert all(line[6:10] == " s  " for line in before)
    assert "\x1b" not in printed.out
    for word in words:
        assert word in sentence
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tokens", "10"], ["--tokens is 10", "256 or more"]),
        (["--window", "4"], ["--window is 4", "16 or more"]),
        (["--components", "1"], ["--components is 1", "2 or more"]),
        (["--seeds", "0"], ["--seeds is 0", "1 or more"]),
        (["--seed", "-1"], ["--seed is -1", "0 or more"]),
        (["--memory", "0"], ["--memory is 0", "0.1 or more"]),
        (["--memory", "nan"], ["--memory is nan"]),
        (["--memory", "inf"], ["--memory is inf"]),
        (["--search-seconds", "0.5"], ["--search-seconds is 0.5", "1 or more"]),
        (["--batch-size", "0"], ["--batch-size is 0", "1 or more"]),
        (["--bos", "yes"], ["no begin token", "leave out --bos"]),
        (["--device", "abacus"], ["abacus", "cpu, cuda or mps"]),
        (["--device", "cuda:7"], ["'cuda:7'", "torch sees none"]),
        (["--revision", "main"], ["revision 'main'", "hub"]),
        (["--skip", "loss", "spectrum"], ["leave no question"]),
        (["--text", "{none}"], ["no such text", "{none}"]),
    ],
    ids=lambda value: "-".join(value),
)
def test_refusals(flags: list[str], words: list[str], diagnose: Run, tmp_path: Path, capsys: Capture) -> None:
    none = str(tmp_path / "none.txt")
    code = diagnose(*[flag.format(none=none) for flag in flags])
    refused(code, capsys, tmp_path / "out", *[word.format(none=none) for word in words])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no text"),
        (b" \n\t", "holds no text"),
        (bytes(range(256)) * 40, "is binary"),
        (bytes(range(1, 256)) * 40, "looks binary"),
        (b"too short", "expected 256 or more"),
    ],
    ids=["empty", "blank", "binary", "looks binary", "short"],
)
def test_texts_that_are_refused(
    content: bytes, words: str, diagnose: Run, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "given.txt").write_bytes(content)
    refused(diagnose(text=tmp_path / "given.txt"), capsys, tmp_path / "out", words)


def test_models_that_are_refused(diagnose: Run, byte_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    from safetensors.torch import load_file

    out, missing, pickled, broken = (tmp_path / name for name in ("out", "nowhere", "pickled", "broken"))
    refused(diagnose(model=missing), capsys, out, "no such path", str(missing))
    shutil.copytree(byte_llama, broken)
    (broken / "tokenizer.json").unlink()
    refused(diagnose(model=broken), capsys, out, "tokenizer")
    shutil.copytree(byte_llama, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    refused(diagnose(model=pickled), capsys, out, "pickle")
    assert diagnose("--allow-pickle", model=pickled) == 0


def test_too_little_memory(diagnose: Run, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    """The lower limit of --memory is more than a tiny model can use: pretend that it is large."""
    monkeypatch.setattr(collect, "_body_width", lambda model, width: 1 << 28)
    code = diagnose("--memory", "0.1", which=[])
    refused(code, capsys, tmp_path / "out", "--memory 0.1 GiB", "fewer --tokens")


@pytest.mark.parametrize("flags", [["--only", "speed"], ["--tokens", "many"]])
def test_flags_that_do_not_exist(flags: list[str], diagnose: Run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        diagnose(*flags, which=[])
    assert stop.value.code == 2
    assert not (tmp_path / "out").exists()


def test_a_file_where_the_results_should_go(diagnose: Run, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "out").write_text("in the way")
    assert diagnose() == 2
    assert "no writable directory" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "in the way"


# What happens on the way


def test_an_interruption_writes_what_is_finished(
    diagnose: Run, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    interrupt(monkeypatch, "logprob_rank", KeyboardInterrupt())
    assert diagnose(which=["--skip", "better_head"]) == 130
    printed = capsys.readouterr()
    assert "not answered: logprob_rank, rank_needed, unreachable, gradient; the same command" in printed.out
    assert "better_head" not in printed.out
    assert "\x1b" not in printed.out
    assert printed.err.splitlines()[-1].startswith("fullrank: interrupted")
    out = tmp_path / "out"
    record = record_in(out)
    assert record.loss is not None
    assert record.anisotropy is not None
    assert {one.question for one in record.missing if one.reason == "interrupted"} == {
        "logprob_rank", "rank_needed", "unreachable", "gradient",
    }  # fmt: skip
    assert "</html>" in (out / "report.html").read_text(encoding="utf8")
    # The rest can be had later, and nothing twice.
    monkeypatch.undo()
    monkeypatch.setattr(collect, "states", None)
    assert diagnose(which=["--only", "logprob_rank", "gradient"]) == 0
    later = record_in(out)
    assert later.loss == record.loss
    assert later.logprob_rank is not None


WAITS = """
import sys, time
from pathlib import Path
from fullrank.diagnose.answers import Answers

def wait(self, progress):
    Path(sys.argv[-1]).touch()
    time.sleep(600)

Answers.spectrum = wait
from fullrank.cli import main
sys.exit(main.run(sys.argv[1:-1]))
"""


# Ten seconds of imports each; what an interruption prints and writes is tested above, and in tests/diagnose
# that every answer is on disk before the next question.
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_costs_only_the_question_in_hand(
    number: signal.Signals, diagnose: Run, byte_llama: Path, text: Path, tmp_path: Path,
    capsys: Capture,
) -> None:  # fmt: skip
    out, there = tmp_path / "out", tmp_path / "there"
    arguments = [str(byte_llama), "--text", str(text), "--out", str(out), *SMALL, *FAST]
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, "diagnose", *arguments, str(there)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    while not there.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    printed, complained = process.communicate(timeout=60)
    killed = record_in(out)
    assert killed.loss is not None
    assert {one.question: one.reason for one in killed.missing}["spectrum"] == "interrupted"
    if number == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM
        assert "not answered: spectrum; the same command goes on" in printed
        assert complained.splitlines()[-1].startswith("fullrank: stopped by SIGTERM")
        assert (out / "report.html").exists()
    else:
        assert process.returncode == -signal.SIGKILL
    assert not [name for name in written(out) if Path(name).name.startswith(".")]
    # The same command goes on.
    assert diagnose() == 0
    assert "kept from an earlier run on the same model and text: loss" in capsys.readouterr().err
    record, made = results.load(out / "results.json")
    assert record.spectrum is not None
    assert (record.loss, record.answered["loss"]) == (killed.loss, killed.answered["loss"])
    assert record.answered["loss"].made.command.endswith(str(there))
    assert record.answered["spectrum"].made.command == made.command


def test_a_begin_token(diagnose: Run, byte_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    begun = tmp_path / "begun"
    shutil.copytree(byte_llama, begun)
    settings = json.loads((begun / "tokenizer_config.json").read_text())
    (begun / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "b"}))
    made = Tokenizer.from_file(str(begun / "tokenizer.json"))
    made.post_processor = TemplateProcessing(single="b $A", special_tokens=[("b", made.token_to_id("b"))])
    made.save(str(begun / "tokenizer.json"))
    for flags, said in (([], ", as the tokenizer has it (--bos no"), (["--bos", "yes"], "")):
        assert diagnose(*flags, "--fresh", "--replace", model=begun) == 0
        assert f"every window begins with b{said}" in capsys.readouterr().err
        assert record_in(tmp_path / "out").text.starts_with_bos
    assert diagnose("--bos", "no", "--replace", model=begun) == 0
    assert "begins with" not in capsys.readouterr().err
    assert not record_in(tmp_path / "out").text.starts_with_bos


@pytest.mark.parametrize("package", ["altair", "vl_convert", "jinja2"])
def test_without_the_packages_of_the_page(
    package: str, diagnose: Run, tmp_path: Path, capsys: Capture,
    monkeypatch: Patch,
) -> None:  # fmt: skip
    assert diagnose("--only", "loss", which=[]) == 0
    monkeypatch.setitem(sys.modules, package, None)
    assert diagnose() == 0
    printed = capsys.readouterr().out
    last = printed.splitlines()[-1]
    assert last.startswith(f"page    none: a report needs the package '{package}'")
    assert "pip install altair vl-convert-python jinja2" in last
    assert "spectrum" in printed
    assert record_in(tmp_path / "out").spectrum is not None
    # The page of other answers would contradict the results.
    assert not (tmp_path / "out" / "report.html").exists()


def test_progress_without_a_terminal(capsys: Capture, monkeypatch: Patch) -> None:
    from rich.console import Console

    from fullrank.cli import progress

    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.Bar(Console()) as bar:
        for second in range(35):
            clock[0] = 100.0 + second
            bar.update("better_head: mos", second / 35)
        bar.update("gradient", 0.0)
        bar.say("out of memory")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "     0 s  better_head: mos", "    10 s  better_head: mos  29%", "    20 s  better_head: mos  57%",
        "    30 s  better_head: mos  86%", "    34 s  gradient", "out of memory",
    ]  # fmt: skip


def test_an_interruption_while_the_model_runs(
    diagnose: Run, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    plain, ran = collect.states, []

    def stop(model: Any, ids: torch.Tensor) -> torch.Tensor:
        if ran:
            raise KeyboardInterrupt
        ran.append(ids)
        return plain(model, ids)

    monkeypatch.setattr(collect, "states", stop)
    assert diagnose() == 130
    assert "interrupted" in capsys.readouterr().err
    out = tmp_path / "out"
    assert [Path(name).suffix for name in written(out)] == [".safetensors"]
    counted: list[int] = []
    monkeypatch.setattr(collect, "states", lambda model, ids: (counted.append(1), plain(model, ids))[1])
    assert diagnose() == 0
    assert len(counted) == 1


def test_a_question_that_fails_is_shown_with_its_reason(
    diagnose: Run, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    interrupt(monkeypatch, "spectrum", FullrankError("got [nothing], expected more"))
    assert diagnose() == 0
    # Brackets are rich's markup: they must come out as they are.
    assert "got [nothing], expected more" in capsys.readouterr().out
    record = record_in(tmp_path / "out")
    assert record.spectrum is None
    assert record.loss is not None


def untimed(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files of a diagnosis without its page and without times of day."""
    return {
        name: re.sub(rb"\d{4}-\d\d-\d\dT[\d:]+", b"", content)
        for name, content in files.items()
        if name != "report.html"
    }


def test_results_survive_runs_that_fail(
    diagnose: Run, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert diagnose() == 0
    before = contents(tmp_path / "out")
    assert {"results.json", "report.html"} < set(before)
    none = tmp_path / "none"
    assert [diagnose("--tokens", "10"), diagnose(text=none), diagnose(model=none)] == [2, 2, 2]
    with monkeypatch.context() as patch:
        interrupt(patch, "loss", TypeError("ours"))
        assert diagnose("--fresh") == 1
        assert "a mistake of ours, TypeError: ours" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        interrupt(patch, "loss", KeyboardInterrupt())
        assert diagnose("--fresh") == 130
        assert "interrupted; earlier answers were kept; the same command" in capsys.readouterr().out
    after = contents(tmp_path / "out")
    # The finished answers are stored again, with the time of that run.
    assert untimed(after) == untimed(before)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert diagnose() == 2
        assert "No space left" in capsys.readouterr().err
    assert contents(tmp_path / "out") == after


def test_a_full_disk_while_states_are_kept(
    diagnose: Run, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert diagnose() == 2
    assert "choose another --out" in capsys.readouterr().err
    assert written(tmp_path / "out") == []


# Training runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps, with a mixture for a head."""
    from fullrank.train.config import override
    from fullrank.train.loop import Options, train
    from fullrank.train.recipes import recipe

    path = tmp_path_factory.mktemp("trained")
    draw = random.Random(0)
    lines = [" ".join(draw.choice(WORDS) for _ in range(9)) for _ in range(120)]
    for split, part in (("train", lines[:60]), ("valid", lines[60:80]), ("test", lines[80:])):
        (path / f"{split}.txt").write_text("\n".join(part) + "\n", encoding="utf8")
    settings = [
        "body.hidden=8", "body.last=6", "head.width=6", "head.components=3", "batch=4", "length=10",
        "steps=4", "evaluate_every=2",
    ]  # fmt: skip
    train(
        override(recipe("awd-lstm", "mos"), settings),
        Options(
            data=(path,), out=path / "mixed", cache=path / "cache", device="cpu", trackers=(), monitors=False
        ),
        None,
    )
    return path / "mixed"


def test_a_training_run(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    """On its test split: what applies to its head is answered, what does not is left out with the reason."""
    out = tmp_path / "out"
    assert main.run(["diagnose", str(trained), "--out", str(out), "--device", "cpu", "--quick"]) == 0
    printed = capsys.readouterr()
    assert "every window begins with <eos>" in printed.err.splitlines()
    assert printed.out.startswith("Undecided: what a better head would buy was not measured.")
    assert "mixed: width 6" in printed.out
    record = record_in(out)
    assert isinstance(record, Diagnosis)
    assert (record.model.name, record.model.source) == ("mixed", "run")
    left_out = {"rank_needed", "better_head", "unreachable", "gradient"}
    assert {one.question for one in record.missing} == left_out
    page = (out / "report.html").read_text(encoding="utf8")
    assert page.count("a mixture of 3 components (mos)") >= len(left_out)
    assert written(out) == ["report.html", "results.json"]


def test_training_runs_that_are_refused(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    out, early = tmp_path / "out", tmp_path / "early"
    shutil.copytree(trained, early, ignore=shutil.ignore_patterns("checkpoints"))
    code = main.run(["diagnose", str(early), "--out", str(out), "--device", "cpu"])
    refused(code, capsys, out, "no checkpoint yet", "let it train")
    code = main.run(["diagnose", str(trained), "--out", str(out), "--revision", "main"])
    refused(code, capsys, out, "--revision was given", "leave it out")
    before = contents(trained)
    assert main.run(["diagnose", str(trained), "--out", f"{trained}/../{trained.name}"]) == 2
    assert "is the run itself" in capsys.readouterr().err
    assert contents(trained) == before
