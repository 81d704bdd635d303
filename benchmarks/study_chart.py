"""Draw docs/study_NAME.svg from the record of a study: the effects that docs/findings.md speaks of.

python -m benchmarks.study_chart results/study_heads.json --without "equal compute" doc4
    --strip " at width 64"
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fullrank.report.charts.picture import svg
from fullrank.report.page import WIDE
from fullrank.report.pages.grid_page import effects
from fullrank.results import Grid, load, write_whole


@dataclass(frozen=True, kw_only=True)
class Config:
    """Draw the effects of a study."""

    record: Annotated[Path, tyro.conf.Positional]
    without: tuple[str, ...] = ()
    """Comparisons whose label has one of these are left out, as where they need another axis."""
    strip: str = ""
    """What all labels have, and the text says."""
    out: Path = Path("docs")


def main(config: Config) -> None:
    record, _ = load(config.record)
    if not isinstance(record, Grid):
        raise SystemExit(f"{config.record} is no study of trainings")
    answers = (dataclasses.replace(one, label=one.label.replace(config.strip, "")) for one in record.answers)
    record = dataclasses.replace(record, answers=tuple(answers))
    picture = effects(record, lambda one: not any(words in one.label for words in config.without))
    drawn = svg(
        picture.specification(width=WIDE),
        name=f"Effects of the study {record.name}",
        description=str(config.record),
    )
    write_whole(config.out / f"study_{record.name}.svg", drawn + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
