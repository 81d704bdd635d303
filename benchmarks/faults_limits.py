"""A disk without room, and a limit of memory.

disk     the command writes to a small file system, where this user may mount one, else under a limit of
         bytes a file (RLIMIT_FSIZE); it must say so in one sentence and leave no half file, and the same
         command with room must then end as it always does
memory   `diagnose --memory M` on a model whose scores are wide: the peak of its memory over that of the
         process with the model loaded, against M
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from benchmarks import faults_child, faults_kills, faults_sandbox
from benchmarks.faults_sandbox import Files

SIZES = (0, 4 << 10, 48 << 10, 256 << 10)
DISKS = tuple(f"{name} {size}" for name in faults_sandbox.COMMANDS for size in SIZES)
MEMORIES = ("0.125", "0.25", "0.5")
OVER = 1.2
"""What a limit may be exceeded by."""
VOCABULARY, WIDTH = 24_000, 64


def disk(case: str, own: Path, files: Files, limit: float) -> dict[str, Any]:
    """The row of a command and a size."""
    name, size = case.split()
    failures = []
    small = own / "small"
    with faults_child.small_disk(small, max(int(size), 4096)) as mounted:
        # A run's own directory on the small disk; its cache too, by a link.
        (own / "cache").symlink_to(small / "cache")
        (small / "cache").mkdir(exist_ok=True)
        out = small / "out"
        arguments = faults_sandbox.COMMANDS[name](files, out)
        ended = faults_child.run(arguments, own, limit=limit, file_size=None if mounted else int(size))
        if wrong := faults_child.refused(ended):
            failures.append(wrong)
        failures += [f"half-written: {one}" for one in faults_sandbox.halves(out)]
        fits = ended.code == 0
        # What is there is taken along to a disk with room, where the command goes on.
        (own / "cache").unlink()
        shutil.copytree(small, own / "large", symlinks=True)
    (own / "cache").symlink_to(own / "large" / "cache")
    out = own / "large" / "out"
    if not fits and not failures:
        again = faults_child.run(faults_sandbox.COMMANDS[name](files, out), own, limit=10 * limit)
        if again.code:
            failures.append(f"with room again: exit {again.code}, {again.errors.strip()[-200:]}")
        elif not faults_kills.outcome(name, out):
            failures.append("with room again: no result")
    return {
        "command": faults_sandbox.shown(arguments, own.parent), "runs": 1, "accepted": int(fits),
        "how": "tmpfs" if mounted else "RLIMIT_FSIZE", "said": faults_child.complaint(ended),
        "failures": failures,
    }  # fmt: skip


def memory(case: str, own: Path, files: Files) -> dict[str, Any]:
    """The row of a limit in GiB."""
    model = own / "wide"
    faults_sandbox.write_model(model, vocabulary=VOCABULARY, width=WIDTH)

    def peak(*more: str, questions: tuple[str, ...]) -> faults_child.Ended:
        arguments = faults_sandbox.diagnose(files, own / "out", questions)
        arguments[1] = str(model)
        arguments[arguments.index("--tokens") + 1] = "4096"
        shutil.rmtree(own / "out", ignore_errors=True)
        return faults_child.run([*arguments, *more], own, limit=600)

    least = peak("--tokens", "256", questions=("spectrum",))
    questions = ("loss", "spectrum", "logprob_rank", "gradient")
    ended = peak("--memory", case, questions=questions)
    allowed = float(case) * (1 << 30)
    used = max(0, ended.peak - least.peak)
    failures = []
    if wrong := faults_child.refused(ended):
        failures.append(wrong)
    if least.code:
        failures.append(f"the model alone cannot be measured: {least.errors.strip()[-200:]}")
    if used > OVER * allowed:
        failures.append(f"used {used / 2**30:.3f} GiB of {case}")
    return {
        "command": f"fullrank diagnose MODEL --memory {case} --only {' '.join(questions)}", "runs": 1,
        "accepted": 0, "used_gib": round(used / 2**30, 3), "allowed_gib": float(case),
        "said": faults_child.complaint(ended), "failures": failures,
    }  # fmt: skip
