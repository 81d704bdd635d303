r"""Text that nobody vouches for: tokens, model names, paths, messages.

A token can hold anything: markup, control characters, marks that turn the writing direction, halves of
surrogate pairs, ten thousand characters. `shown` makes any string a short line that looks like what it is.
What has no shape of its own, or changes the shape of its neighbours, becomes an escape such as \u202e.
Markup needs nothing here: the page's template and the SVG writer escape every string.
"""

from __future__ import annotations

import unicodedata

LIMIT = 80

# Control, format, half surrogate, private, unassigned; separators of lines and paragraphs; odd spaces.
_SHAPELESS = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}
# Letters and symbols by their category, but blank on the screen.
_BLANK = set("\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
# Accents beyond this many on one letter grow into the lines above and below.
_MARKS = 3


def shown(text: str, limit: int = LIMIT) -> str:
    """The text as one inert line of about `limit` characters; a longer one ends in its length."""
    pieces: list[str] = []
    length = marks = 0
    for character in text:
        marks = marks + 1 if unicodedata.category(character).startswith("M") else 0
        # An accent at the very beginning would sit on whatever stands before the text.
        piece = _escape(character) if marks > (_MARKS if pieces else 0) else _piece(character)
        length += len(piece)
        if length > limit:
            return f"{''.join(pieces)}… ({len(text):,} characters)"
        pieces.append(piece)
    return "".join(pieces)


def unique(names: list[str]) -> list[str]:
    """The names, numbered where they repeat, so that each stands for one thing."""
    taken: set[str] = set()
    result = []
    for name in names:
        candidate, count = name, 1
        while candidate in taken:
            count += 1
            candidate = f"{name} ({count})"
        taken.add(candidate)
        result.append(candidate)
    return result


def _piece(character: str) -> str:
    shapeless = unicodedata.category(character) in _SHAPELESS or character in _BLANK
    return _escape(character) if shapeless and character != " " else character


def _escape(character: str) -> str:
    code = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
