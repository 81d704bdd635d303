"""Fixtures: tiny models of many families with random weights, peaked enough that a wrong head is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

WIDTH, LAYERS, HEADS, VOCABULARY, POSITIONS = 32, 3, 4, 101, 64

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**GROUPED, "tie_word_embeddings": True}),
    "llama untied": ("llama", {**GROUPED, "tie_word_embeddings": False}),
    "mistral": ("mistral", {**GROUPED, "sliding_window": 8}),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 8}),
    "gpt2": ("gpt2", {
        "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS,
        "n_positions": POSITIONS,
        "bos_token_id": 0, "eos_token_id": 0,
    }),
    "gpt_neox": ("gpt_neox", COMMON),
    "opt": ("opt", {**COMMON, "ffn_dim": 48, "pad_token_id": 1}),
    "opt projected": ("opt", {
        **COMMON, "ffn_dim": 48, "word_embed_proj_dim": 24, "do_layer_norm_before": False, "pad_token_id": 1,
    }),
    "gemma2": ("gemma2", {**GEMMA, "final_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", GEMMA),
    # Layers of two kinds, whose heads differ in width.
    "gemma4": ("gemma4_text", {
        **GROUPED, "num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
    }),
    "mamba": ("mamba", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 4,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }),
    "rwkv": ("rwkv", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
        "attention_hidden_size": WIDTH, "bos_token_id": 0, "eos_token_id": 0,
    }),
    "granite": ("granite", {**GROUPED, "logits_scaling": 3.0}),
    "cohere": ("cohere", {**GROUPED, "logit_scale": 0.7}),
    "phi": ("phi", COMMON),
    "gptj": ("gptj", {
        "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS,
        "n_positions": POSITIONS,
        "rotary_dim": 8, "bos_token_id": 0, "eos_token_id": 0,
    }),
    "bloom": ("bloom", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS}),
    "mpt": ("mpt", {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS,
        "max_seq_len": POSITIONS,
    }),
    "mixtral": ("mixtral", {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1}),
    # Its frequencies change behind 16 tokens, where prompts of 11 with 8 new ones come by.
    "phi3 long": ("phi3", {
        **GROUPED, "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        },
    }),
    # No cache of any kind.
    "openai-gpt": ("openai-gpt", {
        "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS,
        "n_positions": POSITIONS,
    }),
    # Buffers that no checkpoint has, and layers of kinds that transformers' own list lacks.
    "falcon_h1": ("falcon_h1", {**GROUPED, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}),
    "nemotron_h": ("nemotron_h", {
        **GROUPED, "num_hidden_layers": 4, "head_dim": 8,
        "layers_block_type": ["mamba", "attention", "mlp", "attention"],
        "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8,
    }),
}  # fmt: skip
"""A name for the test, the model type, and its configuration."""


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    """Neither bars nor advice between the dots."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(level)
    if bars:
        logging.enable_progress_bar()


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """A causal language model of a family, new at each call, the same at each call."""

    def make(family: str = "llama", **changes: Any) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        kind, sizes = FAMILIES[family]
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **changes}))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    # Norms and biases that do nothing would hide what is done with them.
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
                elif parameter.ndim == 2:
                    parameter.mul_(5.0)
            model.get_output_embeddings().weight.mul_(4.0)
        return model.eval()

    return make


@pytest.fixture
def ids() -> torch.Tensor:
    """Two texts of eleven tokens."""
    return torch.randint(2, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def padded(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same with the first three tokens of the first text masked, as a batch of prompts has them."""
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}
