"""Bad inputs, drawn by a seed: a good command with one of its files or options spoilt.

A file is cut, emptied, filled with noise, given NUL bytes or another file's content, or replaced by a pipe, a
device, a directory or a link that leads nowhere; a JSON file has one of its values replaced by one of another
type or size. An option gets a number that no option takes. Some such files are still good, as a text is
that lost its end: then the command may succeed, and that is counted apart.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import faults_sandbox
from benchmarks.faults_sandbox import Files

TINY = "transformer-tiny"
ABSURD = ("-1", "nan", "inf", "-inf", "1e99", "1000000000000000000", "x", "", "0.5.1", "1e-400", "[]")
VALUES: tuple[Any, ...] = (
    None, -1, 0, 1e308, 10**30, 10**9, "", "x", "../../../etc/passwd", [], {}, [[]], True, "\x00", "1" * 5000,
    "nan", -(10**18), {"a": {"b": []}},
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command that should be refused."""

    what: str
    arguments: list[str]


def draw(number: int, seed: int, files: Files, place: Path) -> Case:
    """The bad input of this number; its files are made inside `place`."""
    random_ = random.Random(f"{seed} {number}")
    out = place / "out"
    if random_.random() < 0.25:
        return _option(random_, files, out)
    name, build, kinds = random_.choice(SLOTS)
    kind = random_.choice(kinds)
    spoilt = place / "spoilt"
    spoilt.mkdir(parents=True)
    return Case(
        what=f"{name}: {kind}", arguments=build(files, out, _spoil(random_, kind, name, files, spoilt))
    )


def _option(random_: random.Random, files: Files, out: Path) -> Case:
    name, arguments, options = random_.choice(OPTIONS)
    option, value = random_.choice(options), random_.choice(ABSURD)
    added = ["--set", f"{option}={value}"] if "--" not in option else [f"{option}={value}"]
    return Case(what=f"{name} {added[-1]}", arguments=[*arguments(files, out), *added])


FILE = (
    "cut",
    "empty",
    "noise",
    "nul",
    "pipe",
    "zero",
    "directory",
    "nowhere",
    "utf16",
    "latin",
    "deep",
    "html",
)
"""Ways to spoil one file."""
FOLDER = (
    "json", "json", "json", "cut file", "empty file", "noise file", "pipe file", "zero file", "missing file",
    "pipe", "zero", "empty directory", "nowhere", "nul", "cut weights", "huge weights",
)  # fmt: skip
"""Ways to spoil a directory."""

Build = Callable[[Files, Path, Path], list[str]]


def _diagnose(files: Files, out: Path, model: Path | None = None, text: Path | None = None) -> list[str]:
    good = faults_sandbox.diagnose(files, out)
    good[1] = str(model or files.model)
    good[good.index("--text") + 1] = str(text or files.text)
    return good


def _train(out: Path, given: list[str]) -> list[str]:
    return ["train", *given, "--out", str(out), *faults_sandbox.TRAINING, "--set", "steps=2"]


def _upgrade(files: Files, out: Path, model: Path | None = None, text: Path | None = None) -> list[str]:
    good = faults_sandbox.upgrade(files, out)
    good[1] = str(model or files.model)
    good[good.index("--train") + 1] = str(text or files.text)
    return good


def _corpus(files: Files, out: Path, text: Path, tokenizer: str = "words") -> list[str]:
    good = faults_sandbox.corpus(files, out)
    good[2] = str(text)
    good[good.index("--tokenizer") + 1] = tokenizer
    return good


SLOTS: list[tuple[str, Build, tuple[str, ...]]] = [
    ("diagnose text", lambda files, out, bad: _diagnose(files, out, text=bad), FILE),
    ("diagnose model", lambda files, out, bad: _diagnose(files, out, model=bad), FOLDER),
    ("diagnose gguf", lambda files, out, bad: _diagnose(files, out, model=bad), FILE),
    ("train text", lambda files, out, bad: _train(out, [TINY, "--data", str(bad)]), FILE),
    ("train rows", lambda files, out, bad: _train(out, [TINY, "--data", str(bad)]), FILE),
    ("train tokens", lambda files, out, bad: _train(out, [TINY, "--tokens", str(bad)]), FOLDER),
    ("train run", lambda files, out, bad: _train(out, ["--from", str(bad)]), FOLDER),
    (
        "train tokenizer",
        lambda files, out, bad: _train(
            out, [TINY, "--data", str(files.text), "--set", f"data.tokenizer={bad}"]
        ),
        FILE,
    ),
    ("eval run", lambda files, out, bad: ["eval", str(bad), "--limit", "256", "--out", str(out)], FOLDER),
    (
        "eval text",
        lambda files, out, bad: [
            "eval", str(files.model), "--text", str(bad), "--limit", "512", "--out", str(out),
        ],
        FILE,
    ),
    ("upgrade model", lambda files, out, bad: _upgrade(files, out, model=bad), FOLDER),
    ("upgrade text", lambda files, out, bad: _upgrade(files, out, text=bad), FILE),
    (
        "collapse upgraded",
        lambda files, out, bad: [
            "collapse", str(bad), "--text", str(files.text), "--tokens", "512", "--epochs", "1", "--out",
            str(out),
        ],
        FOLDER,
    ),
    ("corpus text", lambda files, out, bad: _corpus(files, out, bad), FILE),
    ("corpus rows", lambda files, out, bad: _corpus(files, out, bad), FILE),
    ("corpus tokenizer", lambda files, out, bad: _corpus(files, out, files.text, str(bad)), FILE),
    ("series curves", lambda files, out, bad: ["series", str(bad), "--out", str(out)], FILE),
    ("series run", lambda files, out, bad: ["series", str(bad), "--out", str(out)], FOLDER),
    ("report results", lambda files, out, bad: ["report", str(bad), "--out", str(out / "page.html")], FOLDER),
    ("generate run", lambda files, out, bad: ["generate", str(bad), "--tokens", "4"], FOLDER),
]  # fmt: skip
"""Every place where a command takes a file or a directory; the second word of a name is what is spoilt."""

OPTIONS: list[tuple[str, Callable[[Files, Path], list[str]], tuple[str, ...]]] = [
    (
        "train",
        lambda files, out: _train(out, [TINY, "--data", str(files.text)]),
        ("steps", "body.layers", "body.hidden", "body.heads", "batch", "length", "accumulate", "optimiser.lr",
         "seed", "data.bpe_size", "budget", "evaluate_batch", "keep", "head.components", "head.width",
         "body.vocabulary_multiple", "no.such", "data.valid_share", "body.dropout", "precision"),
    ),
    (
        "diagnose",
        lambda files, out: _diagnose(files, out),
        ("--tokens", "--window", "--memory", "--seeds", "--components", "--batch-size", "--device",
         "--dtype"),
    ),
    ("upgrade", lambda files, out: _upgrade(files, out),
     ("--tokens", "--window", "--memory", "--components", "--epochs", "--rows", "--seeds", "--head")),
    ("corpus", lambda files, out: _corpus(files, out, files.text),
     ("--tokens", "--order", "--blocks", "--least", "--memory", "--tokenizer", "--workers")),
    (
        "eval",
        lambda files, out: [
            "eval", str(files.run), "--dynamic", "--cache", "--limit", "256", "--out", str(out),
        ],
        ("--lr", "--decay", "--epsilon", "--segment", "--theta", "--weight", "--batch", "--length",
         "--stride", "--split", "--checkpoint"),
    ),
    ("generate", lambda files, out: ["generate", str(files.run), "--tokens", "4"],
     ("--temperature", "--top-k", "--top-p", "--count", "--checkpoint")),
    ("series", lambda files, out: ["series", str(files.curves), "--out", str(out)],
     ("--metric", "--fit-from", "--tokens-per-step")),
]  # fmt: skip
"""Options that take a number or a name. A seed may be any whole number, and a negative one is fine."""

GOOD: dict[str, Callable[[Files], Path]] = {
    "text": lambda files: files.text,
    "rows": lambda files: files.rows,
    "curves": lambda files: files.curves,
    "tokenizer": lambda files: files.model / "tokenizer.json",
    "gguf": lambda files: files.model / "model.safetensors",
    "model": lambda files: files.model,
    "tokens": lambda files: files.tokens,
    "run": lambda files: files.run,
    "upgraded": lambda files: files.upgraded,
    "results": lambda files: files.results,
}
SUFFIX = {"text": ".txt", "rows": ".jsonl", "curves": ".csv", "tokenizer": ".json", "gguf": ".gguf"}


def _spoil(random_: random.Random, kind: str, name: str, files: Files, place: Path) -> Path:
    """A bad file or directory of the kind that the second word of `name` says."""
    what = name.split()[1]
    good = GOOD[what](files)
    bad = place / f"bad{SUFFIX.get(what, '')}"
    if kind in ("pipe", "zero", "nowhere"):
        return _special(kind, bad)
    if good.is_file():
        if kind == "directory":
            bad.mkdir()
        else:
            _spoil_file(random_, kind, good, bad)
        return bad
    if kind == "empty directory":
        bad.mkdir()
        return bad
    if kind == "nul":
        bad.write_bytes(bytes(4096))
        return bad
    shutil.copytree(good, bad)
    every = sorted(path for path in bad.rglob("*") if path.is_file() and path.suffix not in (".html", ".py"))
    if kind == "json":
        _spoil_json(random_, random_.choice([path for path in every if path.suffix == ".json"] or every))
    elif kind.endswith(" weights"):
        _spoil_weights(random_, kind, every)
    else:
        file = random_.choice(every)
        word = kind.split()[0]
        if word == "missing":
            file.unlink()
        elif word in ("pipe", "zero"):
            file.unlink()
            _special(word, file)
        else:
            content = file.read_bytes()
            file.unlink()
            file.write_bytes(_spoilt(random_, word, content))
    return bad


def _special(kind: str, path: Path) -> Path:
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "zero" else path.with_name("nothing there"))
    return path


def _spoil_file(random_: random.Random, kind: str, good: Path, bad: Path) -> None:
    bad.write_bytes(_spoilt(random_, kind, good.read_bytes()))


def _spoilt(random_: random.Random, kind: str, content: bytes) -> bytes:
    if kind == "cut":
        return content[: random_.randrange(1, max(2, min(len(content), 400)))]
    if kind == "noise":
        return random_.randbytes(5000)
    if kind == "nul":
        return content[:100] + bytes(100) + content[100:]
    if kind == "utf16":
        return content.decode("utf8", "replace").encode("utf16")
    if kind == "latin":
        return ("é" * 4000).encode("latin1")
    if kind == "deep":
        return b"[" * 100_000
    return b"<html><script>alert(1)</script></html>\n" if kind == "html" else b""


def _spoil_json(random_: random.Random, file: Path) -> None:
    """One value of a JSON file replaced; at the top or one level below."""
    try:
        document = json.loads(file.read_text(encoding="utf8"))
    except ValueError:
        document = {}
    value = random_.choice(VALUES)
    if not isinstance(document, dict) or not document or random_.random() < 0.1:
        document = value
    else:
        key = random_.choice(sorted(document))
        if isinstance(document[key], dict) and document[key] and random_.random() < 0.7:
            document[key][random_.choice(sorted(document[key]))] = value
        else:
            document[key] = value
    file.unlink()
    file.write_text(json.dumps(document), encoding="utf8")


def _spoil_weights(random_: random.Random, kind: str, every: list[Path]) -> None:
    weights = [path for path in every if path.suffix in (".safetensors", ".bin", ".npy")]
    file = random_.choice(weights or every)
    content = file.read_bytes()
    file.unlink()
    if kind == "cut weights":
        file.write_bytes(content[: len(content) // 2])
    else:
        file.write_bytes((1 << 50).to_bytes(8, "little") + content[8:])
