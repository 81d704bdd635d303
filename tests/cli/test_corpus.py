"""`fullrank corpus dimension`: what is printed and written, and what bad input leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullrank import results
from fullrank.cli import main
from fullrank.cli.corpus import bytes_of
from fullrank.errors import FullrankError

pytest.importorskip("duckdb")
pytest.importorskip("ibis")
pytest.importorskip("altair")

QUICK = [
    "--no-interval", "--no-null", "--constructions", "probability", "--tokenizer", "bytes", "--workers", "1",
]  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("she sells sea shells by the sea shore, and the shells she sells are sea shells\n" * 20)
    return path


def test_a_corpus_is_measured_and_written(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["corpus", "dimension", str(text), "--cache", str(tmp_path / "cache"), "--out", str(out)]
    assert main.run([*arguments, *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "probability" in printed
    assert str(out / "results.json") in printed.replace("\n", "")
    record, made = results.load(out / "results.json")
    assert isinstance(record, results.Corpus)
    assert record.curves[0].construction == "probability"
    assert set(record.curves[0].dimensions) == {"50", "90", "99"}
    assert made.seed == 0
    assert "<html" in (out / "report.html").read_text()


def test_several_corpora_come_into_one_record(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.txt"
    other.write_text("a quite different text, with words of its own and no shells in it\n" * 20)
    out = tmp_path / "out"
    arguments = ["corpus", "dimension", str(text), str(other), "--each", "--cache", str(tmp_path / "cache")]
    assert main.run([*arguments, "--out", str(out), *QUICK]) == 0
    record, _ = results.load(out / "results.json")
    assert isinstance(record, results.Corpora)
    assert [one.name for one in record.corpora] == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no text was given"),
        (["missing.txt"], "no such text"),
        (["{text}", "--memory", "much"], "expected one such as 4GB"),
        (["{text}", "--spark", "local"], "--engine spark"),
        (["{text}", "--order", "1"], "--order is 1"),
        (["{text}", "--tokenizer", "{text}"], "is no tokenizer"),
        (["{text}", "--tokenizer", "bpe:3"], "bpe:257"),
        (["{empty}"], "holds no text"),
        (["{binary}"], "binary"),
    ],
)
def test_refusals(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    places = {"text": text, "empty": tmp_path / "empty.txt", "binary": tmp_path / "data.bin"}
    places["empty"].write_text("")
    places["binary"].write_bytes(bytes(range(256)))
    given = [argument.format(**places) for argument in arguments]
    out, cache = tmp_path / "out", tmp_path / "cache"
    assert main.run(["corpus", "dimension", *given, "--out", str(out), "--cache", str(cache)]) == 2
    said = capsys.readouterr().err
    assert message in said
    # Nothing but progress comes before it.
    assert [line for line in said.splitlines() if " s  " not in line[:10]] == said.splitlines()[-1:]
    assert not out.exists()
    assert not list(cache.glob("counts-*"))


def test_sizes() -> None:
    sizes = {"4GB": 4 * 10**9, "512 MiB": 512 << 20, "1.5gb": 1_500_000_000, "1000000": 10**6}
    assert {size: bytes_of(size) for size in sizes} == sizes
    with pytest.raises(FullrankError, match="no size"):
        bytes_of("-4GB")
