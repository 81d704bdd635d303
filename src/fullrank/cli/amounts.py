"""Numbers on the command line: what every command holds them against before it does anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fullrank.errors import FullrankError

MOST = 10**9
"""Of tokens, epochs, components and the like: more is a slip."""
LARGEST_SEED = 2**63 - 1
MOST_GIB = 10**6


def check(options: Any, least: Mapping[str, int]) -> None:
    """Raise for a whole number below its bound or beyond all use; one that was not given passes."""
    for name, bound in least.items():
        value = getattr(options, name, None)
        most = LARGEST_SEED if name == "seed" else MOST
        if isinstance(value, int) and not bound <= value <= most:
            wanted = f"{bound} or more" if value < bound else f"{most:,} at most"
            raise FullrankError(f"--{name.replace('_', '-')} is {value}, expected {wanted}")


def memory_bytes(gib: float) -> int:
    """The bytes of --memory."""
    if not 0.1 <= gib <= MOST_GIB:
        wanted = f"{MOST_GIB:,} at most" if gib > MOST_GIB else "0.1 or more"
        raise FullrankError(f"--memory is {gib} GiB, expected {wanted}")
    return int(gib * 2**30)
