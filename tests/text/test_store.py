"""Corpora: splits by names and by lines, token files that are whole or not there, and refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullrank.errors import FullrankError
from fullrank.results.files import sha256
from fullrank.text import build, documents, elsewhere, formats, shards, stages
from fullrank.text import sources as reading
from fullrank.text import store as data
from fullrank.text.splits import SPLITS
from fullrank.text.store import Corpus, load, prepare
from fullrank.text.vocabulary import Bpe
from fullrank.train.config import DataConfig

TRAIN = "the cat sat\nthe dog sat\n"
WORDS = DataConfig()


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def three(folder: Path, train: str = TRAIN, valid: str = "the dog\n", test: str = "the cat\n") -> Path:
    for name, content in (("train", train), ("valid", valid), ("test", test)):
        write(folder / f"{name}.txt", content)
    return folder


def texts(corpus: Corpus) -> dict[str, str]:
    return {name: corpus.vocabulary.decode(split.tokens.tolist()) for name, split in corpus.splits.items()}


def folders(cache: Path) -> list[str]:
    """Without what starts remember."""
    names = [path.name for path in cache.iterdir()] if cache.exists() else []
    return sorted(name for name in names if name != data.STARTS and not name.endswith(".lock"))


def test_named_splits_become_read_only_token_files(tmp_path: Path) -> None:
    source = three(tmp_path / "text", valid="the dog")
    write(source / "README.md", "not read")
    corpus = prepare([source], WORDS, tmp_path / "cache")
    assert texts(corpus) == {"train": TRAIN, "valid": "the dog\n", "test": "the cat\n"}
    train = corpus.splits["train"]
    assert isinstance(train.tokens, np.memmap)
    assert train.tokens.dtype == np.uint16
    with pytest.raises(ValueError, match="read-only"):
        train.tokens[0] = 1
    assert (train.bytes, train.lines, train.documents, train.replaced) == (len(TRAIN), 2, 1, 0)
    assert corpus.splits["valid"].bytes == 7
    described = json.dumps(corpus.describe())
    assert str(tmp_path) not in described
    assert json.loads(described) == corpus.describe()
    assert corpus.describe()["vocabulary"] == 5
    assert corpus.cut_note() == ""
    assert [entry["name"] for entry in corpus.describe()["sources"]] == ["train.txt", "valid.txt", "test.txt"]
    again = load(corpus.folder)
    assert again.digest == corpus.digest
    assert texts(again) == texts(corpus)


@pytest.mark.parametrize(
    "names",
    [
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("train", "dev", "test"),
        ("Training.TXT", "val.txt", "test-1.txt"),
        ("train_2.text", "validation.raw", "ptb.test.txt"),
    ],
)
def test_names_of_splits(names: tuple[str, str, str], tmp_path: Path) -> None:
    source = tmp_path / "text"
    for name, content in zip(names, (TRAIN, "the dog\n", "the cat\n"), strict=True):
        write(source / name, content)
    expected = {"train": TRAIN, "valid": "the dog\n", "test": "the cat\n"}
    assert texts(prepare([source], WORDS, tmp_path / "cache")) == expected
    # The same files by name, in any order.
    given = [source / names[2], source / names[0], source / names[1]]
    assert texts(prepare(given, WORDS, tmp_path / "cache")) == expected
    assert len(folders(tmp_path / "cache")) == 1


@pytest.mark.parametrize("given", ["data", "tokens"])
@pytest.mark.parametrize("missing", [("test",), ("valid",), ("valid", "test")])
def test_missing_splits_are_cut_from_train_in_text_as_in_tokens(
    given: str, missing: tuple[str, ...], tmp_path: Path
) -> None:
    """A number is a line of text or a token, so the same places are cut."""
    numbers = {"train": range(40), "valid": range(50, 57), "test": range(60, 65)}
    named = {name: part for name, part in numbers.items() if name not in missing}
    source, config = tmp_path / "source", DataConfig(level="bytes", valid_share=0.2, test_share=0.1)
    for name, part in named.items():
        if given == "tokens":
            write(source / f"{name}.bin", np.array(part, dtype="<u2").tobytes())
            write(source / "tokens.json", '{"vocabulary_size": 70, "end": 69}')
        else:
            write(source / f"{name}.txt", "".join(f"{number}\n" for number in part))
    if given == "tokens":
        corpus = elsewhere.prepare(source, config, tmp_path / "cache")
    else:
        corpus = prepare([source], config, tmp_path / "cache")
    found = {name: [int(word) for word in text.split()] for name, text in texts(corpus).items()}
    # The last tenth is the test split, the fifth before it the validation split.
    test = 36 if "test" in missing else 40
    valid = test - 8 if "valid" in missing else test
    cut = {"train": range(valid), "valid": range(valid, test), "test": range(test, 40)}
    expected = {name: cut[name] if name in ("train", *missing) else numbers[name] for name in SPLITS}
    assert found == {name: list(part) for name, part in expected.items()}
    names = [f"{name} ({len(corpus.splits[name].tokens)} tokens)" for name in missing]
    assert corpus.cut_note().startswith(" and ".join(names))
    assert corpus.cut_note().endswith(" cut from the end of train")


def test_several_files_of_a_split_are_documents_and_archives_are_left(tmp_path: Path) -> None:
    source = three(tmp_path / "text")
    write(source / "train-2.txt", "the cat")
    write(source / "train.txt.gz", b"\x1f\x8b\0\0")
    corpus = prepare([source], DataConfig(level="bytes"), tmp_path / "cache")
    tokens = corpus.splits["train"].tokens.tolist()
    assert tokens == [*b"the cat", 256, *TRAIN.encode(), 256]
    assert corpus.splits["train"].documents == 2
    assert corpus.splits["train"].bytes == len(tokens) - 2
    # The same text again, and no gzip at that.
    assert [one["name"] for one in corpus.describe()["sources"]][:2] == ["train-2.txt", "train.txt"]


def test_files_without_splits_are_cut_by_lines(tmp_path: Path) -> None:
    source = tmp_path / "text"
    lines = [f"line {n} ä" for n in range(40)]
    write(source / "a.txt", "\n".join(lines[:25]))
    write(source / "b" / "c.md", b"\xef\xbb\xbf" + "\n".join([*lines[25:], ""]).encode())
    write(source / "b" / "picture.png", b"\x89PNG\0\0")
    write(source / ".git" / "hidden", "hidden\n")
    config = DataConfig(level="words", vocabulary_from="all", valid_share=0.25, test_share=0.1)
    corpus = prepare([source], config, tmp_path / "cache")
    # Of every file the end: 25 and 15 lines, of which 4 in 40 are for the test and 10 for validation.
    expected = {
        "train": lines[:17] + lines[25:34],
        "valid": lines[17:23] + lines[34:38],
        "test": lines[23:25] + lines[38:],
    }
    assert texts(corpus) == {name: "\n".join([*part, ""]) for name, part in expected.items()}
    assert [split.lines for split in corpus.splits.values()] == [26, 10, 4]
    assert [split.documents for split in corpus.splits.values()] == [2, 2, 2]
    # Bytes of the text alone: no mark, and no line break that was not there.
    assert sum(split.bytes for split in corpus.splits.values()) == len("\n".join(lines).encode())
    assert corpus.describe()["skipped"] == ["b/picture.png"]
    assert corpus.describe()["split_by"] == "lines"
    # Bytes put together again are the files.
    raw = prepare([source], DataConfig(level="bytes"), tmp_path / "cache")
    parts = [texts(raw)[name].encode().count(b"line") for name in SPLITS]
    assert (sum(parts), [split.documents for split in raw.splits.values()]) == (40, [2, 2, 2])
    for name, split in raw.splits.items():
        assert split.tokens.tolist().count(256) == 2, name
    # A file named twice is read once, so that no line is trained on and judged on.
    twice = prepare(
        [source / "a.txt", source / "a.txt", source / "b" / ".." / "a.txt"], config, tmp_path / "c"
    )
    assert sum(split.lines for split in twice.splits.values()) == 25


@pytest.mark.parametrize("level", ["words", "bytes", "bpe"])
def test_blocks_of_any_size_give_the_same_tokens(
    level: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = " ".join(f"wörd{n % 50}" for n in range(3000))
    text = (
        "".join(f" = Title {n} = \n\n  body ä {n % 3}, 日本 don't\n{'x' * (n % 90)}\n" for n in range(300))
        + long
    )
    source = three(tmp_path / "text", train=text, valid=text, test=text)
    config = DataConfig(level=level, bpe_size=300)
    whole = prepare([source], config, tmp_path / "whole")
    assert np.array_equal(whole.splits["train"].tokens, whole.vocabulary.encode(text))
    monkeypatch.setattr(formats, "READ", 257)
    monkeypatch.setattr(documents, "FRAGMENT", 301)
    monkeypatch.setattr(build, "BATCH", (1000, 1000))
    small = prepare([source], config, tmp_path / "small")
    assert small.digest == whole.digest
    # A text without any place to cut is read all the same.
    monkeypatch.setattr(documents, "LONGEST", 1000)
    endless = three(tmp_path / "endless", train="ä" * 5000, valid="ä" * 5000, test="ä" * 5000)
    assert set(texts(prepare([endless], DataConfig(level="bytes"), tmp_path / "c")).values()) == {"ä" * 5000}


def test_ids_beyond_sixteen_bits_are_kept(tmp_path: Path) -> None:
    train = "\n".join(f"w{n}" for n in range(70_000)) + "\n"
    corpus = prepare([three(tmp_path / "text", train, "w69999\n", "w5\n")], WORDS, tmp_path / "cache")
    assert corpus.splits["train"].tokens.dtype == np.uint32
    assert corpus.vocabulary.size == 70_001
    assert texts(corpus)["train"] == train
    assert texts(corpus)["valid"] == "w69999\n"


def test_words_of_train_or_of_all(tmp_path: Path) -> None:
    source = three(tmp_path / "text", valid="the dog\nthe emu\n")
    cache = tmp_path / "cache"
    with pytest.raises(
        FullrankError, match=r"'emu' in line 2 of .*valid.txt .*--set data.vocabulary_from=all"
    ):
        prepare([source], WORDS, cache)
    assert folders(cache) == []
    every = prepare([source], DataConfig(vocabulary_from="all"), cache)
    assert every.describe()["vocabulary_from"] == "all"
    assert "emu" in texts(every)["valid"]
    write(source / "train.txt", TRAIN + "<unk>\n")
    marked = prepare([source], WORDS, cache)
    assert texts(marked)["valid"] == "the dog\nthe <unk>\n"
    assert [split.replaced for split in marked.splits.values()] == [0, 1, 0]


def test_bpe_is_trained_on_train_or_loaded(tmp_path: Path) -> None:
    source = three(tmp_path / "text", train="abcabcabc " * 50, valid="xyzxyzxyz " * 50)
    cache = tmp_path / "cache"
    trained = prepare([source], DataConfig(level="bpe", bpe_size=270), cache)
    merged = {trained.vocabulary.token(index) for index in range(trained.vocabulary.size)}
    assert "abcabcabc" in merged
    assert not any("xy" in token for token in merged)
    Bpe.train(["xyzxyzxyz " * 50], 262).save(tmp_path / "other")
    config = DataConfig(level="bpe", tokenizer=str(tmp_path / "other" / "tokenizer.json"))
    loaded = prepare([source], config, cache)
    assert loaded.vocabulary.size == 262
    assert texts(loaded) == texts(trained)
    assert loaded.describe()["vocabulary_from"] == "tokenizer"
    with pytest.raises(
        FullrankError, match=r"none\.json is not there as a tokenizer: give a tokenizer\.json"
    ):
        prepare([source], DataConfig(level="bpe", tokenizer=str(tmp_path / "none.json")), cache)


def test_a_corpus_is_built_once(tmp_path: Path) -> None:
    source, cache = three(tmp_path / "text"), tmp_path / "cache"
    first = prepare([source], WORDS, cache)
    before = {path.name: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    labels: set[str] = set()
    again = prepare([source], WORDS, cache, progress=lambda label, share: labels.add(label))
    assert labels == {"reading"}
    assert {path.name: path.stat().st_mtime_ns for path in again.folder.iterdir()} == before
    # What does not matter to the tokens does not matter to the key, what does matters.
    assert prepare([source], DataConfig(bpe_size=300, valid_share=0.2), cache).folder == first.folder
    moved = three(tmp_path / "elsewhere")
    assert prepare([moved], WORDS, cache).folder == first.folder
    others = [prepare([source], DataConfig(level="bytes"), cache).folder]
    write(source / "test.txt", "the cat \n")
    others.append(prepare([source], WORDS, cache).folder)
    assert len({first.folder, *others}) == 3


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "meta", "count", "vocabulary", "empty"])
def test_damage_is_found_and_built_again(damage: str, tmp_path: Path) -> None:
    source, cache = three(tmp_path / "text"), tmp_path / "cache"
    corpus = prepare([source], WORDS, cache)
    expected, folder = texts(corpus), corpus.folder
    target = folder / {"meta": "manifest.json", "vocabulary": "vocabulary.json"}.get(damage, "valid.tokens")
    if damage == "remove":
        target.unlink()
    elif damage == "count":
        meta = json.loads((folder / "manifest.json").read_text())
        meta["splits"]["valid"]["bytes"] += 1
        (folder / "manifest.json").write_text(json.dumps(meta))
    elif damage == "empty":
        for path in folder.iterdir():
            path.unlink()
    else:
        content = bytearray(target.read_bytes())
        content[0] ^= 1
        target.write_bytes(content[:-2] if damage == "truncate" else content)
    # What has the right size is believed until someone looks.
    asked = damage == "flip"
    assert (texts(load(folder)) != expected) if asked else True
    with pytest.raises(FullrankError, match="again"):
        load(folder, verify=asked)
    messages: list[str] = []
    rebuilt = prepare([source], WORDS, cache, warn=messages.append, verify=asked)
    assert len(messages) == 1
    assert "made again" in messages[0]
    assert texts(rebuilt) == expected
    assert texts(load(folder)) == expected
    assert folders(cache) == [folder.name]
    (folder / "manifest.json").write_text("{}")
    with pytest.warns(UserWarning, match="made again"):
        prepare([source], WORDS, cache)


SCRIPT = """
import sys, time
from pathlib import Path
from fullrank.text import stages
from fullrank.text import store as data
from fullrank.text.settings import DataConfig
source, cache, pause = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
write = stages.write_whole
def slow(path, text):
    # Everything but the manifest is there.
    Path(sys.argv[2], "waiting").touch()
    time.sleep(pause)
    write(path, text)
stages.write_whole = slow
corpus = data.prepare([source], DataConfig(), cache)
print(corpus.digest)
"""


def start(source: Path, cache: Path, pause: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(source), str(cache), str(pause)], stdout=subprocess.PIPE, text=True
    )


def test_a_killed_build_leaves_no_half_corpus(tmp_path: Path) -> None:
    source, cache = three(tmp_path / "text"), tmp_path / "cache"
    with start(source, cache, 600) as process:
        deadline = time.monotonic() + 300
        while not (cache / "waiting").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    left = [name for name in folders(cache) if name != "waiting"]
    assert len(left) == 1
    assert left[0].startswith(".")
    corpus = prepare([source], WORDS, cache)
    assert texts(corpus)["train"] == TRAIN
    # What was left is gone with the next build.
    assert folders(cache) == [corpus.folder.name, "waiting"]


def test_processes_that_build_at_once_agree(tmp_path: Path) -> None:
    source, cache = three(tmp_path / "text"), tmp_path / "cache"
    processes = [start(source, cache, pause) for pause in (0.5, 0.5, 0.6)]
    digests = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert all(process.returncode == 0 for process in processes)
    assert digests == {prepare([source], WORDS, cache).digest}
    assert len(folders(cache)) == 2


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    for place, name in ((shards.Writer, "add"), (stages, "write_whole")):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, full)
            with pytest.raises(FullrankError, match=r"No space left on device.*free some space"):
                prepare([three(tmp_path / "text")], WORDS, tmp_path / "cache")
        assert [one for one in folders(tmp_path / "cache") if not one.startswith(".")] == []
    prepare([three(tmp_path / "text")], WORDS, tmp_path / "cache")


def rows(path: Path, texts: list[Any], field: str = "text") -> Path:
    return write(path, "".join(json.dumps({field: text}) + "\n" for text in texts))


def test_every_document_ends_with_its_token(tmp_path: Path) -> None:
    """Rows are documents of their own, with the tokens of files of their own."""
    documents = ["the cat\n", "sat", "the dog\nsat"]
    source = three(tmp_path / "text")
    (source / "train.txt").unlink()
    rows(source / "train.jsonl", [*documents, None, "  "])
    for level, end in (("bytes", 256), ("bpe", 0)):
        corpus = prepare([source], DataConfig(level=level, bpe_size=260), tmp_path / "cache")
        expected = [
            token for text in documents for token in [*corpus.vocabulary.encode(text, end=False), end]
        ]
        assert corpus.splits["train"].tokens.tolist() == expected
        assert (corpus.splits["train"].documents, corpus.splits["train"].lines) == (3, 4)
        assert corpus.splits["train"].bytes == sum(map(len, documents))
    # Of words every line ends, and a document with its last line.
    words = prepare([source], DataConfig(vocabulary_from="all"), tmp_path / "cache")
    assert texts(words)["train"] == "the cat\nsat\nthe dog\nsat\n"


def test_processes_build_what_one_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = three(tmp_path / "text", train="".join(f"the cat {n % 7}\n" for n in range(3000)))
    rows(source / "train-2.jsonl", [f"the dog {n}" for n in range(200)])
    config = DataConfig(level="bpe", bpe_size=300)
    alone = prepare([source], config, tmp_path / "one")
    monkeypatch.setattr(build, "LARGE", 0)
    monkeypatch.setattr(build, "BATCH", (2000, 2000))
    monkeypatch.setattr(documents, "FRAGMENT", 999)
    monkeypatch.setattr(build.pool, "cores", lambda: 2)
    assert prepare([source], config, tmp_path / "two").digest == alone.digest


@pytest.mark.parametrize("level", ["bytes", "words"])
def test_shards_are_one_array(level: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 64 KiB of either width: the largest page there is.
    monkeypatch.setattr(shards, "SHARD", 1 << 15)
    train = "".join(f"w{n} {'x' * (n % 5)}\n" for n in range(70_000))
    source = three(tmp_path / "text", train=train)
    corpus = prepare([source], DataConfig(level=level, vocabulary_from="all"), tmp_path / "cache")
    tokens = corpus.splits["train"].tokens
    assert tokens.dtype == (np.uint16 if level == "bytes" else np.uint32)
    names = sorted(path.name for path in corpus.folder.glob("train*.tokens"))
    assert len(names) == -(-len(tokens) // (1 << 15)) > 3
    expected = np.array(corpus.vocabulary.encode(train))
    assert np.array_equal(tokens, expected)
    # As one array is used: across a border, in rows, by numbers.
    border = 1 << 15
    assert np.array_equal(tokens[border - 5 : border + 5], expected[border - 5 : border + 5])
    assert np.array_equal(
        tokens[: 4 * (len(tokens) // 4)].reshape(4, -1)[3],
        expected.reshape(-1)[: 4 * (len(tokens) // 4)].reshape(4, -1)[3],
    )
    picked = np.array([0, border, 2 * border - 1, len(tokens) - 1])
    assert np.array_equal(tokens[picked], expected[picked])
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1
    # A model sees no shards: the digest is that of one file.
    monkeypatch.setattr(shards, "SHARD", 1 << 27)
    whole = prepare([source], DataConfig(level=level, vocabulary_from="all"), tmp_path / "other")
    assert whole.digest == corpus.digest
    (corpus.folder / names[-1]).write_bytes(b"")
    with pytest.raises(FullrankError, match="another size"):
        load(corpus.folder)


def test_a_second_start_reads_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = three(tmp_path / "text"), tmp_path / "cache"
    for path in source.iterdir():
        os.utime(path, (10**9, 10**9))
    first = prepare([source], WORDS, cache)
    monkeypatch.setattr(
        stages,
        "sha256",
        lambda path: pytest.fail(f"{path} hashed") if path.suffix == ".tokens" else sha256(path),
    )
    with monkeypatch.context() as patched:
        patched.setattr(reading, "_hash", lambda path: pytest.fail(f"{path} hashed"))
        patched.setattr(formats, "look", lambda path: pytest.fail(f"{path} looked at"))
        assert prepare([source], WORDS, cache).folder == first.folder
    # A file of another time is hashed, and found to be the same; one of other content is not.
    os.utime(source / "test.txt", (10**9, 10**9 + 1))
    assert prepare([source], WORDS, cache).folder == first.folder
    write(source / "test.txt", "the dog\n")
    os.utime(source / "test.txt", (10**9, 10**9 + 2))
    assert prepare([source], WORDS, cache).folder != first.folder
    # What was changed just now may change again within the same tick: it is not believed by its time.
    write(source / "test.txt", "the cat\n")
    assert prepare([source], WORDS, cache).folder == first.folder
    write(source / "test.txt", "the dog\n")
    assert prepare([source], WORDS, cache).folder != first.folder


def test_a_models_own_tokenizer_and_its_chat_template(tmp_path: Path) -> None:
    """From a transformers directory: its end token, its template, more ids than it has entries."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Bpe.train([TRAIN * 20], 270).tokenizer
    tokenizer.add_special_tokens(["<|user|>", "<|stop|>"])
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|stop|>")
    own.chat_template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    own.save_pretrained(tmp_path / "model")
    chats = [[{"role": "user", "content": f"the cat {n}"}] for n in range(40)]
    path = rows(tmp_path / "chats.jsonl", chats, "messages")
    config = DataConfig(level="bpe", tokenizer=str(tmp_path / "model"), vocabulary_size=300)
    corpus = prepare([f"{path}#messages"], config, tmp_path / "cache")
    user, stop = own.convert_tokens_to_ids(["<|user|>", "<|stop|>"])
    assert (corpus.vocabulary.size, corpus.vocabulary.eos) == (300, stop)
    expected = [user, *own("the cat 39", add_special_tokens=False)["input_ids"], stop]
    assert corpus.splits["test"].tokens.tolist()[-len(expected) :] == expected
    assert load(corpus.folder).vocabulary.digest() == corpus.vocabulary.digest()
    # In plain text a special token is text, and nobody asked for a template.
    plain = write(tmp_path / "plain.txt", "<|user|> the cat\n" * 40)
    assert user not in prepare([plain], config, tmp_path / "cache").splits["train"].tokens
    bare = DataConfig(level="bpe", tokenizer=str(tmp_path / "model" / "tokenizer.json"))
    with pytest.raises(FullrankError, match=r"'messages' of chats.jsonl holds list.*chat template"):
        prepare([f"{path}#messages"], bare, tmp_path / "cache")
    own.chat_template = "{% for m in messages %}{{ m.content }}<|user|>{% endfor %}"
    own.save_pretrained(tmp_path / "model")
    turned = prepare([f"{path}#messages"], config, tmp_path / "cache")
    assert turned.splits["test"].tokens.tolist()[-2:] == [user, stop]
    rows(path, [[{"nobody": 1}]] * 40, "messages")
    own.chat_template = "{{ messages[0].nothing.at_all }}"
    own.save_pretrained(tmp_path / "model")
    with pytest.raises(FullrankError, match="the chat template fails"):
        prepare([f"{path}#messages"], config, tmp_path / "cache")


def test_rare_bytes_that_are_not_utf8_are_said(tmp_path: Path) -> None:
    source = three(tmp_path / "text")
    write(source / "train.txt", b"plain words \xff\n" + b"plain words\n" * 100)
    messages: list[str] = []
    corpus = prepare([source], DataConfig(level="bytes"), tmp_path / "cache", warn=messages.append)
    assert messages == ["1 places of the text were not valid Unicode and became U+FFFD"]
    assert texts(corpus)["train"].startswith("plain words \ufffd\n")


def test_a_json_file_is_read_as_records_even_where_it_was_read_as_text_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache remembers files by name, size and time."""
    records = [{"text": f"text {n % 5}\n", "id": f"id {n}"} for n in range(60)]
    path = write(tmp_path / "a.json", json.dumps(records, indent=1))
    os.utime(path, (10**9, 10**9))
    config = DataConfig(vocabulary_from="all")
    with monkeypatch.context() as patched:
        patched.delitem(formats.KINDS, ".json")
        assert '"text":' in prepare([path], config, tmp_path / "cache").vocabulary.to_json()["words"]
    corpus = prepare([path], config, tmp_path / "cache")
    assert corpus.vocabulary.to_json()["words"] == ["text", "0", "<eos>", "1", "2", "3", "4"]
    assert [split.documents for split in corpus.splits.values()] == [54, 3, 3]


@pytest.mark.parametrize("level", ["words", "bytes", "bpe"])
def test_lone_surrogates_of_json_are_replaced_and_said_once(level: Any, tmp_path: Path) -> None:
    """Half a surrogate pair, which no tokenizer takes."""
    documents = ["a\ud800b \ud83d\ude42\n", *(f"plain {n % 3} words\n" for n in range(60))]
    path = rows(tmp_path / "a.jsonl", documents)
    messages: list[str] = []
    config = DataConfig(level=level, bpe_size=300, vocabulary_from="all")
    corpus = prepare([path], config, tmp_path / "cache", warn=messages.append)
    # Python's JSON writes the pair above as two escapes, which are one character to a reader.
    assert texts(corpus)["train"].startswith("a\ufffdb 🙂\n")
    assert messages == ["1 places of the text were not valid Unicode and became U+FFFD"]
    assert corpus.splits["train"].bytes == sum(len(text) for text in documents[:55]) + 2 + 2


BAD: dict[str, tuple[dict[str, bytes], str]] = {
    "no file": ({}, "holds no text"),
    "empty file": ({"a.txt": b""}, "holds no text"),
    "only binary": ({"a.bin": b"\0\1"}, r"text holds no text: .*a\.bin is binary"),
    "blank": ({"a.txt": b"\n \n\n\n"}, "only blank lines"),
    "few lines": ({"a.txt": b"a\nb\n"}, "2 lines or documents leave 0 for training"),
    "one line": ({"a.txt": b"a b c d"}, "1 lines or documents leave 0 .* or a file for each split"),
    "no test": (
        {"train.txt": b"a\n", "valid.txt": b"a\n"},
        "1 lines or documents leave 0 for training beside 1 for test: .*or a file for each split",
    ),
    "no train": ({"dev.txt": b"a\n", "test.txt": b"a\n"}, "none for train"),
    "empty split": ({"train.txt": b"a\n", "valid.txt": b"", "test.txt": b"a\n"}, "the valid split is empty"),
    "empty train": (
        {"train.txt": b"\xef\xbb\xbf", "valid.txt": b"a", "test.txt": b"a"},
        "train split has only blank",
    ),
    "blank split": (
        {"train.txt": b"a\n", "valid.txt": b"a\n", "test.txt": b" \n"},
        "test split has only blank",
    ),
    "Latin-1": (
        {"train.txt": b"ab\n" * 40_000 + b"caf\xe9 \n" * 9_000, "valid.txt": b"a\n", "test.txt": b"a\n"},
        r"train.txt is not UTF-8 \(9,000 of .* characters\).*iconv",
    ),
    "cut character": (
        {"train.txt": b"ab\xc3", "valid.txt": b"a\n", "test.txt": b"a\n"},
        "not UTF-8 .* the first at byte 2",
    ),
    "binary split": (
        {"train.txt": b"a\0", "valid.txt": b"a\n", "test.txt": b"a\n"},
        "train.txt is binary, it has NUL bytes",
    ),
    "UTF-16": ({"train.txt": "ab".encode("utf-16"), "valid.txt": b"a", "test.txt": b"a"}, "is UTF-16"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_text_is_refused_and_nothing_written(case: str, tmp_path: Path) -> None:
    files, message = BAD[case]
    (tmp_path / "text").mkdir()
    for name, content in files.items():
        write(tmp_path / "text" / name, content)
    with pytest.raises(FullrankError, match=message):
        prepare([tmp_path / "text"], DataConfig(vocabulary_from="all"), tmp_path / "cache")
    assert folders(tmp_path / "cache") == []


def test_bad_files_are_refused_by_name_and_skipped_in_a_directory(tmp_path: Path) -> None:
    cache, source = tmp_path / "cache", tmp_path / "text"
    good = write(source / "good.txt", "a b\n" * 100)
    latin = write(source / "latin.txt", b"caf\xe9\n" * 100)
    with pytest.raises(FullrankError, match=r"latin.txt looks binary or is not UTF-8 .* byte 3"):
        prepare([good, latin], WORDS, cache)
    messages: list[str] = []
    corpus = prepare([source], WORDS, cache, warn=messages.append)
    assert corpus.describe()["skipped"] == ["latin.txt"]
    assert len(messages) == 1
    assert "left out" in messages[0]
    with pytest.raises(FullrankError, match="no such text"):
        prepare([tmp_path / "none"], WORDS, cache)
    with pytest.raises(FullrankError, match="no text was given"):
        prepare([], WORDS, cache)
    with pytest.raises(FullrankError, match="no regular file"):
        prepare([Path(os.devnull)], WORDS, cache)
    with pytest.raises(FullrankError, match=r"data.valid_share=0 leaves a split empty"):
        prepare([good], DataConfig(valid_share=0.0), cache)
    with pytest.raises(FullrankError, match="100 lines or documents leave 0"):
        prepare([good], DataConfig(valid_share=0.5, test_share=0.5), cache)
    with pytest.raises(FullrankError, match="damaged or missing"):
        load(tmp_path / "none")


@pytest.mark.skipif("FULLRANK_WIKITEXT" not in os.environ, reason="FULLRANK_WIKITEXT names no WikiText-2")
def test_wikitext_2_has_its_published_counts(tmp_path: Path) -> None:
    source = Path(os.environ["FULLRANK_WIKITEXT"])
    corpus = prepare([source], DataConfig(vocabulary_from="all"), tmp_path / "cache")
    assert [len(corpus.splits[name].tokens) for name in SPLITS] == [2_088_628, 217_646, 245_569]
    assert corpus.vocabulary.size == 33_278
    assert corpus.describe()["sources"][0]["sha256"].startswith("9e9fa1ad55b1c2c9")


def test_a_script_without_a_guard_is_told_and_does_not_wait(tmp_path: Path) -> None:
    """Its workers run it again, and would wait for the folder that it is filling."""
    (tmp_path / "a.txt").write_text("one two three\n" * 2000)
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from fullrank.text import build, store, workers\n"
        "from fullrank.text.settings import DataConfig\n"
        "build.LARGE, workers.cores = 0, lambda: 2\n"
        f"here = Path({str(tmp_path)!r})\n"
        "store.prepare([here / 'a.txt'], DataConfig(level='words'), here)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert 'under `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]
