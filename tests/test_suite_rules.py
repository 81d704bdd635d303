"""The rules of the suite: a run fails for a slow test or an unlisted skip, and for nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.suite_rules import FOLDER, SECONDS, SuiteRules, entries


def report(test: str, seconds: float = 0.0, *marks: str, skip: str = "") -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=test, location=("file", 1, test), keywords=dict.fromkeys(marks, 1), when="call",
        outcome="skipped" if skip else "passed", longrepr=("file", 1, f"Skipped: {skip}") if skip else None,
        processor_seconds=seconds,
    )  # fmt: skip


@pytest.fixture
def rules() -> SuiteRules:
    rules = SuiteRules()
    rules.long, rules.skips = {"a.py::test_long"}, [("a.py", "no chromium")]
    return rules


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        (report("a.py::test_x", 4.9 * SECONDS), False),
        (report("a.py::test_x", 5.1 * SECONDS), True),
        (report("a.py::test_x", 60, "slow"), False),
        (report("a.py::test_x", 60, "gpu"), False),
        (report("a.py::test_long[case]", 40), False),
        (report("a.py::test_long[case]", 51), True),
        (report("a.py::test_x", skip="no chromium here"), False),
        (report("a.py::test_x", skip="no network"), True),
        (report("b.py::test_x", skip="no chromium here"), True),
    ],
)
def test_a_run_fails_where_a_rule_is_broken(rules: SuiteRules, line: pytest.TestReport, broken: bool) -> None:
    class Session:
        exitstatus: Any = 0

    rules.pytest_runtest_logreport(line)
    rules.pytest_sessionfinish(Session)  # type: ignore[arg-type]
    assert (Session.exitstatus != 0) is broken


def test_setup_and_call_count_together(rules: SuiteRules) -> None:
    for _ in range(3):
        rules.pytest_runtest_logreport(report("a.py::test_x", 2.0))
    assert len(rules.breaches()) == 1


@pytest.mark.parametrize("name", ["long_tests.txt", "allowed_skips.txt"])
def test_lists_name_files_that_exist(name: str) -> None:
    for line in entries(name):
        file, _, function = line.split("|")[0].strip().partition("::")
        assert (FOLDER.parent / file).exists(), line
        if function and name == "long_tests.txt":
            text = Path(FOLDER.parent / file).read_text(encoding="utf8")
            assert f"def {function.split('::')[-1]}(" in text, line
