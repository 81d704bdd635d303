"""Layers that are played back give what the whole model gives, and only the upper ones learn."""

from typing import Any

import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.models import anatomy, loading
from fullrank.models.anatomy import blocks_of
from fullrank.studies.upper_layers import UpperLayers
from fullrank.upgrade import upgrade

SIZES = {"vocab_size": 101, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = {
    **SIZES, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama": LLAMA,
    "gpt2": {**SIZES, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "gemma3_text": {**LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "gpt_neox": LLAMA,
}


def tiny(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with loading.quiet():
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family])).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_played_back_is_the_whole(family: str) -> None:
    original = tiny(family)
    model = upgrade(original, "softmax").requires_grad_(False)
    ids = torch.randint(2, 101, (2, 9), generator=torch.Generator().manual_seed(1))
    upper = UpperLayers(model, blocks_of(original), 2)
    upper.check(ids)
    recorded = upper.record(ids)
    torch.testing.assert_close(upper.states(ids, recorded), model.head_inputs(ids)[0][0])
    # Other recorded states give other ones: they are what is read.
    assert not torch.allclose(upper.states(ids, recorded.flip(0)), model.head_inputs(ids)[0][0], atol=1e-3)
    for parameter in upper.parameters().values():
        parameter.requires_grad_(True)
    upper.states(ids, recorded).square().sum().backward()
    learning = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learning
    assert all(".2." in name or ".3." in name for name in learning)


def test_too_many_layers_are_refused() -> None:
    original = tiny("llama")
    with pytest.raises(FullrankError, match="expected 1 to 3 of its 4"):
        UpperLayers(upgrade(original, "softmax"), blocks_of(original), 4)
    assert anatomy.longest(original) == 64


def test_a_model_that_hands_on_more_is_refused() -> None:
    original = tiny("llama")
    model = upgrade(original, "softmax").requires_grad_(False)
    blocks = blocks_of(original)
    seen: list[torch.Tensor] = []
    # A path around the layers: the last one adds what the first one got.
    blocks[0].register_forward_hook(lambda module, inputs, result: seen.append(result.clone()))
    blocks[3].register_forward_hook(lambda module, inputs, result: result + 3 * seen[-1])
    with pytest.raises(FullrankError, match="need more than the states"):
        UpperLayers(model, blocks, 1).check(torch.arange(2, 12)[None])
