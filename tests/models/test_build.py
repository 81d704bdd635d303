"""Models from settings: every head on both bodies, widths that follow from others, published sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.heads.registry import HEADS
from fullrank.models.awd_lstm import AwdLstm
from fullrank.models.build import PYTHIA, build_model
from fullrank.models.language_model import LanguageModel
from fullrank.models.transformer import TransformerBody

V, TIME = 40, 9


@dataclass(frozen=True, kw_only=True)
class BodyChoice:
    kind: str = "awd_lstm"
    layers: int = 3
    hidden: int = 16
    last: int = 12
    embedding: int = 0
    heads: int = 4
    inner: int = 0
    dropout: float = 0.1
    dropout_embedding: float = 0.1
    dropout_input: float = 0.1
    dropout_hidden: float = 0.1
    weight_drop: float = 0.2
    normaliser: str = "softmax"


@dataclass(frozen=True, kw_only=True)
class HeadChoice:
    name: str = "softmax"
    components: int = 4
    width: int = 0
    private: int = 0
    rank: int = 0
    contexts: tuple[int, ...] = ()
    dropout: float = 0.0
    bias: bool = True
    as_published: bool = False
    tie: bool = True
    balance: float = 0.0


def built(body: BodyChoice, head: HeadChoice, vocab: int = V, **penalties: float) -> LanguageModel:
    torch.manual_seed(0)
    return build_model(body, head, vocab=vocab, length=TIME, **penalties)


@pytest.mark.parametrize("width", [0, 8])
@pytest.mark.parametrize("kind", ["awd_lstm", "transformer"])
@pytest.mark.parametrize("name", HEADS)
def test_every_head_trains_on_every_body(name: str, kind: str, width: int) -> None:
    model = built(BodyChoice(kind=kind), HeadChoice(name=name, width=width), activation=2.0, temporal=1.0)
    ids = torch.randint(V, (4, TIME + 1))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        torch.manual_seed(1)  # the same masks, so that the losses compare
        prediction = model(ids[:, :-1], ids[:, 1:])
        losses.append(prediction.value.item())
        optimiser.zero_grad()
        prediction.value.backward()
        assert all(
            parameter.grad is not None and bool(parameter.grad.isfinite().all())
            for parameter in model.parameters()
        )
        optimiser.step()
    assert losses[2] < losses[1] < losses[0]
    assert model.head.width == (width or model.body.widths[0])
    assert model.head.decoder.weight is model.body.embedding.weight


@pytest.mark.parametrize(
    ("kind", "head", "expected"),
    [
        ("awd_lstm", HeadChoice(), 12),
        ("awd_lstm", HeadChoice(width=8), 8),
        ("awd_lstm", HeadChoice(tie=False), 16),
        ("transformer", HeadChoice(), 16),
        ("transformer", HeadChoice(width=8), 8),
        ("transformer", HeadChoice(width=8, tie=False), 16),
    ],
)
def test_the_embedding_takes_the_width_that_fits(kind: str, head: HeadChoice, expected: int) -> None:
    model = built(BodyChoice(kind=kind), head)
    assert model.body.embedding.embedding_dim == expected
    assert isinstance(model.body, AwdLstm if kind == "awd_lstm" else TransformerBody)
    assert (model.head.decoder.weight is model.body.embedding.weight) == head.tie


def test_a_transformer_gets_its_context_and_four_times_its_width_inside() -> None:
    model = built(BodyChoice(kind="transformer"), HeadChoice())
    assert model.body.context == TIME
    shapes = {tuple(parameter.shape) for parameter in model.body.parameters()}
    assert (64, 16) in shapes
    shapes = {
        tuple(parameter.shape)
        for parameter in built(BodyChoice(kind="transformer", inner=24), HeadChoice()).body.parameters()
    }
    assert (24, 16) in shapes
    assert (64, 16) not in shapes


@pytest.mark.parametrize(
    ("head", "layers", "components"),
    [
        (HeadChoice(name="doc", components=20), 3, (15, 5)),
        (HeadChoice(name="doc", components=10), 3, (8, 2)),
        (HeadChoice(name="doc", components=3), 3, (3,)),
        (HeadChoice(name="doc", components=10), 1, (10,)),
        (HeadChoice(name="doc", contexts=(2, 0, 3)), 3, (2, 0, 3)),
    ],
)
def test_doc_shares_its_contexts_between_layers(
    head: HeadChoice, layers: int, components: tuple[int, ...]
) -> None:
    model = built(BodyChoice(layers=layers), head)
    assert model.head.contexts.counts == components
    assert model.head.state_widths == (12, 16, 16)[: len(components)]


def test_options_reach_the_heads_that_have_them() -> None:
    trunk = built(BodyChoice(), HeadChoice(name="trunk", private=5, bias=False, dropout=0.25)).head
    assert (trunk.private, trunk.decoder.bias, trunk.contexts.dropout.probability) == (5, None, 0.25)
    assert built(BodyChoice(), HeadChoice(name="trunk")).head.private == 3
    assert built(BodyChoice(), HeadChoice(name="mos", as_published=True)).head.contexts.as_published
    assert built(BodyChoice(), HeadChoice(name="low_rank")).head.down.out_features == 6
    assert built(BodyChoice(), HeadChoice(name="low_rank", rank=2)).head.down.out_features == 2
    assert built(BodyChoice(), HeadChoice(name="facets")).head.states == 1
    assert built(BodyChoice(last=16), HeadChoice(name="facets")).head.states == 3


def test_one_seed_gives_one_body_under_every_head() -> None:
    bodies = [built(BodyChoice(), HeadChoice(name=name)).body.state_dict() for name in ("softmax", "mos")]
    assert all(torch.equal(bodies[0][name], bodies[1][name]) for name in bodies[0])


@pytest.mark.parametrize(
    ("body", "head", "message"),
    [
        (BodyChoice(embedding=10), HeadChoice(), "width 10 cannot be tied .* 12: set head.width=10"),
        (BodyChoice(), HeadChoice(name="softmx"), "no head is called 'softmx'.*did you mean 'softmax'"),
        (BodyChoice(kind="gru"), HeadChoice(), "no body is called 'gru'"),
        (BodyChoice(), HeadChoice(name="doc", contexts=(1, 1, 1, 1)), "4 layers and the body has 3"),
        (BodyChoice(), HeadChoice(name="mixtape", components=10), "expected a power of two"),
        (BodyChoice(), HeadChoice(balance=0.1), "softmax has no prior"),
        (BodyChoice(), HeadChoice(name="mixtape", balance=0.1), "mixtape has no prior"),
        (BodyChoice(layers=0), HeadChoice(), "layers=0 is impossible"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(body: BodyChoice, head: HeadChoice, message: str) -> None:
    with pytest.raises(FullrankError, match=message):
        built(body, head)


PTB = BodyChoice(layers=3, hidden=960, last=620, embedding=280)
WT2 = BodyChoice(layers=3, hidden=1150, last=650, embedding=300)
MOS = HeadChoice(name="mos", components=15, as_published=True)
DOC = HeadChoice(name="doc", components=20, contexts=(15, 5), as_published=True)


@pytest.mark.parametrize(
    ("body", "head", "vocab", "millions"),
    [
        (PTB, replace(MOS, width=280), 10_000, 21.50),
        (WT2, replace(MOS, width=300), 33_278, 34.91),
        (PTB, replace(DOC, width=280), 10_000, 22.85),
        (WT2, replace(DOC, width=300), 33_278, 36.64),
    ],
)
def test_published_models_have_the_published_size(
    body: BodyChoice, head: HeadChoice, vocab: int, millions: float
) -> None:
    with torch.device("meta"):
        model = built(body, head, vocab=vocab)
    assert round(count(model) / 1e6, 2) == millions


def test_the_released_mos_counts_the_same_parameters_to_the_last() -> None:
    # zihangdai/mos prints "param size: 34909528" on WikiText-2 (its issue 11).
    with torch.device("meta"):
        model = built(WT2, replace(MOS, width=300), vocab=33_278)
    assert count(model) == 34_909_528


def count(model: LanguageModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Parameters of Pythia without its two embeddings, as its model cards count them.
PYTHIA_INNER: dict[str, int] = {"70m": 18_915_328, "160m": 85_056_000}


@pytest.mark.parametrize("size", PYTHIA_INNER)
def test_pythia_sizes_have_as_many_parameters_as_pythia(size: str) -> None:
    settings: dict[str, Any] = PYTHIA[size]._asdict()
    with torch.device("meta"):
        model = built(BodyChoice(kind="transformer", **settings), HeadChoice(bias=False))
    assert count(model) - model.body.embedding.weight.numel() == PYTHIA_INNER[size]
