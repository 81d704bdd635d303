"""One self-contained HTML page.

A page is a title, a lead, answers and sections. An answer is a few sentences and the figures that matter on
tiles, one a model. A section is a title, paragraphs, a chart, tables, lists, notes and a
definition that can be unfolded, each where there is something to say. Under it stands how the figures came
to be.

Charts are static SVG, drawn once wide and once narrow for telephones, a few hundred kB a page, where an
inlined Vega bundle would be 900 kB of script. Hovering a mark shows its figures through the SVG's own
<title>, and the tables hold every number, so a script would add nothing. And without one, the page's policy
forbids all scripts and all network access: text of tokens, which nobody vouches for, can then do no harm even
if it got past the escaping. The style follows the reader's light or dark scheme.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fullrank.report.charts.picture import Specification, inline, missing, printable, svg
from fullrank.report.charts.theme import DARK, NARROW, WIDE, Key
from fullrank.report.figures import Cell, figure, interval
from fullrank.report.text import shown
from fullrank.results import Estimate, Provenance

if TYPE_CHECKING:
    from collections.abc import Callable

    import jinja2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """The same picture for a wide and a narrow window, as SVG without namespace."""

    wide: str
    narrow: str
    legend: tuple[Key, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    name: str
    unit: str = ""
    shows: str = "both"
    """Of an estimate: value, interval, or both."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of figures; the first column names the row."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    folded: str = ""
    """What to click on to see the table; "" where it is always seen."""

    def holds_numbers(self, column: int) -> bool:
        """Whether a column is set flush right; words among its numbers then are, too."""
        return not self.rows or any(not isinstance(row[column], str) for row in self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writings:
    """A prompt and what several writers made of it."""

    prompt: str
    answers: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    """A writer's name and its text in pieces, each with its kind: copied, invented or plain."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    text: tuple[str, ...] = ()
    chart: Chart | None = None
    table: Table | None = None
    more_tables: tuple[Table, ...] = ()
    writings: tuple[Writings, ...] = ()
    """Generated texts, at the section's end."""
    items: tuple[str, ...] = ()
    """A list, under the paragraphs."""
    definition: tuple[str, ...] = ()
    """Paragraphs that are folded away on a screen and printed on paper."""
    notes: tuple[str, ...] = ()
    """Right under the chart: what its odd marks mean."""
    identity: str = ""
    """Names the section in the document, where something has to find it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """One figure, large."""

    question: str
    value: str
    unit: str
    remarks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a page says first, about one model."""

    name: str
    """"" where the page's title names it."""
    colour: str
    """Of the model in every chart."""
    sentences: tuple[str, ...]
    tiles: tuple[Tile, ...]
    lead: str = ""
    """The verdict in one sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    title: str
    lead: str
    sections: tuple[Section, ...]
    warnings: tuple[str, ...] = ()
    """What a reader must know before comparing anything."""
    answers: tuple[Answer, ...] = ()
    closing: str = ""
    """What holds for all answers."""


def html(page: Page, made: Mapping[str, Provenance]) -> str:
    """The page as one document; `made` by model, the only one under ""."""
    document = template("page.html.j2").render(
        page=page, made=made, colours=DARK, style=(_HERE / "page.css").read_text(encoding="utf8")
    )
    return printable(document)


def draw(
    specification: Callable[..., Specification],
    *records: Any,
    name: str,
    description: str,
    legend: tuple[Key, ...] = (),
) -> Chart:
    """A chart from a function of records and `width`."""

    def drawn(width: int) -> str:
        return inline(svg(specification(*records, width=width), name=name, description=description))

    return Chart(wide=drawn(WIDE), narrow=drawn(NARROW), legend=legend)


class Drawable(Protocol):
    """A picture with axes, which may hold nothing of it."""

    @property
    def legend(self) -> tuple[Key, ...]: ...

    def drawable(self) -> bool: ...

    def specification(self, *, width: int) -> Specification: ...


def chart_of(picture: Drawable, *, name: str, description: str) -> Chart | None:
    """The picture as a chart; None where nothing of it has a place on its axes."""
    if not picture.drawable():
        return None
    return draw(picture.specification, name=name, description=description, legend=picture.legend)


_HERE = Path(__file__).parent


def template(name: str) -> jinja2.Template:
    """A template of this room; raises FullrankError where jinja2 was left out."""
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise missing(error) from error
    return _templates().get_template(name)


@functools.cache
def _templates() -> jinja2.Environment:
    """Kept, with the templates that it has compiled: that takes longer than a page."""
    import jinja2

    environment = jinja2.Environment(
        # Always on: jinja's choice by file name would leave a .j2 unescaped.
        autoescape=True,
        loader=jinja2.FileSystemLoader(_HERE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = figure
    environment.filters["interval"] = interval
    environment.filters["shown"] = shown
    environment.tests["estimate"] = lambda cell: isinstance(cell, Estimate)
    return environment
