"""`fullrank generate`: the text alone, one a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import tyro

from fullrank.cli.generate import Generate, generate
from fullrank.errors import FullrankError
from fullrank.models.loading import from_objects
from fullrank.models.sampling import sample, sample_each
from fullrank.models.tokenizer import as_tokenizer
from fullrank.text.vocabulary import Words
from fullrank.train import loaded
from tests import small_models


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    words = Words(["<eos>", "<unk>", *"abcdefg"])
    made = from_objects(small_models.lstm(vocab=words.size, layers=1), as_tokenizer(words))
    monkeypatch.setattr(loaded, "load_any", lambda path, *, checkpoint, device: made)
    return made


def parsed(*arguments: str) -> Generate:
    return tyro.cli(Generate, args=list(arguments))


def test_the_text_alone(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    generate(parsed("runs/t", "--prompt", "a b", "--tokens", "9", "--seed", "4", "--device", "cpu"))
    printed = capsys.readouterr().out
    assert printed == sample(model, "a b", tokens=9, seed=4) + "\n"


def test_several(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    generate(parsed("runs/t", "--tokens", "9", "--count", "2", "--top-k", "3", "--device", "cpu"))
    printed = capsys.readouterr().out
    texts = [sample(model, "", tokens=9, seed=seed, top_k=3) for seed in (0, 1)]
    assert printed == f"{texts[0]}\n\n--- seed 1\n{texts[1]}\n"


def test_several_prompts_and_beams(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tokens", "5", "--temperature", "0", "--beams", "2", "--device", "cpu"]
    generate(parsed("--prompt", "a b", "--prompt", "c", "runs/t", *flags))
    texts = sample_each(model, ["a b", "c"], tokens=5, temperature=0, beams=2)
    assert capsys.readouterr().out == f"{texts[0]}\n\n--- prompt 2\n{texts[1]}\n"


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--count", "0"], "--count"),
        (["--seed", "-1"], "--seed"),
        (["--tokens", "0"], "tokens=0"),
        (["--top-p", "2"], "top_p=2"),
        (["--beams", "2"], "set the temperature to 0"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_users_mistakes(model: Any, flags: list[str], word: str) -> None:
    with pytest.raises(FullrankError, match=word):
        generate(parsed("runs/t", *flags))


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(FullrankError, match=r"has no config\.json"):
        generate(parsed(str(tmp_path), "--device", "cpu"))
