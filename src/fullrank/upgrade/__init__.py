"""Another head for a model of transformers, and back.

    model = fullrank.upgrade.upgrade("path/to/model", "mos", components=4)   the same distribution, more room
    model.save_pretrained(directory)
    AutoModelForCausalLM.from_pretrained(directory)                     in any process that imported fullrank

transformers is imported when one of these names is first used, and no earlier.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullrank.upgrade.collapse import collapse
    from fullrank.upgrade.upgrade import upgrade

_HOMES = ("collapse", "upgrade")

__all__ = ["collapse", "upgrade"]


class _Room(ModuleType):
    """Importing the file `upgrade` makes Python bind it here under that name, which is the function's."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in _HOMES:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Room


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fullrank.upgrade.{name}"), name)
