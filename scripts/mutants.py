"""Mutation check: put one fault at a time into a copy of the source, and see which test fails.

    .venv/bin/python scripts/mutants.py --list
    .venv/bin/python scripts/mutants.py --workers 2 --json mutants.json
    .venv/bin/python scripts/mutants.py --only prior_gradient_sign --full

`mutants_table.py` lists the faults. For every mutant three stages of the default tier run until a test fails:

    near   the test files that the entry names
    room   the other files in the same directories, not with --near
    full   all other tests, only with --full

A mutant counts as killed if the test that fails on it passes on the unchanged copy. The tracked files are
copied to a temporary directory; the checkout is not touched. --json keeps the results, and --resume goes on
from them. An entry whose old text does not occur exactly once in its file is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mutants_table import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]
SOURCE = Path("src/fullrank")
STAGES = ("near", "room", "full")
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)


class Trees:
    """Two copies of the tracked files: one that is mutated, one that stays as it is."""

    def __init__(self, place: Path, workers: int, limit: float) -> None:
        self.mutated, self.clean, self.workers, self.limit = (
            place / "mutated",
            place / "clean",
            workers,
            limit,
        )
        self.cache, self.passes = place / "cache", dict[str, bool]()
        names = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in names.stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (self.clean / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.clean / name)
        shutil.copytree(self.clean, self.mutated)

    def put(self, mutant: Mutant, *, back: bool) -> None:
        """Write the mutant into its file, or the file as it was."""
        file = SOURCE / mutant.file
        text = (self.clean / file).read_text(encoding="utf8")
        (self.mutated / file).write_text(
            text if back else text.replace(mutant.old, mutant.new), encoding="utf8"
        )
        # A file of the same size, written in the same second, looks unchanged to Python.
        for compiled in (self.mutated / file).parent.glob(f"__pycache__/{file.stem}.*.pyc"):
            compiled.unlink()

    def first_failure(self, tree: Path, arguments: list[str]) -> str:
        """The first test that fails, "" if none does; "timeout" past the limit."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
        if self.workers > 1:
            command += ["-n", str(self.workers), "--dist", "worksteal"]
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree / "src"),
            "FULLRANK_CACHE": str(self.cache),
            "CI": "1",
        }
        process = subprocess.Popen(
            [*command, *arguments], cwd=tree, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=self.limit)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            # Also after an interrupt; the processes of a finished run are gone.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode in (0, 5):
            return ""
        match = FAILED.search(output)
        if match is None:
            raise SystemExit(f"pytest failed without a failed test:\n{output[-3000:]}")
        return match[1]

    def killer(self, arguments: list[str]) -> str:
        """The first test that fails on the mutant and passes on the unchanged copy."""
        deselected: list[str] = []
        while True:
            test = self.first_failure(self.mutated, [*arguments, *deselected])
            if test in ("", "timeout"):
                return test
            if test not in self.passes:
                self.passes[test] = not self.first_failure(self.clean, [test])
            if self.passes[test]:
                return test
            print(f"{test} fails on the unchanged copy, too: left out", file=sys.stderr)
            deselected += [f"--ignore={test}" if "::" not in test else f"--deselect={test}"]

    def run(self, mutant: Mutant, last: str) -> dict[str, Any]:
        near = [f"tests/{name}" for name in mutant.tests]
        rooms = sorted({str(Path(name).parent) for name in near})
        stages = {
            "near": near,
            "room": [*rooms, *(f"--ignore={name}" for name in near)],
            "full": ["tests", *(f"--ignore={name}" for name in rooms)],
        }
        begun, killed_by = time.monotonic(), ""
        self.put(mutant, back=False)
        try:
            for stage in STAGES:
                killed_by = self.killer(stages[stage])
                if killed_by or stage == last:
                    break
        finally:
            self.put(mutant, back=True)
        seconds = round(time.monotonic() - begun, 1)
        return {"killed_by": killed_by, "stage": stage, "seconds": seconds}


def complaints() -> list[str]:
    """What is wrong with the table."""
    wrong = []
    for mutant in MUTANTS:
        file = ROOT / SOURCE / mutant.file
        text = file.read_text(encoding="utf8") if file.is_file() else ""
        if text.count(mutant.old) != 1:
            wrong.append(
                f"{mutant.name}: the old text occurs {text.count(mutant.old)} times in {mutant.file}"
            )
            continue
        try:
            compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
        except SyntaxError as error:
            wrong.append(f"{mutant.name}: the mutant is no Python ({error})")
        wrong += [
            f"{mutant.name}: no tests/{name}"
            for name in mutant.tests
            if not (ROOT / "tests" / name).is_file()
        ]
    if len({mutant.name for mutant in MUTANTS}) < len(MUTANTS):
        wrong.append("two mutants have one name")
    return wrong


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    return git("rev-parse", "HEAD") + (
        "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Put faults into the source and count those that tests find."
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="run these mutants alone")
    parser.add_argument("--workers", type=int, default=1, help="processes of pytest (default 1)")
    parser.add_argument("--near", action="store_true", help="run only the test files that the entries name")
    parser.add_argument("--full", action="store_true", help="run all tests on a mutant that its room misses")
    parser.add_argument("--json", type=Path, help="write the results to this file after every mutant")
    parser.add_argument("--resume", action="store_true", help="keep the results in --json of the same commit")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds of one stage (default 1800)")
    options = parser.parse_args()
    wrong = complaints()
    wrong += [f"no mutant {name!r}" for name in options.only if name not in {one.name for one in MUTANTS}]
    if options.resume and options.json is None:
        wrong.append("--resume needs --json, the file with the earlier results")
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    chosen = [mutant for mutant in MUTANTS if not options.only or mutant.name in options.only]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:32}{mutant.file:28}{mutant.fix or '-':10}{mutant.effect}")
        print(f"{len(chosen)} mutants, {sum(bool(mutant.fix) for mutant in chosen)} of them reverted fixes")
        return 0
    document: dict[str, Any] = {"commit": commit(), "mutants": {}}
    if options.resume and options.json.exists():
        earlier = json.loads(options.json.read_text(encoding="utf8"))
        if earlier["commit"] == document["commit"]:
            document = earlier
    # So that the copies and the tests go with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = document["mutants"]
    last = "full" if options.full else "near" if options.near else "room"
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        trees = Trees(Path(place), options.workers, options.limit)
        for mutant in chosen:
            earlier = results.get(mutant.name)
            stopped = earlier is not None and STAGES.index(earlier["stage"]) < STAGES.index(last)
            if earlier is None or (stopped and not earlier["killed_by"]):
                results[mutant.name] = trees.run(mutant, last)
                if options.json is not None:
                    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf8")
            found = results[mutant.name]
            killed = f"{found['stage']}: {found['killed_by']}" if found["killed_by"] else "SURVIVED"
            print(f"{mutant.name:32}{found['seconds']:8.1f} s  {killed}", flush=True)
    survived = [mutant.name for mutant in chosen if not results[mutant.name]["killed_by"]]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} killed; survived: {', '.join(survived) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
