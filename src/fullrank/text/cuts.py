"""Where a long text may be cut so that both sides have the tokens that they have together.

Between two words: after one line break or before one space, with a character on either side. There words
end, and so do the pieces into which GPT-2's tokeniser and its heirs split a text before they merge bytes: a
space belongs to the word after it, and of several line breaks the last stands alone only before a word.
"""

from __future__ import annotations

import re

CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")

LONGEST = 16 << 20
"""Characters after which a text is cut wherever it is, if no place between two words came."""


def last_cut(text: str, longest: int = LONGEST) -> int:
    """The last place between two words, 0 if there is none and the text is not too long to wait for one."""
    for begin in (max(0, len(text) - 4096), 0):
        last = 0
        for match in CUT.finditer(text, begin):
            last = match.start()
        if last:
            return last
    return len(text) if len(text) >= longest else 0


def first_cut(text: str) -> int:
    """The first place between two words, 0 if there is none."""
    match = CUT.search(text)
    return match.start() if match else 0
