"""A page as text that a person can compare: one line a block of words, and the marks of every picture.

Pictures are not drawn for it. `Canvas` replaces the drawing library: it keeps each Vega-Lite specification
and returns an SVG that names it. `PageReader.lines` has the axes and marks of the specification in its place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

BLOCKS = {
    "title", "h1", "h2", "h3", "p", "li", "summary", "caption", "tr", "dt", "dd", "meta", "code",
}  # fmt: skip
VOID = {"meta", "link", "img", "br", "hr", "input"}
FIELD = re.compile(r'"field": "(\w+)"')
LISTED = 12
"""Numbers of a layer that are listed one by one; of more, the ends and the sum are."""
LISTED_TEXTS = 3


class Canvas:
    """In place of `vl_convert.vegalite_to_svg`."""

    def __init__(self) -> None:
        self.specifications: list[dict[str, Any]] = []

    def __call__(self, specification: dict[str, Any], **options: Any) -> str:
        # A number that JSON has no word for would be a hole in the picture.
        json.dumps(specification, allow_nan=False)
        self.specifications.append(specification)
        name = f'<g data-picture="{len(self.specifications) - 1}"/>'
        size = 'width="1" height="1" viewBox="0 0 1 1"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{name}</svg>'


class PageReader(HTMLParser):
    """Elements, cells and text of a page; fails where an end tag has no start tag."""

    def __init__(self, html: str, canvas: Canvas | None = None) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.lines: list[str] = []
        self.text: dict[str, str] = {}
        """All text inside the elements of a tag."""
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self._words = ""
        self._canvas = canvas
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag in ("td", "th"):
            self.cells.append("")
            self._words += "| "
        if tag == "mark":
            self._words += f"[{attributes['class']}: "
        if tag == "section" and attributes.get("id"):
            self.lines.append(f"\n# {attributes['id']}")
        if tag == "svg" and attributes.get("role") == "img" and not self._narrow():
            self.lines.append(f"picture: {attributes['aria-label']}")
        if tag == "path" and not self._within("img"):
            self._words += f"({attributes.get('fill') or attributes.get('stroke')}) "
        if tag == "g" and "data-picture" in attributes and self._canvas and not self._narrow():
            specification = self._canvas.specifications[int(attributes["data-picture"] or 0)]
            self.lines += drawn(specification)
        if tag not in VOID:
            self._open.append((tag, attributes))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        opened, attributes = self._open.pop()
        assert opened == tag
        if tag == "data":
            value = _exact(attributes["value"] or "")
            self._words += "" if self._words.replace(",", "").endswith(f" {value}") else f" [{value}]"
        if tag == "mark":
            self._words += "]"
        if tag in BLOCKS:
            kind = f"{tag}.{attributes['class']}" if attributes.get("class") else tag
            words = " ".join(self._words.split())
            if words:
                self.lines.append(f"{kind}: {words}")
            self._words = ""

    def handle_data(self, data: str) -> None:
        tags = {tag for tag, _ in self._open}
        if {"td", "th"} & tags:
            self.cells[-1] += data
        for tag in tags:
            self.text[tag] = self.text.get(tag, "") + data
        if not {"style", "svg"} & tags:
            self._words += data

    def _narrow(self) -> bool:
        return any(attributes.get("class") == "narrow" for _, attributes in self._open)

    def _within(self, role: str) -> bool:
        return any(attributes.get("role") == role for _, attributes in self._open)


def drawn(specification: dict[str, Any], indent: str = "  ") -> Iterator[str]:
    """Axes and marks of a specification, one line a layer."""
    for panel in specification.get("concat", ()):
        yield f"{indent}panel {json.dumps(panel.get('title'), ensure_ascii=False)}"
        yield from drawn(panel, indent + "  ")
    layers = specification.get("layer", ())
    axes: dict[str, str] = {}
    for layer in layers:
        for name in ("x", "y"):
            encoding = layer.get("encoding", {}).get(name, {})
            if name not in axes and "scale" in encoding:
                axes[name] = _axis(encoding)
    yield from (f"{indent}{name}: {words}" for name, words in axes.items())
    for layer in layers:
        rows = layer.get("data", {}).get("values", ())
        mark = layer["mark"]
        look = " ".join(str(mark[name]) for name in ("type", "color", "stroke", "fill", "strokeDash", "shape")
                        if mark.get(name))  # fmt: skip
        read = dict.fromkeys(FIELD.findall(json.dumps(layer.get("encoding", {}))))
        fields = {name: [row[name] for row in rows if name in row] for name in read}
        words = "; ".join(f"{name} {_values(values)}" for name, values in fields.items() if values)
        yield f"{indent}{look}, {len(rows)}: {words}"


def _axis(encoding: dict[str, Any]) -> str:
    scale, axis = encoding["scale"], encoding.get("axis") or {}
    domain = scale.get("domain") or ()
    ends = " to ".join(map(_figure, domain)) if encoding["type"] == "quantitative" else " / ".join(domain)
    ticks = f", ticks {axis['values']}" if axis.get("values") else ""
    return f"{axis.get('title')}, {scale.get('type', '')} {ends}{ticks}"


def _values(values: list[Any]) -> str:
    if not all(isinstance(value, float | int) for value in values):
        texts = list(dict.fromkeys(map(str, values)))
        return " / ".join(texts[:LISTED_TEXTS]) + (" / …" if len(texts) > LISTED_TEXTS else "")
    if len(values) > LISTED:
        return f"{_figure(min(values))} to {_figure(max(values))}, sum {_figure(math.fsum(values))}"
    return " ".join(map(_figure, values))


def _exact(value: str) -> str:
    return value if value in ("True", "False") else f"{float(value):.10g}"


def _figure(value: float) -> str:
    """So few digits that processors and mathematical libraries agree on them."""
    return f"{value:.6g}"
