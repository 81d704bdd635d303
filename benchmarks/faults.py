"""How often does fullrank fail? Kills, bad input, hostile files, full disks and memory, counted.

    python -m benchmarks.faults --out results/faults.json

    kills      SIGKILL at random moments of train, diagnose, upgrade and corpus; restarted, they must end with
               the result of an undisturbed run, and not do again what was finished
    inputs     a good command with a file or an option spoilt; it must end with code 2 and one sentence, in
               time, and write nothing
    hostile    models, texts, archives, results and caches made to run code, to write elsewhere or to inject
               into a page
    disk       no room left while a command writes: one sentence, no half file, and the same result later
    memory     peak memory of a diagnosis with --memory against what that allows

A row that is in the file for the same commit and seed is not run again, so it can be run in parts; where the
tree has changes, everything is. docs/reliability.md has the table.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import (
    faults_child,
    faults_hostile,
    faults_inputs,
    faults_kills,
    faults_limits,
    faults_sandbox,
)
from fullrank.results import provenance, write_whole

Category = Literal["kills", "inputs", "hostile", "disk", "memory"]
MEANING = {
    "kills": "SIGKILLs of train, diagnose, upgrade, corpus",
    "inputs": "bad files and options",
    "hostile": "hostile models, texts, results, caches",
    "disk": "full disks",
    "memory": "memory limits",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Count how often commands fail, category by category."""

    out: Path = Path("results/faults.json")
    """Where the figures go; rows of this commit that are there are not run again."""
    kills: int = 100
    """Kills in all, over four commands."""
    inputs: int = 300
    """Bad inputs."""
    seed: int = 0
    """Of everything that is drawn."""
    only: tuple[Category, ...] = get_args(Category)
    """Categories to run."""
    limit: float = faults_sandbox.LIMIT
    """Seconds after which a command counts as hanging."""
    table: Path | None = None
    """A Markdown file whose table between two marks is written anew, such as docs/reliability.md."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A row to be run."""

    category: str
    case: str
    kills: int = 0


def jobs(config: Config) -> list[Job]:
    """All rows that a config asks for, in order."""
    found: list[Job] = []
    if "kills" in config.only:
        names = list(faults_sandbox.COMMANDS)
        each = [
            config.kills // len(names) + (place < config.kills % len(names)) for place in range(len(names))
        ]
        for name, count in zip(names, each, strict=True):
            chains = [faults_kills.CHAIN] * (count // faults_kills.CHAIN)
            chains += [count % faults_kills.CHAIN] * (count % faults_kills.CHAIN > 0)
            found += [
                Job(category="kills", case=f"{name} {place} of {kills}", kills=kills)
                for place, kills in enumerate(chains)
            ]
    if "inputs" in config.only:
        found += [Job(category="inputs", case=str(number)) for number in range(config.inputs)]
    for category, cases in (
        ("hostile", faults_hostile.CASES), ("disk", faults_limits.DISKS), ("memory", faults_limits.MEMORIES),
    ):  # fmt: skip
        if category in config.only:
            found += [Job(category=category, case=case) for case in cases]
    return found


class Bench:
    """The sandbox, and one way to run each category."""

    def __init__(self, place: Path, config: Config) -> None:
        self.place, self.config = place, config
        self.files = faults_sandbox.make(place / "good")
        self._usual: dict[str, tuple[dict[str, str], float]] = {}

    def run(self, job: Job) -> dict[str, Any]:
        """The row of a job: its command, how many runs, and failures in words."""
        own = self.place / "own"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        made: dict[str, Any] = getattr(self, f"_{job.category}")(job, own)
        # Where the sandbox was is nobody's business.
        made = json.loads(json.dumps(made).replace(f"{self.place}/", ""))
        return {"category": job.category, "case": job.case, "seed": self.config.seed, **made}

    def _kills(self, job: Job, own: Path) -> dict[str, Any]:
        name, number = job.case.split()[:2]
        if name not in self._usual:
            self._usual[name] = faults_kills.undisturbed(name, own, self.files)
        seed = 1000 * self.config.seed + int(number)
        return faults_kills.chain(name, job.kills, seed, own, self.files, *self._usual[name])

    def _inputs(self, job: Job, own: Path) -> dict[str, Any]:
        case = faults_inputs.draw(int(job.case), self.config.seed, self.files, own)
        out = own / "out"
        before = faults_sandbox.listing(self.place / "good")
        ended = faults_child.run(case.arguments, own, limit=self.config.limit)
        wrong = faults_child.refused(ended)
        failures = [wrong] if wrong else []
        if ended.code:
            left = sorted(faults_sandbox.listing(out)) if out.exists() else []
            failures += [f"half-written: {name}" for name in left]
        elif halves := faults_sandbox.halves(out):
            failures += [f"half-written: {name}" for name in halves]
        if faults_sandbox.listing(self.place / "good") != before:
            failures.append("a file of the user was changed")
        return {
            "what": case.what, "command": faults_sandbox.shown(case.arguments, self.place), "runs": 1,
            "accepted": int(ended.code == 0), "seconds": round(ended.seconds, 1),
            "said": faults_child.complaint(ended), "failures": failures,
        }  # fmt: skip

    def _hostile(self, job: Job, own: Path) -> dict[str, Any]:
        return faults_hostile.run(job.case, own, self.files, self.config.limit)

    def _disk(self, job: Job, own: Path) -> dict[str, Any]:
        return faults_limits.disk(job.case, own, self.files, self.config.limit)

    def _memory(self, job: Job, own: Path) -> dict[str, Any]:
        return faults_limits.memory(job.case, own, self.files)


Key = tuple[str, str, int]


def key_of(row: dict[str, Any]) -> Key:
    return row["category"], row["case"], row["seed"]


def earlier(path: Path) -> dict[Key, dict[str, Any]]:
    """The rows of a file that an earlier run left."""
    if not path.is_file():
        return {}
    return {key_of(row): row for row in json.loads(path.read_text(encoding="utf8"))["data"]["rows"]}


def missing(wanted: list[Job], rows: dict[Key, dict[str, Any]], seed: int, commit: str) -> list[Job]:
    """What is not in the file for this commit; a tree with changes is no commit that could be found again."""
    fixed = bool(commit) and not commit.endswith("+changes")
    return [
        job
        for job in wanted
        if not (fixed and rows.get((job.category, job.case, seed), {}).get("commit") == commit)
    ]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per category: runs, rows with failures, and what else is counted."""
    found = []
    for category, meaning in MEANING.items():
        own = [row for row in rows if row["category"] == category]
        if own:
            found.append({
                "category": category, "meaning": meaning, "runs": sum(row["runs"] for row in own),
                "accepted": sum(row.get("accepted", 0) for row in own),
                "reused": sum(row.get("reused", 0) for row in own),
                "failures": sum(bool(row["failures"]) for row in own),
            })  # fmt: skip
    return found


MARKS = ("<!-- faults -->", "<!-- end of faults -->")


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| what | runs | failures | also |", "|---|---|---|---|"]
    for one in summary(rows):
        also = f"{one['accepted']} still valid and accepted" if one["accepted"] else ""
        if one["reused"]:
            also = f"{one['reused']} finished pieces of work reused"
        lines.append(f"| {one['meaning']} | {one['runs']} | {one['failures']} | {also} |")
    return "\n".join(lines)


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """The table between the marks of a page."""
    text = path.read_text(encoding="utf8")
    before, _, rest = text.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    path.write_text(f"{before}{MARKS[0]}\n{markdown(rows)}\n{MARKS[1]}{after}", encoding="utf8")


def run_all(wanted: list[Job], config: Config) -> Iterator[dict[str, Any]]:
    if not wanted:
        return
    faults_child.prepare()
    with tempfile.TemporaryDirectory(prefix="fullrank-faults-") as place:
        bench = Bench(Path(place).resolve(), config)
        for job in wanted:
            yield bench.run(job)


def main(config: Config) -> None:
    faults_sandbox.only_one_thread()
    made = dataclasses.replace(provenance(seed=config.seed, device="cpu"), commit=faults_sandbox.commit())
    rows, console = earlier(config.out), Console(width=140)
    wanted = jobs(config)
    for row in run_all(missing(wanted, rows, config.seed, made.commit), config):
        rows[key_of(row)] = row | {"commit": made.commit}
        console.print(
            f"{row['category']} {row['case']}: {'; '.join(row['failures']) or 'ok'}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
        document = {
            "kind": "faults", "version": 1, "made": dataclasses.asdict(made),
            "data": {"summary": summary(list(rows.values())), "rows": list(rows.values())},
        }  # fmt: skip
        write_whole(config.out, json.dumps(document, indent=1) + "\n")
    ours = [rows[key] for job in wanted if (key := (job.category, job.case, config.seed)) in rows]
    if config.table is not None:
        write_table(config.table, ours)
    drawn = Table(title="Faults")
    for header in ("category", "runs", "failures", "still valid", "reused"):
        drawn.add_column(header)
    for one in summary(ours):
        drawn.add_row(*(str(one[name]) for name in ("meaning", "runs", "failures", "accepted", "reused")))
    console.print(drawn)
    for row in ours:
        for failure in row["failures"]:
            console.print(f"{row['command']}\n    {failure}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Config))
