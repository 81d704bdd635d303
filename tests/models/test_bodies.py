"""Bodies of recipes: what they are, and spreads that are those of Pythia."""

from __future__ import annotations

import math

import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.models import bodies
from tests import small_models

V, HIDDEN, TIME, LAYERS = 300, 96, 10, 3


def tokens(batch: int = 2, time: int = TIME) -> torch.Tensor:
    return torch.randint(V, (batch, time), generator=torch.Generator().manual_seed(1))


def model(
    kind: str, head: str = "softmax", *, tie: bool = False, seed: int = 0
) -> small_models.FullrankForCausalLM:
    options = {"components": 3} if head == "mos" else {}
    made = small_models.transformer(
        head, vocab=V, context=TIME, kind=kind, hidden=HIDDEN, layers=LAYERS, heads=4, inner=0, tie=tie,
        options=options,
    )  # fmt: skip
    bodies.draw(made, seed)
    return made


@pytest.mark.parametrize("kind", ["neox", "llama"])
def test_every_matrix_has_its_spread(kind: str) -> None:
    """By the formulas of gpt-neox at d = 96 and L = 3, within four standard errors of n normal draws."""
    made = model(kind)
    small = math.sqrt(2 / (5 * 96))
    outward = {"neox": 2 / (3 * math.sqrt(96)), "llama": small / math.sqrt(6)}[kind]
    names = {"neox": ("dense.weight", "dense_4h_to_h.weight"), "llama": ("o_proj.weight", "down_proj.weight")}
    found = 0
    for name, weight in made.named_parameters():
        if weight.ndim < 2:
            assert bool((weight == (1.0 if name.endswith("norm.weight") else 0.0)).all()), name
            continue
        expected = outward if name.endswith(names[kind]) else small
        found += name.endswith(names[kind])
        assert float(weight.detach().std()) == pytest.approx(
            expected, rel=4 / math.sqrt(2 * weight.numel())
        ), name
    assert found == 2 * LAYERS
    assert bodies.small_init(1000) == pytest.approx(0.02)


@pytest.mark.parametrize("kind", ["neox", "llama"])
def test_one_seed_gives_one_body_under_every_head(kind: str) -> None:
    one, two, other = model(kind), model(kind, "mos"), model(kind, seed=1)
    for name, weight in one.model.named_parameters():
        assert torch.equal(weight, two.model.get_parameter(name))
        assert weight.ndim < 2 or not torch.equal(weight, other.model.get_parameter(name))
    assert torch.equal(one.lm_head.decoder.weight, two.lm_head.decoder.weight)


def test_a_tied_matrix_is_drawn_once_as_an_embedding() -> None:
    tied, free = model("neox", tie=True), model("neox")
    assert tied.lm_head.decoder.weight is tied.model.embed_in.weight
    assert torch.equal(tied.model.embed_in.weight, free.model.embed_in.weight)


@pytest.mark.parametrize("kind", ["neox", "llama"])
def test_a_later_token_changes_no_earlier_state(kind: str) -> None:
    made, ids = model(kind).eval(), tokens()
    other = ids.clone()
    other[:, 6] = (ids[:, 6] + 1) % V
    one, two = made.head_inputs(ids).states[0], made.head_inputs(other).states[0]
    torch.testing.assert_close(one[:, :6], two[:, :6], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(one[:, 6:], two[:, 6:], rtol=1e-3, atol=1e-4)


def test_neox_is_pythias() -> None:
    config = model("neox").config.body
    assert config.use_parallel_residual
    assert config.attention_bias
    assert config.rope_parameters["partial_rotary_factor"] == 0.25
    assert config.hidden_act == "gelu"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "body.hidden=8 cannot be cut into body.heads=3"),
        ({"heads": 8}, "of one even width"),
        ({"layers": 0}, "body.layers=0 is impossible"),
        ({"dropout": 1.5}, r"body.dropout=1\.5 is impossible"),
        ({"kind": "gru"}, "no body is called 'gru': expected awd_lstm, neox or llama"),
    ],
)
def test_bad_sizes_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(FullrankError, match=message):
        small_models.transformer(vocab=V, context=TIME, **options)  # type: ignore[arg-type]
