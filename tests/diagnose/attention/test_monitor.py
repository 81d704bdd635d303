"""Attention in training: figures that are known by construction, padding, and models that have none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullrank.diagnose.attention.monitor import QUERIES, TEXTS, positions, watching
from fullrank.diagnose.monitors import MONITORS
from fullrank.models import FullrankForCausalLM
from fullrank.models.attention import no_attention
from fullrank.models.normalisers import NORMALISERS
from fullrank.train.monitor import measure
from tests import small_models

V, TIME = 31, 16
SEEN = [9, 11, 14, 16]
"""Positions that the queries of a text of 16 see."""


def body(kind: str = "neox", **options: Any) -> FullrankForCausalLM:
    torch.manual_seed(0)
    return small_models.transformer(
        vocab=V, hidden=16, layers=2, heads=4, inner=24, context=TIME, kind=kind, **options
    ).eval()


def flattened(model: FullrankForCausalLM) -> FullrankForCausalLM:
    """With scores of 0 everywhere."""
    for name, parameter in model.model.named_parameters():
        if "query_key_value" in name or "q_proj" in name:
            nn.init.zeros_(parameter)
    return model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(V, (6, TIME), generator=torch.Generator().manual_seed(1))


def test_queries_lie_in_the_second_half_of_each_text() -> None:
    found = positions(torch.tensor([16, 3, 1]))
    assert found.shape == (3, QUERIES)
    assert (found[0] + 1).tolist() == SEEN
    assert found[1].min() >= 1
    assert found[1].max() == 2
    assert found[2].tolist() == [0] * QUERIES


@pytest.mark.parametrize("kind", ["neox", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_uniform_attention_is_exact(kind: str, temperature: float, ids: Tensor) -> None:
    found = measure(flattened(body(kind, temperature=temperature)), ids)
    assert found["attention_effective_tokens"] == pytest.approx(sum(SEEN) / 4, rel=1e-6)
    mean = sum(1 / count for count in SEEN) / 4
    assert found["attention_first"] == pytest.approx(mean, rel=1e-6)
    # diag(1/n) - 1/n² has the eigenvalue 1/n.
    assert found["attention_sensitivity"] == pytest.approx(mean / temperature, rel=1e-6)
    assert "attention_sum" not in found
    assert "attention_zeros" not in found


@pytest.mark.parametrize("name", list(NORMALISERS))
def test_every_normaliser_is_measured_and_every_value_has_a_meaning(name: str, ids: Tensor) -> None:
    model = body(normaliser=name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = measure(model, ids)
    of_attention = {key: value for key, value in found.items() if key.startswith("attention_")}
    assert set(of_attention) <= set(MONITORS)
    assert all(math.isfinite(float(value)) for value in of_attention.values())  # type: ignore[arg-type]
    assert ("attention_sum" in found) == (not NORMALISERS[name].sums_to_one)
    assert ("attention_zeros" in found) == NORMALISERS[name].sparse
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    # The same as without the look, for all other monitors.
    plain = {key: value for key, value in found.items() if key not in of_attention}
    assert plain == measure_without_attention(model, ids)


def measure_without_attention(model: FullrankForCausalLM, ids: Tensor) -> dict[str, Any]:
    from fullrank.diagnose import monitors

    with torch.no_grad(), monitors.evaluating(model):
        return dict(monitors.measure(model.lm_head, model.head_inputs(ids).states, ids))


def test_padding_is_not_looked_at(ids: Tensor) -> None:
    model = body()
    seen = torch.ones_like(ids, dtype=torch.bool)
    seen[:, 10:] = False
    with torch.no_grad(), watching(model.model, ids, seen) as padded:
        model.head_inputs(ids, seen.long())
    with torch.no_grad(), watching(model.model, ids[:, :10]) as cut:
        model.head_inputs(ids[:, :10])
    assert padded == pytest.approx(cut, rel=1e-5)


def test_weights_that_are_no_numbers_are_nan(ids: Tensor) -> None:
    model = body()
    nn.init.constant_(model.model.layers[0].attention.query_key_value.weight, math.nan)
    with torch.no_grad(), watching(model.model, ids[:TEXTS]) as found:
        model.head_inputs(ids[:TEXTS])
    assert len(found) == 3
    assert all(math.isnan(value) for value in found.values())


def test_a_body_without_attention_says_so(ids: Tensor) -> None:
    model = small_models.lstm(vocab=V)
    assert no_attention(model.model) == "AwdLstmModel has no attention"
    assert not any(name.startswith("attention") for name in measure(model, ids))


@pytest.mark.parametrize("family", ["mamba", "rwkv"])
def test_so_do_recurrent_bodies_of_transformers(family: str) -> None:
    from transformers import AutoConfig, AutoModel

    from tests.tiny_models import FAMILIES

    kind, options = FAMILIES[family]
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(kind, **options))
    assert no_attention(model).endswith("has no attention")
    with watching(model, torch.zeros(2, 4, dtype=torch.long)) as found:
        pass
    assert found == {}
