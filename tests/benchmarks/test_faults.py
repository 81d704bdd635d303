"""What counts faults: the inputs it draws, how it judges an end, what it keeps, and a small run of it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks are not installed: they run from the source tree."""
    monkeypatch.syspath_prepend(str(ROOT))


def module(name: str = "faults") -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def ended(code: int, errors: str = "", output: str = "", stopped: str = "") -> Any:
    return module("faults_child").Ended(
        code=code, stopped=stopped, seconds=1.0, peak=0, output=output, errors=errors
    )


def test_an_end_is_judged() -> None:
    refused = module("faults_child").refused
    assert refused(ended(2, "  0 s  loading\nfullrank: no such path: x; give another\n")) == ""
    assert refused(ended(0)) == ""
    assert "hang" in refused(ended(-9, stopped="hang"))
    assert "traceback" in refused(ended(2, "Traceback (most recent call last)\nKeyError: 1"))
    assert "mistake of ours" in refused(ended(1, "fullrank: a mistake of ours, KeyError: 1\n"))
    assert "signal 6" in refused(ended(-6))
    assert "not one sentence" in refused(ended(2, "fullrank: one line\nand another\n"))
    assert "not one sentence" in refused(ended(2))


def test_jobs_are_all_that_was_asked_for() -> None:
    faults = module()
    found = faults.jobs(faults.Config(kills=14, inputs=3))
    kills = [job for job in found if job.category == "kills"]
    assert sum(job.kills for job in kills) == 14
    assert {job.case.split()[0] for job in kills} == {"train", "diagnose", "upgrade", "corpus"}
    assert sum(job.category == "inputs" for job in found) == 3
    assert {job.category for job in faults.jobs(faults.Config(only=("disk",)))} == {"disk"}
    assert len({(job.category, job.case) for job in found}) == len(found)


def test_rows_of_this_commit_are_not_run_again() -> None:
    faults = module()
    jobs = faults.jobs(faults.Config(inputs=2, only=("inputs",)))
    row = {"category": "inputs", "case": "0", "seed": 0, "commit": "abc", "runs": 1, "failures": []}
    rows = {faults.key_of(row): row}
    assert [job.case for job in faults.missing(jobs, rows, 0, "abc")] == ["1"]
    assert len(faults.missing(jobs, rows, 1, "abc")) == 2
    assert len(faults.missing(jobs, rows, 0, "abd")) == 2
    assert len(faults.missing(jobs, rows, 0, "abc+changes")) == 2


def test_the_table_stands_between_its_marks(tmp_path: Path) -> None:
    faults, page = module(), tmp_path / "page.md"
    page.write_text(f"before\n{faults.MARKS[0]}\nold\n{faults.MARKS[1]}\nafter\n")
    rows = [
        {"category": "inputs", "runs": 1, "accepted": 1, "failures": []},
        {"category": "inputs", "runs": 1, "accepted": 0, "failures": ["a", "b"]},
        {"category": "kills", "runs": 5, "reused": 7, "failures": []},
    ]
    faults.write_table(page, rows)
    text = page.read_text()
    assert "| bad files and options | 2 | 1 | 1 still valid and accepted |" in text
    assert "| 5 | 0 | 7 finished pieces of work reused |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text


def test_bad_inputs_are_drawn_alike_and_of_all_kinds(tmp_path: Path) -> None:
    """Every slot and every way to spoil it, without running any."""
    inputs, sandbox = module("faults_inputs"), module("faults_sandbox")
    files = sandbox.Files(place=tmp_path / "good")
    for folder in (files.model, files.run, files.upgraded, files.tokens, files.results):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"a": {"b": 1}, "c": [2]}')
        (folder / "model.safetensors").write_bytes(bytes(200))
    (files.model / "tokenizer.json").write_text("{}")
    for file in (files.text, files.rows, files.curves):
        file.write_text("text\n" * 100)
    seen = set()
    for number in range(200):
        case = inputs.draw(number, 0, files, tmp_path / f"a{number}")
        again = inputs.draw(number, 0, files, tmp_path / f"b{number}")
        assert case.what == again.what
        assert [word.replace(f"a{number}", f"b{number}") for word in case.arguments] == again.arguments
        seen.add(case.arguments[0])
    assert seen >= {
        "diagnose",
        "train",
        "eval",
        "upgrade",
        "collapse",
        "corpus",
        "series",
        "report",
        "generate",
    }


@pytest.mark.slow(reason="a hundred commands in processes of their own: some ten minutes")
def test_a_small_run_finds_no_fault(tmp_path: Path) -> None:
    out = tmp_path / "faults.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", "--kills", "8", "--inputs", "24", "--out", str(out)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["data"]["rows"]
    assert [row for row in rows if row["failures"]] == []
    assert {row["category"] for row in rows} == {"kills", "inputs", "hostile", "disk", "memory"}
