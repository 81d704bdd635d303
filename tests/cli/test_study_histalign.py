"""`fullrank study histalign`: files, a table, and bad input in one sentence."""

from pathlib import Path

import pytest

from fullrank.cli.main import run
from fullrank.results import load
from tests.studies.conftest import word_model, word_tokenizer
from tests.studies.test_data_to_text import write

__all__ = ["word_model", "word_tokenizer"]


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["study", "histalign", "--methods", "trime", "--out", str(tmp_path)]) == 2
    assert "expected base" in capsys.readouterr().err
    assert run(["study", "histalign", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert "no such path" in capsys.readouterr().err


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


def test_the_tasks_of_generated_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["study", "histalign", "--task", "restaurants", "--out", str(tmp_path)]
    assert run(words) == 2
    assert "--task restaurants needs --data" in capsys.readouterr().err
    assert run([*words, "--data", str(tmp_path / "none")]) == 2
    assert "devset.csv cannot be read" in capsys.readouterr().err
    assert run([*words, "--data", str(tmp_path), "--methods", "histalign_sum"]) == 2
    assert "expected some of base, softmax" in capsys.readouterr().err
    # What only the other task reads would be left out without a word.
    assert run([*words, "--data", str(tmp_path), "--epochs", "5"]) == 2
    assert "--epochs is no option of --task restaurants" in capsys.readouterr().err
    assert run(["study", "histalign", "--new-tokens", "5", "--out", str(tmp_path)]) == 2
    assert "--new-tokens is no option of --task templates" in capsys.readouterr().err


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
