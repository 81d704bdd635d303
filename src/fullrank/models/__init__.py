"""The model: any body of transformers under any of our heads, and how models are loaded.

    fullrank.models.FullrankForCausalLM, FullrankConfig

transformers and torch are imported when one of these names is first used, and no earlier.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullrank.models.body import Body, BodyOutput
    from fullrank.models.causal_lm import FullrankForCausalLM
    from fullrank.models.configuration import FullrankConfig
    from fullrank.models.language_model import LanguageModel, Prediction

_HOMES = {
    "Body": "body",
    "BodyOutput": "body",
    "FullrankConfig": "configuration",
    "FullrankForCausalLM": "causal_lm",
    "LanguageModel": "language_model",
    "Prediction": "language_model",
}

__all__ = ["Body", "BodyOutput", "FullrankConfig", "FullrankForCausalLM", "LanguageModel", "Prediction"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fullrank.models.{_HOMES[name]}"), name)
