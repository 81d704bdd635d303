"""Models that cannot be are refused by their configuration alone, those that can are not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig

from fullrank import heads
from fullrank.errors import FullrankError
from fullrank.models import sizes
from fullrank.models.loading import load
from fullrank.results import reading

TRUE = {
    "gpt2": ({}, 124_439_808),
    "llama": ({"tie_word_embeddings": False}, 6_738_415_616),
    "gpt_neox": ({}, 20_554_567_680),
    "mixtral": ({}, 46_702_792_704),
    "qwen3_moe": ({}, 15_350_731_776),
}
"""Families at their default sizes, and the parameters that they have."""


@pytest.mark.parametrize("family", TRUE)
def test_the_estimate_is_right_within_its_slack(family: str) -> None:
    changes, true = TRUE[family]
    found = sizes.parameters(AutoConfig.for_model(family, **changes))
    assert true <= 1.05 * found
    assert found <= sizes.SLACK * true


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**9}, "1,000,000,000 layers"),
        ({"num_hidden_layers": 5000}, "5,000 layers, its files hold"),
        ({"hidden_size": 2**20, "intermediate_size": 2**22, "head_dim": 8}, "are of different models"),
        ({"vocab_size": 10**13}, "are of different models"),
    ],
)  # fmt: skip
def test_a_config_beyond_its_files_is_refused_before_anything_is_made(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, changes: dict[str, int], words: str
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama"), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(FullrankError, match=words):
        load(directory)


def test_weights_beyond_memory_are_refused_with_a_remedy(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "memory", lambda: 1 << 14)
    with pytest.raises(FullrankError, match=r"--dtype bfloat16, --device-map auto"):
        load(tiny_checkpoint("llama"))


def test_a_head_beyond_memory_is_not_built() -> None:
    assert reading.memory() < 10**15
    with pytest.raises(FullrankError, match="take fewer components"):
        heads.build("mos", hidden=64, vocab=100, components=10**12)
