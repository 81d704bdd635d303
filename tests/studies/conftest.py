"""A tiny model whose tokenizer knows the words of the templates, for the study of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def word_tokenizer() -> Any:
    """A byte-level BPE tokenizer in which most words of the templates are one piece, with a space before."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from fullrank.studies.facts import RELATIONS

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1800,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = [f" {one} {other}" for relation in RELATIONS for one, other in relation.pairs] * 3
    tokenizer.train_from_iterator([*lines, *(text for one in RELATIONS for text in one.sentences)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token=None
    )


@pytest.fixture(scope="session")
def word_model(tmp_path_factory: pytest.TempPathFactory, word_tokenizer: Any) -> Path:
    """A directory with a model of three layers and that tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from fullrank.models.loading import quiet

    directory = tmp_path_factory.mktemp("words") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1800, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=256, bos_token_id=0, eos_token_id=0,
        tie_word_embeddings=True,
    )  # fmt: skip
    with quiet():
        LlamaForCausalLM(config).save_pretrained(directory)
    word_tokenizer.save_pretrained(directory)
    return directory
