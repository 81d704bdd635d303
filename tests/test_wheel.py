"""The wheel holds every package and all that they read, and works where nothing else of fullrank is."""

import fnmatch
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest

from tests.tiny_checkpoints import TEXT, tiny_checkpoint, tiny_tokenizer  # noqa: F401

ROOT = Path(__file__).parents[1]


def sources() -> list[str]:
    """Files of the package, relative to src/."""
    files = [one for one in (ROOT / "src" / "fullrank").rglob("*") if one.is_file() and one.suffix != ".pyc"]
    return sorted(one.relative_to(ROOT / "src").as_posix() for one in files)


def test_every_file_is_a_module_of_a_package_or_named_as_data() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["fullrank"]
    data = [name for name in sources() if not name.endswith(".py")]
    assert {Path(name).suffix for name in data} >= {".j2", ".css", ".json", ".typed"}
    for name in data:
        assert any(fnmatch.fnmatch(name.removeprefix("fullrank/"), pattern) for pattern in patterns), name
    packages = {Path(name).parent for name in sources() if name.endswith(".py")}
    assert all((ROOT / "src" / package / "__init__.py").is_file() for package in packages)


@pytest.mark.slow(reason="builds and installs a wheel, and starts Python three times: half a minute")
def test_an_installed_wheel_diagnoses_a_model(
    tmp_path: Path,
    tiny_checkpoint: Callable[..., Path],  # noqa: F811
) -> None:
    tree, wheels, target, elsewhere = (tmp_path / name for name in ("tree", "dist", "target", "elsewhere"))
    elsewhere.mkdir()
    copytree(ROOT / "src", tree / "src", ignore=ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, tree)

    def python(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=elsewhere, capture_output=True, text=True, timeout=600,
            env={**os.environ, "PYTHONPATH": str(target), "FULLRANK_CACHE": str(tmp_path / "cache")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    python(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(tree))
    (wheel,) = wheels.glob("fullrank-*-py3-none-any.whl")
    packed = zipfile.ZipFile(wheel).namelist()
    assert sorted(name for name in packed if name.startswith("fullrank/")) == sources()

    python(*pip, "install", "--no-deps", "--target", str(target), str(wheel))
    assert python("-c", "import fullrank; print(fullrank.__file__)").startswith(str(target))
    assert "diagnose" in python("-m", "fullrank.cli.main", "--help")
    (elsewhere / "book.txt").write_text(20 * TEXT)
    questions = ("--only", "loss", "spectrum", "logprob_rank")
    asked = ("diagnose", str(tiny_checkpoint("llama")), "--text", "book.txt", *questions, "--out", "out")
    assert "spectrum" in python("-m", "fullrank.cli.main", *asked)
    assert (elsewhere / "out" / "results.json").is_file()
    assert "<svg" in (elsewhere / "out" / "report.html").read_text(encoding="utf8")
