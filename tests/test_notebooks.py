"""The notebooks run from top to bottom; their outputs are of their code; and the check sees what is wrong."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "notebooks.py"
_specification = importlib.util.spec_from_file_location("notebooks", SCRIPT)
assert _specification is not None
assert _specification.loader is not None
notebooks = importlib.util.module_from_spec(_specification)
sys.modules["notebooks"] = notebooks
_specification.loader.exec_module(notebooks)

PATHS = notebooks.paths()
of_each = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def cell(name: str, *lines: str, kind: str = "code") -> dict[str, Any]:
    made = {"cell_type": kind, "id": name, "metadata": {}, "source": [*lines]}
    return made | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def notebook(*cells: dict[str, Any]) -> dict[str, Any]:
    return {"cells": [*cells], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def test_each_of_the_first_pages_has_its_notebook_and_names_it() -> None:
    assert [path.stem for path in PATHS] == ["have", "loss", "train"]
    for path in PATHS:
        start = ROOT / "docs" / "start" / f"{path.stem}.md"
        assert f"](../notebooks/{path.name})" in start.read_text(encoding="utf8")


@of_each
def test_outputs_belong_to_the_code_and_say_nothing_of_a_machine(path: Path) -> None:
    read = notebooks.read(path)
    assert notebooks.complaints(read) == []
    assert 8 <= len(read["cells"]) <= 15
    kinds = {
        kind for one in notebooks.code_cells(read) for out in one["outputs"] for kind in out.get("data", ())
    }
    assert {"image/svg+xml", "text/html"} <= kinds, "a picture and a table"


@of_each
@pytest.mark.slow  # A diagnosis, two trainings and a look at memory: half a minute to two minutes each.
def test_a_notebook_runs_from_top_to_bottom(path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--check", path.stem], capture_output=True, text=True, timeout=1800
    )
    assert run.returncode == 0, run.stderr


# The runner itself, on cells that take no time.


class Drawn:
    def _repr_svg_(self) -> str:
        return '<svg aria-label="a picture"/>'


def test_cells_share_their_names_and_keep_what_they_show() -> None:
    done = notebooks.execute(
        notebook(
            cell("words", "# A title\n", "and more", kind="markdown"),
            cell("first", "x = 20\n", "print('said')"),
            cell("second", "x += 1\n", "x * 2"),
            cell("third", "from tests.test_notebooks import Drawn\n", "Drawn()"),
            cell("quiet", "y = x"),
        )
    )
    first, second, third, quiet = notebooks.code_cells(done)
    assert first["outputs"] == [{"output_type": "stream", "name": "stdout", "text": ["said\n"]}]
    assert second["outputs"][0]["data"] == {"text/plain": ["42"]}
    assert third["outputs"][0]["data"]["image/svg+xml"] == [Drawn()._repr_svg_()]
    assert quiet["outputs"] == []
    assert [one["execution_count"] for one in notebooks.code_cells(done)] == [1, 2, 3, 4]
    files = notebooks.page("small", done)
    assert files["small-1.svg"] == Drawn()._repr_svg_()
    assert files["small.md"].startswith(
        "# A title\n\n*The notebook [small.ipynb](small.ipynb), as it was run.*\n"
    )
    assert "```text\n42\n```\n\n```python\nfrom tests" in files["small.md"]
    assert "![a picture](small-1.svg)" in files["small.md"]


def test_a_cell_that_raises_is_named() -> None:
    with pytest.raises(notebooks.CellError, match="<cell second> raised NameError: name 'x' is not defined"):
        notebooks.execute(notebook(cell("first", "1"), cell("second", "x")))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("print('/home/someone/model')", "cell only shows a path of this machine: /home"),
        ("print(r'C:\\Users')", "cell only shows a path of this machine: C:\\U"),
        ("object()", "cell only shows an address in memory of this machine: at 0x"),
        (
            "import sys; print('oh', file=sys.stderr)",
            "cell only has an error or a warning among its outputs: oh",
        ),
        (f"print('x' * {notebooks.MOST_BYTES})", "it has 300,"),
    ],
)
def test_what_an_output_should_not_say_is_named(line: str, complaint: str) -> None:
    (found,) = notebooks.complaints(notebooks.execute(notebook(cell("only", line))))
    assert found.startswith(complaint)


def test_what_is_wrong_with_a_notebook_is_named() -> None:
    good = notebooks.execute(notebook(cell("first", "1"), cell("second", "2")))
    assert notebooks.complaints(good) == []

    def complaint(**changes: Any) -> str:
        changed = copy.deepcopy(good)
        changed["cells"][1] |= changes
        return notebooks.complaints(changed)[0]

    assert complaint(source=["3"]) == "its outputs are of other code: run `make notebooks`"
    assert complaint(source=["3 +"]).startswith("cell second does not compile")
    assert complaint(id="first") == "its cells have no ids of their own"
    assert complaint(execution_count=7) == "cell second was not run in its turn"
