"""One chart of a record's page as a picture that stands alone, for notebooks, slides and papers.

    fullrank.report.picture(record, "better_head")      the chart of a question, with its legend, on white

On the page the legend is HTML above the chart and colours follow the reader's scheme; here both are in the
SVG. Jupyter shows a `Picture` by itself.
"""

from __future__ import annotations

import dataclasses
from xml.etree import ElementTree

from fullrank.report.charts.dots import LETTER_WIDTH
from fullrank.report.charts.theme import INK, Key
from fullrank.report.page import Chart, template

# Of a legend: what a sample takes, with the space behind it and behind its label, and the height of a line.
SAMPLE, AFTER_SAMPLE, AFTER_LABEL, LINE = (28, 12), 8, 22, 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawn chart."""

    svg: str = dataclasses.field(repr=False)
    """A whole SVG document."""

    def _repr_svg_(self) -> str:
        return self.svg


def stand_alone(chart: Chart) -> Picture:
    """The wide form of a chart under its legend, on white."""
    drawn = ElementTree.fromstring(chart.wide)
    _, _, width, height = map(float, drawn.attrib["viewBox"].split())
    legend, above = _legend(chart.legend, width)
    whole = {"width": f"{width:g}", "height": f"{height + above:g}"}
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **whole})
    root.set("viewBox", f"0 0 {whole['width']} {whole['height']}")
    # What a screen reader hears is said once, by the outermost element.
    for name in ("role", "aria-label"):
        if name in drawn.attrib:
            root.set(name, drawn.attrib.pop(name))
    root.append(ElementTree.Element("rect", {**whole, "fill": "white"}))
    root.extend(legend)
    drawn.attrib |= {"y": f"{above:g}", "width": f"{width:g}", "height": f"{height:g}"}
    root.append(drawn)
    return Picture(svg=ElementTree.tostring(root, encoding="unicode"))


def _legend(keys: tuple[Key, ...], width: float) -> tuple[list[ElementTree.Element], float]:
    """Samples and labels from left to right, in lines, and the height that these take."""
    sample = template("legend.html.j2").module.sample  # type: ignore[attr-defined]
    elements: list[ElementTree.Element] = []
    across, line = 0.0, 0
    for key in keys:
        takes = SAMPLE[0] + AFTER_SAMPLE + LETTER_WIDTH * len(key.label) + AFTER_LABEL
        if across and across + takes > width:
            across, line = 0.0, line + 1
        middle = LINE * (line + 0.5)
        mark = ElementTree.fromstring(str(sample(key)).strip())
        mark.attrib |= {"x": f"{across:g}", "y": f"{middle - SAMPLE[1] / 2:g}"}
        mark.attrib |= {"width": str(SAMPLE[0]), "height": str(SAMPLE[1])}
        place = {"x": f"{across + SAMPLE[0] + AFTER_SAMPLE:g}", "y": f"{middle + 4:g}"}
        font = {"font-family": "sans-serif", "font-size": "12", "fill": INK}
        label = ElementTree.Element("text", place | font)
        label.text = key.label
        elements += [mark, label]
        across += takes
    return elements, LINE * (line + 1.0) if keys else 0.0
