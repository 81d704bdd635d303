"""The README's Python runs as it stands and says what it says."""

import re
from pathlib import Path
from typing import Any

import torch

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf8")


def test_the_taste_of_python_runs() -> None:
    torch.manual_seed(0)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    # Unmodified except for the vocabulary and the table, which take ten seconds of products and a search.
    assert code.count("50257") == 2
    assert "randn(60, 8" in code
    code = (
        code.replace("50257", "1009")
        .replace("randn(60, 8", "randn(12, 8")
        .replace("randn(8, 40", "randn(8, 14")
    )
    code = code.replace("[:500, :16]", "[:60, :16]")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["head"].decoder.weight.grad is not None
    assert names["stats"].entropy.shape == (128,)
    assert names["fullrank"].theory.least_rank(names["log_probs"]).rank == 8
