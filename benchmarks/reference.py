"""The reference table of the report, from diagnoses of models.

    python -m benchmarks.reference runs/a="what it is" runs/b="..." --out src/fullrank/report/reference.json

Each is a directory that holds the results.json of `fullrank diagnose`, or such a file, and a line of what the
model is and what it read. Models that the table has and are not named stay; one of the same name and width is
replaced.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fullrank.report.pages.reference_section import FILE, known
from fullrank.results import Diagnosis, load, provenance, write_whole


@dataclass(frozen=True, kw_only=True)
class Config:
    """Add diagnoses to the reference table."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """DIRECTORY=LINE, each."""
    out: Path = FILE


def main(config: Config) -> None:
    rows = {}
    if config.out.exists():
        before = json.loads(config.out.read_text(encoding="utf8"))["data"]["models"]
        rows = {(row["name"], row["width"]): row for row in before}
    for run in config.runs:
        place, _, about = run.partition("=")
        if not about:
            raise SystemExit(f"{run!r} does not say what the model is: expected {place}='a line about it'")
        file = Path(place) if place.endswith(".json") else Path(place) / "results.json"
        record, _ = load(file)
        if not isinstance(record, Diagnosis):
            raise SystemExit(f"{file} holds a {record.kind!r}: expected a diagnosis")
        row = dataclasses.asdict(known(record, about))
        rows[row["name"], row["width"]] = row
    document = {
        "kind": "reference",
        "version": 1,
        "made": dataclasses.asdict(provenance(seed=None, device="")),
        "data": {"models": sorted(rows.values(), key=lambda row: (row["width"], row["name"]))},
    }
    write_whole(config.out, json.dumps(document, indent=1) + "\n")
    print(f"{len(rows)} models in {config.out}")


if __name__ == "__main__":
    main(tyro.cli(Config))
