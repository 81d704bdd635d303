"""Draw docs/study_NAME.svg from results/study_NAME.json, a record: what docs/findings.md speaks of.

python -m benchmarks.study_chart results/study_heads.json --without "equal compute" doc4
    --strip " at width 64"
python -m benchmarks.study_chart results/study_heads_128.json --without "equal compute"
    --strip " at width 128"
python -m benchmarks.study_chart results/study_cause.json --strip "loss: "
python -m benchmarks.study_chart results/study_width.json --curves head_effective_rank_share
    --without constant
python -m benchmarks.study_chart results/study_spam.json --curves ""
    --without v8192 v32768 x2 rate mos4 trunk10 sigsoftmax _as_
python -m benchmarks.study_chart results/study_published.json --curves minutes
python -m benchmarks.study_chart results/study_optimiser.json --without rise "end at"
    --strip "effective rank at " "schedule "
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fullrank.report.charts.curves import Curves
from fullrank.report.charts.intervals import Intervals
from fullrank.report.page import draw
from fullrank.report.pages.grid_page import SHOWN, curves, effects, over_minutes
from fullrank.report.standalone import stand_alone
from fullrank.results import Grid, load, write_whole


@dataclass(frozen=True, kw_only=True)
class Config:
    """Draw the effects of a study, or curves of its runs."""

    record: Annotated[Path, tyro.conf.Positional]
    curves: str | None = None
    """In place of effects, of every run over its tokens: a monitor, or "" for the loss; `minutes` is
    perplexity over time."""
    without: tuple[str, ...] = ()
    """Comparisons whose label, or runs whose name, has one of these are left out. Effects are drawn in one
    unit, the statement's where any is left."""
    strip: tuple[str, ...] = ()
    """What labels need not say, because the text does."""
    out: Path = Path("docs")


def main(config: Config) -> None:
    record, _ = load(config.record)
    if not isinstance(record, Grid):
        raise SystemExit(f"{config.record} is no study of trainings")

    def shorter(label: str) -> str:
        for words in config.strip:
            label = label.replace(words, "")
        return label

    def wanted(name: str) -> bool:
        return not any(words in name for words in config.without)

    answers = tuple(dataclasses.replace(one, label=shorter(one.label)) for one in record.answers)
    runs = tuple(run for run in record.runs if wanted(run.name))
    record = dataclasses.replace(record, answers=answers, runs=runs)
    picture: Intervals | Curves
    if config.curves is None:
        picture = next(effects(record, lambda one: wanted(one.label)))
        name = f"Effects of the study {record.name}"
    elif config.curves == "minutes":
        picture = over_minutes(record)
        name = f"Study {record.name}: validation perplexity over minutes"
    else:
        picture = curves(record, config.curves)
        name = f"Study {record.name}: {SHOWN[config.curves]}"
    chart = draw(picture.specification, name=name, description=str(config.record), legend=picture.legend)
    write_whole(config.out / f"{config.record.stem}.svg", stand_alone(chart).svg + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
