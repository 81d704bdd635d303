"""How a text is cut, fixed before it is tokenised, from an estimate of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from fullrank.errors import FullrankError
from fullrank.text import sources, tokenisers
from fullrank.text.sources import Texts
from fullrank.text.tokenisers import Tokeniser

SAMPLE = 1 << 18
"""Characters that the number of tokens is estimated from."""
BATCH = (4 << 20, 24 << 20)
"""Characters of a batch, at least and at most."""
PART = 4_000_000
"""Windows of a part that is counted at once, at most; each part opens every file, so many would cost."""
FEWEST = 16
"""Parts of a text that is long enough for them, so that all processors have some."""
SMALL_PART = 500_000
MOST_PARTS = 4096
WINDOW_MEMORY = 400
"""Bytes that counting takes a window of a part, about."""
WORKER_MEMORY = 120
"""Bytes that a process takes a token of its batch, about."""
UNKNOWN = 1 << 28
"""Characters that a text is taken to have whose size is not known."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a text is cut; fixed before the first batch, because a continued run must cut in the same way."""

    tokens: int
    """Estimated."""
    characters: int
    """Estimated; of the text that is used."""
    blocks: int
    block_characters: int
    batch_characters: int
    parts: int


def plan(
    corpus: Texts, tokeniser: Tokeniser, *, blocks: int, limit: int | None, memory: int, workers: int
) -> Plan:
    """From the beginning of the text."""
    texts, characters = [], 0
    for fragment in sources.fragments(corpus):
        texts.append(fragment.text[: SAMPLE - characters])
        characters += len(texts[-1])
        if characters >= SAMPLE:
            break
    if not characters:
        raise FullrankError(f"{corpus.name} holds no text, only blank lines: give text with words in it")
    share = max(tokenisers.tokens_per_character(tokeniser, texts), 1e-6)
    size = sum(len(text.encode("utf8", "replace")) for text in texts) / characters
    # A short text was read whole; what is not here cannot be measured, so a middling size is assumed.
    whole = characters if characters < SAMPLE else max(round(corpus.bytes / size), SAMPLE)
    if any(source.kind == "dataset" for source in corpus.sources):
        whole = max(whole, UNKNOWN)
    if limit is not None:
        whole = min(whole, max(round(limit / share), 1))
    tokens = max(round(whole * share), 1)
    rows = max(min(PART, memory // WINDOW_MEMORY, max(tokens // FEWEST, SMALL_PART)), 1)
    parts = 1 << min(max((tokens - 1) // rows, 0).bit_length(), MOST_PARTS.bit_length() - 1)
    most = max(int(memory / 2 / max(workers, 1) / WORKER_MEMORY / max(share, 0.25)), BATCH[0])
    return Plan(
        tokens=tokens,
        characters=whole,
        blocks=blocks,
        block_characters=max(-(-whole // blocks), 1),
        batch_characters=min(max(whole // 48, BATCH[0]), BATCH[1], most),
        parts=parts,
    )
