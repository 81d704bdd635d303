"""Training: recipes, loop, checkpoints, monitors and evaluation.

config = fullrank.train.override(fullrank.train.recipe("transformer-tiny", "mos"), ["steps=200"])
fullrank.train.train(config, fullrank.train.Options(data=..., out=..., cache=...))
fullrank.results.read_log(out)      the run as a record, also while it goes on

fullrank.train.FullrankMonitor      rank and geometry of the head in the log of transformers' Trainer
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullrank.train.config import Config, override
    from fullrank.train.loop import Options, Outcome, train
    from fullrank.train.recipes import recipe
    from fullrank.train.trainer_monitor import FullrankMonitor

_HOMES = {
    "Config": "config",
    "FullrankMonitor": "trainer_monitor",
    "Options": "loop",
    "Outcome": "loop",
    "override": "config",
    "recipe": "recipes",
    "train": "loop",
}

__all__ = ["Config", "FullrankMonitor", "Options", "Outcome", "override", "recipe", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fullrank.train.{_HOMES[name]}"), name)
