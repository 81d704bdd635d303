"""The command line: exit codes, one-sentence errors, nothing written on a mistake."""

import inspect
import json
import re
import runpy
import shlex
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from fullrank import results
from fullrank.cli import demo as demo_module
from fullrank.cli import main
from fullrank.cli.demo import findings
from fullrank.cli.study import Study
from fullrank.errors import FullrankError
from fullrank.results import Ladder, LadderRung
from fullrank.version import __version__


def tiny(out: Path) -> list[str]:
    return [
        "demo", "--out", str(out), "--contexts", "8", "--vocabulary", "6", "--rank", "3", "--width", "2",
        "--components", "2", "--steps", "2",
    ]  # fmt: skip


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"fullrank {__version__}\n"


def test_python_runs_the_package_as_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fullrank", "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("fullrank", run_name="__main__")
    assert not stop.value.code
    assert capsys.readouterr().out == f"fullrank {__version__}\n"


def test_help_and_version_import_nothing_heavy() -> None:
    """What makes them slow is imports; a clock would be flaky."""
    code = (
        "import sys\n"
        "from fullrank.cli import main\n"
        "assert main.run(['--version']) == 0\n"
        "try:\n    main.run(['--help'])\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'numpy', 'scipy', 'altair', 'jinja2', 'highspy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
    assert "report" in done.stdout


def test_without_a_command_it_says_what_it_does_for_whom(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([]) == 0
    front = capsys.readouterr().out
    assert max(map(len, front.splitlines())) <= 110
    for command in main.COMMANDS:
        assert f"fullrank {command.__name__.lower()}" in front


@pytest.mark.parametrize("command", [*main.COMMANDS])
def test_every_command_has_an_example_that_parses(command: type) -> None:
    described = inspect.getdoc(command) or ""
    if command is Study:
        kinds = typing.get_args(typing.get_type_hints(Study, include_extras=True)["what"])
        each = [inspect.getdoc(typing.get_args(kind)[0]) or "" for kind in kinds]
        assert all("Example: " in one for one in each)
        described = "\n".join(each)
    examples = re.findall(r"fullrank (\w+ [^\n>]*)", described.replace("`", ""))
    assert examples
    for example in examples:
        assert main.parse(shlex.split(example)) is not None


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main.run(["completion", shell])
    assert not stop.value.code
    script = capsys.readouterr().out
    for word in ("diagnose", "upgrade", "--thorough", "--components"):
        assert word.lstrip("-") in script


def test_demo_writes_results_and_a_page_that_can_be_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main.run([*tiny(run), "--json"]) == 0
    printed = capsys.readouterr()
    # JSON is all that goes to the standard output.
    assert json.loads(printed.out) == json.loads((run / "results.json").read_text())
    record, made = results.load(run / "results.json")
    assert isinstance(record, Ladder)
    assert record.least_rank == 3
    assert {rung.head for rung in record.rungs} >= {"softmax", "moc", "sigsoftmax", "mos", "trunk"}
    assert made.seed == 0
    assert "torch" in made.versions
    page = (run / "report.html").read_text()
    assert all(rung.head in printed.err and rung.head in page for rung in record.rungs)
    (run / "report.html").unlink()
    assert main.run(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": str(run / "report.html")}
    assert (run / "report.html").read_text() == page


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rank", "6"], ["--rank 6", "at most 5"]),
        (["--width", "3"], ["--width 3", "below --rank 3"]),
        (["--width", "0"], ["--width 0", "at least 1"]),
        (["--components", "-1"], ["--components -1", "at least 1"]),
        (["--steps", "0"], ["--steps 0", "at least 1"]),
        (["--heads", "mos", "moz"], ["--heads moz", "moc", "mixtape"]),
        (["--heads", "mixtape", "--components", "3"], ["components=3", "power of two"]),
    ],
    ids=lambda value: "-".join(value),
)
def test_refusals(
    flags: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main.run([*tiny(out), *flags]) == 2
    message = capsys.readouterr().err
    assert message.startswith("fullrank: ")
    assert message.count("\n") == 1
    for word in words:
        assert word in message
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments", [["demo", "--no-such-flag"], ["no-such-command"], ["demo", "--steps", "many"]]
)
def test_unknown_flag_and_command_exit_with_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main.run(arguments)
    assert stop.value.code == 2


def test_report_without_results_is_the_users_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["report", str(tmp_path), "--json"]) == 2
    printed = capsys.readouterr()
    assert "no results" in json.loads(printed.out)["error"]
    assert printed.err.startswith("fullrank: no results")
    (tmp_path / "results.json").write_text(json.dumps({"kind": "something"}))
    assert main.run(["report", str(tmp_path)]) == 2
    assert not (tmp_path / "report.html").exists()


def test_unwritable_output_is_the_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main.run(tiny(out)) == 2
        assert "is no writable directory" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (FullrankError("came X, expected Y: do Z"), 2, "came X"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("boom"), 1, "boom"),
    ],
    ids=["users", "interrupt", "ours"],
)
def test_exit_codes(
    error: BaseException, code: int, word: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(options: object) -> None:
        raise error

    monkeypatch.setitem(main.COMMANDS, demo_module.Demo, fail)
    assert main.run(["demo"]) == code
    message = capsys.readouterr().err
    assert word in message
    assert "Traceback" not in message


def test_our_own_mistake_shows_its_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setitem(main.COMMANDS, demo_module.Demo, fail)
    monkeypatch.setenv(main.DEBUG, "1")
    with pytest.raises(RuntimeError, match="boom"):
        main.run(["demo"])


def test_findings_are_counted_from_the_record() -> None:
    def found(*rungs: tuple[str, float, float, int]) -> list[str]:
        """By head, KL, floor and width; the small width is 2."""
        ladder = tuple(
            LadderRung(
                head=head,
                width=width,
                components=1,
                parameters=1,
                least_rank=1,
                kl=kl,
                floor=floor,
                seconds=1,
            )
            for head, kl, floor, width in rungs
        )
        return findings(
            Ladder(contexts=4, vocabulary=4, least_rank=3, small_width=2, steps=1, entropy=1.0, rungs=ladder)
        )

    rungs = ("softmax", 0.6, 0.5, 2), ("softmax", 0.1, 0.0, 4), ("moc", 0.55, 0.5, 2), ("mos", 0.2, 0.5, 2)
    _, first, second = found(*rungs)
    assert "above its floor: 0.6000" in first
    assert second.endswith(": mos")
    _, first, second = found(("softmax", 0.4, 0.5, 2), ("mos", 0.7, 0.5, 2))
    assert "below its floor" in first
    assert second.endswith("none")


def test_a_reader_that_leaves_early_is_no_mistake() -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m fullrank.cli.main diagnose --help | head -1"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stderr == ""
    assert done.stdout.startswith("usage:")
