"""`fullrank train` from the command line: what it prints and writes, and one sentence for every bad input."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fullrank import results
from fullrank.cli.main import run as command
from fullrank.text import store
from fullrank.train import checkpoint
from fullrank.train.config import override
from fullrank.train.recipes import RECIPES, recipe

Capture = pytest.CaptureFixture[str]
Arguments = Callable[..., list[str]]
Refused = Callable[[list[str]], str]
SMALL = (
    "body.hidden=8", "body.last=6", "head.width=6", "head.components=2", "batch=4", "length=5", "steps=6",
    "evaluate_every=3", "evaluate_batch=2", "optimiser.lr=0.02",
)  # fmt: skip


def texts(path: Path, *, seed: int = 0, train: int = 20) -> Path:
    draw = np.random.default_rng(seed)
    path.mkdir(parents=True)
    for split, count in (("train", train), ("valid", 4), ("test", 3)):
        rows = draw.integers(0, 12, (count, 9))
        lines = [" ".join(f"w{word}" for word in row) for row in rows]
        (path / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return path


def settings(*more: str) -> list[str]:
    return [word for setting in (*SMALL, *more) for word in ("--set", setting)]


def snapshot(path: Path) -> dict[str, bytes]:
    # A lock holds nothing.
    files = [one for one in path.rglob("*") if one.is_file() and one.name != ".lock"]
    return {str(one.relative_to(path)): one.read_bytes() for one in files}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("train")
    texts(path / "text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLRANK_CACHE", str(path / "cache"))
        patch.setenv("FULLRANK_DEBUG", "1")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield path
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def arguments(place: Path) -> Arguments:
    def build(out: str, *more: str, data: str = "text", head: str = "mos") -> list[str]:
        return [
            "train", "awd-lstm", "--data", str(place / data), "--head", head, "--out", str(place / out),
            "--device", "cpu", "--track", "none", *settings(), *more,
        ]  # fmt: skip

    return build


@pytest.fixture(scope="module")
def trained(place: Path, arguments: Arguments) -> Path:
    """A finished run with nothing in its way."""
    assert command([*arguments("trained"), "--track", "tensorboard"]) == 0
    return place / "trained"


@pytest.fixture
def stopped(place: Path, trained: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A copy of it that did not come to its end."""
    path = place / f"stopped-{abs(hash(request.node.name))}"
    shutil.copytree(trained, path)
    shutil.rmtree(checkpoint.found(path / "checkpoints", "step")[-1])
    yield path
    shutil.rmtree(path)


def test_a_run_from_the_command_line(trained: Path) -> None:
    record, made = results.load(trained / "results.json")
    assert isinstance(record, results.Training)
    assert made.seed == 0
    assert [(one.split, one.step) for one in record.evaluations] == [("valid", 3), ("valid", 6), ("test", 6)]
    assert (trained / "report.html").stat().st_size > 1000
    assert record.evaluations[0].monitors["head_effective_rank"] > 0


def test_a_finished_run_has_a_card_and_one_that_was_changed_stays(
    place: Path, trained: Path, arguments: Arguments, capsys: Capture
) -> None:
    from huggingface_hub import ModelCard

    record, _ = results.load(trained / "results.json")
    card = ModelCard.load(trained / "README.md")
    assert card.data.to_dict()["tags"] == ["fullrank", "mos"]
    assert f"{record.test.value:.4f} ({record.test.low:.4f} to {record.test.high:.4f})" in card.text
    assert "`components=2`" in card.text
    assert "`train.txt`, `valid.txt`, `test.txt`" in card.text
    assert "`fullrank train awd-lstm --head mos --set body.hidden=8" in card.text
    assert str(place) not in card.content
    # It is part of what an unchanged run goes on with.
    again = place / "carded"
    shutil.copytree(trained, again)
    assert command(arguments("carded", "--set", "steps=8")) == 0
    assert "in 8 steps" in (again / "README.md").read_text()
    (again / "README.md").write_text("mine")
    assert command(arguments("carded", "--set", "steps=9")) == 0
    assert (again / "README.md").read_text() == "mine"
    assert "README.md is not as fullrank left it" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["store", "flat"])
def test_tokens_made_elsewhere_train_the_same(
    kind: str, place: Path, trained: Path, arguments: Arguments
) -> None:
    (tokens,) = (trained / "tokens").iterdir()
    if kind == "flat":
        corpus = store.load(tokens)
        tokens = place / "flat"
        tokens.mkdir()
        for name, split in corpus.splits.items():
            np.asarray(split.tokens).tofile(tokens / f"{name}.bin")
        about = {"vocabulary_size": corpus.vocabulary.size, "end": corpus.vocabulary.eos}
        (tokens / "tokens.json").write_text(json.dumps(about))
    words = arguments(f"from-{kind}", "--verify")
    words[words.index("--data") : words.index("--data") + 2] = ["--tokens", str(tokens)]
    assert command(words) == 0
    found, expected = (results.load(path / "results.json")[0] for path in (place / f"from-{kind}", trained))
    assert [one.loss for one in found.evaluations] == [one.loss for one in expected.evaluations]


def test_tensorboard_is_the_default_and_holds_the_log(trained: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(trained / "tensorboard" / "fullrank"))
    read.Reload()
    lines = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    for tag, event, name, split in (
        ("train/loss", "train", "loss", None),
        ("train/lr", "train", "lr", None),
        ("valid/loss", "evaluate", "loss", "valid"),
        ("test/perplexity", "evaluate", "perplexity", "test"),
    ):
        told = [
            (line["step"], line[name])
            for line in lines
            if line["event"] == event and line.get("split") == split
        ]
        held = [(one.step, one.value) for one in read.Scalars(tag)]
        assert [step for step, _ in held] == [step for step, _ in told]
        assert [value for _, value in held] == pytest.approx([value for _, value in told], rel=1e-6)
    assert "monitor/head_effective_rank" in read.Tags()["scalars"]
    assert "monitor/component_shares/1" in read.Tags()["scalars"]


def test_a_finished_run_is_left_alone(trained: Path, arguments: Arguments, capsys: Capture) -> None:
    before = snapshot(trained)
    assert command(arguments("trained")) == 0
    assert "had already finished; nothing was changed" in capsys.readouterr().out
    assert snapshot(trained) == before


def test_results_that_were_lost_are_written_again(trained: Path, place: Path, arguments: Arguments) -> None:
    # Killed between the last line of the log and the record of it.
    shutil.copytree(trained, place / "lost")
    (place / "lost" / "results.json").unlink()
    assert command(arguments("lost")) == 0
    again, before = (results.load(path / "results.json")[0] for path in (place / "lost", trained))
    assert again.evaluations == before.evaluations


def test_a_killed_run_continues(stopped: Path, trained: Path, arguments: Arguments, capsys: Capture) -> None:
    assert command(arguments(stopped.name)) == 0
    assert "perplexity" in capsys.readouterr().out
    ends = [checkpoint.found(path / "checkpoints", "step")[-1] for path in (stopped, trained)]
    assert ends[0].name == ends[1].name
    for file in ends[0].glob("*.safetensors"):
        assert file.read_bytes() == (ends[1] / file.name).read_bytes()


@pytest.mark.parametrize("name", RECIPES)
def test_printed_settings_are_settings(name: str, capsys: Capture) -> None:
    flags = ["--print-config", "--head", "mos", "--components", "3", "--width", "8", "--seed", "5"]
    flags += ["--set", "steps=7"]
    assert command(["train", name, *flags]) == 0
    printed = capsys.readouterr().out.splitlines()
    config = override(recipe("transformer-tiny"), printed)
    assert config == override(recipe(name, "mos"), ["head.components=3", "head.width=8", "seed=5", "steps=7"])
    again = [word for line in printed for word in ("--set", line)]
    assert command(["train", "awd-lstm", "--print-config", *again]) == 0
    assert capsys.readouterr().out.splitlines() == printed


# Refusals


@pytest.fixture
def refused(place: Path, capsys: Capture) -> Refused:
    """The sentence of a command that exits with 2 and changes no file."""

    def files() -> dict[str, bytes]:
        # Token files are built once and serve the next run.
        return {name: content for name, content in snapshot(place).items() if not name.startswith("cache")}

    def run(words: list[str]) -> str:
        before = files()
        try:
            assert command(words) == 2
            message = capsys.readouterr().err
            assert message.startswith("fullrank: ")
            assert message.count("\n") == 1, message
        except SystemExit:
            # The parser has its own form.
            message = capsys.readouterr().err
        assert files() == before
        return message

    return run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("awd-lstmm", "did you mean 'awd-lstm'?"),
        ("awd-lstm --head mosh", "did you mean 'mos'?"),
        ("awd-lstm --set stepz=3", "did you mean steps?"),
        ("awd-lstm --set steps=soon", "a whole number"),
        ("awd-lstm --set steps", "name=value"),
        ("awd-lstm --set batch=0", "at least 1"),
        ("awd-lstm --set batch=7 --set accumulate=2", "multiple"),
        ("awd-lstm", "pass --data"),
        ("awd-lstm --tokens a --data b", "choose one"),
    ],
)
def test_refusals_of_settings(refused: Refused, place: Path, words: str, message: str) -> None:
    assert message in refused(["train", *words.split(), "--out", str(place / "bad")])
    assert not (place / "bad").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--set batch=1000", "one batch of 1000 sequences of 5 needs 5001"),
        ("--set body.hidden=0", "hidden"),
        ("--set body.dropout=1", "dropout"),
        ("--set head.components=0", "components"),
        ("--set body.embedding=7", "cannot be tied"),
        ("--vocab-parallel", "--set head.tie=false"),
        ("--device tpu", "expected auto, cpu, cuda or mps"),
        pytest.param(
            "--device cuda", "pass --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
        ),
        *(
            pytest.param(
                f"--track {name}", f"pip install {name}",
                marks=pytest.mark.skipif(importlib.util.find_spec(name) is not None, reason="installed"),
            )
            for name in ("wandb", "trackio")
        ),
        ("--track mlflow", "tensorboard"),
    ],
)  # fmt: skip
def test_refusals_of_runs(
    refused: Refused, arguments: Arguments, place: Path, more: str, message: str
) -> None:
    assert message in refused(arguments("bad", *more.split()))
    assert not (place / "bad" / "run.json").exists()


def blank(path: Path) -> None:
    path.mkdir()
    for split in ("train", "valid", "test"):
        (path / f"{split}.txt").write_text(" \n\n")


def unknown_word(path: Path) -> None:
    texts(path)
    (path / "valid.txt").write_text("w1 novelty w2\n")


@pytest.mark.parametrize(
    ("name", "write", "more", "message"),
    [
        ("empty", Path.mkdir, "", ""),
        ("missing", lambda path: None, "", ""),
        ("blank", blank, "", ""),
        ("unknown", unknown_word, "--set data.vocabulary_from=train", "novelty"),
    ],
)
def test_refusals_of_text(
    refused: Refused, arguments: Arguments, place: Path, name: str, write: Callable[[Path], None], more: str,
    message: str,
) -> None:  # fmt: skip
    write(place / f"text-{name}")
    assert message in refused(arguments("bad", *more.split(), data=f"text-{name}"))
    assert not (place / "bad" / "run.json").exists()


def test_refusals_to_continue(
    refused: Refused, arguments: Arguments, stopped: Path, trained: Path, place: Path
) -> None:
    message = refused(arguments(stopped.name, "--set", "optimiser.lr=0.5", "--seed", "3"))
    assert "optimiser.lr was 0.02 and is 0.5" in message
    assert "seed was 0 and is 3" in message
    refused(arguments(trained.name, head="softmax"))
    texts(place / "text-other", seed=9)
    assert "other data" in refused(arguments(stopped.name, data="text-other"))
    with (stopped / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "in use by another process" in refused(arguments(stopped.name))


def test_a_checkpoint_of_another_architecture_is_refused(
    refused: Refused, arguments: Arguments, stopped: Path, place: Path, capsys: Capture
) -> None:
    assert command(arguments("wider", "--set", "body.hidden=10", "--no-monitors")) == 0
    last = checkpoint.found(stopped / "checkpoints", "step")[-1]
    shutil.rmtree(last)
    shutil.copytree(place / "wider" / "checkpoints" / last.name, last)
    capsys.readouterr()
    assert "another architecture" in refused(arguments(stopped.name))
    shutil.rmtree(place / "wider")


@pytest.mark.parametrize(
    ("out", "file", "content", "message"),
    [
        ("mine", "thesis.txt", "years of work", "thesis.txt"),
        ("model", "config.json", '{"model_type": "gpt2"}', ""),
        ("file", None, "in the way", "choose another --out"),
        ("other/below", None, "in the way", "choose another --out"),
    ],
)
def test_refusals_of_places(
    refused: Refused,
    arguments: Arguments,
    place: Path,
    out: str,
    file: str | None,
    content: str,
    message: str,
) -> None:
    path = place / out.split("/")[0]
    if file is not None:
        path.mkdir()
        path = path / file
    path.write_text(content)
    assert message in refused(arguments(out))


def test_losses_that_are_not_finite_stop_the_run(place: Path, arguments: Arguments, capsys: Capture) -> None:
    more = "optimiser.lr=1e6 optimiser.clip=0 optimiser.name=nt-asgd checkpoint_every=1 steps=50"
    words = [word for setting in more.split() for word in ("--set", setting)]
    assert command(arguments("nan", *words)) == 2
    message = capsys.readouterr().err
    assert message.startswith("fullrank: ")
    assert message.count("\n") == 1
    assert "not finite" in message
    assert "is the last good checkpoint" in message
    lines = [json.loads(line) for line in (place / "nan" / "log.jsonl").read_text().splitlines()]
    assert lines[-2]["kind"] == "nan"
    assert lines[-1]["reason"] == "nan"
    stored = checkpoint.read(checkpoint.found(place / "nan" / "checkpoints", "step")[-1])
    assert all(bool(torch.isfinite(weight).all()) for weight in stored.groups["model"].values())
