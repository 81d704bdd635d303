"""A temperature of attention: scores over T for every normaliser and body, kept, refused if impossible."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fullrank.errors import FullrankError
from fullrank.models import FullrankConfig, FullrankForCausalLM
from fullrank.models.attention import TEMPERATURE, install_temperature, replace_normaliser
from fullrank.models.normalisers import NORMALISERS
from fullrank.train.config import from_json, override, to_json
from fullrank.train.model import build
from fullrank.train.recipes import recipe
from fullrank.upgrade import upgrade
from fullrank.upgrade.plain import plain_model
from tests import small_models
from tests.models.test_attention import FAMILIES, MORE, logits, made

V, TIME = 31, 10
KINDS = ("neox", "llama")


def body(kind: str = "neox", **options: Any) -> FullrankForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab": V, "hidden": 16, "layers": 2, "heads": 4, "inner": 24, "context": TIME}
    model = small_models.transformer(kind=kind, **{**sizes, **options})
    for name, weight in model.model.named_parameters():
        if name.endswith(("query_key_value.weight", "q_proj.weight", "k_proj.weight")):
            # At its own start the scores are nearly zero, and no temperature shows.
            torch.nn.init.normal_(weight, std=0.8)
    return model.eval()


def tokens() -> Tensor:
    return torch.randint(V, (2, TIME), generator=torch.Generator().manual_seed(1))


def states(model: FullrankForCausalLM) -> Tensor:
    with torch.no_grad():
        return model.head_inputs(tokens()).states[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(NORMALISERS))
@pytest.mark.parametrize("temperature", [0.25, 0.7, 2.0])
def test_a_body_divides_the_scores_of_every_normaliser_by_it(
    kind: str, name: str, temperature: float
) -> None:
    plain = body(kind, normaliser=name).double()
    warm = body(kind, normaliser=name, temperature=temperature).double()
    # The definition of a temperature, in `normalise`; a learnt parameter is the layer's own in both.
    with replace_normaliser(plain, name, temperature=temperature, check=False):
        expected = states(plain)
    torch.testing.assert_close(states(warm), expected, rtol=1e-12, atol=1e-12)
    assert float((expected - states(plain)).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_queries_over_it(kind: str) -> None:
    """So it is no other set of functions: another start, and another length of steps."""
    temperature = 0.25
    warm, plain = body(kind, temperature=temperature).double(), body(kind).double()
    for layer in plain.model.layers:
        with torch.no_grad():
            if kind == "llama":
                layer.self_attn.q_proj.weight /= temperature
            else:
                for part in (layer.attention.query_key_value.weight, layer.attention.query_key_value.bias):
                    # A head's queries, keys and values lie behind each other.
                    part.view(4, 3, -1)[:, 0] /= temperature
    torch.testing.assert_close(states(warm), states(plain), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "sink"])
def test_a_temperature_of_one_changes_no_bit(kind: str, name: str) -> None:
    plain, warm = body(kind, normaliser=name), body(kind, normaliser=name, temperature=1.0)
    assert torch.equal(states(plain), states(warm))
    assert plain.state_dict().keys() == warm.state_dict().keys()
    assert plain.model.config._attn_implementation == warm.model.config._attn_implementation
    assert not any(hasattr(layer, TEMPERATURE) for layer in warm.modules())
    install_temperature(warm, 1.0)
    assert torch.equal(states(plain), states(warm))


def test_it_keeps_the_fused_attention_and_can_be_set_anew() -> None:
    model = body(temperature=0.5)
    assert model.model.config._attn_implementation == "sdpa"
    install_temperature(model, 2.0)
    assert torch.equal(states(model), states(body(temperature=2.0)))
    install_temperature(model, 1.0)
    assert torch.equal(states(model), states(body()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_a_saved_model_keeps_it_and_generates_with_a_cache_as_without(
    kind: str, name: str, tmp_path: Path
) -> None:
    model = body(kind, normaliser=name, temperature=0.25)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attention_temperature"] == 0.25
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        whole = model(tokens()).logits
        assert torch.equal(again(tokens()).logits, whole)
        held, parts = None, []
        for piece in tokens().split((4, 1, 1, 1, 3), dim=1):
            found = again(piece, past_key_values=held, use_cache=True)
            held = found.past_key_values
            parts.append(found.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    text = again.generate(tokens()[:, :4], use_cache=True, **options)
    assert torch.equal(text, again.generate(tokens()[:, :4], use_cache=False, **options))


@pytest.mark.parametrize(
    "family",
    [name for name in FAMILIES if name != "gemma2"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in MORE],
)
def test_any_model_that_calls_its_attention_by_name_has_one(family: str) -> None:
    model = made(family)
    with replace_normaliser(model, "softmax", temperature=0.5):
        expected = logits(model)
    install_temperature(model, 0.5)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma2"])
def test_scores_that_are_bent_have_none(family: str) -> None:
    model = made(family)
    before = logits(model)
    with pytest.raises(FullrankError, match=r"does more to its scores.*leave attention_temperature=1"):
        install_temperature(model, 0.5)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf, "warm", None])
def test_an_impossible_one_is_refused(temperature: Any) -> None:
    for refuses in (
        lambda: install_temperature(body(), temperature),
        lambda: FullrankConfig(attention_temperature=temperature),
    ):
        with pytest.raises(FullrankError, match=r"attention_temperature=.* expected a finite number above 0"):
            refuses()


@pytest.mark.parametrize("text", ["0", "-0.5"])
def test_a_setting_of_none_is_refused(text: str) -> None:
    config = recipe("transformer-tiny")
    with pytest.raises(FullrankError, match=r"body.attention_temperature=.* above 0, such as 1"):
        override(config, [f"body.attention_temperature={text}"])
    with pytest.raises(FullrankError, match="expected a number"):
        override(config, ["body.attention_temperature=nan"])


def test_a_recipe_hands_it_to_its_model_and_old_configs_have_none() -> None:
    config = recipe("transformer-tiny")
    warm = override(config, ["body.attention_temperature=0.5", "body.normaliser=sink"])
    assert from_json(to_json(warm)) == warm
    old = to_json(config)
    del old["body"]["attention_temperature"]
    assert from_json(old) == config
    model = build(warm, 300)
    assert model.config.attention_temperature == 0.5
    assert [layer.attention.scaling for layer in model.model.layers] == pytest.approx([2 / math.sqrt(32)] * 2)
    lstm = override(recipe("awd-lstm"), ["body.attention_temperature=0.5"])
    with pytest.raises(FullrankError, match=r"an LSTM has no attention.*leave body.attention_temperature=1"):
        build(lstm, 300)


def test_another_head_keeps_it_and_nothing_plain_has_it() -> None:
    model = body(temperature=0.5)
    other = upgrade(model, "mos", components=2)
    assert other.config.attention_temperature == 0.5
    torch.testing.assert_close(states(other.eval()), states(body(temperature=0.5)))
    with pytest.raises(FullrankError, match=r"a temperature of 0.5: there is nothing to collapse into"):
        plain_model(other)
