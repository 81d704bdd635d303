"""Vocabularies: what a word and an end are, exact returns, and refusals with a remedy."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullrank.errors import FullrankError
from fullrank.text import tokenisers, vocabulary
from fullrank.text.documents import CUT
from fullrank.text.vocabulary import Bpe, Bytes, Vocabulary, Words

TEXT = "the cat sat\n the  dog\tsat \n\nä cat\n"
PROSE = [f"line {n % 7} of some plain text, {n * n} times over" + "\n" * (1 + n % 3) for n in range(400)]


@pytest.fixture(scope="module")
def bpe() -> Bpe:
    return Bpe.train(PROSE, 400)


def test_words_end_every_line_once() -> None:
    words = Words.build([[TEXT]])
    assert words.words == ["the", "cat", "sat", "<eos>", "dog", "ä"]
    ids = words.encode(TEXT)
    assert [words.token(index) for index in ids] == (
        ["the", "cat", "sat", "<eos>", "the", "dog", "sat", "<eos>", "<eos>", "ä", "cat", "<eos>"]
    )
    assert words.encode(TEXT[:-1]) == ids
    assert words.encode(TEXT[:-1], end=False) == ids[:-1]
    assert words.encode(TEXT, end=False) == ids
    assert words.encode("") == []
    assert words.encode("\n") == [words.eos]
    assert words.decode(ids) == "the cat sat\nthe dog sat\n\nä cat\n"
    assert (words.size, words.unknown, words.level) == (6, None, "words")


def test_a_lone_surrogate_is_read_as_a_replaced_character(bpe: Bpe) -> None:
    for level in (bpe, Bytes(), Words.build([["a\ufffdb"]])):
        assert level.encode("a\ud800b") == level.encode("a\ufffdb")


@given(
    st.text(st.sampled_from("ab \n\t\r\x0b\x1c\x85\u2028\u3000é"), max_size=60), st.lists(st.integers(0, 60))
)
def test_words_are_those_of_split_in_any_blocks(text: str, places: list[int]) -> None:
    words = Words.build([[text]])
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    expected = [token for line in lines for token in [*line.split(), "<eos>"]]
    assert [words.token(index) for index in words.encode(text)] == expected
    # Cut wherever there is whitespace, also within a line.
    bounds = sorted(
        {0, len(text), *(place for place in places if place < len(text) and text[place].isspace())}
    )
    blocks = [text[low:high] for low, high in itertools.pairwise(bounds)]
    assert np.concatenate([[], *(piece.ids for piece in words.stream(blocks))]).tolist() == words.encode(text)
    assert Words.build([blocks]).words == words.words


def test_unknown_words_become_unk_only_where_the_text_has_it() -> None:
    words = Words.build([["a <unk> b\n"]])
    (piece,) = words.stream(["a c <unk> d b\n"])
    assert [words.token(int(index)) for index in piece.ids] == ["a", "<unk>", "<unk>", "<unk>", "b", "<eos>"]
    assert piece.replaced == 2
    plain = Words.build([["a b\n"]])
    with pytest.raises(
        FullrankError, match=r"'c' in line 12 of some.txt .* 3 words.*vocabulary_from=all.*bpe"
    ):
        list(plain.stream(["a\n", "b\na c\n"], name="some.txt", line=10))
    with pytest.raises(FullrankError, match=r"'c' in line 1 of the text.*use words that it has"):
        plain.encode("a c")
    long = "x" * 10_000
    with pytest.raises(FullrankError) as caught:
        plain.encode(long)
    assert len(str(caught.value)) < 300


@given(st.text())
def test_bytes_and_bpe_return_any_text(bpe: Bpe, text: str) -> None:
    for level in (Bytes(), bpe):
        ids = level.encode(text)
        assert ids[-1] == level.eos
        assert ids[:-1] == level.encode(text, end=False)
        assert all(0 <= index < level.size and index != level.eos for index in ids[:-1])
        assert level.decode(ids) == text
    assert Bytes().encode(text, end=False) == list(text.encode())


def test_half_a_character_decodes_to_a_mark(bpe: Bpe) -> None:
    assert Bytes().decode([0x61, 0xC3]) == "a\ufffd"
    (first, *_) = bpe.encode("ä")
    assert bpe.decode([first]) == "\ufffd"
    assert bpe.token(first) == "Ã"
    assert bpe.token(bpe.eos) == "<|endoftext|>"
    assert (Bytes().token(0x61), Bytes().token(10), Bytes().token(256)) == ("a", "0x0a", "<|endoftext|>")


def read(path: Path) -> Bpe:
    tokenizer, end = tokenisers.loaded(str(path))
    return Bpe.loaded(tokenizer, str(path), end)


def test_a_text_cannot_end_itself(bpe: Bpe, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    for level in (bpe, vocabulary.load(tmp_path), read(tmp_path / "tokenizer.json")):
        ids = level.encode("plain <|endoftext|> text")
        assert ids.count(level.eos) == 1
        assert level.decode(ids) == "plain <|endoftext|> text"


def test_bpe_is_the_same_in_another_process_with_other_threads(bpe: Bpe) -> None:
    script = f"from fullrank.text.vocabulary import Bpe\nprint(Bpe.train({PROSE!r}, 400).digest())"
    for threads in ("1", "3"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
        )
        assert done.stdout.strip() == bpe.digest()
    assert bpe.size == 400
    # Merges were learnt: a line takes far fewer tokens than bytes.
    assert len(bpe.encode(PROSE[0])) < len(PROSE[0]) / 2


def test_blocks_cut_between_words_leave_bpe_as_it_is(bpe: Bpe) -> None:
    assert len(bpe.encode("\n\n", end=False)) == 1
    text = "".join(PROSE[:40]) + "two\n\nbreaks,   spaces ' s don't \n indented\r\nlast"
    places = [0, *(match.start() for match in CUT.finditer(text)), len(text)]
    assert len(places) > 100
    blocks = [text[low:high] for low, high in itertools.pairwise(places)]
    assert np.concatenate([piece.ids for piece in bpe.stream(blocks)]).tolist() == bpe.encode(text)


def test_saved_vocabularies_come_back(bpe: Bpe, tmp_path: Path) -> None:
    levels: list[Vocabulary] = [Words.build([[TEXT, "<unk>\u2028\n"]]), Bytes(), bpe]
    for index, level in enumerate(levels):
        folder = tmp_path / str(index)
        level.save(folder)
        loaded = vocabulary.load(folder)
        assert loaded.digest() == level.digest()
        assert (loaded.size, loaded.eos, loaded.unknown, loaded.level) == (
            level.size,
            level.eos,
            level.unknown,
            level.level,
        )
        assert loaded.encode("the cat") == level.encode("the cat")
    assert len({level.digest() for level in [*levels, Words.build([["the\n"]])]}) == 4


def test_what_is_no_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.json"
    for content in (
        "",
        "[]",
        "{}",
        '{"level": "letters"}',
        '{"level": "words", "words": ["a", "a", "<eos>"]}',
    ):
        path.write_text(content)
        with pytest.raises(FullrankError, match="again"):
            vocabulary.load(tmp_path)
    path.write_text('{"level": "bpe", "eos": 0}')
    with pytest.raises(FullrankError, match="no tokenizer at"):
        vocabulary.load(tmp_path)
    for level in (Bytes(), Words.build([["a\n"]])):
        for index in (-1, level.size):
            with pytest.raises(
                FullrankError, match=f"token {index} is not in this vocabulary of {level.size}"
            ):
                level.decode([index])


def test_loaded_tokenisers_are_used_plainly_or_refused(bpe: Bpe, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    bpe.save(tmp_path)
    content = json.loads(path.read_text())
    # What a file of the hub often asks for: cut, fill up, and put marks around.
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["added_tokens"].append({**content["added_tokens"][0], "id": 400, "content": "</s>"})
    path.write_text(json.dumps(content))
    loaded = read(path)
    assert loaded.encode(PROSE[0]) == bpe.encode(PROSE[0])
    assert (loaded.size, loaded.eos) == (401, bpe.eos)
    content["added_tokens"] = [{**content["added_tokens"][0], "id": 400, "content": "<mask>"}]
    path.write_text(json.dumps(content))
    with pytest.raises(FullrankError, match=r"no special token that ends a text \(it has <mask>.*train one"):
        read(path)
    path.write_text('{"model": 1}')
    with pytest.raises(FullrankError, match=r"cannot be loaded .*a tokenizer.json"):
        read(path)
    with pytest.raises(FullrankError, match=r"bpe_size=256 .*257"):
        Bpe.train(["a"], 256)
