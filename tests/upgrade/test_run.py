"""The command from end to end: a kill or a full disk costs nothing, and its comparison sees everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro

from fullrank import results
from fullrank.cli.upgrade import Upgrade, upgrade
from fullrank.errors import FullrankError
from fullrank.models.loading import Loaded, load, quiet
from fullrank.upgrade import folder, run
from fullrank.upgrade import upgrade as upgraded

TINY = ["--tokens", "640", "--window", "32", "--epochs", "2", "--seeds", "2"]


@pytest.fixture
def saved(tiny_model: Callable[..., Any], tmp_path: Path) -> tuple[Path, Path]:
    """A tiny model on disk, with a tokenizer of words, and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{place}": place for place in range(101)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with quiet():
        tiny_model("llama").save_pretrained(tmp_path / "model")
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    draw = torch.randint(2, 90, (700,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(f"w{number}" for number in draw))
    return tmp_path / "model", tmp_path / "text.txt"


def command(saved: tuple[Path, Path], place: Path, *flags: str) -> list[str]:
    model, text = map(str, saved)
    out, cache = str(place / "out"), str(place / "states")
    return [model, "--train", text, "--out", out, "--cache", cache, *TINY, *flags]


def outcome(place: Path) -> tuple[Any, bytes]:
    """What was found, without times, and the model's file."""
    record, _ = results.load(place / "out" / "results.json")
    assert isinstance(record, results.Upgrade)
    assert record.training is not None
    fits = [(one.head, one.before, one.after, one.after_by_seed, one.steps) for one in record.training.fits]
    tried = [(one.choose_loss, one.control_loss) for one in record.training.candidates]
    model = place / "out" / "model.safetensors"
    return (record.head, fits, tried, record.training.gain), model.read_bytes() if model.exists() else b""


# The whole model's training has its own test of a kill; twice two more runs take four seconds.
@pytest.mark.parametrize("flags", [[], pytest.param(["--unfreeze"], marks=pytest.mark.slow)])
def test_a_failed_write_loses_no_training(
    flags: list[str], saved: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(place: Path) -> None:
        upgrade(tyro.cli(Upgrade, args=command(saved, place, "--seeds", "1", *flags)))

    def full(*arguments: Any) -> None:
        raise FullrankError("the model cannot be written (disk full): free some space")

    go(tmp_path / "straight")
    with monkeypatch.context() as patched:
        patched.setattr(folder, "write_model", full)
        with pytest.raises(FullrankError, match="free some space"):
            go(tmp_path / "failed")
    assert not (tmp_path / "failed" / "out").exists()
    assert list((tmp_path / "failed" / "states").glob("training-*"))
    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.AdamW, "step", None)
        go(tmp_path / "failed")
    assert outcome(tmp_path / "failed") == outcome(tmp_path / "straight")
    assert not list((tmp_path / "failed" / "states").glob("training-*"))


@pytest.mark.slow
@pytest.mark.parametrize("head", ["mos", "auto"])
def test_the_command_killed_ends_as_an_undisturbed_one(
    head: str, saved: tuple[Path, Path], tmp_path: Path
) -> None:
    def go(place: Path, seconds: float) -> bool:
        arguments = command(saved, place, "--head", head)
        process = subprocess.Popen(
            [sys.executable, "-m", "fullrank.cli.main", "upgrade", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            assert process.wait(seconds) == 0
            return True
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return False

    begun = time.monotonic()
    go(tmp_path / "straight", 300.0)
    took = time.monotonic() - begun
    for share in (0.6, 0.7, 0.8, 0.9, 0.95):
        # It may also be killed after its last write: what has the name is whole.
        if go(tmp_path / "killed", share * took) or (tmp_path / "killed" / "out").exists():
            break
    else:
        go(tmp_path / "killed", 300.0)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "straight")


def test_the_comparison_counts_every_token_and_not_only_those_that_came(
    saved: tuple[Path, Path],
) -> None:
    directory, text = saved
    loaded: Loaded = load(directory)
    model = upgraded(loaded, "sigsoftmax")
    assert run.preserved(loaded, model, [text]).largest < 1e-3
    # A token that the text has nowhere, and that is improbable: no loss of the text would show it.
    absent = 95
    with torch.no_grad():
        model.lm_head.decoder.bias[absent] -= 5.0
    moved = run.preserved(loaded, model, [text])
    assert moved.largest == pytest.approx(5.0, abs=0.5)
    assert moved.kl.value > 0
