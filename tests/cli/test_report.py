"""`fullrank report`: a page of a run, a comparison of several, and one sentence for a mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fullrank import results
from fullrank.cli import main
from fullrank.results import Diagnosis, Ladder, LadderRung, Provenance
from tests.diagnosis_records import diagnosis, model_facts

MADE = Provenance(command="fullrank", commit="", time="", device="cpu", seed=None, versions={})


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("one", "two"):
        results.save(
            diagnosis(model=model_facts(name=f"model {name}")), tmp_path / name / "results.json", MADE
        )
    rung = LadderRung(
        head="softmax", width=1, components=1, parameters=1, least_rank=1, kl=0.1, floor=0.1, seconds=1.0
    )
    ladder = Ladder(
        contexts=2, vocabulary=2, least_rank=1, small_width=1, steps=1, entropy=0.5, rungs=(rung,)
    )
    results.save(ladder, tmp_path / "ladder" / "results.json", MADE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_run_gets_its_page_beside_it(runs: Path) -> None:
    assert main.run(["report", "one"]) == 0
    assert "model one" in (runs / "one" / "report.html").read_text()
    assert main.run(["report", "two/results.json"]) == 0
    assert "model two" in (runs / "two" / "report.html").read_text()
    assert main.run(["report", "one", "--out", "elsewhere/page.html"]) == 0
    assert "model one" in (runs / "elsewhere" / "page.html").read_text()


def test_several_runs_get_one_page(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["report", "one", "two/results.json"]) == 0
    assert "comparison.html" in capsys.readouterr().out
    page = (runs / "comparison.html").read_text()
    assert "model one" in page
    assert "model two" in page
    assert not (runs / "one" / "report.html").exists()
    assert main.run(["report", "one", "two", "one", "--out", "page.html"]) == 0
    assert "model one (2)" in (runs / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["one", "ladder"], ["'ladder'", "only diagnoses", "fullrank report ladder"]),
        (["one", "three"], ["no results at three/results.json"]),
        (["one", "three.json"], ["no results at three.json"]),
        (["one", "--out", "two"], ["two is a directory", "--out"]),
        (["one", "--out", "two/results.json"], ["looks like a results file", "--out"]),
    ],
)
def test_refusals(
    arguments: list[str], words: list[str], runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["report", *arguments]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words)
    assert isinstance(results.load(runs / "two" / "results.json")[0], Diagnosis)
    assert not list(runs.glob("**/*.html"))


def test_a_page_needs_no_torch(runs: Path) -> None:
    code = (
        "import sys, vl_convert; from fullrank.cli import main\n"
        "vl_convert.vegalite_to_svg = lambda *of, **options: '<svg></svg>'\n"
        "assert main.run(['report', 'one', 'two']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=runs)
