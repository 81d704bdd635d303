"""Draw docs/performance.svg from results/output_layer_cuda.json: time over its products, and extra memory.

    python -m benchmarks.performance_chart

One row a shape and K, both axes logarithmic. Of an implementation that was measured in several forms (two
ways to write what is compiled, CCE with its filter and without, Liger with larger chunks) the faster one is
drawn, with its own memory, at least 1 MiB of it. What ran out of memory has no mark.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from fullrank.report.charts.picture import Specification, svg
from fullrank.report.charts.theme import HIGH_RANK_COLOUR, MODEL_COLOURS, REFERENCE, configuration
from fullrank.results import write_whole

FAMILIES = {
    "fullrank": ("fullrank",),
    "torch.compile": ("compiled",),
    "eager": ("eager",),
    "Liger": ("liger", "liger 16x"),
    "CCE": ("cce", "cce exact"),
    "torch chunked": ("torch",),
    "QuACK": ("quack", "quack 8192"),
}
LEAST_MIB = 1.0
"""Less is drawn here."""
TICKS = {"time": (0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50), "memory": (1, 10, 100, 1e3, 1e4, 1e5)}
ROW_HEIGHT = 30
TITLE = "The output layer, forward and backward"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Draw the figures of the CUDA benchmark."""

    source: Path = Path("results/output_layer_cuda.json")
    out: Path = Path("docs/performance.svg")


def points(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One point a case and family: the fastest form that ran."""
    found = []
    peers = [row for row in rows if row.get("part") == "peers"]
    for case in sorted({(row["width"], row["vocab"], row["components"]) for row in peers}):
        here = [row for row in peers if (row["width"], row["vocab"], row["components"]) == case]
        for family, names in FAMILIES.items():
            ran = [row for row in here if row["implementation"] in names and "missing" not in row]
            if not ran:
                continue
            row = min(ran, key=lambda row: row["milliseconds"])
            label = f"D={case[0]} V={case[1]} K={case[2]}"
            memory = row["extra_mib"]
            found.append({
                "case": label, "family": family, "time": row["time_over_products"],
                "memory": None if memory is None else max(LEAST_MIB, memory),
                "summary": f"{label}, {row['implementation']}: {row['milliseconds']:.2f} ms, "
                f"{row['time_over_products']:.2f} of its products"
                + ("" if memory is None else f", {memory:.0f} MiB"),
            })  # fmt: skip
    return found


def panel(
    values: list[dict[str, Any]], field: str, title: str, labels: bool, reference: float | None
) -> dict[str, Any]:
    cases = list(dict.fromkeys(value["case"] for value in values))
    families = [name for name in FAMILIES if any(value["family"] == name for value in values)]
    others = [*(colour for colour in MODEL_COLOURS if colour != HIGH_RANK_COLOUR), REFERENCE]
    peers = [name for name in families if name != "fullrank"]
    colours = {"fullrank": HIGH_RANK_COLOUR, **dict(zip(peers, others, strict=False))}
    drawn = [value for value in values if value[field] is not None]
    reach = [value[field] for value in drawn] + ([] if reference is None else [reference])
    low, high = min(reach) * 0.9, max(reach) * 1.15
    x: dict[str, Any] = {
        "field": field, "type": "quantitative",
        "scale": {"type": "log", "domain": [low, high], "nice": False},
        "axis": {
            "title": title, "values": [tick for tick in TICKS[field] if low <= tick <= high],
            "labelExpr": "format(datum.value, '~s')",
        },
    }  # fmt: skip
    y = {
        "field": "case", "type": "nominal", "scale": {"domain": cases},
        "axis": {"title": None, "labels": labels, "ticks": False, "domain": False, "labelLimit": 240},
    }  # fmt: skip
    layers: list[dict[str, Any]] = []
    if reference is not None:
        rule = {"type": "rule", "color": REFERENCE, "strokeDash": [3, 3], "aria": False}
        layers.append(
            {"data": {"values": [{field: reference}]}, "mark": rule, "encoding": {"x": x}},
        )
    layers.append({
        # Ours last, so that nothing covers it.
        "data": {"values": sorted(drawn, key=lambda value: value["family"] == "fullrank")},
        "mark": {"type": "point", "filled": True, "size": 90, "opacity": 0.9},
        "encoding": {
            "x": x, "y": y, "description": {"field": "summary", "type": "nominal"},
            "color": {
                "field": "family", "type": "nominal",
                "scale": {"domain": families, "range": [colours[name] for name in families]},
                "legend": {"title": None, "orient": "top", "direction": "horizontal"},
            },
        },
    })  # fmt: skip
    return {"width": 300, "height": ROW_HEIGHT * len(cases), "layer": layers}


def specification(document: dict[str, Any]) -> Specification:
    values = points(document["rows"])
    panels = [panel(values, "time", "time over its own 3 K products", True, 1.0)]
    if any(value["memory"] is not None for value in values):
        panels.append(panel(values, "memory", "extra memory, MiB", False, None))
    return {
        "hconcat": panels,
        "title": {"text": TITLE, "subtitle": subtitle(document)},
        "config": configuration(),
        "background": "white",
        # What the renderer takes the labels to need is less than they do.
        "padding": {"left": 40, "top": 5, "right": 5, "bottom": 5},
    }


def subtitle(document: dict[str, Any]) -> str:
    sizes, versions = document["sizes"], document["versions"]
    return (
        f"{document['device']}, {sizes['dtype']}, {sizes['tokens']} tokens, "
        f"torch {versions.get('torch', '?')}; {document['made']['time'][:10]}"
    )


def run(config: Config) -> int:
    document = json.loads(config.source.read_text(encoding="utf8"))
    if document.get("version", 0) < 2:
        raise SystemExit(
            f"{config.source} is not of the CUDA benchmark: python -m benchmarks.output_layer --device cuda"
        )
    drawn = svg(specification(document), name=TITLE, description=subtitle(document))
    write_whole(config.out, drawn + "\n")
    print(f"wrote {config.out} from {config.source}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run(tyro.cli(Config)))
