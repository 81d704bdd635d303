"""`fullrank eval MODEL --text`: plain and with a cache, judged on text that nothing was tuned on."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro

from fullrank import results
from fullrank.cli.eval import Eval, evaluate
from fullrank.errors import FullrankError
from fullrank.fit import collect
from fullrank.models import loading
from fullrank.results import Evaluated
from fullrank.train.cache import Cache, trace_transformers, with_cache


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        **sizes, vocab_size=256, max_position_embeddings=64, bos_token_id=None, eos_token_id=None
    )
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with loading.quiet():
        LlamaForCausalLM(config).save_pretrained(directory)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    draw = random.Random(0)
    path.write_text(
        " ".join(draw.choice(["sea", "shells", "she", "sells"]) for _ in range(300)), encoding="utf8"
    )
    return path


def run(*arguments: object) -> Evaluated:
    out = next(Path(str(b)) for a, b in itertools.pairwise(arguments) if a == "--out")
    evaluate(tyro.cli(Eval, args=[str(argument) for argument in arguments]))
    record, _ = results.load(out / "results.json")
    assert isinstance(record, Evaluated)
    return record


def test_plain_and_with_a_cache(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [model, "--text", text, "--limit", 1200, "--length", 32, "--out", tmp_path]
    record = run(*common, "--cache", "--weight", 0.2, "--theta", 0.5, "--window", 90)
    plain, cache = record.scores
    loaded = loading.load(str(model))
    windows = collect.tokenise(loaded.tokenizer, [text], tokens=1200, window=32, longest=64, in_order=True)
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


def test_what_only_a_run_can_be_asked(model: Path, text: Path, tmp_path: Path) -> None:
    common = [model, "--text", text, "--out", tmp_path]
    for more, message in [
        (["--dynamic"], "--dynamic follows"),
        (["--batch", 2], "--batch is for runs"),
        (["--stride", 2], "--stride is for runs"),
        (["--tune"], "--tune chooses settings of --cache"),
    ]:
        with pytest.raises(FullrankError, match=message):
            run(*common, *more)
    with pytest.raises(FullrankError, match="nothing-here"):
        run(tmp_path / "nothing-here", "--text", text, "--out", tmp_path)
