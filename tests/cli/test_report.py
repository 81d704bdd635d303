from __future__ import annotations

from pathlib import Path

import pytest

from fullrank import results
from fullrank.cli import main
from fullrank.results import Diagnosis, Ladder, LadderRung, Provenance
from fullrank.results.diagnosis import ModelFacts, TextFacts

MADE = Provenance(command="fullrank", commit="", time="", device="cpu", seed=None, versions={})


def bare(name: str) -> Diagnosis:
    """A diagnosis that answers nothing."""
    fields = dict.fromkeys(results.QUESTIONS)
    model = ModelFacts(
        name=name,
        source="object",
        architecture="Tiny",
        parameters=1,
        layers=1,
        width=2,
        vocabulary=3,
        tokens=3,
        tied=False,
        bias=False,
        logit_scale=1.0,
        softcap=None,
        final_norm="",
        storage="float32",
        dtype="float32",
        fingerprint="",
        notes=(),
    )
    text = TextFacts(
        sources=(),
        sha256="",
        bytes=1,
        tokens=1,
        window=1,
        windows=1,
        starts_with_bos=False,
        fit_tokens=0,
        choose_tokens=0,
        held_out_tokens=0,
    )
    return Diagnosis(model=model, text=text, findings=(), missing=(), seconds={}, **fields)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("one", "two"):
        results.save(bare(f"model {name}"), tmp_path / name / "results.json", MADE)
    rung = LadderRung(
        head="softmax", width=1, components=1, parameters=1, least_rank=1, kl=0.1, floor=0.1, seconds=1.0
    )
    ladder = Ladder(
        contexts=2, vocabulary=2, least_rank=1, small_width=1, steps=1, entropy=0.5, rungs=(rung,)
    )
    results.save(ladder, tmp_path / "ladder" / "results.json", MADE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("pictures")
def test_one_run_gets_its_page_beside_it(runs: Path) -> None:
    assert main.run(["report", "one"]) == 0
    assert "model one" in (runs / "one" / "report.html").read_text()
    assert main.run(["report", "two/results.json"]) == 0
    assert "model two" in (runs / "two" / "report.html").read_text()
    assert main.run(["report", "one", "--out", "elsewhere/page.html"]) == 0
    assert "model one" in (runs / "elsewhere" / "page.html").read_text()


@pytest.mark.usefixtures("pictures")
def test_several_runs_get_one_page(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["report", "one", "two/results.json"]) == 0
    assert "comparison.html" in capsys.readouterr().out
    page = (runs / "comparison.html").read_text()
    assert "model one" in page
    assert "model two" in page
    assert not (runs / "one" / "report.html").exists()
    assert main.run(["report", "one", "two", "one", "--out", "page.html"]) == 0
    assert "model one (2)" in (runs / "page.html").read_text()


def test_mistakes_are_the_users(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["one", "ladder"], ["'ladder'", "only diagnoses", "fullrank report ladder"]),
        (["one", "three"], ["no results at three/results.json"]),
        (["one", "three.json"], ["no results at three.json"]),
        (["one", "--out", "two"], ["two is a directory", "--out"]),
        (["one", "--out", "two/results.json"], ["looks like a results file", "--out"]),
    ):
        assert main.run(["report", *arguments]) == 2
        message = capsys.readouterr().err
        for word in words:
            assert word in message
    assert isinstance(results.load(runs / "two" / "results.json")[0], Diagnosis)
    assert not list(runs.glob("**/*.html"))


def test_a_page_needs_no_torch(runs: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from fullrank.cli import main\n"
        "assert main.run(['report', 'one', 'two']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=runs)
