"""Measure and break the softmax bottleneck of language models.

The top of the package is the primitive and the rooms, imported when first used, so that `import fullrank` and
the command line stay fast:

    fullrank.mixture_nll, fullrank.linear_logprob      exact losses, no N x V tensor
    fullrank.heads.build("mos", hidden=768, vocab=50257, components=4)
    fullrank.theory.least_rank(log_probs)
    fullrank.diagnose.run("path/to/model")             everything about a model's output layer
    fullrank.upgrade.upgrade("path/to/model", "mos")        a model of transformers with another head
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fullrank.errors import FullrankError
from fullrank.models.registration import register_when_imported
from fullrank.version import __version__

if TYPE_CHECKING:
    from fullrank import diagnose, heads, models, ops, report, results, theory, train, upgrade
    from fullrank.ops import linear_logprob, mixture_nll

_ROOMS = ("diagnose", "heads", "models", "ops", "report", "results", "theory", "train", "upgrade")
_OPERATIONS = ("linear_logprob", "mixture_nll")

__all__ = [
    "FullrankError",
    "__version__",
    "diagnose",
    "heads",
    "linear_logprob",
    "mixture_nll",
    "models",
    "ops",
    "report",
    "results",
    "theory",
    "train",
    "upgrade",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"fullrank.{name}")
    if name in _OPERATIONS:
        return getattr(importlib.import_module("fullrank.ops"), name)
    raise AttributeError(f"module 'fullrank' has no attribute {name!r}")


# Whoever loads an upgraded model through transformers' Auto classes needs no other import than this package.
register_when_imported()
