"""`fullrank eval MODEL --text`: plain and with a cache, judged on text that nothing was tuned on."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest
import tyro

from fullrank import results
from fullrank.cli.eval import Eval, evaluate
from fullrank.errors import FullrankError
from fullrank.fit import collect
from fullrank.models import loading
from fullrank.results import Evaluated
from fullrank.train.cache import Cache, trace_transformers, with_cache


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    draw = random.Random(0)
    path.write_text(" ".join(draw.choice(["sea", "shells", "she", "sells"]) for _ in range(300)))
    return path


def run(*arguments: object) -> Evaluated:
    out = next(Path(str(b)) for a, b in itertools.pairwise(arguments) if a == "--out")
    evaluate(tyro.cli(Eval, args=[str(argument) for argument in arguments]))
    record, _ = results.load(out / "results.json")
    assert isinstance(record, Evaluated)
    return record


def test_plain_and_with_a_cache(
    byte_llama: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [byte_llama, "--text", text, "--limit", 1200, "--length", 32, "--out", tmp_path]
    record = run(*common, "--cache", "--weight", 0.2, "--theta", 0.5, "--window", 90)
    plain, cache = record.scores
    loaded = loading.load(str(byte_llama))
    windows = collect.tokenise(loaded.tokenizer, [text], tokens=1200, window=32, longest=256, in_order=True)
    way = trace_transformers(loaded, windows.ids)
    assert plain.counted == len(way.losses) == record.tokens
    assert plain.loss == pytest.approx(float(np.mean(way.losses)), abs=1e-5)
    assert plain.bits_per_byte == pytest.approx(plain.loss / math.log(2), rel=1e-6)  # a byte a token
    expected = with_cache(way, Cache(weight=0.2, theta=0.5, window=90))
    assert cache.loss == pytest.approx(float(np.mean(expected)), abs=1e-5)
    assert cache.loss < plain.loss - 0.1
    printed = capsys.readouterr().out
    assert "prose.txt" in printed
    assert "step" not in printed

    tuned = run(*common, "--cache", "--tune")
    first = len(windows.ids) // 3 * 31
    assert tuned.scores[0].counted == len(way.losses) - first
    assert tuned.scores[0].loss == pytest.approx(float(np.mean(way.losses[first:])), abs=1e-5)
    assert tuned.scores[1].loss < tuned.scores[0].loss
    assert "first third of the text" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dynamic"], "--dynamic follows"),
        (["--batch", 2], "--batch is for runs"),
        (["--stride", 2], "--stride is for runs"),
        (["--tune"], "--tune chooses settings of --cache"),
        (["nothing-here"], "nothing-here"),
    ],
)
def test_refusals(flags: list[object], message: str, byte_llama: Path, text: Path, tmp_path: Path) -> None:
    model = [] if flags == ["nothing-here"] else [byte_llama]
    with pytest.raises(FullrankError, match=message):
        run(*model, *flags, "--text", text, "--out", tmp_path)
