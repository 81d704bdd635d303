"""Build a head by name."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from fullrank.errors import FullrankError
from fullrank.heads.base import Head
from fullrank.heads.cache import CacheHead
from fullrank.heads.doc import DirectOutputConnection
from fullrank.heads.facets import MultiFacet
from fullrank.heads.low_rank import LowRank
from fullrank.heads.mixtape import Mixtape
from fullrank.heads.mos import MixtureOfContexts, MixtureOfSigsoftmaxes, MixtureOfSoftmaxes
from fullrank.heads.plif import Plif
from fullrank.heads.pointer import Pointer
from fullrank.heads.sigsoftmax import Sigsoftmax
from fullrank.heads.softmax import Softmax
from fullrank.heads.trunk import Trunk

HEADS: dict[str, type[Head]] = {
    head.name: head
    for head in (
        Softmax,
        LowRank,
        MixtureOfContexts,
        MixtureOfSoftmaxes,
        Trunk,
        Sigsoftmax,
        MixtureOfSigsoftmaxes,
        Plif,
        DirectOutputConnection,
        Mixtape,
        MultiFacet,
        Pointer,
        CacheHead,
    )
}


def build(name: str, *, hidden: int, vocab: int, **options: Any) -> Head:
    """The head `name` for states of width `hidden` and `vocab` tokens; options are those of its class."""
    if name not in HEADS:
        close = difflib.get_close_matches(name, HEADS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise FullrankError(f"no head is called {name!r}: expected one of {', '.join(HEADS)}{hint}")
    accepted = inspect.signature(HEADS[name]).parameters
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise FullrankError(
            f"{name} has no option {', '.join(unknown)}: expected some of "
            f"{', '.join(option for option in accepted if option not in ('hidden', 'vocab'))}"
        )
    missing = [
        option
        for option, parameter in accepted.items()
        if parameter.default is inspect.Parameter.empty and option not in {"hidden", "vocab", *options}
    ]
    if missing:
        raise FullrankError(f"{name} needs {', '.join(missing)}: pass it to build")
    return HEADS[name](hidden=hidden, vocab=vocab, **options)
