"""The transformer body: shapes, causality, and that it is transformers' GPT-NeoX."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.models.transformer import TransformerBody

V, HIDDEN, TIME = 31, 16, 10


def body(**options: Any) -> TransformerBody:
    torch.manual_seed(0)
    sizes = {"vocab": V, "hidden": HIDDEN, "layers": 3, "heads": 4, "inner": 24, "context": TIME}
    return TransformerBody(**{**sizes, **options})


def tokens(batch: int = 2, time: int = TIME) -> torch.Tensor:
    return torch.randint(V, (batch, time), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("embedding", [HIDDEN, 6])
def test_a_later_token_changes_no_earlier_state(embedding: int) -> None:
    model, ids = body(embedding=embedding).eval(), tokens()
    other = ids.clone()
    other[:, 6] = (ids[:, 6] + 1) % V
    before, after = model(ids), model(other)
    assert model.widths == (HIDDEN,) * 3
    for one, two in zip(before.states, after.states, strict=True):
        assert one.shape == (2, TIME, HIDDEN)
        torch.testing.assert_close(one[:, :6], two[:, :6], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(one[:, 6:], two[:, 6:], rtol=1e-3, atol=1e-4)
    assert before.carried == ()
    assert model.start(2, torch.device("cpu")) == ()


def test_states_are_those_of_gpt_neox_the_last_layer_first() -> None:
    from transformers import GPTNeoXConfig, GPTNeoXModel

    model, ids = body().double().eval(), tokens()
    published = GPTNeoXModel(
        GPTNeoXConfig(
            vocab_size=V,
            hidden_size=HIDDEN,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=24,
            max_position_embeddings=TIME,
        )
    )
    weights = {**model.model.state_dict(), "embed_in.weight": model.embedding.weight}
    published.load_state_dict(weights)
    published = published.double().eval()
    expected = published(ids, output_hidden_states=True)
    output = model(ids)
    torch.testing.assert_close(output.raw, expected.last_hidden_state)
    # Where the last layer ends, before the final norm, is not among the states.
    for found, wanted in zip(output.states, reversed(expected.hidden_states[1:]), strict=True):
        torch.testing.assert_close(found, wanted)
    config = published.config
    assert config.use_parallel_residual
    assert config.rope_parameters["partial_rotary_factor"] == 0.25


def test_one_seed_gives_one_model_and_one_dropout() -> None:
    results = []
    for _ in range(2):
        model = body(dropout=0.3, embedding=6)
        torch.manual_seed(4)
        results.append((model.state_dict(), model(tokens()).raw))
    assert all(torch.equal(results[0][0][name], results[1][0][name]) for name in results[0][0])
    assert torch.equal(results[0][1], results[1][1])
    model.eval()
    assert not torch.equal(model(tokens()).raw, results[0][1])


@pytest.mark.parametrize("embedding", [HIDDEN, 6])
def test_every_parameter_has_a_gradient(embedding: int) -> None:
    model = body(embedding=embedding)
    model(tokens()).raw.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert sum(name.startswith("embedding.") for name in model.state_dict()) == 1
    assert model.embedding.weight.shape == (V, embedding)


def test_a_narrow_embedding_enters_at_the_size_of_a_wide_one() -> None:
    wide = body(hidden=256, layers=1)
    narrow = body(hidden=256, layers=1, embedding=64)
    sizes = [model.project(model.embedding(tokens())).std().item() for model in (wide, narrow)]
    assert 0.7 < sizes[1] / sizes[0] < 1.4


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(FullrankError, match="hidden=16 cannot be cut into heads=3"):
        body(heads=3)
    with pytest.raises(FullrankError, match=r"dropout=1\.5 is impossible"):
        body(dropout=1.5)
    with pytest.raises(FullrankError, match=r"ids have shape \[2, 11\], expected at most 10 tokens"):
        body()(tokens(time=11))
