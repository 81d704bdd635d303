"""SIGKILL at random moments: what a command ends with after restarts is what it ends with undisturbed.

A chain is one command that is killed some times and started again each time with the same words, then left
to finish. Where it finishes before a kill comes, it begins anew. Compared are the numbers: weights bit by
bit, results without clocks. What was finished before a kill (checkpoints, answers, states, stages) must not
be made again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

from benchmarks import faults_child, faults_sandbox

CHAIN = 5
"""Kills of a chain."""
CLOCKS = {
    "time", "seconds", "tokens_per_second", "monitor_seconds", "evaluate_seconds", "made", "peak_bytes",
    "seconds_training", "monitor_share", "starts",
}  # fmt: skip
"""Fields that differ between two runs of the same work."""


def chain(
    name: str,
    kills: int,
    seed: int,
    place: Path,
    files: faults_sandbox.Files,
    reference: dict[str, str],
    usual: float,
) -> dict[str, Any]:
    """A row: so many kills of a command, and what was wrong in the end."""
    draw = random.Random(f"{name} {seed}")
    out, cache = place / "out", place / "cache"
    arguments = faults_sandbox.COMMANDS[name](files, out)
    done, wrong, redone, kept, finishes = 0, list[str](), 0, 0, 0
    before: dict[str, tuple[int, int]] = {}

    def finish(ended: faults_child.Ended) -> None:
        nonlocal finishes, redone, kept, before
        finishes += 1
        if ended.code:
            wrong.append(f"after {done} kills: exit {ended.code}, {ended.errors.strip()[-200:]}")
        else:
            found = outcome(name, out)
            differing = sorted(
                key for key in found.keys() | reference.keys() if found.get(key) != reference.get(key)
            )
            if differing:
                wrong.append(f"after {done} kills another result: {', '.join(differing[:4])}")
            wrong.extend(f"left behind: {one}" for one in faults_sandbox.halves(out))
        now = pieces(name, out, cache)
        same = [key for key in before if key in now]
        redone += sum(now[key] != before[key] for key in same)
        kept += sum(now[key] == before[key] for key in same)
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(cache, ignore_errors=True)
        before = {}

    while done < kills and not wrong:
        moment = draw.uniform(0.0, usual)
        ended = faults_child.run(arguments, place, limit=20 * usual + 60, kill_after=moment)
        if ended.stopped == "killed":
            done += 1
            before |= pieces(name, out, cache)
            if name == "upgrade" and (out / "results.json").is_file():
                # The kill came when the whole directory was in its place: it is done, and never replaced.
                finish(dataclasses.replace(ended, code=0))
        else:
            finish(ended)
    if not wrong:
        finish(faults_child.run(arguments, place, limit=20 * usual + 60))
    if redone:
        wrong.append(f"{redone} finished pieces of work were made again")
    return {
        "command": faults_sandbox.shown(arguments, place.parent), "runs": done, "finishes": finishes,
        "reused": kept, "failures": wrong,
    }  # fmt: skip


def undisturbed(name: str, place: Path, files: faults_sandbox.Files) -> tuple[dict[str, str], float]:
    """What a command ends with when nothing happens to it, and its seconds."""
    out = place / "out"
    arguments = faults_sandbox.COMMANDS[name](files, out)
    ended = faults_child.run(arguments, place, limit=600)
    if ended.code:
        raise SystemExit(f"{' '.join(arguments)} failed undisturbed:\n{ended.errors}")
    found = outcome(name, out)
    for folder in (out, place / "cache"):
        shutil.rmtree(folder, ignore_errors=True)
    return found, ended.seconds


def outcome(name: str, out: Path) -> dict[str, str]:
    """The numbers that a command promises, by file, hashed."""
    found = {"results.json": _hash(json.dumps(_timeless(json.loads((out / "results.json").read_text()))))}
    patterns = ["model.safetensors"]
    if name == "train":
        patterns += ["checkpoints/best-*/*.safetensors"]
        last = sorted((out / "checkpoints").glob("step-*"))[-1]
        patterns += [f"checkpoints/{last.name}/*.safetensors"]
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        events = [_timeless(line) for line in lines if line["event"] != "start"]
        found["log.jsonl"] = _hash(json.dumps(events))
    for pattern in patterns:
        for file in sorted(out.glob(pattern)):
            found[str(file.relative_to(out))] = _hash(file.read_bytes())
    return found


def pieces(name: str, out: Path, cache: Path) -> dict[str, tuple[int, int]]:
    """Work that is finished, by what changes when it is done again: the file, or an answer's time."""
    files: list[Path] = []
    if name == "train":
        files = [
            *out.glob("checkpoints/step-*/model.safetensors"),
            *cache.glob("tokens/tokens-*/manifest.json"),
        ]
    elif name == "diagnose":
        files = [*out.glob("**/*.safetensors")]
    elif name == "upgrade":
        files = [path for path in cache.rglob("*.safetensors") if "state" in str(path.parent)]
    elif name == "corpus":
        files = [*cache.rglob("manifest.json")]
    found = {}
    for path in files:
        if not any(part.startswith(".") for part in path.parts[len(cache.parent.parts) :]):
            state = path.stat()
            found[str(path)] = (state.st_ino, state.st_mtime_ns)
    if name == "diagnose" and (out / "results.json").is_file():
        answers = json.loads((out / "results.json").read_text()).get("answered", {})
        found |= {f"answer {key}": (0, hash(answer["made"]["time"])) for key, answer in answers.items()}
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _timeless(item) for name, item in value.items() if name not in CLOCKS}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def _hash(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()
