"""The notebooks of docs/notebooks/: run from top to bottom, and what they print and draw written back.

    .venv/bin/python scripts/notebooks.py               what `make notebooks` runs
    .venv/bin/python scripts/notebooks.py have loss     these alone
    .venv/bin/python scripts/notebooks.py --check       run them, write nothing, fail where a cell raises

No Jupyter is needed. The code cells of a notebook run in one namespace, in an empty directory of their own,
and the last expression of a cell is shown as Jupyter shows it: by `_repr_mimebundle_`, `_repr_svg_`,
`_repr_html_` or repr. Nothing is written where a cell raises, warns, or shows
a path of this machine. A hash of the code is kept in the notebook, so that a test can tell its outputs from
those of earlier code. The same file makes pages of the site from notebooks, for `scripts/build_docs.py`.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
MOST_BYTES = 300_000
"""Of a notebook with its outputs."""
Notebook = dict[str, Any]

MACHINE = (
    (re.compile(r"(?<![\w.<])/(?:home|root|tmp|var|usr|opt|work|mnt|srv|private|Users)\b"), "a path"),
    (re.compile(r"\b[A-Z]:\\\w"), "a path"),
    (re.compile(r"\bat 0x[0-9a-f]{6,}"), "an address in memory"),
)
"""What an output says of the machine that it was made on."""


class CellError(Exception):
    """A cell raised; the cause is what it raised."""


def paths(names: Sequence[str] = ()) -> list[Path]:
    """The notebooks of these names, or all."""
    found = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
    if unknown := [name for name in names if name not in found]:
        sys.exit(f"no notebook is called {', '.join(unknown)}: expected some of {', '.join(found)}")
    return [found[name] for name in names or found]


def read(path: Path) -> Notebook:
    return json.loads(path.read_text(encoding="utf8"))


def write(path: Path, notebook: Notebook) -> None:
    """As Jupyter writes it, so that saving it there changes nothing else."""
    path.write_text(
        json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf8"
    )


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def code_cells(notebook: Notebook) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def digest(notebook: Notebook) -> str:
    """Of the code, to be kept beside its outputs."""
    return hashlib.sha256("\0".join(map(source, code_cells(notebook))).encode()).hexdigest()


# Running


def execute(notebook: Notebook) -> Notebook:
    """The notebook with the outputs of its code, run here and now; raises CellError where a cell raises."""
    import rich

    # Tables come out alike in whatever terminal this is started.
    rich.reconfigure(width=100, color_system=None, force_terminal=False)
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            outputs = _run(source(cell), f"<cell {cell['id']}>", names, number)
            cell = {**cell, "execution_count": number, "outputs": outputs}
        cells.append(cell)
    done = {**notebook, "cells": cells}
    return {**done, "metadata": {**notebook["metadata"], "code_sha256": digest(done)}}


def _run(code: str, name: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    # Tracebacks find the lines of a cell here.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    said, complained, value = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        try:
            exec(compile(tree, name, "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), name, "eval"), names)
            shown = None if value is None else _bundle(value)
        except Exception as error:
            raise CellError(f"{name} raised {type(error).__name__}: {error}") from error
    outputs: list[dict[str, Any]] = [
        {"output_type": "stream", "name": stream, "text": text.getvalue().splitlines(keepends=True)}
        for stream, text in (("stdout", said), ("stderr", complained))
        if text.getvalue()
    ]
    if shown is not None:
        outputs.append(
            {"output_type": "execute_result", "execution_count": number, "data": shown, "metadata": {}}
        )
    return outputs


def _bundle(value: Any) -> dict[str, list[str]]:
    """What Jupyter would keep of a value, by media type, in lines."""
    found: dict[str, str] = {}
    if hasattr(value, "_repr_mimebundle_"):
        made = value._repr_mimebundle_(include=None, exclude=None)
        found = dict(made[0] if isinstance(made, tuple) else made)
    else:
        for kind, method in (("image/svg+xml", "_repr_svg_"), ("text/html", "_repr_html_")):
            if hasattr(value, method):
                found[kind] = getattr(value, method)()
    found.setdefault("text/plain", repr(value))
    return {kind: text.splitlines(keepends=True) for kind, text in found.items()}


@contextlib.contextmanager
def empty_directory() -> Iterator[None]:
    """Work in a new directory, which is gone afterwards."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="notebook-") as directory:
        os.chdir(directory)
        try:
            yield
        finally:
            os.chdir(before)


# Judging


def complaints(notebook: Notebook) -> list[str]:
    """What is wrong with a notebook as it stands, without running it."""
    found = []
    if (notebook["nbformat"], notebook["nbformat_minor"]) != (4, 5):
        found.append("its format is not 4.5")
    names = [cell.get("id", "") for cell in notebook["cells"]]
    if len(set(names)) < len(names) or not all(re.fullmatch(r"[\w-]{1,64}", name) for name in names):
        found.append("its cells have no ids of their own")
    for number, cell in enumerate(code_cells(notebook), start=1):
        name = f"cell {cell['id']}"
        try:
            compile(source(cell), name, "exec")
        except SyntaxError as error:
            found.append(f"{name} does not compile: {error}")
        if cell["execution_count"] != number:
            found.append(f"{name} was not run in its turn")
        for output in cell["outputs"]:
            if output["output_type"] == "error" or output.get("name") == "stderr":
                found.append(f"{name} has an error or a warning among its outputs: {_text(output)[:300]}")
            for pattern, what in MACHINE:
                if there := pattern.search(_text(output)):
                    found.append(f"{name} shows {what} of this machine: {there[0]}")
    if notebook["metadata"].get("code_sha256") != digest(notebook):
        found.append("its outputs are of other code: run `make notebooks`")
    if (size := len(json.dumps(notebook, ensure_ascii=False).encode())) > MOST_BYTES:
        found.append(f"it has {size:,} bytes, more than {MOST_BYTES:,}")
    return found


def _text(output: dict[str, Any]) -> str:
    """All that an output says, in whatever form."""
    parts = [output.get("text", []), output.get("traceback", []), *output.get("data", {}).values()]
    return "\n".join("".join(part) for part in parts)


# Pages


def page(name: str, notebook: Notebook) -> dict[str, str]:
    """A notebook as files of the site: Markdown, and its pictures beside it."""
    files: dict[str, str] = {}
    parts = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(source(cell))
            continue
        parts.append(_fenced("python", source(cell)))
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/svg+xml" in data:
                drawn = "".join(data["image/svg+xml"])
                files[f"{name}-{len(files) + 1}.svg"] = drawn
                label = re.search(r'aria-label="([^"]+)"', drawn)
                parts.append(f"![{label[1] if label else 'A chart'}]({list(files)[-1]})")
            else:
                parts.append(_fenced("text", "".join(output.get("text") or data["text/plain"])))
    title, _, rest = parts[0].partition("\n")
    parts[0] = f"{title}\n\n*The notebook [{name}.ipynb]({name}.ipynb), as it was run.*\n{rest}"
    return {f"{name}.md": "\n\n".join(parts) + "\n", **files}


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


@contextlib.contextmanager
def pages_of_the_site() -> Iterator[None]:
    """Every notebook as a page among the documents, while the site is built from these."""
    made = {FOLDER / file: text for path in paths() for file, text in page(path.stem, read(path)).items()}
    try:
        for file, text in made.items():
            file.write_text(text, encoding="utf8")
        yield
    finally:
        for file in made:
            file.unlink(missing_ok=True)


def main(arguments: Sequence[str]) -> None:
    check = "--check" in arguments
    given = paths([one for one in arguments if one != "--check"])
    if len(given) > 1:
        # Each in a process of its own: what one sets, such as threads, is no concern of another.
        command = [sys.executable, __file__, *(["--check"] if check else [])]
        sys.exit(max(subprocess.run([*command, path.stem]).returncode for path in given))
    (path,) = given
    started = time.monotonic()
    with empty_directory():
        done = execute(read(path))
    if wrong := complaints(done):
        sys.exit("\n".join(f"{path.name}: {one}" for one in wrong))
    if not check:
        write(path, done)
    print(f"{path.stem:<8}{len(done['cells'])} cells, {time.monotonic() - started:.0f} seconds", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
