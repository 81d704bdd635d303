"""A look at attention beside the pass: what the layers themselves have, and not a bit of the pass changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.models import FullrankForCausalLM
from fullrank.models.attention import replace_normaliser
from fullrank.models.glimpse import Glimpse, glimpses
from fullrank.models.normalisers import NORMALISERS
from tests import small_models
from tests.models.test_attention import FAMILIES, made

V, TIME = 31, 12
QUERIES = torch.tensor([[5, 8, 11], [0, 3, 11]])


def body(kind: str, **options: Any) -> FullrankForCausalLM:
    torch.manual_seed(0)
    model = small_models.transformer(
        vocab=V, hidden=16, layers=2, heads=4, inner=24, context=TIME, kind=kind, **options
    )
    for parameter in model.model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model.eval()


def tokens(rows: int = 3) -> Tensor:
    return torch.randint(V, (rows, TIME), generator=torch.Generator().manual_seed(1))


def looked(model: Any, ids: Tensor) -> tuple[Tensor, list[Glimpse]]:
    with torch.no_grad(), glimpses(model, QUERIES) as found:
        return model(input_ids=ids, use_cache=False).last_hidden_state, found


def observed(model: Any, ids: Tensor, name: str) -> list[Tensor]:
    """The weights [texts, heads, R, L] that our own attention function uses."""
    kept: list[Tensor] = []

    def observe(layer: nn.Module, scores: Tensor, visible: Tensor, weights: Tensor, values: Tensor) -> None:
        places = QUERIES[:, None, :, None].expand(-1, weights.shape[1], -1, weights.shape[-1])
        kept.append(weights[:2].gather(2, places))

    with torch.no_grad(), replace_normaliser(model, name, observe=observe, check=False):
        model(input_ids=ids, use_cache=False)
    return kept


@pytest.mark.parametrize("kind", ["neox", "llama"])
@pytest.mark.parametrize("name", list(NORMALISERS))
def test_weights_are_the_layers_own_and_states_are_as_they_were(kind: str, name: str) -> None:
    model, ids = body(kind, normaliser=name, temperature=0.5).model, tokens()
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).last_hidden_state
    before = model.config._attn_implementation
    states, found = looked(model, ids)
    assert torch.equal(states, plain)
    assert model.config._attn_implementation == before
    for one, weights in zip(found, observed(model, ids, name), strict=True):
        torch.testing.assert_close(one.weights, weights, rtol=1e-5, atol=1e-6)
        assert one.visible.shape == weights.shape
        assert one.visible.sum(-1)[:, 0].tolist() == (QUERIES + 1).tolist()
        assert (one.normaliser, one.temperature) == (name, 0.5)
        assert (one.parameter is not None) == (NORMALISERS[name].parameter is not None)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "phi"])
def test_families_with_their_windows_and_groups(family: str, implementation: str) -> None:
    assert family in FAMILIES
    model, ids = made(family).base_model, tokens()
    model.config._attn_implementation = implementation
    states, found = looked(model, ids)
    with torch.no_grad():
        assert torch.equal(states, model(input_ids=ids, use_cache=False).last_hidden_state)
    for one, weights in zip(found, observed(model, ids, "softmax"), strict=True):
        torch.testing.assert_close(one.weights, weights, rtol=1e-5, atol=1e-6)


def test_a_sink_of_the_models_own_takes_its_share() -> None:
    from transformers import GptOssConfig, GptOssModel

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=4, intermediate_size=16, num_local_experts=2, num_experts_per_tok=1, pad_token_id=0,
        max_position_embeddings=32, sliding_window=4,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = GptOssModel(config).eval()
    ids = tokens()
    with torch.no_grad():
        theirs = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
    _, found = looked(model, ids)
    for one, table in zip(found, theirs, strict=True):
        places = QUERIES[:, None, :, None].expand(-1, 4, -1, TIME)
        torch.testing.assert_close(one.weights, table[:2].gather(2, places), rtol=1e-4, atol=1e-5)
        assert one.normaliser == "sink"
        assert bool((one.weights.sum(-1) < 1).all())


@pytest.mark.slow(reason="compiles for two seconds")
def test_a_compiled_body_is_looked_into_and_not_compiled_again() -> None:
    model, ids = body("neox").model, tokens()
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    model.compile(backend=backend, dynamic=False)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).last_hidden_state
        before = len(compiled)
        assert before
        states, found = looked(model, ids)
        assert torch.equal(model(input_ids=ids, use_cache=False).last_hidden_state, plain)
    assert len(compiled) == before
    torch.testing.assert_close(states, plain, rtol=1e-5, atol=1e-6)
    assert len(found) == 2


def test_no_attention_no_look() -> None:
    model = small_models.lstm(vocab=V).model
    with pytest.raises(FullrankError, match="AwdLstmModel has no attention"), glimpses(model, QUERIES):
        pass
