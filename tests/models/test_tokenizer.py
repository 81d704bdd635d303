"""A vocabulary as a tokenizer of transformers: the same ids, the same text, also after it was saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fullrank.models.tokenizer import as_tokenizer
from fullrank.text.settings import DataConfig
from fullrank.text.store import load, prepare
from fullrank.text.vocabulary import Bpe, Bytes, Vocabulary, Words

TEXT = "the cat\nsat <unk> on <eos> the mat , it 's\n\n a a\x1ca\u3000b naïve <|endoftext|> 😀\n"
VOCABULARIES: dict[str, Vocabulary] = {
    "words": Words.build([[TEXT]]),
    "bytes": Bytes(),
    "bpe": Bpe.train([TEXT * 20], 300),
}


@pytest.mark.parametrize("level", VOCABULARIES)
def test_saved_and_loaded_it_reads_and_writes_as_the_vocabulary(level: str, tmp_path: Path) -> None:
    vocabulary = VOCABULARIES[level]
    as_tokenizer(vocabulary, longest=77).save_pretrained(tmp_path)
    found = AutoTokenizer.from_pretrained(tmp_path)
    ids = vocabulary.encode(TEXT, end=False)
    assert found(TEXT, add_special_tokens=False)["input_ids"] == ids
    assert found(TEXT)["input_ids"] == [vocabulary.eos, *ids]
    assert found.decode(ids) == vocabulary.decode(ids)
    assert len(found) == vocabulary.size
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (vocabulary.eos,) * 3
    assert found.model_max_length == 77
    assert found.unk_token_id == vocabulary.unknown


@pytest.mark.parametrize("level", ["bytes", "bpe"])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_has_the_same_ids(level: str, text: str) -> None:
    vocabulary = VOCABULARIES[level]
    found = as_tokenizer(vocabulary)
    ids = vocabulary.encode(text, end=False)
    assert found(text, add_special_tokens=False)["input_ids"] == ids
    assert found.decode(ids, skip_special_tokens=True) == vocabulary.decode(ids)


@given(
    words=st.lists(
        st.sampled_from(["the", "cat", "\n", "<eos>", "\t", "\x1f", "\x85", "mat", "dog", "a<eos>b"])
    )
)
def test_words_have_the_same_ids_and_lines(words: list[str]) -> None:
    vocabulary = VOCABULARIES["words"]
    found = as_tokenizer(vocabulary)
    text = " ".join(words)
    ids = vocabulary.encode(text, end=False)
    assert found(text, add_special_tokens=False)["input_ids"] == ids
    assert found.decode(ids) == vocabulary.decode(ids)


def test_a_word_that_is_not_there_is_an_error_where_there_is_no_unknown_word() -> None:
    with pytest.raises(Exception, match="Missing"):
        as_tokenizer(Words(["<eos>", "a"]))("b")


def test_the_vocabulary_that_reads_text_is_left_alone() -> None:
    vocabulary = VOCABULARIES["bpe"]
    before = vocabulary.to_json()
    as_tokenizer(vocabulary)
    assert vocabulary.to_json() == before


def test_a_run_on_conversations_saves_its_template_and_cuts_text_as_training_did(tmp_path: Path) -> None:
    tokenizer = Bpe.train([TEXT * 20], 280).tokenizer
    tokenizer.add_special_tokens(["<s>", "<|user|>", "<|stop|>"])
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|stop|>")
    # A template may name special tokens, which are others in the tokenizer that a run saves.
    theirs.chat_template = (
        "{% macro opened() %}{{ bos_token }}{% endmacro %}{{ opened() }}\n"
        "{% for m in messages %}<|user|>{{ m.content }}\n  {% if not loop.last %}{{ eos_token }}{% endif %}\n"
        "{% endfor %}"
    )
    theirs.save_pretrained(tmp_path / "theirs")
    chats = [
        [{"role": "user", "content": f"the cat {n}"}, {"role": "user", "content": "a"}] for n in range(40)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf8")
    config = DataConfig(level="bpe", tokenizer=str(tmp_path / "theirs"))
    corpus = prepare([f"{path}#messages"], config, tmp_path / "cache")
    trained = corpus.splits["test"].tokens.tolist()
    as_tokenizer(load(corpus.folder).vocabulary).save_pretrained(tmp_path / "saved")
    found = AutoTokenizer.from_pretrained(tmp_path / "saved")
    ids = found.apply_chat_template(chats[-1], return_dict=False)
    stop = corpus.vocabulary.eos
    assert ids == theirs.apply_chat_template(chats[-1], return_dict=False)
    assert trained[-len(ids) - 2 :] == [stop, *ids, stop]
    start, user = theirs.convert_tokens_to_ids(["<s>", "<|user|>"])
    assert (ids[0], ids.count(user)) == (start, 2)
    text = "<|user|>the mat"
    assert found(text, add_special_tokens=False)["input_ids"] == corpus.vocabulary.encode(text, end=False)
    # The same tokenizer on plain text: a special token in it is text.
    plain = tmp_path / "plain.txt"
    plain.write_text("<|user|> the cat\n" * 40, encoding="utf8")
    vocabulary = prepare([plain], config, tmp_path / "cache").vocabulary
    found = as_tokenizer(vocabulary)
    assert found.chat_template is None
    assert user not in found(text)["input_ids"]
