"""Fixtures: tiny models of many families with random weights on disk, and a tokenizer trained on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

TINY: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 64, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "mistral": {"intermediate_size": 64, "num_key_value_heads": 2},
    "qwen3": {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8},
    "granite": {"intermediate_size": 64, "num_key_value_heads": 2, "logits_scaling": 8.0},
    "cohere": {"intermediate_size": 64, "num_key_value_heads": 2, "logit_scale": 0.25},
    "gemma2": {
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 30.0,
        "sliding_window": 64,
    },
    "gemma3_text": {
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 64,
    },
    # Layers of two kinds, whose heads differ in width.
    "gemma4_text": {
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 64,
        "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
    },
    "phi": {"intermediate_size": 64},
    "gpt_neox": {"intermediate_size": 64},
    "gpt2": {},
    "opt": {"ffn_dim": 64},
    "bloom": {},
    "mpt": {},
    "mamba": {"state_size": 4, "num_hidden_layers": 2},
}
"""What a family's configuration needs beside the sizes below."""

WIDTH, LAYERS, HEADS, VOCABULARY, POSITIONS = 32, 2, 4, 300, 256

NAMES: dict[str, dict[str, str]] = {
    "gpt2": {"width": "n_embd", "layers": "n_layer", "heads": "n_head", "positions": "n_positions"},
    "bloom": {"layers": "n_layer", "heads": "n_head"},
    "mpt": {"width": "d_model", "layers": "n_layers", "heads": "n_heads", "positions": "max_seq_len"},
    "mamba": {},
}
"""Where a family names its sizes otherwise."""

TEXT = """The tokenizer of the tests is trained on these few lines. A model is small when it is measured in
seconds, and a language is large when its log-probabilities have a high rank. She sells sea shells by the sea
shore; the shells that she sells are sea shells, for sure. Nothing begins like the word "the" does.
"""


@pytest.fixture(scope="module")
def few_orderings() -> Iterator[None]:
    """Two orderings in place of eight for the capacity: whole diagnoses ask it in passing, a second each."""
    from fullrank.diagnose.questions import unreachable

    measure = unreachable.top_m_capacity
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            unreachable, "top_m_capacity", lambda *of, **options: measure(*of, **{**options, "samples": 2})
        )
        yield


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer of 300 entries; id 0 begins and ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token=None
    )


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Callable[..., Path]:
    """tiny_checkpoint(family, **changes of the configuration): a directory with model and tokenizer."""
    made: dict[str, Path] = {}

    def build(family: str, **changes: Any) -> Path:
        key = json.dumps([family, changes], sort_keys=True, default=str)
        if key not in made:
            directory = tmp_path_factory.mktemp(family) / family
            save_tiny(family, directory, **changes)
            tiny_tokenizer.save_pretrained(directory)
            made[key] = directory
        return made[key]

    return build


def save_tiny(family: str, directory: Path, **changes: Any) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from fullrank.models.loading import quiet

    names = {
        "width": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "positions": "max_position_embeddings",
    }
    names |= NAMES.get(family, {})
    sizes = {"width": WIDTH, "layers": LAYERS, "heads": HEADS, "positions": POSITIONS}
    settings = {names[size]: number for size, number in sizes.items()}
    settings |= {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    with quiet():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **(settings | TINY[family] | changes))
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                # A bias of the output layer starts at zero, where no test could see that it is used.
                if name == "lm_head.bias":
                    weight.normal_(std=0.1)
        model.save_pretrained(directory)
