"""The model: any body of transformers under any of our heads, and how models are loaded.

    fullrank.models.FullrankForCausalLM, FullrankConfig
    fullrank.models.AwdLstmModel, AwdLstmConfig      the one body that transformers has not

transformers and torch are imported when one of these names is first used, and no earlier.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullrank.models.awd_lstm import AwdLstmModel
    from fullrank.models.causal_lm import FullrankForCausalLM
    from fullrank.models.configuration import AwdLstmConfig, FullrankConfig

_HOMES = {
    "AwdLstmConfig": "configuration",
    "AwdLstmModel": "awd_lstm",
    "FullrankConfig": "configuration",
    "FullrankForCausalLM": "causal_lm",
}

__all__ = ["AwdLstmConfig", "AwdLstmModel", "FullrankConfig", "FullrankForCausalLM"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fullrank.models.{_HOMES[name]}"), name)
