"""Draw docs/corpus_scale.svg and docs/corpus_languages.svg, from `corpus_scale` and the study of languages.

python -m benchmarks.corpus_chart
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from fullrank.report.charts.picture import Specification, svg
from fullrank.report.charts.theme import MODEL_COLOURS, REFERENCE, configuration
from fullrank.results import write_whole

STAGES = {"tokenising": "tokenise", "counting": "count", "bare": "bare group-by", "curves": "one curve"}
PANELS = {
    "probability": "plain probabilities",
    "frequent": "contexts seen 5 times or more",
    "log": "log-probabilities, beyond the first dimension",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Draw the figures of the corpus page."""

    scale: Path = Path("results/corpus_scale.json")
    languages: Path = Path("results/corpus_languages.json")
    out: Path = Path("docs")


def colours(names: list[str], *, legend: bool = True) -> dict[str, Any]:
    return {
        "field": "name", "type": "nominal",
        "scale": {"domain": names, "range": list(MODEL_COLOURS[: len(names)])},
        "legend": {"title": None, "orient": "top", "direction": "horizontal"} if legend else None,
    }  # fmt: skip


def logarithmic(field: str, title: str, values: list[float], form: str = ",") -> dict[str, Any]:
    """An axis with these ticks, from the first to the last."""
    return {
        "field": field, "type": "quantitative",
        "scale": {"type": "log", "nice": False, "domain": [values[0], values[-1]]},
        "axis": {"title": title, "labelExpr": f"format(datum.value, '{form}')", "values": values},
    }  # fmt: skip


def scale(document: dict[str, Any]) -> Specification:
    """Seconds of every stage, and resident memory, against the number of tokens."""
    times, memory = [], []
    peaks = {"counting": "count", "bare group-by": "bare group-by", "probability spectrum": "one curve"}
    for size in document["sizes"]:
        seconds = dict(size["seconds"])
        seconds["tokenising"] += seconds["vocabulary"]
        for stage, label in STAGES.items():
            times.append({"name": label, "tokens": size["tokens"], "value": seconds[stage]})
        for stage, label in peaks.items():
            memory.append(
                {"name": label, "tokens": size["tokens"], "value": size["stage_peaks"][stage] / 1e9}
            )
    names = list(STAGES.values())

    def panel(values: list[dict[str, Any]], title: str, ticks: list[float]) -> dict[str, Any]:
        return {
            "width": 300, "height": 220, "data": {"values": values},
            "mark": {"type": "line", "point": True, "strokeWidth": 2},
            "encoding": {
                "x": logarithmic("tokens", "tokens", [1e6, 1e7, 1e8], "~s"),
                "y": logarithmic("value", title, ticks),
                "color": colours(names),
            },
        }  # fmt: skip

    return {
        "hconcat": [panel(times, "seconds", [0.1, 1, 10, 100, 300]),
                    panel(memory, "peak resident memory, GB", [0.3, 0.5, 1, 2, 4])],
        "config": configuration(), "background": "white",
    }  # fmt: skip


def languages(document: dict[str, Any]) -> Specification:
    """Dimensions for 90%, one row a tokeniser, one dot a corpus with its interval, a tick for its null."""
    records = document["corpora"]
    most = max(record["tokens"] for record in records)
    full = [record for record in records if record["tokens"] == most]
    names = list(dict.fromkeys(record["name"].split(", ")[0] for record in full))
    kinds = list(dict.fromkeys(record["tokenizer"] for record in full))
    panels = [
        _construction(full, names, kinds, one, title, place)
        for place, (one, title) in enumerate(PANELS.items())
    ]
    return {
        "vconcat": panels, "config": configuration(), "background": "white", "padding": {"left": 24},
        "resolve": {"scale": {"color": "shared"}},
    }  # fmt: skip


def _construction(
    records: list[dict[str, Any]],
    names: list[str],
    kinds: list[str],
    construction: str,
    title: str,
    place: int,
) -> dict[str, Any]:
    values, nulls = [], []
    for record in records:
        curve = next((one for one in record["curves"] if one["construction"] == construction), None)
        if curve is None:
            continue
        here = {"name": record["name"].split(", ")[0], "kind": record["tokenizer"]}
        if construction == "log":
            value = {"value": curve["beyond_first"]["90"]}
        else:
            value = {"value": curve["dimensions"]["90"]}
            interval = (curve["dimension_intervals"] or {}).get("90")
            if interval:
                value |= {"low": max(interval["low"], 1), "high": interval["high"]}
            if curve["null"]:
                nulls.append({**here, "value": curve["null"]["dimensions"]["90"]})
        values.append({**here, **value})
    y = {
        "field": "kind", "type": "nominal", "scale": {"domain": kinds},
        "axis": {"title": None, "ticks": False, "domain": False, "grid": True},
    }  # fmt: skip
    offset = {"field": "name", "type": "nominal", "scale": {"domain": names}}
    ticks: list[float] = [10, 30, 100, 300, 1000, 3000, 10_000, 20_000]
    x = logarithmic("value", "dimensions for 90%: the smallest d with a relative error of 10%", ticks)
    shared = {"y": y, "yOffset": offset, "color": colours(names, legend=place == 0)}
    layers: list[dict[str, Any]] = [
        {
            "data": {"values": [one for one in values if "low" in one]},
            "mark": {"type": "rule", "strokeWidth": 2},
            "encoding": {**shared, "x": {**x, "field": "low"}, "x2": {"field": "high"}},
        },
        {
            "data": {"values": values}, "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
            "encoding": {**shared, "x": x},
        },
        {
            "data": {"values": nulls},
            "mark": {"type": "tick", "color": REFERENCE, "thickness": 2, "size": 10},
            "encoding": {"y": y, "yOffset": offset, "x": x},
        },
    ]  # fmt: skip
    return {
        "title": title,
        "width": 560,
        "height": {"step": 9},
        "layer": [one for one in layers if one["data"]["values"]],
    }


def run(config: Config) -> int:
    jobs = (
        (config.scale, scale, "corpus_scale.svg", "Cost of the dimension of a corpus"),
        (config.languages, languages, "corpus_languages.svg", "Dimensions of languages"),
    )
    for source, draw, name, title in jobs:
        document = json.loads(source.read_text(encoding="utf8"))
        write_whole(config.out / name, svg(draw(document), name=title, description=str(source)) + "\n")
        print(f"wrote {config.out / name} from {source}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run(tyro.cli(Config)))
