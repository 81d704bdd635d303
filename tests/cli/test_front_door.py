"""Input that once made a command hang or take all memory is refused at once, in one sentence, with nothing
written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fullrank.cli import main
from fullrank.errors import FullrankError
from fullrank.text import tokenisers, vocabulary
from fullrank.train.cache import Cache
from fullrank.train.config import override
from fullrank.train.dynamic import Dynamic
from fullrank.train.model import build
from fullrank.train.recipes import recipe

TEXT = "one two three four five six seven eight nine ten\n" * 400


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FULLRANK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    for name in ("pipe", "pipe.txt", "pipe.csv", "pipe.json", "pipe.gguf"):
        os.mkfifo(tmp_path / name)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], out: Path, *arguments: str) -> str:
    """The sentence of a command that refuses its input and writes nothing."""
    assert main.run([*arguments, "--out", str(out)]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("fullrank: ")
    assert not out.exists()
    return said.removeprefix("fullrank: ")


TINY = ("--set", "body.hidden=8", "--set", "body.heads=2", "--set", "body.layers=1", "--set", "batch=2",
        "--set", "length=8", "--set", "data.bpe_size=300", "--track", "none", "--no-monitors")  # fmt: skip

SPECIAL = {
    "train text": ("train", "transformer-tiny", "--data", "{pipe}.txt"),
    "train tokens": ("train", "transformer-tiny", "--tokens", "{pipe}"),
    "train run": ("train", "--from", "{pipe}"),
    "train tokenizer": (
        "train", "transformer-tiny", "--data", "{text}", "--set", "data.tokenizer={pipe}.json",
    ),
    "eval run": ("eval", "{pipe}"),
    "corpus text": ("corpus", "dimension", "{pipe}.txt", "--tokenizer", "words"),
    "corpus tokenizer": ("corpus", "dimension", "{text}", "--tokenizer", "{pipe}.json"),
    "corpus gguf": ("corpus", "dimension", "{text}", "--tokenizer", "{pipe}.gguf"),
    "series": ("series", "{pipe}.csv"),
    "report": ("report", "{pipe}.json"),
    "diagnose": ("diagnose", "{pipe}"),
    "diagnose gguf": ("diagnose", "{pipe}.gguf"),
    "upgrade": ("upgrade", "{pipe}"),
    "collapse": ("collapse", "{pipe}"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
def test_a_pipe_is_refused_by_every_command(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(pipe=place / "pipe", text=place / "text.txt") for word in SPECIAL[name]]
    refused(capsys, place / "out", *words)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("device", [False, True])
def test_a_model_directory_with_a_pipe_or_a_device_is_refused(
    file: str,
    device: bool,
    place: Path,
    tiny_checkpoint: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = place / "model"
    shutil.copytree(tiny_checkpoint("llama"), model)
    (model / file).unlink(missing_ok=True)
    if device:
        (model / file).symlink_to("/dev/zero")
    else:
        os.mkfifo(model / file)
    said = refused(capsys, place / "out", "diagnose", str(model), "--text", str(place / "text.txt"))
    assert f"{file} is a {'device' if device else 'named pipe'}, expected a regular file" in said


@pytest.mark.parametrize("file", ["run.json", "log.jsonl", ".lock"])
def test_a_run_directory_with_a_pipe_is_refused(
    file: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place / "run"
    run.mkdir()
    os.mkfifo(run / file)
    assert (
        main.run(["train", "transformer-tiny", "--data", str(place / "text.txt"), "--out", str(run), *TINY])
        == 2
    )
    assert "is a named pipe" in capsys.readouterr().err
    assert [path.name for path in run.iterdir()] == [file]


@pytest.mark.parametrize("special", ["train.bin", "tokens.json"])
def test_tokens_of_a_pipe_are_refused(special: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = place / "tokens"
    tokens.mkdir()
    (tokens / "train.bin").write_bytes(bytes(4000))
    (tokens / "tokens.json").write_text('{"vocabulary_size": 300}')
    (tokens / special).unlink()
    os.mkfifo(tokens / special)
    said = refused(capsys, place / "out", "train", "transformer-tiny", "--tokens", str(tokens), *TINY)
    assert f"{special} is a named pipe" in said


def test_results_that_are_a_device_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "results.json").symlink_to("/dev/zero")
    assert "is a device" in refused(capsys, place / "page.html", "report", str(place))


@pytest.mark.parametrize(
    "setting",
    ["steps=1e99", "steps=1e12", "epochs=1e300", "body.layers=1e9", "body.hidden=1e15", "batch=1e99",
     "length=1e99", "keep=1e99", "seed=1e99", "head.contexts=1000000000", "budget=tokens=1e99",
     "budget=flops=1e300", "body.vocabulary_multiple=1e99", "data.bpe_size=1e99", "optimiser.warmup=1e99"],
)  # fmt: skip
def test_settings_beyond_all_use_are_refused_before_anything_is_read(setting: str) -> None:
    with pytest.raises(FullrankError, match=r"at most|that a run can live to see"):
        override(recipe("transformer-tiny"), [setting])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("transformer-tiny", ["body.hidden=1e6"]),
        ("transformer-tiny", ["body.inner=1e12"]),
        ("transformer-tiny", ["body.layers=9999", "body.hidden=65536"]),
        ("transformer-tiny", ["body.vocabulary_multiple=1e12"]),
        ("awd-lstm", ["body.hidden=1e7"]),
        ("awd-lstm", ["head.name=mos", "head.components=1e11"]),
    ],
)
def test_models_beyond_memory_are_not_built(name: str, settings: list[str]) -> None:
    config = override(recipe(name), settings)
    with pytest.raises(FullrankError, match=r"parameters, .* GiB where this machine has"):
        build(config, 1000)


def test_a_refused_run_leaves_no_directory(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "train",
        "transformer-tiny",
        "--data",
        str(place / "text.txt"),
        *TINY,
        "--set",
        "body.inner=1e12",
    )
    assert "parameters" in refused(capsys, place / "out", *words)
    assert "expected at most" in refused(capsys, place / "out", *words[:-1], "data.bpe_size=1e12")


@pytest.mark.parametrize("command", ["corpus", "train"])
def test_a_tokenizer_with_an_id_in_the_billions_is_refused(
    command: str, place: Path, tiny_tokenizer: object, capsys: pytest.CaptureFixture[str]
) -> None:
    file = place / "tokenizer.json"
    document = json.loads(tiny_tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    words = document["model"]["vocab"]
    words[max(words, key=words.__getitem__)] = 4_000_000_000
    file.write_text(json.dumps(document))
    text = str(place / "text.txt")
    arguments = {
        "corpus": ("corpus", "dimension", text, "--tokenizer", str(file)),
        "train": ("train", "transformer-tiny", "--data", text, *TINY, "--set", f"data.tokenizer={file}"),
    }[command]
    assert "a vocabulary of 4,000,000,001 was asked for" in refused(capsys, place / "out", *arguments)


def test_vocabularies_beyond_all_use_are_refused() -> None:
    with pytest.raises(FullrankError, match="expected at most"):
        vocabulary.Numbers(4_000_000_000, 0)
    with pytest.raises(FullrankError, match="expected at most"):
        tokenisers.check("bpe:1000000000000")


@pytest.mark.parametrize(
    "settings",
    [{"decay": 1.5}, {"decay": -0.1}, {"decay": float("nan")}, {"lr": -1.0}, {"lr": float("nan")},
     {"lr": 1e300}, {"epsilon": 0.0}, {"epsilon": float("inf")}, {"epsilon": float("nan")}],
)  # fmt: skip
def test_rates_of_dynamic_evaluation_that_are_none(settings: dict[str, float]) -> None:
    with pytest.raises(FullrankError, match="is impossible: expected"):
        Dynamic(**settings)  # type: ignore[arg-type]


def test_other_numbers_beyond_all_use(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FullrankError, match="theta=1e"):
        Cache(theta=1e300)
    for flags in (("--memory", "1e300"), ("--memory", "nan"), ("--tokens", "1000000000000")):
        for command in ("diagnose", "upgrade"):
            assert flags[0] in refused(capsys, place / "out", command, "model", *flags)
    assert "--contexts" in refused(capsys, place / "out", "demo", "--contexts", "1000000000")
