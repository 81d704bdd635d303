"""`fullrank study histalign`: files, a table, and bad input in one sentence."""

from pathlib import Path

import pytest

from fullrank.cli.main import run
from fullrank.results import load
from tests.studies.conftest import word_model, word_tokenizer
from tests.studies.test_data_to_text import write

__all__ = ["word_model", "word_tokenizer"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--methods trime", "expected base"),
        ("{place}/none", "no such path"),
        ("--new-tokens 5", "--new-tokens is no option of --task templates"),
        ("--task restaurants", "--task restaurants needs --data"),
        ("--task restaurants --data {place}/none", "devset.csv cannot be read"),
        ("--task restaurants --data {place} --methods histalign_sum", "expected some of base, softmax"),
        # An option of the other task would have no effect.
        ("--task restaurants --data {place} --epochs 5", "--epochs is no option of --task restaurants"),
    ],
)
def test_refusals(words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["study", "histalign", *words.format(place=tmp_path).split(), "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_the_recorded_study_reads_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from fullrank.cli.study_histalign import tables

    file = Path(__file__).parents[2] / "results" / "histalign_smollm2.json"
    record, made = load(file)
    assert "study histalign" in made.command
    console = Console(width=160)
    for drawn in tables(record):
        console.print(drawn)
    shown = capsys.readouterr().out
    for method in ("base", "cache", "softmax", "trime", "histalign", "mos"):
        assert method in shown


@pytest.mark.slow
def test_descriptions_from_end_to_end(
    tmp_path: Path, word_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write(data)
    words = ["study", "histalign", str(word_model), "--task", "restaurants", "--data", str(data)]
    words += ["--methods", "base", "trime", "--seeds", "0", "--rates", "1e-4", "--layers", "1"]
    words += ["--steps", "2", "--generated", "2", "--new-tokens", "4"]
    words += ["--cache", str(tmp_path / "c"), "--out", str(tmp_path / "o")]
    assert run(words) == 0
    assert "trime" in capsys.readouterr().out
    assert load(tmp_path / "o" / "results.json")[0].task == "restaurants"
    assert "name: Strada" in (tmp_path / "o" / "report.html").read_text(encoding="utf8")
