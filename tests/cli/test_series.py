"""`fullrank series`: a table, results.json and report.html; one sentence for what cannot be read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fullrank import results
from fullrank.cli import main
from fullrank.results import Series, Training, Trainings

# LAMBADA perplexity and its standard error, EleutherAI/pythia evals, zero-shot.
STEPS = range(13_000, 144_000, 10_000)
ROWS = {
    "pythia-70m": (
        136.2, 121.3, 118.1, 112.4, 94.32, 101.7, 117.1, 124.3, 140.5, 125.6, 120.5, 133.1, 148.5, 142.4,
    ),
    "pythia-1b-bf16": (
        15.20, 12.42, 11.14, 10.53, 9.875, 9.157, 8.778, 8.709, 8.507, 8.310, 8.067, 7.663, 7.576, 7.916,
    ),
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("few_simulations")


@pytest.fixture
def curves(tmp_path: Path) -> Path:
    path = tmp_path / "curves.csv"
    rows = [
        f"{model},0,{step},{value},{0.035 * value},0.3"
        for model, values in ROWS.items()
        for step, value in zip(STEPS, values, strict=True)
    ]
    path.write_text("\n".join(["model,shots,step,lambada_ppl,lambada_ppl_stderr,sciq_acc", *rows]) + "\n")
    return path


def test_table_results_and_page(curves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main.run(["series", str(curves), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for words in (
        "pythia-70m", "53,000", "51.0", "undecided", "if the noise of neighbouring checkpoints correlates by",
        "no scaling law", "--tokens-per-step", "results.json",
    ):  # fmt: skip
        assert words in printed
    document = json.loads((out / "results.json").read_text())
    assert document["kind"] == "series"
    entries = {(entry["model"], entry["shots"]): entry for entry in document["saturation"]}
    assert len(entries) == len(document["saturation"]) == 2
    small, large = entries["pythia-70m", 0], entries["pythia-1b-bf16", 0]
    assert small["outcome"] == "undecided"
    assert small["best_step"] == 53_000
    assert small["interval"][0] < small["lost_percent"] < small["interval"][1]
    assert large["outcome"] == "not turned"
    record, made = results.load(out / "results.json")
    assert isinstance(record, Series)
    assert made.seed == 0
    page = (out / "report.html").read_text()
    assert "pythia-70m" in page
    assert "2602.20433" in page
    (out / "report.html").unlink()
    assert main.run(["report", str(out)]) == 0
    assert "pythia-70m" in (out / "report.html").read_text()


def test_metric_and_seed(curves: Path, tmp_path: Path) -> None:
    arguments = ["series", str(curves), "--out", str(tmp_path), "--metric", "sciq_acc", "--seed", "3"]
    assert main.run(arguments) == 0
    record, made = results.load(tmp_path / "results.json")
    assert record.metric == "sciq_acc"
    assert made.seed == 3
    assert not any(entry.turned for entry in record.saturation)


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        (None, [], ["no file at", "CSV file"]),
        ("", [], ["no column model"]),
        ("step,loss\n1,2\n", [], ["no column model"]),
        ("model,step\nm,1\n", [], ["no column of numbers"]),
        ("model,step,loss\nm,1,2\n", ["--metric", "ppl"], ["'ppl'", "loss"]),
        ("model,step,loss\nm,1,2\n", ["--tokens-per-step", "-1"], ["--tokens-per-step -1"]),
        ("model,step,loss\nm,1,2\n", ["--revisions", "step1"], ["for checkpoints"]),
        ("\0\1", [], ["not text"]),
    ],
)
def test_refusals(
    text: str | None, flags: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "given.csv", tmp_path / "out"
    if text is not None:
        path.write_text(text)
    assert main.run(["series", str(path), "--out", str(out), *flags]) == 2
    message = capsys.readouterr().err
    assert message.startswith("fullrank: ")
    assert message.count("\n") == 1
    for word in words:
        assert word in message
    assert not out.exists()


def test_nothing_given_and_mixed_sources(
    curves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["series", "--out", str(tmp_path / "out")]) == 2
    assert "nothing to read" in capsys.readouterr().err
    assert main.run(["series", str(curves), str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "stands alone" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_output_is_checked_first(curves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main.run(["series", str(curves), "--out", str(tmp_path / "file")]) == 2
    assert "no writable directory" in capsys.readouterr().err


def test_one_run(write_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = write_run("mine", turns=True, dead_from=7), tmp_path / "out"
    log = (run / "log.jsonl").read_bytes()
    assert main.run(["series", str(run), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for words in (
        "Training mine, head mos", "2,400", "112/112", "turned after step 1,200", "alarm at step 1,400",
        "1 of 4 components", str(out / "report.html"),
    ):  # fmt: skip
        assert words in printed
    record, _ = results.load(out / "results.json")
    assert isinstance(record, Training)
    assert record.saturation.turned
    page = (out / "report.html").read_text()
    assert "Training mine" in page
    (out / "report.html").unlink()
    assert main.run(["report", str(out / "results.json")]) == 0
    assert "Training mine" in (out / "report.html").read_text()
    assert (run / "log.jsonl").read_bytes() == log


def test_several_runs_and_one_in_progress(
    write_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        write_run("plain", head="softmax", components=1, evaluations=4),
        write_run("going-on", finished=False, evaluations=2),
    ]
    with (runs[1] / "log.jsonl").open("a") as log:
        log.write('{"event": "evaluate", "ste')
    assert main.run(["series", *map(str, runs), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    for words in ("2 training runs", "softmax", "going-on: the run has not ended (step 400 of 2,400)"):
        assert words in printed
    record, _ = results.load(tmp_path / "out" / "results.json")
    assert isinstance(record, Trainings)
    assert [run.name for run in record.runs] == ["plain", "going-on"]


def test_runs_stand_alone(
    write_run: Callable[..., Path], curves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(evaluations=1)
    for other in (str(curves), "EleutherAI/pythia-70m", str(tmp_path)):
        assert main.run(["series", str(run), other, "--out", str(tmp_path / "out")]) == 2
        assert "is a training run and" in capsys.readouterr().err
    for flags in (["--metric", "loss"], ["--text", str(curves)], ["--revisions", "step1"]):
        assert main.run(["series", str(run), "--out", str(tmp_path / "out"), *flags]) == 2
        assert f"{flags[0]} is not for training runs" in capsys.readouterr().err
    (run / "log.jsonl").write_text("{}\n")
    assert main.run(["series", str(run), "--out", str(tmp_path / "out")]) == 2
    assert "line 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
