"""`fullrank train` from the command line: what it prints and writes, and one sentence for every bad input."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullrank import results
from fullrank.cli.main import run as command
from fullrank.text import store
from fullrank.train import checkpoint
from fullrank.train.config import override
from fullrank.train.recipes import RECIPES, recipe

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
def arguments(place: Path) -> Callable[..., list[str]]:
    def build(out: str, *more: str, data: str = "text", head: str = "mos") -> list[str]:
        return [
            "train", "awd-lstm", "--data", str(place / data), "--head", head, "--out", str(place / out),
            "--device", "cpu", "--track", "none", *settings(), *more,
        ]  # fmt: skip

    return build


@pytest.fixture(scope="module")
def trained(place: Path, arguments: Callable[..., list[str]]) -> Path:
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
    place: Path, trained: Path, arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
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
    kind: str, place: Path, trained: Path, arguments: Callable[..., list[str]]
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


def test_a_finished_run_is_left_alone(
    trained: Path, arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(trained)
    assert command(arguments("trained")) == 0
    assert "had already finished; nothing was changed" in capsys.readouterr().out
    assert snapshot(trained) == before


def test_results_that_were_lost_are_written_again(
    trained: Path, place: Path, arguments: Callable[..., list[str]]
) -> None:
    # Killed between the last line of the log and the record of it.
    shutil.copytree(trained, place / "lost")
    (place / "lost" / "results.json").unlink()
    assert command(arguments("lost")) == 0
    again, before = (results.load(path / "results.json")[0] for path in (place / "lost", trained))
    assert again.evaluations == before.evaluations


def test_a_killed_run_continues(
    stopped: Path, trained: Path, arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(arguments(stopped.name)) == 0
    assert "perplexity" in capsys.readouterr().out
    ends = [checkpoint.found(path / "checkpoints", "step")[-1] for path in (stopped, trained)]
    assert ends[0].name == ends[1].name
    for file in ends[0].glob("*.safetensors"):
        assert file.read_bytes() == (ends[1] / file.name).read_bytes()


@pytest.mark.parametrize("name", RECIPES)
def test_printed_settings_are_settings(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "train",
        name,
        "--print-config",
        "--head",
        "mos",
        "--components",
        "3",
        "--width",
        "8",
        "--seed",
        "5",
    ]
    assert command([*words, "--set", "steps=7"]) == 0
    printed = capsys.readouterr().out.splitlines()
    config = override(recipe("transformer-tiny"), printed)
    assert config == override(recipe(name, "mos"), ["head.components=3", "head.width=8", "seed=5", "steps=7"])
    again = [word for line in printed for word in ("--set", line)]
    assert command(["train", "awd-lstm", "--print-config", *again]) == 0
    assert capsys.readouterr().out.splitlines() == printed


class TestBadInput:
    """Exit code 2, one sentence, and no file other than it was."""

    @pytest.fixture
    def refused(self, place: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], str]:
        def run(words: list[str]) -> str:
            before = snapshot(place)
            try:
                code = command(words)
            except SystemExit as stop:
                # The parser's own.
                code = int(stop.code or 0)
            assert code == 2
            said = capsys.readouterr().err
            assert "Traceback" not in said
            after = snapshot(place)
            # Token files are not the run's: they are built once and serve the next try.
            kept = {name for name in after if not name.startswith("cache")}
            assert kept == {name for name in before if not name.startswith("cache")}
            assert all(after[name] == before[name] for name in kept)
            return said

        return run

    def one_sentence(self, said: str) -> None:
        assert said.startswith("fullrank: ")
        assert said.count("\n") == 1, said

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["train", "awd-lstmm"], "did you mean 'awd-lstm'?"),
            (["train", "awd-lstm", "--head", "mosh"], "did you mean 'mos'?"),
            (["train", "awd-lstm", "--set", "stepz=3"], "did you mean steps?"),
            (["train", "awd-lstm", "--set", "steps=soon"], "a whole number"),
            (["train", "awd-lstm", "--set", "steps"], "name=value"),
            (["train", "awd-lstm", "--set", "batch=0"], "at least 1"),
            (["train", "awd-lstm", "--set", "batch=7", "--set", "accumulate=2"], "multiple"),
            (["train", "awd-lstm"], "pass --data"),
            (["train", "awd-lstm", "--tokens", "a", "--data", "b"], "choose one"),
        ],
    )
    def test_settings(
        self, refused: Callable[[list[str]], str], place: Path, words: list[str], expected: str
    ) -> None:
        said = refused([*words, "--out", str(place / "bad")])
        self.one_sentence(said)
        assert expected in said
        assert not (place / "bad").exists()

    @pytest.mark.parametrize(
        ("more", "expected"),
        [
            (["--set", "batch=1000"], "one batch of 1000 sequences of 5 needs 5001"),
            (["--set", "body.hidden=0"], "hidden"),
            (["--set", "body.dropout=1"], "dropout"),
            (["--set", "head.components=0"], "components"),
            (["--set", "body.embedding=7"], "cannot be tied"),
            (["--vocab-parallel"], "--set head.tie=false"),
            (["--device", "tpu"], "expected auto, cpu, cuda or mps"),
        ],
    )
    def test_what_the_run_cannot_do(
        self,
        refused: Callable[[list[str]], str],
        arguments: Callable[..., list[str]],
        place: Path,
        more: list[str],
        expected: str,
    ) -> None:
        said = refused(arguments("bad", *more))
        self.one_sentence(said)
        assert expected in said
        assert not (place / "bad" / "run.json").exists()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
    def test_no_such_device(
        self, refused: Callable[[list[str]], str], arguments: Callable[..., list[str]]
    ) -> None:
        said = refused(arguments("bad", "--device", "cuda"))
        self.one_sentence(said)
        assert "pass --device cpu" in said

    @pytest.mark.parametrize("name", ["wandb", "trackio"])
    def test_a_tracker_that_is_not_installed(
        self, refused: Callable[[list[str]], str], arguments: Callable[..., list[str]], name: str
    ) -> None:
        if importlib.util.find_spec(name):
            pytest.skip("it is installed")
        said = refused(arguments("bad", "--track", name))
        self.one_sentence(said)
        assert f"pip install {name}" in said

    def test_an_unknown_tracker(
        self, refused: Callable[[list[str]], str], arguments: Callable[..., list[str]]
    ) -> None:
        assert "tensorboard" in refused(arguments("bad", "--track", "mlflow"))

    @pytest.mark.parametrize("what", ["empty", "missing", "blank"])
    def test_no_text(
        self,
        refused: Callable[[list[str]], str],
        arguments: Callable[..., list[str]],
        place: Path,
        what: str,
    ) -> None:
        source = place / f"text-{what}"
        if what != "missing":
            source.mkdir()
        if what == "blank":
            for split in ("train", "valid", "test"):
                (source / f"{split}.txt").write_text(" \n\n")
        self.one_sentence(refused(arguments("bad", data=source.name)))
        assert not (place / "bad" / "run.json").exists()

    def test_a_word_outside_the_vocabulary(
        self, refused: Callable[[list[str]], str], arguments: Callable[..., list[str]], place: Path
    ) -> None:
        source = texts(place / "text-unknown")
        (source / "valid.txt").write_text("w1 novelty w2\n")
        said = refused(arguments("bad", "--set", "data.vocabulary_from=train", data="text-unknown"))
        self.one_sentence(said)
        assert "novelty" in said

    def test_another_config(
        self, refused: Callable[[list[str]], str], arguments: Callable[..., list[str]], stopped: Path
    ) -> None:
        said = refused(arguments(stopped.name, "--set", "optimiser.lr=0.5", "--seed", "3"))
        self.one_sentence(said)
        assert "optimiser.lr was 0.02 and is 0.5" in said
        assert "seed was 0 and is 3" in said

    def test_another_config_on_a_finished_run(
        self, refused: Callable[[list[str]], str], arguments: Callable[..., list[str]], trained: Path
    ) -> None:
        self.one_sentence(refused(arguments(trained.name, head="softmax")))

    def test_other_data(
        self,
        refused: Callable[[list[str]], str],
        arguments: Callable[..., list[str]],
        stopped: Path,
        place: Path,
    ) -> None:
        texts(place / "text-other", seed=9)
        said = refused(arguments(stopped.name, data="text-other"))
        self.one_sentence(said)
        assert "other data" in said

    def test_a_checkpoint_of_another_architecture(
        self,
        refused: Callable[[list[str]], str],
        arguments: Callable[..., list[str]],
        stopped: Path,
        place: Path,
    ) -> None:
        assert command(arguments("wider", "--set", "body.hidden=10", "--no-monitors")) == 0
        own = checkpoint.found(stopped / "checkpoints", "step")[-1]
        shutil.rmtree(own)
        shutil.copytree(place / "wider" / "checkpoints" / own.name, own)
        said = refused(arguments(stopped.name))
        self.one_sentence(said)
        assert "another architecture" in said
        shutil.rmtree(place / "wider")

    def test_a_directory_of_something_else(
        self, refused: Callable[[list[str]], str], arguments: Callable[..., list[str]], place: Path
    ) -> None:
        (place / "mine").mkdir()
        (place / "mine" / "thesis.txt").write_text("years of work")
        said = refused(arguments("mine"))
        self.one_sentence(said)
        assert "thesis.txt" in said
        assert [one.name for one in (place / "mine").iterdir()] == ["thesis.txt"]

    def test_a_directory_of_a_model(
        self, refused: Callable[[list[str]], str], arguments: Callable[..., list[str]], place: Path
    ) -> None:
        (place / "model").mkdir()
        (place / "model" / "config.json").write_text('{"model_type": "gpt2"}')
        self.one_sentence(refused(arguments("model")))

    def test_a_directory_in_use(
        self, refused: Callable[[list[str]], str], arguments: Callable[..., list[str]], stopped: Path
    ) -> None:
        with (stopped / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            said = refused(arguments(stopped.name))
        self.one_sentence(said)
        assert "in use by another process" in said

    @pytest.mark.parametrize("out", ["file", "file/below"])
    def test_a_place_that_cannot_be_written(
        self, refused: Callable[[list[str]], str], arguments: Callable[..., list[str]], place: Path, out: str
    ) -> None:
        (place / "file").write_text("in the way")
        said = refused(arguments(out))
        self.one_sentence(said)
        assert "choose another --out" in said

    def test_no_number(
        self, place: Path, arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        more = [
            "optimiser.lr=1e6",
            "optimiser.clip=0",
            "optimiser.name=nt-asgd",
            "checkpoint_every=1",
            "steps=50",
        ]
        words = [word for setting in more for word in ("--set", setting)]
        assert command(arguments("nan", *words)) == 2
        said = capsys.readouterr().err
        self.one_sentence(said)
        assert "not finite" in said
        assert "is the last good checkpoint" in said
        lines: list[dict[str, Any]] = [
            json.loads(line) for line in (place / "nan" / "log.jsonl").read_text().splitlines()
        ]
        assert lines[-2]["kind"] == "nan"
        assert lines[-1]["reason"] == "nan"
        stored = checkpoint.read(checkpoint.found(place / "nan" / "checkpoints", "step")[-1])
        assert all(bool(torch.isfinite(one).all()) for one in stored.groups["model"].values())
