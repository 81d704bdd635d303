"""The examples of docs/memory.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

DOCUMENT = Path(__file__).parents[2] / "docs" / "memory.md"


def test_the_documented_heads_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf8"), re.DOTALL)
    assert len(blocks) >= 3
    names: dict[str, Any] = {}
    for block in blocks[:2]:  # the last one reads a model from disk
        exec(compile(block, str(DOCUMENT), "exec"), names)
    assert names["log_probs"].shape == (2, 16, 1000)
    assert bool(torch.isfinite(names["loss"]))
    assert len(names["store"]) == 2 * 15
    assert len(names["memory"]) == 16
