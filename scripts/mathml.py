"""Equations of the docs as MathML: an extension of Python-Markdown that `make docs` names in mkdocs.yml.

`$...$` stands in a line and `$$...$$` by itself, as GitHub has it. Browsers draw MathML by themselves, so
that a page needs neither a script nor a font from elsewhere. What math-core cannot read ends the build.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from math_core import LatexToMathML


class Equation(InlineProcessor):
    def __init__(self, pattern: str, md: Markdown, display: bool) -> None:
        super().__init__(pattern, md)
        self.display = display
        self.converter = LatexToMathML()

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element | str, int, int]:  # type: ignore[override]
        drawn = self.converter.convert_with_local_state(m[1], displaystyle=self.display)
        # Kept aside: Markdown would read what stands inside.
        return self.md.htmlStash.store(drawn), m.start(0), m.end(0)


class Equations(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        # After code (190), which may hold dollars, and before backslashes escape (180).
        md.inlinePatterns.register(Equation(r"\$\$(.+?)\$\$", md, True), "equation_display", 186)
        inline = r"(?<![\w$])\$(?!\s)([^$]+?)\$(?![\w$])"
        md.inlinePatterns.register(Equation(inline, md, False), "equation", 185)


def makeExtension(**settings: Any) -> Equations:
    return Equations(**settings)
