"""Another normaliser inside transformers models: softmax is eager attention, and nothing stays changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.models.attention import (
    IMPLEMENTATION,
    LEARNT,
    attention_layers,
    attention_scores,
    install_normaliser,
    replace_normaliser,
)
from fullrank.models.normalisers import NORMALISERS, normalise

V, TIME = 40, 10
SIZES = {
    "vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
WINDOW = {"sliding_window": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 0,
         "eos_token_id": 1, "scale_attn_by_inverse_layer_idx": True},
    ),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, **WINDOW, "head_dim": 4, "attn_logit_softcapping": 0.05}),
    "mistral": ("MistralForCausalLM", {**GROUPED, **WINDOW}),
    "phi": ("PhiForCausalLM", SIZES),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES),
}  # fmt: skip
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": (
        "Qwen2ForCausalLM", {**GROUPED, **WINDOW, "use_sliding_window": True, "max_window_layers": 1}
    ),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 4}),
    "gemma3_text": ("Gemma3ForCausalLM", {**GROUPED, **WINDOW, "head_dim": 4}),
    "olmo": ("OlmoForCausalLM", SIZES),
    "phi3": ("Phi3ForCausalLM", GROUPED),
    "granite": ("GraniteForCausalLM", GROUPED),
    "cohere": ("CohereForCausalLM", GROUPED),
    "bert": ("BertLMHeadModel", {**SIZES, "is_decoder": True}),
}  # fmt: skip


def made(family: str, **changes: Any) -> Any:
    import transformers

    name, options = {**FAMILIES, **MORE}[family]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**options, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        # At their own start scores are so small that every normaliser is nearly uniform.
        nn.init.normal_(parameter, std=0.3)
    return model


def tokens() -> tuple[Tensor, Tensor]:
    """Two texts, the second with padding at its left."""
    ids = torch.randint(3, V, (2, TIME), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return ids, mask


def logits(model: Any) -> Tensor:
    ids, mask = tokens()
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_softmax_is_eager_attention_and_others_are_not(family: str) -> None:
    model = made(family)
    eager = logits(model)
    model.config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
    before = model.config._attn_implementation
    with replace_normaliser(model, "softmax"):
        assert model.config._attn_implementation == IMPLEMENTATION
        # Twice: the first call compares each layer with its own eager attention.
        assert torch.equal(logits(model), eager)
        assert torch.equal(logits(model), eager)
    assert model.config._attn_implementation == before
    torch.testing.assert_close(logits(model), eager, rtol=1e-4, atol=1e-4)
    with replace_normaliser(model, "sink", parameter=-60.0):
        torch.testing.assert_close(logits(model), eager, rtol=1e-4, atol=1e-4)
    others = {}
    for name in NORMALISERS:
        with replace_normaliser(model, name):
            others[name] = logits(model)
        assert bool(others[name].isfinite().all())
    different = [name for name, one in others.items() if float((one - eager).abs().max()) > 1e-3]
    assert different == [name for name in NORMALISERS if name != "softmax"]
    assert not any(hasattr(layer, "normaliser_setting") for layer in model.modules())


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_a_window_hides_what_it_should(family: str) -> None:
    """Weights as seen inside: a query sees itself and two before it in layers with a window of 3."""
    model, seen = made(family), []
    config = model.config
    windows = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or [None] * 2]
    windows = windows if any(windows) else [True, True]

    def observe(layer: nn.Module, scores: Tensor, visible: Tensor, weights: Tensor, values: Tensor) -> None:
        assert weights.shape == scores.shape == visible.shape
        assert values.shape == (2, 4, TIME, scores.shape[1])
        seen.append((visible, weights))

    with replace_normaliser(model, "sigmoid", observe=observe):
        logits(model)
    assert len(seen) == 2
    place = torch.arange(TIME)
    for window, (visible, weights) in zip(windows, seen, strict=True):
        reach = place[:, None] - place[None, :]
        expected = (reach >= 0) & (reach < (3 if window else TIME))
        assert torch.equal(visible[0], expected.expand(4, TIME, TIME))
        # Padding sees nothing and is seen by nothing.
        assert not bool(visible[1, :, :4].any())
        assert not bool(visible[1, :, :, :4].any())
        assert bool((weights[~visible] == 0).all())
        assert bool((weights[visible] > 0).all())
    assert {True, False} == set(windows) or family == "mistral"


def test_the_numbers_are_those_of_the_normaliser_in_a_layer_written_out() -> None:
    """A GPT-NeoX of one layer, its attention by hand from its own weights."""
    model, ids = made("gpt_neox", num_hidden_layers=1, rotary_pct=0.0, partial_rotary_factor=0.0), tokens()[0]
    layer = model.gpt_neox.layers[0]
    rotated = layer.attention.rotary_ndims
    caught: list[Tensor] = []
    layer.attention.dense.register_forward_pre_hook(lambda module, given: caught.append(given[0]))
    with torch.no_grad(), replace_normaliser(model, "sparsemax"):
        model(ids[:1])
        states = layer.input_layernorm(model.gpt_neox.embed_in(ids[:1]))
        query, key, value = layer.attention.query_key_value(states).view(TIME, 4, 12).chunk(3, dim=-1)
    assert rotated == 0
    for head in range(4):
        scores = query[:, head] @ key[:, head].T / 2.0
        weights = normalise(scores, mask=torch.ones(TIME, TIME).tril().bool(), name="sparsemax")
        found = caught[0][0].view(TIME, 4, 4)[:, head]
        torch.testing.assert_close(found, weights @ value[:, head], rtol=1e-5, atol=1e-6)


def test_contexts_nest_and_an_error_inside_leaves_no_trace() -> None:
    model = made("llama")
    eager = logits(model)
    with replace_normaliser(model, "sigmoid"):
        outer = logits(model)
        with replace_normaliser(model, "softmax"):
            assert torch.equal(logits(model), eager)
        assert torch.equal(logits(model), outer)
    with pytest.raises(RuntimeError, match="on purpose"), replace_normaliser(model, "sink"):
        raise RuntimeError("on purpose")
    assert model.config._attn_implementation == "eager"
    assert torch.equal(logits(model), eager)


def test_generation_with_a_cache_is_that_without_one() -> None:
    model, (ids, _) = made("llama"), tokens()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
    with replace_normaliser(model, "log_length"):
        one, two = (model.generate(ids[:1], use_cache=cached, **options) for cached in (True, False))
    assert torch.equal(one, two)


def test_an_installed_parameter_is_learnt_one_a_head() -> None:
    model, (ids, _) = made("gpt_neox"), tokens()
    install_normaliser(model, "sink", start=0.25)
    layers = attention_layers(model)
    for name, layer in layers.items():
        parameter = dict(model.named_parameters())[f"{name}.{LEARNT}"]
        assert parameter.tolist() == [0.25] * 4
        assert parameter is getattr(layer, LEARNT)
    with torch.no_grad():
        learnt = model(ids).logits
        with replace_normaliser(model, "sink", parameter=0.25):
            torch.testing.assert_close(model(ids).logits, learnt)
        with replace_normaliser(model, "softmax"):
            assert not torch.allclose(model(ids).logits, learnt, rtol=1e-3)
        # What was learnt as a sink is no factor on log n.
        plain = made("gpt_neox")
        with replace_normaliser(model, "log_length"), replace_normaliser(plain, "log_length"):
            assert torch.equal(model(ids).logits, plain(ids).logits)
        assert torch.equal(copy.deepcopy(model)(ids).logits, learnt)
    model(ids, labels=ids).loss.backward()
    gradients = [getattr(layer, LEARNT).grad for layer in layers.values()]
    assert all(bool(gradient.any()) for gradient in gradients)
    assert len({float(value) for gradient in gradients for value in gradient}) == 8


def test_dropout_falls_on_the_weights_while_training() -> None:
    model = made("gpt_neox", attention_dropout=0.5)
    with replace_normaliser(model, "sparsemax"):
        quiet = logits(model)
        model.train()
        torch.manual_seed(0)
        first = logits(model)
        torch.manual_seed(0)
        assert torch.equal(logits(model), first)
        assert not torch.allclose(first, quiet, rtol=1e-2)


def test_scores_take_masks_of_both_kinds_and_biases() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 3, 5, generator=generator)
    key = torch.randn(2, 2, 3, 5, generator=generator)
    plain, visible = attention_scores(query, key, None, scaling=0.5)
    assert visible is None
    torch.testing.assert_close(plain[1, 3, 2, 0], 0.5 * query[1, 3, 2] @ key[1, 1, 0])
    capped, _ = attention_scores(query, key, None, scaling=0.5, softcap=0.3)
    torch.testing.assert_close(capped, 0.3 * torch.tanh(plain / 0.3))
    hidden = torch.ones(3, 3).tril().bool()
    scores, visible = attention_scores(query, key, hidden, scaling=0.5)
    assert torch.equal(scores, plain)
    assert visible is not None
    assert torch.equal(visible, hidden.expand(2, 4, 3, 3))
    bias = torch.tensor([-4.0, 0.0, 1.0]).expand(2, 1, 3, 3)
    added = torch.where(hidden, bias, torch.finfo(torch.float32).min)
    scores, visible = attention_scores(query, key, added, scaling=0.5)
    assert torch.equal(visible, hidden.expand(2, 4, 3, 3))
    torch.testing.assert_close(scores[visible], (plain + bias)[visible])
    default, _ = attention_scores(query, key, None)
    torch.testing.assert_close(default, 2 * plain / 5**0.5)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_models_that_cannot_be_served_are_told_why() -> None:
    import transformers

    mamba = transformers.MambaModel(
        transformers.MambaConfig(vocab_size=V, hidden_size=8, num_hidden_layers=1, state_size=2)
    )
    with pytest.raises(FullrankError, match="MambaModel has no attention"), replace_normaliser(mamba, "sink"):
        pass
    bloom = transformers.BloomModel(
        transformers.BloomConfig(vocab_size=V, hidden_size=8, n_layer=1, n_head=2)
    )
    with pytest.raises(FullrankError, match="does not let it be exchanged"):
        attention_layers(bloom)
    with pytest.raises(FullrankError, match="is no transformers model"):
        attention_layers(nn.Linear(2, 2))
    model = made("llama")
    with (
        pytest.raises(FullrankError, match="did you mean 'sigmoid'"),
        replace_normaliser(model, "sigmoids"),
    ):
        pass
    with (
        pytest.raises(FullrankError, match="softmax has no parameter"),
        replace_normaliser(model, "softmax", parameter=1.0),
    ):
        pass
    model.config._attn_implementation = IMPLEMENTATION
    with pytest.raises(FullrankError, match="was given no normaliser"):
        logits(model)


def test_a_layer_that_computes_more_than_softmax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    own = modeling_llama.eager_attention_forward

    def with_more(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        output, weights = own(*arguments, **options)
        return 1.01 * output, weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", with_more)
    model = made("llama")
    with (
        replace_normaliser(model, "softmax"),
        pytest.raises(FullrankError, match="LlamaAttention computes more than a softmax"),
    ):
        logits(model)
    with replace_normaliser(model, "softmax", check=False):
        logits(model)
    monkeypatch.delattr(modeling_llama, "eager_attention_forward")
    with pytest.raises(FullrankError, match="pass check=False"), replace_normaliser(model, "softmax"):
        pass


@pytest.mark.slow
def test_a_model_with_sinks_of_its_own_is_refused() -> None:
    import transformers

    config = transformers.GptOssConfig(
        **{**GROUPED, "max_position_embeddings": 4096}, head_dim=4, num_local_experts=4, num_experts_per_tok=2
    )
    model = transformers.GptOssForCausalLM(config).eval()
    with (
        replace_normaliser(model, "softmax"),
        pytest.raises(FullrankError, match="already has a learnt sink"),
    ):
        model(tokens()[0])


# A CPU without bf16 says so once.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_widths_of_number_pass_the_comparison(dtype: torch.dtype) -> None:
    # Without padding: in fp64 eager attention makes NaN of a query that sees nothing.
    ids, _ = tokens()
    for family in ("llama", "gpt2"):
        model = made(family).to(dtype)
        with torch.no_grad():
            eager = model(ids).logits
            with replace_normaliser(model, "softmax"):
                found = model(ids).logits
        assert found.dtype == dtype
        error = float((found - eager).abs().max() / eager.abs().max())
        assert error < (0.05 if dtype == torch.bfloat16 else 1e-6)
