"""The check of the lock fails with a sentence for each package that is not the locked one."""

import importlib.util
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

SCRIPT = Path(__file__).parents[1] / "scripts" / "lock.py"
_specification = importlib.util.spec_from_file_location("lock", SCRIPT)
assert _specification is not None
assert _specification.loader is not None
lock = importlib.util.module_from_spec(_specification)
_specification.loader.exec_module(lock)

LOCK = f"""# Why.
numpy==2.4.6
torch==2.13.0
triton==3.7.1 ; platform_system == "Nowhere"

{lock.OPTIONAL}faiss-cpu==1.15.1
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is installed, as far as the script can see."""
    (tmp_path / "constraints.txt").write_text(LOCK)
    found = {"numpy": "2.4.6", "torch": "2.13.0"}
    monkeypatch.setattr(lock, "LOCK", tmp_path / "constraints.txt")
    monkeypatch.setattr(lock, "installed", lambda: found)
    return found


def test_the_locked_environment_has_no_complaint(here: dict[str, str]) -> None:
    assert lock.complaints() == []
    here["faiss-cpu"] = "1.15.1"
    assert lock.complaints() == []


def test_another_version_a_stranger_and_a_gap_are_named(here: dict[str, str]) -> None:
    here |= {"numpy": "2.4.7", "stranger": "1.0"}
    del here["torch"]
    assert lock.complaints() == [
        "numpy 2.4.7 is installed and the lock has numpy==2.4.6",
        "stranger 1.0 is installed and the lock has nothing of it",
        "the lock has torch==2.13.0 and it is not installed",
    ]


def test_writing_keeps_comments_markers_and_what_is_optional(here: dict[str, str]) -> None:
    here |= {"faiss-cpu": "1.15.1", "numpy": "2.5.0", "triton": "3.7.1"}
    lock.write()
    assert lock.LOCK.read_text() == LOCK.replace("2.4.6", "2.5.0")
    assert lock.complaints() == []


def test_builds_of_torch_are_one_version_and_bring_packages_of_their_own() -> None:
    versions = lock.installed()
    assert "+" not in versions["torch"]
    assert not any(name.startswith(("nvidia-", "cuda-")) for name in versions)


def test_the_lowest_versions_are_the_bounds_of_the_package() -> None:
    root = SCRIPT.parents[1]
    lowest = lock.parsed((root / "constraints-lowest.txt").read_text(encoding="utf8"))
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf8"))["project"]
    for requirement in map(Requirement, project["dependencies"]):
        (bound,) = requirement.specifier
        pinned = str(lowest[requirement.name].specifier)
        # torch has one build that installs without CUDA.
        assert bound.operator == ">="
        assert requirement.name == "torch" or pinned.startswith(f"=={bound.version}."), pinned
