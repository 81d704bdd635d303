"""The output layer that `examine` reads out of a model is the one that the model itself computes with."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fullrank.errors import FullrankError
from fullrank.models.anatomy import PROBE, Anatomy, examine, states, watched
from fullrank.models.loading import Loaded, from_objects, load
from fullrank.ops.pointwise import Softcap

Build = Callable[..., Path]

WIDTH, LAYERS, VOCABULARY = 32, 2, 300

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", {}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-padded": ("llama", {"vocab_size": 320}),
    "mistral": ("mistral", {}),
    "qwen3": ("qwen3", {}),
    "granite": ("granite", {}),
    "cohere": ("cohere", {}),
    "gemma2": ("gemma2", {}),
    "gemma3_text": ("gemma3_text", {}),
    "phi": ("phi", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {}),
    "opt-projected": ("opt", {"word_embed_proj_dim": 16}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {}),
    "mamba": ("mamba", {}),
}

DIFFERENT: dict[str, dict[str, Any]] = {
    "llama-tied": {"tied": True, "final_norm": "LlamaRMSNorm"},
    "llama-untied": {"final_norm": "LlamaRMSNorm"},
    "llama-padded": {"tied": True, "vocabulary": 320, "final_norm": "LlamaRMSNorm"},
    "mistral": {"final_norm": "MistralRMSNorm"},
    "qwen3": {"final_norm": "Qwen3RMSNorm"},
    "granite": {"logit_scale": 0.125, "final_norm": "GraniteRMSNorm"},
    "cohere": {"tied": True, "logit_scale": 0.25, "final_norm": "CohereLayerNorm", "lost": 1},
    "gemma2": {"tied": True, "softcap": 30.0, "final_norm": "Gemma2RMSNorm"},
    "gemma3_text": {"tied": True, "final_norm": "Gemma3RMSNorm"},
    # The biases of these norms start at zero, which takes the dimension as well.
    "phi": {"bias": True, "final_norm": "LayerNorm", "lost": 1},
    "gpt_neox": {"final_norm": "LayerNorm", "lost": 1},
    "gpt2": {"tied": True, "final_norm": "LayerNorm", "lost": 1},
    "opt": {"tied": True, "final_norm": "LayerNorm", "lost": 1},
    "opt-projected": {"tied": True, "width": 16},
    "bloom": {"tied": True, "final_norm": "LayerNorm", "lost": 1},
    "mpt": {"tied": True, "final_norm": "LayerNorm", "lost": 1},
    "mamba": {"tied": True, "final_norm": "MambaRMSNorm"},
}
"""What is expected of a family beside the plain facts of `expected`."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tiny_checkpoint: Build) -> tuple[str, Loaded, Anatomy]:
    name, changes = FAMILIES[request.param]
    loaded = load(tiny_checkpoint(name, **changes))
    return request.param, loaded, examine(loaded)


def fresh(seed: int = 5, most: int = VOCABULARY, length: int = 40) -> Tensor:
    return torch.randint(most, (2, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids).logits.float()


def edited(loaded: Loaded, **tensors: Tensor) -> Loaded:
    """The model with other values in some parameters, named with __ for a dot."""
    parameters = dict(loaded.model.named_parameters())
    with torch.no_grad():
        for name, value in tensors.items():
            parameters[name.replace("__", ".")].copy_(value)
    return loaded


def test_logits_and_losses_are_the_models(family: tuple[str, Loaded, Anatomy]) -> None:
    _, loaded, anatomy = family
    ids = fresh()
    own = logits(loaded.model, ids)
    hidden = states(loaded.model, ids)
    assert hidden.shape == (2, 40, anatomy.output.width)
    size = float(own.abs().max())
    torch.testing.assert_close(anatomy.output.logits(hidden), own, rtol=1e-5, atol=1e-6 * size)
    expected = functional.cross_entropy(own[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    found = anatomy.output.losses(hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # Losses differ from token to token by more than the tolerance, or the comparison would say nothing.
    assert float(expected.std()) > 1e-3 or anatomy.facts.logit_scale < 1 or anatomy.output.width < WIDTH


def test_facts(family: tuple[str, Loaded, Anatomy]) -> None:
    name, loaded, anatomy = family
    facts = anatomy.facts
    expected = {
        "tied": False,
        "bias": False,
        "softcap": None,
        "vocabulary": VOCABULARY,
        "tokens": VOCABULARY,
        "width": WIDTH,
        "final_norm": "",
        "layers": LAYERS,
        "storage": "float32",
        "dtype": "float32",
        "source": "directory",
        "architecture": type(loaded.model).__name__,
        "parameters": sum(one.numel() for one in loaded.model.parameters()),
        "fingerprint": loaded.fingerprint,
    }
    different = dict(DIFFERENT[name])
    lost, scale = different.pop("lost", 0), different.pop("logit_scale", 1.0)
    expected |= different
    found = dataclasses.asdict(facts)
    assert {key: found[key] for key in expected} == expected
    assert facts.logit_scale == pytest.approx(scale, rel=1e-5)
    assert anatomy.states_rank == facts.width - lost
    assert len(anatomy.blocks) == loaded.model.config.num_hidden_layers
    softcap = expected["softcap"]
    assert isinstance(anatomy.output.pointwise, Softcap) == (softcap is not None)


def test_notes_say_what_was_found_and_no_more(family: tuple[str, Loaded, Anatomy]) -> None:
    name, _, anatomy = family
    different = DIFFERENT[name]
    notes = " ".join(anatomy.facts.notes)
    for word, said in (
        ("tied", different.get("tied", False)),
        ("padding", different.get("vocabulary", VOCABULARY) > VOCABULARY),
        ("bias: one dimension more", different.get("bias", False)),
        ("multiplies its logits", "logit_scale" in different),
        ("soft-capped at 30", "softcap" in different),
        ("takes one dimension", "lost" in different),
    ):
        assert (word in notes) == said, word
    if "logit_scale" in different:
        assert f"{different['logit_scale']:g}" in notes


def test_states_are_what_the_model_calls_its_last(family: tuple[str, Loaded, Anatomy]) -> None:
    name, loaded, anatomy = family
    ids = fresh()
    with torch.no_grad():
        own = loaded.model(input_ids=ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(states(loaded.model, ids), own[-1], rtol=0, atol=0)
    seen: dict[int, Tensor] = {}
    with watched(anatomy.blocks, lambda layer, value: seen.__setitem__(layer, value)):
        states(loaded.model, ids)
    assert sorted(seen) == list(range(LAYERS + 1))
    # Mamba's list begins after the first block, that of all others before it.
    first = 1 if name == "mamba" else 0
    for layer in range(first, LAYERS):
        torch.testing.assert_close(seen[layer], own[layer - first], rtol=0, atol=0)


def test_examining_leaves_the_model_as_it_was(tiny_checkpoint: Build) -> None:
    loaded = load(tiny_checkpoint("llama"))
    before = logits(loaded.model, fresh())
    anatomy = examine(loaded)
    states(loaded.model, fresh(6))
    hooks = [
        hook
        for module in loaded.model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    assert not hooks
    assert torch.equal(logits(loaded.model, fresh()), before)
    # The matrix is a copy: what is fitted on it must not reach the model.
    anatomy.output.weight.zero_()
    assert torch.equal(logits(loaded.model, fresh()), before)


@pytest.mark.parametrize("family_name", ["gpt2", "opt", "bloom", "phi", "gpt_neox"])
def test_a_shift_in_the_norm_gives_the_dimension_back(family_name: str, tiny_checkpoint: Build) -> None:
    loaded = load(tiny_checkpoint(family_name))
    norms = {
        "gpt2": "transformer__ln_f",
        "opt": "model__decoder__final_layer_norm",
        "bloom": "transformer__ln_f",
        "phi": "model__final_layernorm",
        "gpt_neox": "gpt_neox__final_layer_norm",
    }
    shift = torch.linspace(-1, 2, WIDTH)
    anatomy = examine(edited(loaded, **{f"{norms[family_name]}__bias": shift}))
    # Beside a bias of the head the shift is no dimension more: both are the constant.
    assert anatomy.states_rank == WIDTH - (anatomy.output.bias is not None)
    assert ("takes one dimension" in " ".join(anatomy.facts.notes)) == (anatomy.output.bias is not None)
    hidden = states(loaded.model, fresh(length=60)).flatten(0, 1).double()
    assert int(torch.linalg.matrix_rank(hidden, rtol=1e-6)) == WIDTH


@pytest.mark.parametrize("family_name", ["cohere", "mpt"])
def test_the_states_have_the_rank_that_is_said(family_name: str, tiny_checkpoint: Build) -> None:
    """Also with unequal gains, where the states' mean is not zero: the hyperplane is tilted."""
    loaded = load(tiny_checkpoint(family_name))
    gain = {"cohere": "model__norm__weight", "mpt": "transformer__norm_f__weight"}[family_name]
    anatomy = examine(edited(loaded, **{gain: torch.linspace(0.3, 2.0, WIDTH)}))
    assert anatomy.states_rank == WIDTH - 1
    hidden = states(loaded.model, fresh(length=60)).flatten(0, 1)
    singular = torch.linalg.svdvals(hidden.double())
    assert float(singular[-1]) < 1e-5 * float(singular[0]) < float(singular[-2])


def test_a_soft_cap_is_found_with_small_and_with_large_logits(tiny_checkpoint: Build) -> None:
    """Small logits pass for uncapped ones, large ones all stand at the cap, where tanh cannot be undone."""
    loaded = load(tiny_checkpoint("gemma2"))
    norm = dict(loaded.model.named_parameters())["model.norm.weight"].clone()
    for size in (0.1, 30.0, 3000.0):
        # Gemma's norm multiplies with 1 + weight.
        changed = edited(loaded, model__norm__weight=size * (1 + norm) - 1)
        anatomy = examine(changed)
        assert anatomy.facts.softcap == 30.0
        assert anatomy.facts.logit_scale == 1.0
        own = logits(loaded.model, fresh())
        torch.testing.assert_close(
            anatomy.output.logits(states(loaded.model, fresh())), own, rtol=1e-4, atol=1e-4 * float(own.max())
        )
    assert float(own.abs().median()) > 29.9


def test_other_names_of_the_cap(tiny_tokenizer: Any) -> None:
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    from fullrank.models.loading import quiet

    with quiet():
        torch.manual_seed(0)
        config = RecurrentGemmaConfig(
            hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            vocab_size=VOCABULARY, lru_width=WIDTH, attention_window_size=64, logits_soft_cap=20.0,
            bos_token_id=0, eos_token_id=0, pad_token_id=None,
        )  # fmt: skip
        model = RecurrentGemmaForCausalLM(config)
    anatomy = examine(from_objects(model, tiny_tokenizer))
    assert (anatomy.facts.softcap, anatomy.facts.logit_scale, anatomy.facts.layers) == (20.0, 1.0, 3)


def test_a_cap_that_the_model_does_not_apply_is_not_believed(tiny_checkpoint: Build) -> None:
    loaded = load(tiny_checkpoint("llama"))
    weight = dict(loaded.model.named_parameters())["model.norm.weight"]
    examine(edited(loaded, model__norm__weight=300 * weight))
    loaded.model.config.final_logit_softcapping = 30.0
    anatomy = examine(loaded)
    assert float(logits(loaded.model, fresh()).abs().max()) > 30
    assert anatomy.facts.softcap is None
    assert anatomy.output.linear


def test_rows_that_the_model_cuts_off_take_no_part(tiny_checkpoint: Build) -> None:
    loaded = load(tiny_checkpoint("llama", vocab_size=320))
    whole = type(loaded.model).forward

    def cut(*arguments: Any, **keywords: Any) -> Any:
        found = whole(loaded.model, *arguments, **keywords)
        found.logits = found.logits[..., :310]
        return found

    loaded.model.forward = cut  # type: ignore[method-assign]
    anatomy = examine(loaded)
    assert (anatomy.facts.vocabulary, anatomy.facts.tokens) == (310, VOCABULARY)
    assert "10 rows" in " ".join(anatomy.facts.notes)
    own = logits(loaded.model, fresh())
    torch.testing.assert_close(anatomy.output.logits(states(loaded.model, fresh())), own)


def test_half_precision(tiny_checkpoint: Build) -> None:
    loaded = load(tiny_checkpoint("granite"), dtype=torch.bfloat16)
    anatomy = examine(loaded)
    assert anatomy.facts.dtype == "bfloat16"
    assert anatomy.facts.storage == "float32"
    assert anatomy.output.weight.dtype == torch.float32
    assert anatomy.facts.logit_scale == pytest.approx(0.125, rel=1e-2)


def test_fewer_positions_than_the_probe_has_tokens(tiny_checkpoint: Build) -> None:
    positions = 16
    assert positions < PROBE
    assert examine(load(tiny_checkpoint("gpt2", n_positions=positions))).facts.width == WIDTH


def one_sentence(error: FullrankError) -> str:
    message = str(error)
    assert "\n" not in message
    assert not re.search(r"\.\s", message)
    assert len(message) < 300
    return message


def test_a_model_that_sees_the_future_is_refused(
    tiny_checkpoint: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    loaded = load(tiny_checkpoint("llama"))
    examine(loaded)

    def everything(*arguments: Any, **keywords: Any) -> Tensor:
        return torch.zeros(2, 1, PROBE, PROBE)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", everything)
    with pytest.raises(FullrankError, match="sees later tokens") as caught:
        examine(loaded)
    assert "LlamaForCausalLM" in one_sentence(caught.value)


def test_an_encoder_is_refused(tiny_tokenizer: Any) -> None:
    from transformers import BertConfig, BertLMHeadModel

    from fullrank.models.loading import quiet

    with quiet():
        torch.manual_seed(0)
        config = BertConfig(
            hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=64,
            vocab_size=VOCABULARY, max_position_embeddings=64,
        )  # fmt: skip
        model = BertLMHeadModel(config)
    with pytest.raises(FullrankError, match="sees later tokens") as caught:
        examine(from_objects(model, tiny_tokenizer))
    one_sentence(caught.value)


@pytest.mark.parametrize(
    "bend",
    [torch.square, lambda own: own + 1.0, lambda own: own.flip(-1), lambda own: -own.exp()],
    ids=["square", "shift", "flip", "exp"],
)
def test_an_output_layer_of_another_form_is_refused(
    bend: Callable[[Tensor], Tensor], tiny_checkpoint: Build
) -> None:
    loaded = load(tiny_checkpoint("llama"))
    whole = type(loaded.model).forward

    def bent(*arguments: Any, **keywords: Any) -> Any:
        found = whole(loaded.model, *arguments, **keywords)
        found.logits = bend(found.logits)
        return found

    loaded.model.forward = bent  # type: ignore[method-assign]
    with pytest.raises(FullrankError, match="not read yet") as caught:
        examine(loaded)
    one_sentence(caught.value)


def test_states_that_overflow_are_refused(tiny_checkpoint: Build) -> None:
    loaded = load(tiny_checkpoint("llama"), dtype=torch.float16)
    weight = torch.full((WIDTH,), 60000.0)
    with pytest.raises(FullrankError, match="float32") as caught:
        examine(edited(loaded, model__norm__weight=weight))
    assert "infinity" in one_sentence(caught.value)


def test_a_model_that_never_calls_its_output_layer_is_refused(tiny_checkpoint: Build) -> None:
    loaded = load(tiny_checkpoint("llama"))
    body = loaded.model.model
    loaded.model.forward = lambda input_ids, use_cache: body(input_ids)  # type: ignore[method-assign, assignment]
    with pytest.raises(FullrankError, match="never calls its output embedding"):
        states(loaded.model, fresh())
    with pytest.raises(FullrankError, match="gives no logits"):
        examine(loaded)
