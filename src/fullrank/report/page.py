"""One self-contained HTML page of a result record.

A page is a title, a lead and sections; a section is a title, paragraphs, a chart, a table and notes, each of
the last four where there is something to say. Under it stands how the figures came to be.

Charts are static SVG, drawn once wide and once narrow for telephones, some 100 kB a page, where an inlined
Vega bundle would be 900 kB of script. Hovering a row shows its figures through the SVG's own <title>, and the
table holds every number, so a script would add nothing. And without one, the page's policy forbids all
scripts and all network access: text of tokens, which nobody vouches for, can then do no harm even if it got
past the escaping. The style follows the reader's light or dark scheme.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullrank.errors import FullrankError
from fullrank.report import charts
from fullrank.report.dots import DARK, NARROW, SMALLEST_DRAWN, WIDE
from fullrank.report.picture import inline, missing, printable, svg
from fullrank.results import Ladder, Provenance, write_whole

if TYPE_CHECKING:
    import jinja2

Cell = str | int | float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """The same picture for a wide and a narrow window, as SVG without namespace."""

    wide: str
    narrow: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    name: str
    unit: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of figures; the first column names the row."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def holds_numbers(self, column: int) -> bool:
        return not any(isinstance(row[column], str) for row in self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    text: tuple[str, ...] = ()
    chart: Chart | None = None
    table: Table | None = None
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    title: str
    lead: str
    sections: tuple[Section, ...]


def write(record: Any, made: Provenance, path: Path) -> None:
    """Write the record's page, whole or not at all."""
    write_whole(path, render(record, made))


def render(record: Any, made: Provenance) -> str:
    """The record's page as HTML."""
    kind = getattr(record, "kind", type(record).__name__)
    if kind not in _PAGES:
        raise FullrankError(f"no page shows a {kind!r}, expected one of {', '.join(_PAGES)}")
    template = _environment().get_template("page.html.j2")
    html = template.render(
        page=_PAGES[kind](record),
        made=made,
        colours=DARK,
        style=(_HERE / "page.css").read_text(encoding="utf8"),
    )
    return printable(html)


_HERE = Path(__file__).parent


def _environment() -> jinja2.Environment:
    try:
        import jinja2
    except ImportError as error:
        raise missing(error) from error
    environment = jinja2.Environment(
        # Always on: jinja's choice by file name would leave a .j2 unescaped.
        autoescape=True,
        loader=jinja2.FileSystemLoader(_HERE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = figure
    return environment


def figure(value: Cell) -> str:
    """A cell as text: four significant digits, thousands apart."""
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else charts.number(value)


def _chart(draw: Any, record: Any, *, name: str, description: str) -> Chart:
    def drawn(width: int) -> str:
        return inline(svg(draw(record, width=width), name=name, description=description))

    return Chart(wide=drawn(WIDE), narrow=drawn(NARROW))


def _ladder(record: Ladder) -> Page:
    rungs = charts.ordered(record)
    dashed = f" The dashed line is the floor for width {record.small_width}."
    return Page(
        title="Rank ladder",
        lead=(
            f"Output layers trained on one made-up language whose least rank, {record.least_rank}, is known "
            "by construction: softmax layers of several widths, and high-rank heads at width "
            f"{record.small_width}."
        ),
        sections=(
            Section(
                title="KL to the truth, by output layer",
                text=(
                    "Each row is one output layer after training. The dot is how far its predictions are "
                    "from the language’s true probabilities; further left is closer. The tick, the softmax "
                    "floor, is the lowest value found for a softmax of the layer’s width."
                    + (dashed if charts.small_floor(record) is not None else ""),
                ),
                chart=_chart(
                    charts.ladder_kl,
                    record,
                    name="KL to the truth by output layer, nats per token",
                    description=f"{charts.ladder_subtitle(record)}. All figures are in the table below.",
                ),
                notes=_edge_notes(record),
            ),
            Section(
                title="Least rank learnt, by output layer",
                text=(
                    "The same layers. The dot is the least rank of what the layer learnt, over every context "
                    "of the language; the tick, the softmax ceiling, is the most that a softmax of the "
                    "layer’s width can have. The dashed line is the language.",
                ),
                chart=_chart(
                    charts.ladder_rank,
                    record,
                    name="Least rank learnt by output layer",
                    description=f"{charts.ladder_subtitle(record)}. All figures are in the table below.",
                ),
            ),
            Section(
                title="All figures",
                table=Table(
                    caption=(
                        "One row a trained output layer, in the order of the charts. KL is to the truth; the "
                        "softmax floor is the lowest KL found for a softmax of the row’s width."
                    ),
                    columns=(
                        Column(name="head"),
                        Column(name="width", unit="D"),
                        Column(name="components", unit="K"),
                        Column(name="KL", unit="nats per token"),
                        Column(name="softmax floor", unit="nats per token"),
                        Column(name="least rank", unit="learnt"),
                        Column(name="parameters"),
                        Column(name="training", unit="seconds"),
                    ),
                    rows=tuple(
                        (
                            rung.head,
                            rung.width,
                            rung.components,
                            rung.kl,
                            rung.floor,
                            rung.least_rank,
                            rung.parameters,
                            rung.seconds,
                        )
                        for rung in rungs
                    ),
                ),
            ),
            Section(
                title="The language",
                table=Table(
                    caption="What every layer was trained on.",
                    columns=(Column(name="quantity"), Column(name="value"), Column(name="unit")),
                    rows=(
                        ("contexts", record.contexts, ""),
                        ("vocabulary", record.vocabulary, "tokens"),
                        ("least rank, by construction", record.least_rank, ""),
                        ("entropy of the truth", record.entropy, "nats per token"),
                        ("small width", record.small_width, ""),
                        ("training", record.steps, "steps a layer"),
                    ),
                ),
            ),
            Section(
                title="How to read this",
                text=(
                    f"The language is a table: for each of {record.contexts:,} contexts, the probability of "
                    f"each of {record.vocabulary:,} tokens. Its least rank, {record.least_rank}, is the "
                    "least width at which a softmax without a bias can give exactly these probabilities.",
                    "KL is what the layer’s predictions cost beyond the truth, in nats per token: at 0 they "
                    "are the truth, and the loss of the layer is its KL plus the entropy, "
                    f"{charts.number(record.entropy)}.",
                    "The softmax floor is the lowest KL that a search found for a softmax of that "
                    "width whose context vectors may be anything. The search proves nothing: the true least "
                    "can lie lower. A dot to the left of its tick is closer to the truth than any softmax of "
                    "that width that was found; a dot to the right leaves a gap that the width alone does "
                    "not explain.",
                    "A rank above the language’s is no merit in itself: how close a layer came is what the "
                    "KL says.",
                    "Each row is one training run on one language. Small differences between rows can be "
                    "chance, and nothing here is a statement about models of real text.",
                ),
            ),
        ),
    )


def _edge_notes(record: Ladder) -> tuple[str, ...]:
    """Words for the marks that only odd values have."""
    values = [value for rung in record.rungs for value in (rung.kl, rung.floor)]
    notes = []
    if any(value < SMALLEST_DRAWN for value in values):
        notes.append(
            f"A triangle at the left edge stands for a value under {SMALLEST_DRAWN:f}, zero included: "
            "a log scale has no place for it."
        )
    if math.inf in values:
        notes.append("A triangle at the right edge stands for infinity.")
    if any(math.isnan(value) for value in values):
        notes.append("A row without its mark has no number (nan).")
    return tuple(notes)


_PAGES = {Ladder.kind: _ladder}
