"""The CUDA benchmark's figures as a few narrow tables of plain text, from its JSON alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
Cells = Sequence[str]

ORDER = (
    "fullrank",
    "compiled",
    "eager",
    "torch",
    "liger",
    "liger 16x",
    "cce",
    "cce exact",
)

SHORT = {
    "score product": "scores",
    "rows product": "dH",
    "weight product": "dW",
    "row kernel": "kernel",
    "rest": "rest",
    "idle": "idle",
}


def aligned(heading: Cells, lines: Iterable[Cells]) -> str:
    """Columns as wide as their widest cell, the first to the left."""
    table = [list(heading), *(list(line) for line in lines)]
    widths = [max(len(line[place]) for line in table) for place in range(len(heading))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    )


def shape_of(row: Row) -> str:
    return f"{row['width']},{row['vocab']}"


def unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def mib(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def number(row: Row, name: str, form: str = ".2f") -> str:
    value = row.get(name)
    return "-" if value is None else format(value, form)


def layer_table(rows: list[Row]) -> str:
    """A line a shape and K, a column an implementation: time over its products behind another call and from
    an idle device, extra MiB, gradient error."""
    rows = [row for row in rows if row.get("part") == "peers"]
    if not rows:
        return ""
    found = {row["implementation"] for row in rows} - {"all"}
    names = [name for name in ORDER if name in found] + sorted(found - set(ORDER))
    present = [
        name for name in names if any(r["implementation"] == name and "missing" not in r for r in rows)
    ]
    lines = []
    for key in unique((row["width"], row["vocab"], row["components"]) for row in rows):
        here = {r["implementation"]: r for r in rows if (r["width"], r["vocab"], r["components"]) == key}
        products = next((r["products_milliseconds"] for r in here.values() if "missing" not in r), None)
        cells = [f"{key[0]},{key[1]} K={key[2]}", "-" if products is None else f"{products:.2f}"]
        for name in present:
            row = here.get(name)
            if row is None:
                cells.append("")
            elif "missing" in row:
                cells.append("OOM" if row["missing"] == "out of memory" else "failed")
            elif row["extra_mib"] is None and row["gradient_error"] is None:
                cells.append(number(row, "time_over_products"))
            else:
                error = number(row, "gradient_error", ".0e")
                alone = number(row, "alone_over_products")
                cells.append(f"{row['time_over_products']:.2f} ({alone}) {mib(row['extra_mib'])} {error}")
        lines.append(cells)
    head = (
        "Layer, forward and backward: time over its products (from an idle device), extra MiB, gradient "
        "error against fp64"
    )
    return f"{head}\n{aligned(['D,V K', 'products ms', *present], lines)}{missing_lines(rows)}"


def missing_lines(rows: list[Row]) -> str:
    """Each reason once, with what it met."""
    met: dict[str, list[str]] = {}
    for row in rows:
        if "missing" in row:
            words = [
                row.get("body", ""),
                row["implementation"],
                row["head"],
                f"K={row.get('components', '')}",
            ]
            name = " ".join(word for word in words if word)
            met.setdefault(row["missing"], []).append(name)
    lines = []
    for why, names in met.items():
        several = unique(names)
        shown = ", ".join(several[:4]) + (f" and {len(several) - 4} more" if len(several) > 4 else "")
        lines.append(f"\n  {shown}: {why}")
    return "".join(lines)


def own_table(rows: list[Row], part: str, title: str) -> str:
    """Whole heads, or captured graphs: a line a variant."""
    rows = [row for row in rows if row.get("part") == part]
    if not rows:
        return ""
    lines = []
    for row in (row for row in rows if "missing" not in row):
        name = f"{row['implementation']} {row['head']}"
        lines.append([
            f"{shape_of(row)} K={row['components']} {name}", number(row, "milliseconds"),
            number(row, "time_over_products"), mib(row["extra_mib"]), number(row, "gradient_error", ".0e"),
            number(row, "time_over_softmax"), row.get("path", ""),
        ])  # fmt: skip
    heading = ["", "ms", "/products", "MiB", "error", "/softmax", "path"]
    return title + (f"\n{aligned(heading, lines)}" if lines else "") + missing_lines(rows)


def stages_table(rows: list[Row]) -> str:
    if not rows:
        return ""
    lines = []
    for row in rows:
        name = f"{shape_of(row)} K={row['components']}"
        if "stages" not in row:
            lines.append([name, "-", *["-"] * len(SHORT)])
            continue
        stages = [number(row["stages"], stage) for stage in SHORT]
        lines.append([name, number(row, "milliseconds"), *stages])
    reasons = "".join(f"\n  {why}" for why in unique(row["missing"] for row in rows if "missing" in row))
    return f"Stages of our call, ms\n{aligned(['D,V K', 'total', *SHORT.values()], lines)}{reasons}"


def steps_table(rows: list[Row]) -> str:
    if not rows:
        return ""
    lines = []
    for row in (row for row in rows if "missing" not in row):
        name = f"{row['body']} model: {row['head']} K={row['components']} {row['implementation']}"
        lines.append([
            name, number(row, "milliseconds", ".1f"), number(row, "time_over_softmax", ".3f"),
            number(row, "time_over_peer", ".3f"), mib(row.get("peak_mib")),
            number(row, "memory_over_softmax", ".3f"), number(row, "memory_over_peer", ".3f"),
        ])  # fmt: skip
    heading = ["", "ms", "/softmax", "/peer", "peak MiB", "/softmax", "/peer"]
    title = "Training step, over the fastest softmax and the fastest peer's"
    return f"{title}\n{aligned(heading, lines)}{missing_lines(rows)}"


def decoding_table(rows: list[Row]) -> str:
    """A line a shape, call and head; a column a batch: microseconds and ratio to the fastest softmax."""
    if not rows:
        return ""
    batches = unique(row["batch"] for row in rows if "batch" in row)
    lines = []
    keys = unique(
        (row["width"], row["vocab"], row["call"], row["implementation"], row["head"])
        for row in rows
        if "batch" in row
    )
    for key in keys:
        width, vocab, call, implementation, head = key
        cells = [f"{width},{vocab} {call} {implementation} {head}"]
        for batch in batches:
            row = next(
                row for row in rows
                if (row["width"], row["vocab"], row.get("call"), row["implementation"], row["head"]) == key
                and row.get("batch") == batch
            )  # fmt: skip
            if "missing" in row:
                cells.append("failed")
            else:
                mark = "" if row["graph"] else "*"
                ratio = number(row, "time_over_softmax")
                cells.append(f"{1e3 * row['milliseconds']:.1f}{mark} {ratio}")
        lines.append(cells)
    note = "\n  * without a CUDA graph" if any(row.get("graph") is False for row in rows) else ""
    table = aligned(["", *(f"batch {batch}" for batch in batches)], lines)
    return f"Decoding, µs a call and over the fastest softmax\n{table}{note}{missing_lines(rows)}"


def tables(document: dict[str, Any]) -> str:
    rows = document["rows"]
    found = [
        layer_table(rows),
        own_table(rows, "heads", "Whole heads on hidden states"),
        own_table(rows, "graphs", "Softmax as a captured CUDA graph"),
        stages_table(document["stages"]),
        steps_table(document["steps"]),
        decoding_table(document["decoding"]),
    ]
    return "\n\n".join(each for each in found if each)
