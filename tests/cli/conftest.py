"""Pages are written by nearly every command here, and most tests look at their words alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.level_curves import few_simulations
from tests.prose import text
from tests.tiny_checkpoints import tiny_checkpoint, tiny_tokenizer

__all__ = ["few_simulations", "text", "tiny_checkpoint", "tiny_tokenizer"]

BLANK = '<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"></svg>'


@contextlib.contextmanager
def blank_pictures() -> Iterator[Callable[..., str]]:
    """A picture takes a tenth of a second, and a page has up to thirty. Gives the function that draws."""
    import vl_convert

    with pytest.MonkeyPatch.context() as patched:
        draw = vl_convert.vegalite_to_svg
        patched.setattr(vl_convert, "vegalite_to_svg", lambda *of, **options: BLANK)
        yield draw


@pytest.fixture(scope="module", autouse=True)
def _pictures_are_blank() -> Iterator[Callable[..., str]]:
    with blank_pictures() as draw:
        yield draw


@pytest.fixture
def pictures(_pictures_are_blank: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """For the one test whose page has its pictures; tests/report has those of each kind."""
    monkeypatch.setattr("vl_convert.vegalite_to_svg", _pictures_are_blank)


SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 256, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip


def save_with_bytes(model: Any, directory: Path) -> Path:
    """Save the model with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from fullrank.models.loading import quiet

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: place for place, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    with quiet():
        model.save_pretrained(directory)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def byte_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of width 16 with random weights and a tokenizer of bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return save_with_bytes(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path_factory.mktemp("models") / "tiny")
