"""Texts of every kind give the same fragments, documents are kept apart, and what is no text is refused."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import sys
import tarfile
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.errors import FullrankError
from fullrank.text import documents, formats, json_records, sources
from fullrank.text.documents import Read
from fullrank.text.sources import find, fragments

pyarrow = pytest.importorskip("pyarrow")
zstandard = pytest.importorskip("zstandard")

TEXT = "The first line.\nThe second, ä line.\n\nA new paragraph\nof two lines.\n"


def texts_of(*names: Path | str, **options: Any) -> list[str]:
    return [fragment.text for fragment in fragments(find(list(names), **options))]


def whole_documents(corpus: sources.Corpus) -> list[str]:
    found: list[str] = []
    for fragment in fragments(corpus):
        if fragment.begins:
            found.append("")
        found[-1] += fragment.text
    return found


def test_compressed_files_and_tables_read_as_the_plain_text(tmp_path: Path) -> None:
    from pyarrow import parquet

    data = TEXT.encode()
    (tmp_path / "a.txt").write_bytes(data)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(data))
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(data))
    # Two frames, as tools that compress in parallel write them.
    compress = zstandard.ZstdCompressor().compress
    (tmp_path / "a.txt.zst").write_bytes(compress(data[:20]) + compress(data[20:]))
    parquet.write_table(pyarrow.table({"text": [TEXT], "other": [1]}), tmp_path / "a.parquet")
    for name in ("a.txt", "a.txt.gz", "a.txt.xz", "a.txt.zst", "a.parquet"):
        assert texts_of(tmp_path / name) == [TEXT], name


def packed(folder: Path, files: dict[str, bytes]) -> list[Path]:
    """The same files in every kind of archive."""
    names = [folder / name for name in ("a.zip", "a.tar", "a.tar.gz", "a.tgz", "a.tar.zst", "a.tar.xz")]
    with zipfile.ZipFile(names[0], "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    with tarfile.open(names[1], "w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    plain = names[1].read_bytes()
    for path, compress in zip(
        names[2:],
        (gzip.compress, gzip.compress, zstandard.ZstdCompressor().compress, lzma.compress),
        strict=True,
    ):
        path.write_bytes(compress(plain))
    return names


def test_rows_and_archives_read_as_the_plain_text(tmp_path: Path) -> None:
    """Three documents, as files, as rows, and as either in every kind of archive."""
    from pyarrow import parquet

    texts = [TEXT, "Another\n", 'ä third, "quoted" one']
    plain = tmp_path / "plain"
    plain.mkdir()
    for number, text in enumerate(texts):
        (plain / f"{number}.txt").write_text(text, encoding="utf8")
    assert whole_documents(find([plain])) == texts
    lines = "".join(json.dumps({"text": text, "other": 1}) + "\n\n" for text in texts).encode()
    compress = zstandard.ZstdCompressor().compress
    for name, data in (
        ("a.jsonl", b"\xef\xbb\xbf" + lines),
        ("a.ndjson.gz", gzip.compress(lines)),
        ("a.jsonl.zst", compress(lines[:30]) + compress(lines[30:])),
    ):
        (tmp_path / name).write_bytes(data)
        assert texts_of(tmp_path / name) == texts, name
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    table = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(table))
    assert texts_of(tmp_path / "a.parquet") == texts_of(tmp_path / "a.parquet.gz") == texts
    files = {
        "in/0.txt": texts[0].encode(),
        "in/rows.jsonl.gz": gzip.compress(json.dumps({"text": texts[1]}).encode()),
        "in/picture.png": b"\x89PNG\0",
        "in/.hidden": b"hidden",
        "__MACOSX/0.txt": b"no text of ours",
        "z.parquet": b"",
    }
    parquet.write_table(pyarrow.table({"text": texts[2:]}), tmp_path / "z.parquet")
    files["z.parquet"] = (tmp_path / "z.parquet").read_bytes()
    for path in packed(tmp_path, files):
        found = find([path])
        assert whole_documents(found) == texts, path
        assert found.skipped == (f"{path.name}/in/picture.png",)
        assert len({source.sha256 for source in sources.hashed(found).sources}) == 1


def test_a_name_twice_in_an_archive_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for data in (b"first", b"second"):
            entry = tarfile.TarInfo("a.txt")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    assert texts_of(path) == ["first"]
    with tarfile.open(path, "w"):
        pass
    with pytest.raises(FullrankError, match="archive without files"):
        find([path])


def test_a_field_is_named_behind_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one", "n": 1}\n{"body": null, "n": 2}\n{"body": "two", "n": 3}\n')
    assert texts_of(f"{path}#body") == texts_of(path, field="body") == ["one", "two"]
    path.write_text('{"a": "one", "b": "two"}\n')
    assert texts_of(f"{path}#a", f"{path}#b", f"{path}#a") == ["one", "two"]
    # A file of that very name is meant first.
    odd = tmp_path / "a.jsonl#body"
    odd.write_text("plain")
    assert texts_of(odd) == ["plain"]
    odd.unlink()
    path.write_text('{"body": "one", "n": 1}\n')
    for name, message in (
        (path, r"no field 'text', it has body, n: .*FILE#FIELD"),
        (f"{path}#n", "holds int"),
    ):
        with pytest.raises(FullrankError, match=message):
            texts_of(name)
    for line, message in (
        ("no JSON", "line 2 of a.jsonl is no JSON"),
        ("[1]", "line 2 of a.jsonl is a list"),
    ):
        path.write_text('{"text": "one"}\n' + line)
        with pytest.raises(FullrankError, match=message):
            texts_of(path)


def test_damaged_archives_are_refused_where_they_were_named(tmp_path: Path) -> None:
    for path in packed(tmp_path / ".", {"a.txt": b"text " * 50_000}):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(FullrankError, match=r"is it whole\?") as caught:
            texts_of(path)
        assert "\n" not in str(caught.value)
    # In a directory they are left out, as other files that are no text; copies of a.tar are not looked at.
    (tmp_path / "good.txt").write_text("good")
    found = find([tmp_path])
    assert [source.name for source in found.sources] == ["good.txt"]
    assert found.skipped == ("a.tar", "a.tgz", "a.zip")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("file", [TEXT]),
        ("line", ["The first line.", "The second, ä line.", "A new paragraph", "of two lines."]),
        ("blank", ["The first line.\nThe second, ä line.", "A new paragraph\nof two lines."]),
    ],
)
def test_what_a_document_is(tmp_path: Path, rule: Any, expected: list[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_text(TEXT, encoding="utf8")
    corpus = find([path], documents=rule)
    read = Read()
    found = list(fragments(corpus, read))
    assert [fragment.text for fragment in found] == expected
    assert all(fragment.begins and fragment.ends for fragment in found)
    assert read.documents == len(expected)


@given(
    text=st.text(alphabet="ab \n", max_size=120),
    rule=st.sampled_from(["file", "line", "blank"]),
    size=st.integers(3, 30),
    at_once=st.integers(1, 7),
)
def test_cutting_never_changes_documents(text: str, rule: Any, size: int, at_once: int) -> None:
    def found_with(fragment_size: int, step: int) -> list[str]:
        before = documents.FRAGMENT
        documents.FRAGMENT = fragment_size
        try:
            blocks = (text[start : start + step] for start in range(0, len(text), step))
            found: list[str] = []
            for fragment in documents.parted(blocks, rule, Read()):
                if fragment.begins:
                    found.append("")
                found[-1] += fragment.text
            return found
        finally:
            documents.FRAGMENT = before

    plain = found_with(10**6, 10**6)
    if rule == "blank":
        # Three line breaks in a row part documents in two places; which one is no matter.
        assert [item.strip() for item in found_with(size, at_once)] == [item.strip() for item in plain]
    else:
        assert found_with(size, at_once) == plain


def test_a_giant_line_comes_in_fragments_between_words(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    text = "word " * 400_000
    path.write_text(text)
    found = list(fragments(find([path])))
    assert len(found) > 2
    assert "".join(fragment.text for fragment in found) == text
    assert all(fragment.text.startswith(" word") for fragment in found[1:])
    assert [fragment.begins for fragment in found] == [True] + [False] * (len(found) - 1)
    assert [fragment.ends for fragment in found] == [False] * (len(found) - 1) + [True]
    assert len(list(fragments(find([path], documents="line")))) > 2


def test_a_giant_word_is_cut_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LONGEST", 600_000)
    path = tmp_path / "a.txt"
    path.write_text("x" * 2_000_000)
    found = texts_of(path)
    assert "".join(found) == "x" * 2_000_000
    assert max(map(len, found)) <= 2 * 600_000 + formats.READ


def test_bad_bytes_are_replaced_and_counted_while_they_are_rare(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"plain text " * 100 + b"\xff\xfe" + b" and more" * 100)
    read = Read()
    text = "".join(fragment.text for fragment in fragments(find([path]), read))
    assert text.count("\ufffd") == read.replaced == 2
    path.write_bytes("gr\xfc\xdfe ".encode("latin-1") * 100)
    with pytest.raises(FullrankError, match=r"not UTF-8 .*iconv"):
        find([path])
    # Text at first, and no text later on.
    path.write_bytes(b"plain text " * 10_000 + b"\xff" * 100_000)
    with pytest.raises(FullrankError, match=r"not UTF-8 .*iconv"):
        texts_of(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x7fELF\0\0\0\1", "binary.*give a file of UTF-8"),
        ("text".encode("utf-16"), "UTF-16.*save it as UTF-8"),
        (b"", "holds no text"),
    ],
)
def test_what_is_no_text_is_refused_where_it_was_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    with pytest.raises(FullrankError, match=message):
        find([path])


def test_a_nul_byte_far_into_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"text " * 100_000 + b"\0")
    with pytest.raises(FullrankError, match="NUL"):
        texts_of(path)


def test_a_directory_gives_its_texts_in_order_and_says_what_it_left_out(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "sub" / "c.md").write_text("third")
    (tmp_path / "d.bin").write_bytes(b"\0\1\2")
    (tmp_path / ".hidden").write_text("hidden")
    corpus = find([tmp_path, tmp_path / "a.txt"])
    assert whole_documents(corpus) == ["first", "second", "third"]
    assert corpus.skipped == ("d.bin",)
    assert [source.name for source in corpus.sources] == ["a.txt", "b.txt", "sub/c.md"]


def test_damaged_archives_and_tables_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b"text " * 100_000, mtime=0)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FullrankError, match="whole"):
        texts_of(path)
    path.write_bytes(b"no gzip at all")
    with pytest.raises(FullrankError, match="decompressed"):
        find([path])
    path = tmp_path / "a.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(FullrankError, match="no parquet file"):
        find([path])


def test_a_table_without_the_column_names_those_it_has(tmp_path: Path) -> None:
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table({"body": ["a", None, "b"], "number": [1, 2, 3]}), tmp_path / "a.parquet"
    )
    with pytest.raises(FullrankError, match=r"body, number.*--column"):
        texts_of(tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet", field="body") == ["a", "b"]
    with pytest.raises(FullrankError, match="holds int"):
        texts_of(tmp_path / "a.parquet", field="number")


def test_names_that_are_nothing_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FullrankError, match="no such text"):
        find([tmp_path / "missing.txt"])
    with pytest.raises(FullrankError, match="no text was given"):
        find([])
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FullrankError, match="pip install datasets"):
        find(["someone/something"])


def test_a_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((name, config, split, streaming))
        if name == "no/such":
            raise ConnectionError("no network")
        return iter([{"text": "one"}, {"text": "two"}])

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: object())
    assert texts_of("someone/text:small:test") == ["one", "two"]
    assert asked == [("someone/text", "small", "test", True)]
    with pytest.raises(FullrankError, match=r"no network.*NAME:CONFIG:SPLIT"):
        texts_of("no/such")


@pytest.mark.parametrize(
    "kind", ["jsonl", "bad bytes", "parquet", "large_string", "dictionary", "dataset", "chat"]
)
def test_lone_surrogates_and_bad_bytes_are_replaced_and_counted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a surrogate pair, which JavaScript leaves of an emoji, has the rule of bad bytes everywhere."""
    from pyarrow import parquet

    name, chat = tmp_path / "a.jsonl", None
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude42 \\ufffd"}\n')
    if kind == "bad bytes":
        line = f'{{"text": "a?b 🙂 \ufffd", "other": "{"ä" * 400}"}}\n'
        name.write_bytes(line.encode().replace(b"?", b"\xff"))
    elif kind == "chat":
        name.write_text('{"text": [{"content": "a\\ud800b"}]}\n')
        chat = lambda messages: messages[0]["content"] + " 🙂 \ufffd"  # noqa: E731
    elif kind == "dataset":
        module = types.ModuleType("datasets")
        rows = [{"text": "a\ud800b 🙂 \ufffd"}]
        module.load_dataset = lambda *_, **__: iter(rows)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", module)
        monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: object())
        name = Path("some/text")
    elif kind != "jsonl":
        name = tmp_path / "a.parquet"
        data = pyarrow.array([None, "a?b 🙂 \ufffd".encode().replace(b"?", b"\xff")], pyarrow.large_binary())
        column = data.view(pyarrow.large_string())
        if kind == "parquet":
            column = data.cast(pyarrow.binary()).view(pyarrow.string())
        parquet.write_table(
            pyarrow.table({"text": column.dictionary_encode() if kind == "dictionary" else column}), name
        )
    read = Read()
    assert [fragment.text for fragment in fragments(find([name]), read, chat)] == ["a\ufffdb 🙂 \ufffd"]
    assert read.replaced == 1


def test_a_nested_column_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    from pyarrow import parquet

    column = pyarrow.ListArray.from_arrays([0, 1], pyarrow.array([b"\xff"]).view(pyarrow.string()))
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(FullrankError, match=r"field 'text' of a.parquet is not UTF-8 .*write the file again"):
        texts_of(tmp_path / "a.parquet")


ROW = st.dictionaries(st.text(max_size=4), st.text(max_size=9) | st.floats(allow_nan=False) | st.none())


@settings(max_examples=40)
@given(
    written=st.lists(ROW.map(lambda row: {**row, "text": "a"}), max_size=9),
    indent=st.sampled_from([None, 1]),
    form=st.sampled_from(["array", "lines", "held"]),
    escaped=st.booleans(),
    step=st.integers(1, 30),
)
def test_json_in_blocks_of_any_size_has_the_same_records(
    written: list[dict[str, Any]], indent: int | None, form: str, escaped: bool, step: int
) -> None:
    held = {"version": [1], "data": written} if written else []
    shown = [held if form == "held" else written] if form != "lines" else written
    text = "\n".join(json.dumps(value, indent=indent, ensure_ascii=escaped) for value in shown) + "\n"
    blocks = (text[start : start + step] for start in range(0, len(text), step))
    assert list(json_records.records(blocks, "a.json", "text")) == written


def test_a_json_array_is_read_while_it_is_parsed() -> None:
    blocks = iter(["[", *['{"text": "a"},'] * 1000, '{"text": "b"}]'])
    assert next(json_records.records(blocks, "a.json", "text")) == {"text": "a"}
    assert len(list(blocks)) > 990


@pytest.mark.parametrize(
    "suffix", [".json", ".JSON", ".json.gz", ".json.zst", ".json in a zip", ".json in a directory"]
)
def test_json_files_are_read_as_records(suffix: str, tmp_path: Path) -> None:
    """As JSON lines are: the same field, no brackets in the text."""
    data = json.dumps([{"text": "one ü", "id": 1}, {"text": None}, {"text": "two\n"}], indent=1).encode()
    name = tmp_path / f"a{suffix.split(' in ')[0]}"
    name.write_bytes(
        gzip.compress(data) if suffix == ".json.gz"
        else zstandard.ZstdCompressor().compress(data) if suffix == ".json.zst"
        else b"\xef\xbb\xbf" + data
    )  # fmt: skip
    if suffix.endswith("zip"):
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            archive.write(name, "in/a.json")
        name = tmp_path / "a.zip"
    assert texts_of(tmp_path if suffix.endswith("directory") else name) == ["one ü", "two\n"]
    if suffix == ".json":
        assert texts_of(f"{name}#text") == ["one ü", "two\n"]


def test_an_object_alone_is_a_record_or_holds_them(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for document, expected in (
        ({"text": "one", "data": [{"text": "two"}]}, ["one"]),
        ({"version": 1, "data": [{"text": "one"}, {"text": "two"}]}, ["one", "two"]),
        ([], []),
    ):
        path.write_text(json.dumps(document))
        assert texts_of(path) == expected


def test_conversations_in_a_json_array_go_through_the_template(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"messages": [{"content": f"number {n}"}]} for n in range(2)]))
    read = Read()
    found = fragments(find([f"{path}#messages"]), read, lambda messages: messages[0]["content"])
    assert [fragment.text for fragment in found] == ["number 0", "number 1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            json.dumps([{"instruction": "a", "input": "", "output": "b"}]),
            r"a.json has no field 'text', it has instruction, input, output: name one, as FILE#FIELD",
        ),
        (json.dumps({"name": "a", "scripts": {}}), "no field 'text', it has name, scripts: name one"),
        (json.dumps({f"k{n}": n for n in range(99)}), "k8, k9 and 89 more: name one"),
        (
            json.dumps({"train": [{"text": "a"}], "test": [{"text": "b"}]}),
            r"several arrays .*\(train, test\)",
        ),
        ('["one", "two"]', "holds a str as record 1: expected an array of objects"),
        ('"text"', "holds a str as record 1"),
        ('[{"text": "a"}, {"text": }]', r"record 2 \(Expecting value\): is it whole"),
        ('[{"text": "a"}, {"text": }, {"text": "b"}]', r"at record 2 \(Expecting value\): expected an array"),
        ('[{"text": "a"} {"text": "b"}]', r"no JSON at record 1 \('\{' follows it\)"),
        ('[{"text": "a"}] more', "goes on after the end of its array"),
        ('[{"text": "a"}, {"text": "b', r"at its end, record 2 \(Unterminated string starting at\)"),
        ('[{"text": "a"},', r"at its end, record 1 \(the array has no end\): is it whole"),
        ('[{"text": "a"}', r"record 1 \(the array has no end\)"),
        ('[{"text": ' + "[" * 99_999, "nested too deeply"),
    ],
)
def test_json_that_is_no_records_is_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(FullrankError, match=message) as caught:
        texts_of(path)
    assert "\n" not in str(caught.value)


def test_json_without_records_is_left_out_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"name": "a"}')
    with pytest.raises(
        FullrankError, match=r"holds no text: .*package.json has no field 'text', it has name"
    ):
        find([tmp_path])
    (tmp_path / "a.txt").write_text("text")
    found = find([tmp_path])
    assert whole_documents(found) == ["text"]
    assert found.skipped == ("package.json",)


def test_a_record_that_memory_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_records, "memory", lambda: 8000)
    blocks = iter(['[{"text": "', *["a" * 100] * 1000])
    with pytest.raises(
        FullrankError, match=r"a.json has a record of more than .*save the records as JSON lines"
    ):
        list(json_records.records(blocks, "a.json", "text"))
    assert len(list(blocks)) > 900
