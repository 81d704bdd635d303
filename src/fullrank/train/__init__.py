"""Training: recipes, loop, checkpoints, monitors and evaluation.

fullrank.train.FullrankMonitor     rank and geometry of the head in the log of transformers' Trainer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullrank.train.trainer_monitor import FullrankMonitor

__all__ = ["FullrankMonitor"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("fullrank.train.trainer_monitor"), name)
