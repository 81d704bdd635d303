"""The transformer body with another normaliser: what the default leaves alone, and what others learn."""

from __future__ import annotations

import json
import math
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fullrank.errors import FullrankError
from fullrank.fit.optimiser import make
from fullrank.models import FullrankForCausalLM
from fullrank.models.attention import IMPLEMENTATION
from fullrank.models.normalisers import NORMALISERS
from fullrank.train.config import BodyConfig, from_json, override, to_json
from fullrank.train.model import build
from fullrank.train.recipes import recipe
from tests import small_models

V, TIME = 31, 10


def body(**options: Any) -> FullrankForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab": V, "hidden": 16, "layers": 2, "heads": 4, "inner": 24, "context": TIME}
    made = small_models.transformer(**{**sizes, **options})
    for layer in made.model.layers:
        # At its own start the scores are nearly zero, and all normalisers alike.
        torch.nn.init.normal_(layer.attention.query_key_value.weight, std=0.8)
    return made


def tokens() -> torch.Tensor:
    return torch.randint(V, (2, TIME), generator=torch.Generator().manual_seed(1))


def test_the_default_is_the_body_as_it_was() -> None:
    plain, named = body(), body(normaliser="softmax")
    assert plain.model.config._attn_implementation == "sdpa"
    assert plain.state_dict().keys() == named.state_dict().keys()
    assert not any("normaliser" in name for name in plain.state_dict())
    assert not any(hasattr(layer.attention, "normaliser_setting") for layer in plain.model.layers)


@pytest.mark.parametrize("name", [name for name in NORMALISERS if name != "softmax"])
def test_each_starts_from_the_same_weights_is_causal_and_learns(name: str) -> None:
    plain, model, ids = body(), body(normaliser=name), tokens()
    assert model.model.config._attn_implementation == IMPLEMENTATION
    before = plain.state_dict()
    added = [entry for entry in model.state_dict() if entry not in before]
    assert all(torch.equal(model.state_dict()[entry], before[entry]) for entry in before)
    assert len(added) == (2 if NORMALISERS[name].parameter else 0)
    other = ids.clone()
    other[:, 6] = (ids[:, 6] + 1) % V
    one, two = model.head_inputs(ids).states[0], model.head_inputs(other).states[0]
    torch.testing.assert_close(one[:, :6], two[:, :6], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(one[:, 6:], two[:, 6:], rtol=1e-3)
    assert not torch.allclose(one, plain.head_inputs(ids).states[0], rtol=1e-2, atol=1e-3)
    one.square()[..., 0].sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())  # type: ignore[union-attr]
    assert all(bool(model.get_parameter(entry).grad.any()) for entry in added)  # type: ignore[union-attr]


def test_log_length_begins_as_softmax_for_the_last_token_of_a_full_context() -> None:
    plain, model = body(layers=1), body(layers=1, normaliser="log_length")
    assert model.model.layers[0].attention.normaliser_parameter.tolist() == pytest.approx(
        [1 / math.log(TIME)] * 4
    )
    one, two = plain.head_inputs(tokens()).states[0], model.head_inputs(tokens()).states[0]
    torch.testing.assert_close(one[:, -1], two[:, -1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(one[:, 2], two[:, 2], rtol=1e-2)
    short = [body(layers=1, context=1, normaliser=name) for name in ("log_length", "softmax")]
    torch.testing.assert_close(*(one.head_inputs(tokens()[:, :1]).states[0] for one in short))


def test_a_learnt_number_is_not_decayed() -> None:
    config = override(recipe("transformer-tiny"), ["body.normaliser=sink"])
    model = build(config, 300)
    optimiser = make(model, config.optimiser, torch.device("cpu"))
    (decay,) = {
        group["weight_decay"]
        for group in optimiser.param_groups
        for parameter in group["params"]
        if any(parameter is layer.attention.normaliser_parameter for layer in model.model.layers)
    }
    assert decay == 0.0


def test_the_setting_names_every_normaliser_and_old_configs_read_as_softmax() -> None:
    choices = typing.get_args(typing.get_type_hints(BodyConfig)["normaliser"])
    assert set(choices) == set(NORMALISERS)
    config = recipe("transformer-tiny")
    assert config.body.normaliser == "softmax"
    old = json.loads(json.dumps(to_json(config)))
    del old["body"]["normaliser"]
    assert from_json(old) == config
    changed = override(config, ["body.normaliser=entmax15"])
    assert from_json(to_json(changed)) == changed
    with pytest.raises(FullrankError, match="expected one of softmax, sparsemax"):
        override(config, ["body.normaliser=hardmax"])


def test_a_saved_model_keeps_its_normaliser(tmp_path: Path) -> None:
    model = body(normaliser="sink").eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.attention.normaliser_parameter.fill_(0.7)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, model(tokens()).logits)
