"""Static SVG of Vega-Lite specifications, drawn without a browser and without a network."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from fullrank.errors import FullrankError

Specification = dict[str, Any]

_SVG = "{http://www.w3.org/2000/svg}"
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """The text with what neither XML nor UTF-8 can hold (control characters, half surrogates) as U+FFFD."""
    return _UNPRINTABLE.sub("\ufffd", text)


def svg(specification: Specification, *, name: str, description: str) -> str:
    """Draw a specification. Every mark's description becomes its <title>, which browsers show on hovering."""
    try:
        import vl_convert
        from altair import SCHEMA_VERSION
    except ImportError as error:
        raise missing(error) from error
    # No base URL is allowed, so that no specification can make this process load anything.
    version = ".".join(SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    drawn = vl_convert.vegalite_to_svg(specification, vl_version=version, allowed_base_urls=[])
    ElementTree.register_namespace("", _SVG[1:-1])
    root = ElementTree.fromstring(drawn)
    # Readers hear one picture with a name; the figures themselves stand in a table.
    root.set("role", "img")
    root.set("aria-label", printable(name))
    for element in list(root.iter()):
        summary = element.get("aria-label")
        if element.get("role") == "graphics-symbol" and element.tag == f"{_SVG}path" and summary:
            ElementTree.SubElement(element, f"{_SVG}title").text = summary
    explanation = ElementTree.Element(f"{_SVG}desc")
    explanation.text = printable(description)
    root.insert(0, explanation)
    return ElementTree.tostring(root, encoding="unicode")


def inline(drawn: str) -> str:
    """An SVG as HTML wants it: the parser knows the namespace, and the page's style gives the size."""
    root = ElementTree.fromstring(drawn)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
    del root.attrib["width"], root.attrib["height"]
    return ElementTree.tostring(root, encoding="unicode")


def check_installed() -> None:
    """Raise before long work, not after it, where its page could not be drawn."""
    try:
        import altair  # noqa: F401
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise missing(error) from error


def missing(error: ImportError) -> FullrankError:
    # They come with fullrank, and are left out by `pip install --no-deps` alone.
    return FullrankError(
        f"a report needs the package {error.name!r}, which is not installed: "
        "pip install altair vl-convert-python jinja2"
    )
