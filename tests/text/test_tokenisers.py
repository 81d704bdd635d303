"""Tokenisers by name: the same ids after a round through a folder, and a sentence for what is none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fullrank.errors import FullrankError
from fullrank.text import tokenisers
from fullrank.text.tokenisers import Tokeniser, build, load
from fullrank.text.vocabulary import Bpe

TEXTS = [f"line {number} of {number * 7 % 13} plain words, ä\n" for number in range(300)]


def made(name: str) -> Tokeniser:
    return build(name, lambda: TEXTS, sum(map(len, TEXTS)))


@pytest.mark.parametrize(("name", "size"), [("bytes", 256), ("words", 306), ("bpe:300", 300)])
def test_a_tokeniser_comes_back_from_its_folder(tmp_path: Path, name: str, size: int) -> None:
    tokeniser = made(name)
    assert tokeniser.size == size
    tokeniser.save(tmp_path)
    again = load(tmp_path)
    assert (again.name, again.size) == (name, size)
    for text in TEXTS[:5]:
        ids = tokeniser.encode(text, ends=True)
        assert ids.dtype == np.int64
        np.testing.assert_array_equal(ids, again.encode(text, ends=True))


def test_only_words_end_a_document() -> None:
    text = "line 1"
    assert len(made("words").encode(text, ends=True)) == 3
    assert len(made("words").encode(text, ends=False)) == 2
    for name in ("bytes", "bpe:300"):
        one, two = (made(name).encode(text, ends=ends) for ends in (True, False))
        np.testing.assert_array_equal(one, two)


def test_files_and_directories_of_tokenizers_are_read(tmp_path: Path) -> None:
    bpe = Bpe.train(TEXTS, 300)
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe.tokenizer.to_str())
    expected = bpe.encode(TEXTS[0], end=False)
    for name in (path, tmp_path):
        tokeniser = build(str(name), list, 0)
        assert tokeniser.encode(TEXTS[0], ends=True).tolist() == expected
        assert str(tmp_path.parent) not in tokeniser.name


@pytest.mark.parametrize("name", ["bpe:", "bpe:12", "bpe:many"])
def test_sizes_that_are_none(name: str) -> None:
    with pytest.raises(FullrankError, match=r"such as bpe:32000"):
        tokenisers.check(name)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "a.txt"
    text.write_text("text")
    broken = tmp_path / "tokenizer.json"
    broken.write_text(json.dumps({"model": 1}))

    def unreachable(name: str, **_: object) -> None:
        raise OSError("We couldn't connect\nand say so at length")

    monkeypatch.setattr(tokenisers, "_auto", unreachable)
    monkeypatch.setattr(tokenisers, "_reached", lambda name: False)
    for name in (text, broken, "some/name"):
        with pytest.raises(FullrankError, match=r"bytes, words, bpe:SIZE") as caught:
            build(str(name), list, 0)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_what_transformers_cannot_load_is_refused(tmp_path: Path) -> None:
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(b"no GGUF")
    with pytest.raises(FullrankError, match=r"a\.gguf is damaged"):
        build(str(gguf), list, 0)
    (tmp_path / "empty").mkdir()
    for name in (tmp_path / "empty", "no-such-name-on-any-hub"):
        with pytest.raises(FullrankError, match=r"bytes, words, bpe:SIZE"):
            build(str(name), list, 0)


def test_a_bpe_of_a_long_text_is_trained_on_stretches_of_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenisers, "TRAINING_TEXT", 1000)
    characters = sum(map(len, TEXTS))
    taken = list(tokenisers.sampled(TEXTS, characters))
    assert 900 < sum(map(len, taken)) < 1100
    places = [TEXTS.index(text) for text in taken]
    assert places[0] < 60
    assert places[-1] > 240


def test_text_without_words_is_refused() -> None:
    with pytest.raises(FullrankError, match="no words"):
        build("words", lambda: [" \t "], 3)
