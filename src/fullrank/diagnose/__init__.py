"""Measure a model's output layer: states are streamed out of it, then one file answers one question.

fullrank.diagnose.run("path/to/model", text=["book.txt"])    -> results.Diagnosis
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullrank.diagnose.diagnosis import QUICK, Interrupted, Settings, run

__all__ = ["QUICK", "Interrupted", "Settings", "run"]


def __getattr__(name: str) -> Any:
    # Reading curves from a table must not cost the import of torch.
    if name in __all__:
        import importlib

        value = getattr(importlib.import_module("fullrank.diagnose.diagnosis"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
