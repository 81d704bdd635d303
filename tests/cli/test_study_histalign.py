"""`fullrank study histalign`: files, a table, and bad input in one sentence."""

from pathlib import Path

import pytest

from fullrank.cli.main import run
from fullrank.results import load


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
