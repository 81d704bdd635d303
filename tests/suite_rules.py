"""Rules of the suite: how long a test may take, and which tests may be skipped.

A test of the default tier takes at most one second of processor time, a named end-to-end test at most ten;
`long_tests.txt` holds those names. Child processes count. On a machine slower or busier than the reference,
the seconds of a long test are scaled down. A run prints its slowest 25 tests and fails where a test takes
five times its limit. Tests that are marked slow or gpu have no limit.

`allowed_skips.txt` holds the skips that a run may have, one a line: `start of test id | part of the reason`.
Any other skip fails the run.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
SECONDS, LONG_SECONDS, NOISE_FACTOR = 1.0, 10.0, 5.0
SHOWN, WIDTH = 25, 120
LOOP, LOOP_SECONDS = 200_000, 0.018
"""A computation, and its processor time on the reference machine when idle."""


def entries(name: str) -> list[str]:
    """The lines of a list in this folder, without comments."""
    lines = (line.split("#")[0].strip() for line in (FOLDER / name).read_text(encoding="utf8").splitlines())
    return [line for line in lines if line]


class ProcessorClock:
    """Notes in each report how long this process and its ended children used a processor."""

    def __init__(self) -> None:
        self.last = 0.0

    @staticmethod
    def now() -> float:
        return sum(os.times()[:4])

    @staticmethod
    def slowdown() -> float:
        """How much slower than the reference machine this one is now: busy machines take 20 times as long."""
        start = time.process_time()
        sum(number * number for number in range(LOOP))
        return max(1.0, (time.process_time() - start) / LOOP_SECONDS)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self.last = self.now()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report: Any = yield
        now = self.now()
        seconds = now - self.last
        report.processor_seconds = seconds / self.slowdown() if seconds > SECONDS else seconds
        self.last = self.now()
        return report


class SuiteRules:
    """Collects durations and skips where the reports arrive: in the process that started the workers."""

    def __init__(self) -> None:
        self.long = set(entries("long_tests.txt"))
        self.skips = [
            tuple(part.strip() for part in line.split("|")) for line in entries("allowed_skips.txt")
        ]
        self.seconds: dict[str, float] = defaultdict(float)
        self.limited: set[str] = set()
        self.refused_skips: list[str] = []

    def limit(self, test: str) -> float:
        return LONG_SECONDS if test.split("[")[0] in self.long else SECONDS

    def breaches(self) -> list[str]:
        return [
            f"{test} took {seconds:.1f} s, its limit is {self.limit(test):g} s: make it faster, mark it "
            "slow, or name it in tests/long_tests.txt"
            for test, seconds in self.seconds.items()
            if test in self.limited and seconds > NOISE_FACTOR * self.limit(test)
        ]

    def _check_skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not any(report.nodeid.startswith(place) and text in reason for place, text in self.skips):
            self.refused_skips.append(f"{report.nodeid}: {reason}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.processor_seconds
        if not {"slow", "gpu"} & set(report.keywords):
            self.limited.add(report.nodeid)
        self._check_skip(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._check_skip(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == 0 and (self.breaches() or self.refused_skips):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        slowest = sorted(self.seconds.items(), key=lambda item: -item[1])[:SHOWN]
        over = sum(self.seconds[test] > self.limit(test) for test in self.limited)
        terminalreporter.section(
            f"slowest {len(slowest)}, of {sum(self.seconds.values()):.0f} processor seconds in all; "
            f"{over} tests over their limit"
        )
        for test, seconds in slowest:
            terminalreporter.write_line(f"{seconds:6.1f} s  {test[:WIDTH]}")
        for title, lines in (
            ("over five times their limit", self.breaches()),
            ("skips that tests/allowed_skips.txt does not hold", self.refused_skips),
        ):
            if lines:
                terminalreporter.section(title, red=True)
                for line in lines:
                    terminalreporter.write_line(line)
