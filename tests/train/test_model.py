"""Models from configs: every head on every body, widths that follow from others, published sizes, and a fresh
head that predicts the frequencies of the training text before it has seen a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.fit.optimiser import hidden_matrices, make, set_rate
from fullrank.heads import build as build_head
from fullrank.heads.registry import HEADS
from fullrank.models import FullrankForCausalLM
from fullrank.train.config import BodyConfig, Config, HeadConfig, OptimiserConfig
from fullrank.train.model import build, configuration, start_at_unigram, width_factors
from fullrank.train.objective import Objective

COUNTS = np.array([0, 5, 80, 1, 3_000, 12, 250])


@pytest.mark.parametrize("lift", [0.0, 7.0, -3.0])
@pytest.mark.parametrize("name", ["softmax", "sigsoftmax", "mos", "moss"])
def test_the_bias_alone_gives_every_token_its_frequency(name: str, lift: float) -> None:
    head = build_head(name, hidden=8, vocab=len(COUNTS), bias=True)
    start_at_unigram(head, COUNTS, lift=lift)
    # A state of zero: rows of zero, scores that are the bias.
    predicted = head(torch.zeros(1, 8))[0].exp()
    wanted = torch.from_numpy((COUNTS + 1) / (COUNTS + 1).sum()).float()
    assert torch.allclose(predicted, wanted, rtol=2e-5, atol=0)


def test_a_lift_moves_scores_to_where_the_function_is_straight() -> None:
    low, high = (build_head("sigsoftmax", hidden=8, vocab=len(COUNTS), bias=True) for _ in range(2))
    start_at_unigram(low, COUNTS, lift=-20.0)
    start_at_unigram(high, COUNTS, lift=40.0)
    log_frequency = torch.from_numpy(np.log(COUNTS + 1.0)).float()
    apart = log_frequency - log_frequency[0]
    # f is 2 z far below zero and z far above.
    for head, slope in ((low, 2.0), (high, 1.0)):
        bias = head.decoder.bias.detach()
        assert torch.allclose(slope * (bias - bias[0]), apart, atol=1e-3)


def test_without_a_bias_nothing_changes() -> None:
    head = build_head("softmax", hidden=8, vocab=len(COUNTS))
    before = [parameter.clone() for parameter in head.parameters()]
    start_at_unigram(head, COUNTS)
    assert all(torch.equal(*pair) for pair in zip(before, head.parameters(), strict=True))


V, TIME = 40, 9


def config(kind: str = "awd_lstm", *, head: dict[str, Any] | None = None, **body: Any) -> Config:
    sizes: dict[str, Any] = {"kind": kind, "layers": 3, "hidden": 16, "last": 12, "heads": 4, **body}
    return Config(
        recipe="test",
        body=BodyConfig(**sizes),
        head=HeadConfig(**{"components": 4, **(head or {})}),
        length=TIME,
    )


def built(kind: str = "awd_lstm", *, vocab: int = V, head: dict[str, Any] | None = None, **body: Any) -> Any:
    return build(config(kind, head=head, **body), vocab)


@pytest.mark.parametrize("width", [0, 8])
@pytest.mark.parametrize("kind", ["awd_lstm", "neox", "llama"])
@pytest.mark.parametrize("name", HEADS)
def test_every_head_trains_on_every_body(name: str, kind: str, width: int) -> None:
    tie = kind == "awd_lstm" or not width
    model = built(kind, head={"name": name, "width": width, "tie": tie}, dropout=0.1)
    objective = Objective(model, activation=2.0, temporal=1.0)
    ids = torch.randint(V, (4, TIME + 1), generator=torch.Generator().manual_seed(0))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        torch.manual_seed(1)  # the same masks, so that the losses compare
        prediction = objective(ids[:, :-1], ids[:, 1:])
        losses.append(prediction.value.item())
        optimiser.zero_grad()
        prediction.value.backward()
        assert all(
            parameter.grad is not None and bool(parameter.grad.isfinite().all())
            for parameter in model.parameters()
        )
        optimiser.step()
    assert losses[2] < losses[1] < losses[0]
    assert model.lm_head.width == (width or model.config.hidden_size)
    assert (model.lm_head.decoder.weight is model.get_input_embeddings().weight) == tie


@pytest.mark.parametrize(
    ("kind", "head", "expected"),
    [
        ("awd_lstm", {}, 12),
        ("awd_lstm", {"width": 8}, 8),
        ("awd_lstm", {"tie": False}, 16),
        ("neox", {}, 16),
        ("neox", {"width": 8, "tie": False}, 16),
    ],
)
def test_the_embedding_takes_the_width_that_fits(kind: str, head: dict[str, Any], expected: int) -> None:
    assert built(kind, head=head).get_input_embeddings().embedding_dim == expected


@pytest.mark.parametrize(
    ("kind", "inner", "expected"), [("neox", 0, 64), ("neox", 24, 24), ("llama", 0, 48), ("llama", 24, 24)]
)
def test_a_transformer_gets_its_context_and_its_width_inside(kind: str, inner: int, expected: int) -> None:
    made = configuration(config(kind, inner=inner), V)
    assert made.body.max_position_embeddings == TIME
    assert made.body.intermediate_size == expected


@pytest.mark.parametrize(("size", "vocab"), [(50_277, 50_304), (50_257, 50_304), (16_384, 16_384), (1, 128)])
def test_a_vocabulary_is_padded_to_a_multiple(size: int, vocab: int) -> None:
    assert configuration(config(vocabulary_multiple=128), size).vocab_size == vocab
    assert configuration(config(), size).vocab_size == size


@pytest.mark.parametrize(
    ("head", "layers", "components"),
    [
        ({"name": "doc", "components": 20}, 3, (15, 5)),
        ({"name": "doc", "components": 10}, 3, (8, 2)),
        ({"name": "doc", "components": 3}, 3, (3,)),
        ({"name": "doc", "components": 10}, 1, (10,)),
        ({"name": "doc", "contexts": (2, 0, 3)}, 3, (2, 0, 3)),
    ],
)
def test_doc_shares_its_contexts_between_layers(
    head: dict[str, Any], layers: int, components: tuple[int, ...]
) -> None:
    model = built(layers=layers, head=head)
    assert model.lm_head.contexts.counts == components
    assert model.lm_head.state_widths == (12, 16, 16)[: len(components)]


def test_options_reach_the_heads_that_have_them() -> None:
    def head(**settings: Any) -> Any:
        last = settings.pop("last", 12)
        return built(head=settings, last=last).lm_head

    trunk = head(name="trunk", private=5, bias=False, dropout=0.25)
    assert (trunk.private, trunk.decoder.bias, trunk.contexts.dropout.probability) == (5, None, 0.25)
    assert head(name="trunk").private == 3
    assert head(name="mos", as_published=True).contexts.as_published
    assert head(name="mos").contexts.centred
    assert not head(name="mos", centred=False).contexts.centred
    assert head(name="low_rank").down.out_features == 6
    assert head(name="low_rank", rank=2).down.out_features == 2
    assert head(name="facets").states == 1
    assert head(name="facets", last=16).states == 3


@pytest.mark.parametrize("kind", ["awd_lstm", "neox"])
def test_one_seed_gives_one_body_under_every_head(kind: str) -> None:
    bodies = [built(kind, head={"name": name}).model.state_dict() for name in ("softmax", "mos")]
    assert all(torch.equal(bodies[0][name], bodies[1][name]) for name in bodies[0])


@pytest.mark.parametrize(
    ("kind", "body", "head", "message"),
    [
        ("awd_lstm", {"embedding": 10}, {}, "width 10 cannot be tied .* 12: set head.width=10"),
        ("neox", {}, {"width": 8}, "width 16 cannot be tied .* 8: set head.width=16.*head.tie=false"),
        ("awd_lstm", {}, {"name": "softmx"}, "no head is called 'softmx'.*did you mean 'softmax'"),
        ("gru", {}, {}, "no body is called 'gru'"),
        ("awd_lstm", {}, {"name": "doc", "contexts": (1, 1, 1, 1)}, "4 layers and the body has 3"),
        ("awd_lstm", {}, {"name": "mixtape", "components": 10}, "expected a power of two"),
        ("awd_lstm", {"layers": 0}, {}, "body.layers=0 is impossible"),
        ("awd_lstm", {"normaliser": "sigmoid"}, {}, "an LSTM has no attention"),
        ("neox", {"vocabulary_multiple": 0}, {}, "body.vocabulary_multiple=0 is impossible"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    kind: str, body: dict[str, Any], head: dict[str, Any], message: str
) -> None:
    with pytest.raises(FullrankError, match=message):
        built(kind, head=head, **body)


PTB = {"hidden": 960, "last": 620, "embedding": 280}
WT2 = {"hidden": 1150, "last": 650, "embedding": 300}
MOS = {"name": "mos", "components": 15, "as_published": True}
DOC = {"name": "doc", "components": 20, "contexts": (15, 5), "as_published": True}


@pytest.mark.parametrize(
    ("body", "head", "vocab", "millions"),
    [
        (PTB, {**MOS, "width": 280}, 10_000, 21.50),
        # zihangdai/mos prints "param size: 34909528" on WikiText-2 (its issue 11).
        (WT2, {**MOS, "width": 300}, 33_278, 34.909528),
        (PTB, {**DOC, "width": 280}, 10_000, 22.85),
        (WT2, {**DOC, "width": 300}, 33_278, 36.64),
    ],
)
def test_published_models_have_the_published_size(
    body: dict[str, Any], head: dict[str, Any], vocab: int, millions: float
) -> None:
    with torch.device("meta"):
        model = FullrankForCausalLM(configuration(config(head=head, **body), vocab))
    digits = len(str(millions).partition(".")[2])
    assert round(model.num_parameters() / 1e6, max(2, digits)) == millions


@pytest.mark.parametrize("kind", ["neox", "llama"])
def test_rates_of_hidden_matrices_follow_the_width(kind: str) -> None:
    """Twice the width, half the rate, and a mixture's own factor stays."""
    chosen = config(kind, head={"name": "mos"}, hidden=32, rate_width=16)
    model = build(chosen, V)
    factors = width_factors(model, chosen.body)
    update = make(model, OptimiserConfig(lr=1.0, lr_head=0.25), torch.device("cpu"), factors=factors)
    set_rate(update, 1.0)
    rates = {parameter: group["lr"] for group in update.param_groups for parameter in group["params"]}
    assert rates.keys() == set(model.parameters())
    for name, parameter in model.named_parameters():
        own = name.startswith("lm_head.") and "decoder" not in name
        hidden = "layers." in name and parameter.ndim == 2
        assert rates[parameter] == (0.25 if own else 0.5 if hidden else 1.0), name


@pytest.mark.parametrize(("kind", "rate_width"), [("neox", 16), ("neox", 0), ("awd_lstm", 8)])
def test_rates_stay_at_their_own_width_and_of_an_lstm(kind: str, rate_width: int) -> None:
    chosen = config(kind, rate_width=rate_width)
    assert width_factors(build(chosen, V), chosen.body) == {}


@pytest.mark.parametrize(("kind", "each"), [("neox", 4), ("llama", 7)])
def test_hidden_matrices_are_those_of_the_layers(kind: str, each: int) -> None:
    chosen = config(kind)
    made = build(chosen, V)
    expected = {name for name, weight in made.named_parameters() if ".layers." in name and weight.ndim == 2}
    assert hidden_matrices(made) == expected
    assert len(expected) == each * chosen.body.layers
