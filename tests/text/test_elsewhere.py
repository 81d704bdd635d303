"""Tokens made elsewhere: taken as they are, checked, and refused in a sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from fullrank.errors import FullrankError
from fullrank.text import elsewhere, stages, store
from fullrank.text.elsewhere import prepare
from fullrank.text.settings import DataConfig
from fullrank.text.vocabulary import Bpe

CONFIG = DataConfig(valid_share=0.1, test_share=0.1)


def flat(folder: Path, **splits: np.ndarray) -> Path:
    """nanoGPT's files."""
    folder.mkdir(exist_ok=True)
    for name, ids in splits.items():
        ids.astype("<u2").tofile(folder / f"{name}.bin")
    return folder


def said(folder: Path, **about: object) -> Path:
    (folder / elsewhere.DESCRIPTION).write_text(json.dumps(about))
    return folder


def test_flat_files_become_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "AT_ONCE", 64)
    train, valid = np.arange(1000) % 50, np.arange(90) % 7
    source = said(flat(tmp_path / "tokens", train=train, val=valid), vocabulary_size=50, end=49)
    corpus = prepare(source, CONFIG, tmp_path / "cache")
    # No test split: the end of the training tokens.
    assert np.array_equal(corpus.splits["train"].tokens, train[:900])
    assert np.array_equal(corpus.splits["test"].tokens, train[900:])
    assert np.array_equal(corpus.splits["valid"].tokens, valid)
    assert (corpus.vocabulary.size, corpus.vocabulary.eos, corpus.vocabulary.level) == (50, 49, "ids")
    assert "end of train" in corpus.describe()["split_by"]
    assert corpus.vocabulary.decode([1, 2]) == "1 2"
    with pytest.raises(FullrankError, match="came without a tokenizer"):
        corpus.vocabulary.encode("text")
    # A store is taken as it is.
    again = prepare(corpus.folder, CONFIG, tmp_path / "other")
    assert (again.digest, again.folder) == (corpus.digest, corpus.folder)
    assert not (tmp_path / "other").exists()
    # Nothing is read again at the next start, and other content is noticed.
    for path in source.iterdir():
        os.utime(path, (10**9, 10**9))
    prepare(source, CONFIG, tmp_path / "cache")
    with monkeypatch.context() as patched:
        patched.setattr(elsewhere, "sha256", lambda path: pytest.fail("hashed again"))
        assert prepare(source, CONFIG, tmp_path / "cache").folder == corpus.folder
    flat(source, train=train[::-1].copy())
    assert prepare(source, CONFIG, tmp_path / "cache").digest != corpus.digest


def test_all_three_missing_and_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "AT_ONCE", 7)
    source = tmp_path / "tokens"
    source.mkdir()
    parts = [np.arange(40), np.arange(40, 100)]
    for number, part in enumerate(parts):
        np.save(source / f"train_{number}.npy", part.astype(np.int64))
    corpus = prepare(source, DataConfig(vocabulary_size=70_000), tmp_path / "cache")
    tokens = [corpus.splits[name].tokens for name in ("train", "valid", "test")]
    assert [len(part) for part in tokens] == [90, 5, 5]
    assert np.array_equal(np.concatenate(tokens), np.arange(100))
    assert tokens[0].dtype == np.uint32


def test_a_tokenizer_beside_the_tokens(tmp_path: Path) -> None:
    bpe, text = Bpe.train(["the cat sat on the mat"] * 20, 270), "the cat sat on the mät, 日本\n" * 20
    ids = np.array(bpe.encode(text))
    source = flat(tmp_path / "tokens", train=ids, valid=ids, test=ids)
    bpe.save(source)
    said(source, tokenizer="tokenizer.json", vocabulary_size=300)
    corpus = prepare(source, CONFIG, tmp_path / "cache")
    assert corpus.vocabulary.size == 300
    assert corpus.vocabulary.decode(corpus.splits["test"].tokens.tolist()).startswith("the cat sat on")
    assert corpus.splits["test"].bytes == len(text.encode())
    by_flag = DataConfig(tokenizer=str(source / "tokenizer.json"), vocabulary_size=300)
    (source / elsewhere.DESCRIPTION).unlink()
    assert prepare(source, by_flag, tmp_path / "cache").digest == corpus.digest


def test_damage_is_copied_again(tmp_path: Path) -> None:
    source = said(flat(tmp_path / "tokens", train=np.arange(50)), vocabulary_size=50, end=0)
    corpus = prepare(source, CONFIG, tmp_path / "cache")
    (corpus.folder / "train.tokens").write_bytes(b"")
    messages: list[str] = []
    again = prepare(source, CONFIG, tmp_path / "cache", warn=messages.append)
    assert np.array_equal(again.splits["train"].tokens, np.arange(40))
    assert "made again" in messages[0]


def test_what_is_no_tokens_is_refused(tmp_path: Path) -> None:
    cache, source = tmp_path / "cache", tmp_path / "tokens"

    def refused(match: str, config: DataConfig = CONFIG) -> None:
        with pytest.raises(FullrankError, match=match) as caught:
            prepare(source, config, cache)
        assert "\n" not in str(caught.value)
        assert not list(cache.glob("tokens-*"))

    refused("no directory .*train.bin")
    flat(source, valid=np.arange(9))
    refused(r"no training tokens \(it has valid.bin\): expected train.bin")
    flat(source, train=np.arange(90))
    refused(r"size of the vocabulary is not known: .*data.vocabulary_size")
    refused("token 85 of the train split lies outside the vocabulary of 80", DataConfig(vocabulary_size=80))
    said(source, vocabulary_size=90, end=90)
    refused("end token 90 lies outside")
    said(source, vocabulary=90)
    refused(r"says \['vocabulary'\]: expected vocabulary_size")
    said(source, vocabulary_size=90, dtype="float32")
    refused("expected .* dtype uint16 or uint32")
    for name, value in (("vocabulary_size", []), ("end", ""), ("end", True), ("tokenizer", 3)):
        said(source, **{"vocabulary_size": 90, name: value})
        refused(f"says {name} is .*: expected a ")
    (source / elsewhere.DESCRIPTION).write_text("no JSON")
    refused("is no JSON object")
    said(source, vocabulary_size=90)
    (source / "train.bin").write_bytes(b"odd")
    refused("cannot be read as tokens")
    flat(source, train=np.arange(90))
    refused(r"data.test_share=0 leaves a split empty", DataConfig(vocabulary_size=90, test_share=0))
    (source / "train.bin").unlink()
    np.save(source / "train.npy", np.zeros((2, 2)))
    refused(r"holds float64 of shape \(2, 2\)")
    np.save(source / "train.npy", np.full(30, -1))
    refused("token -1 is negative")
    np.save(source / "train.npy", np.zeros(0, dtype=np.uint16))
    refused("0 tokens leave 0 for training beside 1 for test")
    assert stages.MANIFEST not in {path.name for path in source.iterdir()}
    assert store.FORMAT == 2
