"""Measure a model's output layer: states are streamed out of it, then one file answers one question.

fullrank.diagnose.run("path/to/model", text=["book.txt"])    -> results.Diagnosis
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullrank.diagnose.diagnosis import Interrupted, run
    from fullrank.diagnose.settings import QUICK, Settings

__all__ = ["QUICK", "Interrupted", "Settings", "run"]


def __getattr__(name: str) -> Any:
    # Reading curves from a table must not cost the import of torch.
    if name in __all__:
        import importlib

        where = "settings" if name in ("QUICK", "Settings") else "diagnosis"
        value = getattr(importlib.import_module(f"fullrank.diagnose.{where}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
