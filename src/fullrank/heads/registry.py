"""Build a head by name. The heads of this package are those that its modules define."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from typing import Any

import fullrank.heads
from fullrank.errors import FullrankError
from fullrank.heads.base import HEADS, Head
from fullrank.results.reading import memory

SLACK = 2
"""Times the memory beyond which a head is not even tried."""

# Defining a head makes it known: see `Head`.
for _module in pkgutil.iter_modules(fullrank.heads.__path__, "fullrank.heads."):
    importlib.import_module(_module.name)


def find(name: str) -> type[Head]:
    """The class of that name; raises FullrankError for an unknown one, with the nearest."""
    if name not in HEADS:
        close = difflib.get_close_matches(name, HEADS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise FullrankError(f"no head is called {name!r}: expected one of {', '.join(sorted(HEADS))}{hint}")
    return HEADS[name]


def parameters(*, contexts: Any = (), **options: Any) -> int:
    """About how many a head with these options has: a projection for every component, and its matrix. What
    is no number counts nothing here: the head itself complains of it."""

    def size(name: str) -> int:
        value = options.get(name)
        return value if isinstance(value, int) and value > 0 else 0

    hidden = size("hidden")
    wide = size("width") or hidden
    each = [one for one in contexts or () if isinstance(one, int)]
    return max(size("components"), sum(each), 1) * wide * hidden + size("vocab") * wide


def build(name: str, *, hidden: int, vocab: int, **options: Any) -> Head:
    """The head `name` for states of width `hidden` and `vocab` tokens; options are those of its class."""
    accepted = find(name).options()
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise FullrankError(
            f"{name} has no option {', '.join(unknown)}: expected some of {', '.join(accepted)}"
        )
    missing = [
        option
        for option, default in accepted.items()
        if default is inspect.Parameter.empty and option not in options
    ]
    if missing:
        raise FullrankError(f"{name} needs {', '.join(missing)}: pass it to build")
    count = parameters(hidden=hidden, vocab=vocab, **options)
    if 4 * count > SLACK * memory():
        raise FullrankError(
            f"{name} would have about {count:.1e} parameters, {4 * count / (1 << 30):,.0f} GiB where this "
            f"machine has {memory() / (1 << 30):,.0f}: take fewer components or a smaller width"
        )
    return HEADS[name](hidden=hidden, vocab=vocab, **options)
