"""Files made to do harm: to run code, to write outside --out, to put scripts into a page, to take all memory.

Every case makes its files in a sandbox and gives a command. After it a marker file must not exist, the rest
of the sandbox must be as it was, a page must have none of the planted markup, and the command must have
ended as bad input ends, or have succeeded where the content is odd but allowed.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import faults_child, faults_inputs, faults_sandbox
from benchmarks.faults_sandbox import Files

SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@dataclass(frozen=True, kw_only=True)
class Attack:
    """A command, and whether it may succeed."""

    arguments: list[str]
    may_succeed: bool = False
    page: Path | None = None
    """A page that must not have the planted markup."""
    cache: dict[str, bytes] = field(default_factory=dict)


Make = Callable[[Files, Path, Path], Attack]


class Payload:
    """A pickle of this writes the marker when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.marker), "w"))


def run(name: str, own: Path, files: Files, limit: float) -> dict[str, Any]:
    """The row of a case."""
    # The command sees the marker's place as any other of the user's.
    marker, out = own / "user" / "marker", own / "out"
    marker.parent.mkdir()
    attack = CASES[name](files, own, marker)
    kept = [own / part for part in ("out", "cache", "home", "stdout", "stderr")]
    before = faults_sandbox.listing(own, without=kept), faults_sandbox.listing(files.place)
    ended = faults_child.run(attack.arguments, own, limit=limit)
    failures = []
    if marker.exists():
        failures.append("code of the file was run")
        marker.unlink()
    if (faults_sandbox.listing(own, without=kept), faults_sandbox.listing(files.place)) != before:
        failures.append("files outside --out were changed")
    if outside := [path.name for path in (own / "home" / "tmp").iterdir()]:
        failures.append(f"left in the temporary directory: {outside[0]}")
    if wrong := faults_child.refused(ended):
        failures.append(wrong)
    if ended.code == 0 and not attack.may_succeed:
        failures.append("accepted what it must refuse")
    if ended.code and not attack.cache and out.exists() and any(out.rglob("*")):
        failures.append("half-written --out")
    pages = [attack.page] if attack.page else [*out.rglob("*.html")]
    for page in pages:
        if page.is_file() and any(
            word in page.read_text(encoding="utf8") for word in ("<script", "<img src=x")
        ):
            failures.append(f"markup of the file stands in {page.name}")
    if "\x1b]" in ended.output + ended.errors or "\x07" in ended.output + ended.errors:
        failures.append("control characters of the file reach the terminal")
    return {
        "command": faults_sandbox.shown(attack.arguments, own.parent), "runs": 1,
        "accepted": int(ended.code == 0), "said": faults_child.complaint(ended), "failures": failures,
    }  # fmt: skip


def _copy(files: Files, own: Path, name: str = "model") -> Path:
    return Path(shutil.copytree(files.model, own / name))


def _set(file: Path, **changes: Any) -> None:
    document = json.loads(file.read_text(encoding="utf8"))
    file.write_text(json.dumps(document | changes), encoding="utf8")


def _pickled(*, allowed: bool) -> Make:
    def make(files: Files, own: Path, marker: Path) -> Attack:
        model = _copy(files, own)
        (model / "model.safetensors").unlink()
        (model / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(marker)))
        more = ["--allow-pickle"] if allowed else []
        return Attack(arguments=[*_diagnose(files, own, model), *more])

    return make


def _diagnose(files: Files, own: Path, model: Path | None = None, text: Path | None = None) -> list[str]:
    return faults_inputs._diagnose(files, own / "out", model, text)


def _remote(where: str) -> Make:
    """Code beside the checkpoint, named by its configuration or its tokenizer."""

    def make(files: Files, own: Path, marker: Path) -> Attack:
        model = _copy(files, own)
        (model / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass C:\n    pass\n", encoding="utf8")
        if where == "config":
            _set(model / "config.json", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"},
                 model_type="evil")  # fmt: skip
        elif where == "known config":
            _set(model / "config.json", auto_map={"AutoModelForCausalLM": "evil.C"})
        else:
            _set(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.C", "evil.C"]},
                 tokenizer_class="C")  # fmt: skip
        return Attack(arguments=_diagnose(files, own, model), may_succeed=where != "config")

    return make


def _index(name: str) -> Make:
    """An index of weights that names a file elsewhere."""

    def make(files: Files, own: Path, marker: Path) -> Attack:
        model = _copy(files, own)
        (model / "model.safetensors").rename(own / "elsewhere.safetensors")
        target = str(own / "elsewhere.safetensors") if name == "absolute" else "../elsewhere.safetensors"
        weights = {"weight_map": {"model.norm.weight": target}, "metadata": {}}
        (model / "model.safetensors.index.json").write_text(json.dumps(weights), encoding="utf8")
        return Attack(arguments=_diagnose(files, own, model))

    return make


def _template(files: Files, own: Path, marker: Path) -> Attack:
    """A chat template that reaches for Python."""
    model = _copy(files, own)
    reach = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    reach += f"{{{{ cycler.__init__.__globals__.os.system('touch {marker}') }}}}"
    (model / "chat_template.jinja").unlink(missing_ok=True)
    _set(model / "tokenizer_config.json", chat_template=reach)
    rows = own / "chat.jsonl"
    message = {"text": [{"role": "user", "content": "hello"}]}
    rows.write_text((json.dumps(message) + "\n") * 50, encoding="utf8")
    return Attack(arguments=_diagnose(files, own, model, rows))


def _array(files: Files, own: Path, marker: Path) -> Attack:
    """Tokens as an array of pickled objects."""
    import numpy as np

    tokens = own / "tokens"
    tokens.mkdir()
    np.save(tokens / "train.npy", np.array([Payload(marker)] * 100, dtype=object), allow_pickle=True)
    (tokens / "tokens.json").write_text('{"vocabulary_size": 300}', encoding="utf8")
    arguments = ["train", faults_inputs.TINY, "--tokens", str(tokens), "--out", str(own / "out")]
    return Attack(arguments=[*arguments, *faults_sandbox.TRAINING])


def _archive(kind: str) -> Make:
    """Members that lie outside, links, and a file with a thousand times its size in it."""

    def make(files: Files, own: Path, marker: Path) -> Attack:
        text = files.text.read_bytes()
        if kind == "zip":
            archive = own / "bad.zip"
            with zipfile.ZipFile(archive, "w") as writer:
                writer.writestr("../user/marker", text)
                writer.writestr(str(marker), text)
        elif kind == "bomb":
            archive = own / "bad.txt.gz"
            archive.write_bytes(gzip.compress(b"\0" * (1 << 28), 9))
        else:
            archive = own / "bad.tar"
            with tarfile.open(archive, "w") as tar:
                for name in ("../user/marker", str(marker), "good.txt"):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(text)
                    tar.addfile(entry, io.BytesIO(text))
                link = tarfile.TarInfo("link.txt")
                link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
                tar.addfile(link)
        return Attack(arguments=_diagnose(files, own, text=archive), may_succeed=kind != "bomb")

    return make


TEXTS = {
    "control characters": "\x1b]0;owned\x07\x1b[2J\x08\x7f word ",
    "bidi": "\u202eevil\u2066 word\u2069 \u200f and ",
    "html": f"{SCRIPT} &amp; <b>word</b> ",
    "surrogates and combining": "\ufffe\ufdd0 a" + "\u0301" * 50 + " word ",
    "markup of the terminal": "[bold red]word[/] [link=x]y[/link] [/nothing] ",
}


def _text(content: str, *, line: bool = False) -> Make:
    def make(files: Files, own: Path, marker: Path) -> Attack:
        text = own / ("[red]text.txt" if line else "text.txt")
        separator = "" if line else "\n"
        text.write_text(separator.join([content * 4] * 400), encoding="utf8", errors="replace")
        return Attack(arguments=_diagnose(files, own, text=text), may_succeed=True)

    return make


def _named(name: str) -> Make:
    """A file whose name is markup or control characters."""

    def make(files: Files, own: Path, marker: Path) -> Attack:
        text = own / name
        shutil.copy(files.text, text)
        return Attack(arguments=_diagnose(files, own, text=text), may_succeed=True)

    return make


def _huge_line(files: Files, own: Path, marker: Path) -> Attack:
    text = own / "line.txt"
    text.write_text("word " * 4_000_000, encoding="utf8")
    return Attack(arguments=faults_inputs._corpus(files, own / "out", text), may_succeed=True)


def _results(change: Callable[[dict[str, Any]], Any], *, allowed: bool) -> Make:
    """results.json that others wrote."""

    def make(files: Files, own: Path, marker: Path) -> Attack:
        place = own / "results"
        place.mkdir()
        document = json.loads((files.results / "results.json").read_text(encoding="utf8"))
        document = change(document) or document
        (place / "results.json").write_text(json.dumps(document), encoding="utf8")
        page = own / "out" / "page.html"
        return Attack(arguments=["report", str(place), "--out", str(page)], may_succeed=allowed, page=page)

    return make


def _inject(document: Any) -> Any:
    """Markup into every text of a document, but what says its kind."""
    if isinstance(document, dict):
        return {
            name: value if name in ("kind", "version") else _inject(value) for name, value in document.items()
        }
    if isinstance(document, list):
        return [_inject(item) for item in document]
    # "nan" and the like are numbers.
    if isinstance(document, str) and document not in ("nan", "inf", "-inf"):
        return document + SCRIPT
    return document


def _earlier(files: Files, own: Path, marker: Path) -> Attack:
    """A results.json in --out that is none of ours."""
    (own / "out").mkdir()
    (own / "out" / "results.json").write_text('{"kind": "diagnosis", "version": []}', encoding="utf8")
    return Attack(arguments=_diagnose(files, own), cache={"out": b""})


def _linked_out(files: Files, own: Path, marker: Path) -> Attack:
    """results.json in --out is a link to a file of the user."""
    (own / "out").mkdir()
    (own / "user" / "precious").write_text("mine", encoding="utf8")
    (own / "out" / "report.html").symlink_to(own / "user" / "precious")
    return Attack(arguments=_diagnose(files, own), may_succeed=True, cache={"out": b""})


def _cache(files: Files, own: Path, marker: Path) -> Attack:
    """Every file of a warm cache replaced by noise: it is made again, or refused."""
    import random

    first = faults_child.run(faults_sandbox.corpus(files, own / "out"), own, limit=300)
    assert first.code == 0, first.errors
    shutil.rmtree(own / "out")
    draw = random.Random(0)
    for path in sorted((own / "cache").rglob("*")):
        if path.is_file() and not path.name.endswith(".lock"):
            path.unlink()
            path.write_bytes(draw.choice([b"", b"{}", draw.randbytes(300), pickle.dumps(Payload(marker))]))
    return Attack(arguments=faults_sandbox.corpus(files, own / "out"), may_succeed=True)


def _manifest(files: Files, own: Path, marker: Path) -> Attack:
    """A checkpoint whose manifest names a file elsewhere."""
    run_ = Path(shutil.copytree(files.run, own / "run"))
    for manifest in run_.glob("checkpoints/*/manifest.json"):
        document = json.loads(manifest.read_text(encoding="utf8"))
        document["files"]["../../../user/marker"] = {"bytes": 0, "sha256": ""}
        manifest.unlink()
        manifest.write_text(json.dumps(document), encoding="utf8")
    return Attack(arguments=["eval", str(run_), "--out", str(own / "out")])


def _vocabulary(files: Files, own: Path, marker: Path) -> Attack:
    """Tokens of the tokenizer are markup; the page names tokens."""
    model = _copy(files, own)
    document = json.loads((model / "tokenizer.json").read_text(encoding="utf8"))
    words = document["model"]["vocab"]
    for number, word in enumerate([word for word, index in words.items() if index > 280]):
        words[f"{SCRIPT}{number}"] = words.pop(word)
    document["model"]["merges"] = []
    (model / "tokenizer.json").write_text(json.dumps(document), encoding="utf8")
    arguments = _diagnose(files, own, model)
    arguments[arguments.index("spectrum")] = "unreachable"
    return Attack(arguments=[*arguments, "--search-seconds", "1"], may_succeed=True)


CASES: dict[str, Make] = {
    "pickled weights": _pickled(allowed=False),
    "pickled weights that were allowed": _pickled(allowed=True),
    "remote code in config.json": _remote("config"),
    "remote code for a known model": _remote("known config"),
    "remote code in tokenizer_config.json": _remote("tokenizer"),
    "index of weights with an absolute path": _index("absolute"),
    "index of weights with a path upwards": _index("upwards"),
    "chat template that reaches for Python": _template,
    "pickled array of tokens": _array,
    "zip with members outside": _archive("zip"),
    "tar with members outside and links": _archive("tar"),
    "gzip of 256 MiB of zeros": _archive("bomb"),
    **{f"text of {name}": _text(content) for name, content in TEXTS.items()},
    "text in one line, its name markup": _text("word ", line=True),
    "text whose name is a script": _named("<script>alert(1)<∕script>.txt"),
    "text whose name rings the bell": _named("a\x1b]0;owned\x07.txt"),
    "line of 20 MB": _huge_line,
    "results with scripts in every text": _results(_inject, allowed=True),
    "results whose model is a list": _results(lambda document: document | {"model": []}, allowed=False),
    "results whose loss is a text": _results(lambda document: document | {"loss": SCRIPT}, allowed=False),
    "results of an unknown kind": _results(lambda document: document | {"kind": SCRIPT}, allowed=False),
    "results that are a list": _results(lambda document: [document], allowed=False),
    "results of another version": _results(lambda document: document | {"version": 10**30}, allowed=False),
    "results in --out that are none": _earlier,
    "page in --out that is a link": _linked_out,
    "cache full of noise": _cache,
    "manifest that names a file elsewhere": _manifest,
    "tokens that are scripts": _vocabulary,
}
