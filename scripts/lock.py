"""The lock, constraints.txt: write it from this environment, or check this environment against it.

    .venv/bin/python scripts/lock.py            what `make lock` runs
    .venv/bin/python scripts/lock.py --check    what CI runs

What stands below the line OPTIONAL is not installed by `make env` and is kept as it was written by hand.
"""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

LOCK = Path(__file__).parents[1] / "constraints.txt"
OPTIONAL = "# Not installed by `make env`: other extras, and the model of `make demo`.\n"
# Requirements of torch's CUDA build alone: torch names their versions itself.
CUDA = ("nvidia-", "cuda-")


def installed() -> dict[str, str]:
    """Name and version of everything here but fullrank; torch 2.13.0+cpu and 2.13.0+cu130 are 2.13.0."""
    found = {canonicalize_name(one.name): Version(one.version).public for one in distributions()}
    return {name: found[name] for name in sorted(found) if name != "fullrank" and not name.startswith(CUDA)}


def parsed(text: str) -> dict[str, Requirement]:
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return {canonicalize_name(one.name): one for one in map(Requirement, filter(None, lines))}


def write() -> None:
    required, line, optional = LOCK.read_text().partition(OPTIONAL)
    comments = [text for text in required.splitlines() if text.startswith("#")]
    before = parsed(required)
    pins = [
        # A marker says where a package installs at all; the environment cannot know it.
        f"{name}=={version}" + (f" ; {before[name].marker}" if name in before and before[name].marker else "")
        for name, version in installed().items()
        if name not in parsed(optional)
    ]
    LOCK.write_text("\n".join([*comments, *pins, "", ""]) + line + optional)


def complaints() -> list[str]:
    required, _, optional = map(parsed, LOCK.read_text().partition(OPTIONAL))
    here, pins = installed(), required | optional
    wrong = [
        f"{name} {version} is installed and the lock has {pins.get(name, 'nothing of it')}"
        for name, version in here.items()
        if name not in pins or not pins[name].specifier.contains(version, prereleases=True)
    ]
    missing = [
        f"the lock has {pin} and it is not installed"
        for name, pin in required.items()
        if name not in here and (pin.marker is None or pin.marker.evaluate())
    ]
    return wrong + missing


def main() -> None:
    if "--check" not in sys.argv:
        write()
        return
    if found := complaints():
        found.append(
            "An old environment: `make clean env`. A dependency that changed: `make lock`, then commit it."
        )
        sys.exit("\n".join(found))
    print(f"the environment is the one that {LOCK.name} locks")


if __name__ == "__main__":
    main()
