"""A language model from settings: which widths follow from which, and what each head is given.

    head width D        as set, else the width of the state that it reads
    embedding width     as set, else D where head and embedding share one matrix, else the hidden width

A head takes from the settings what it has options for, and for a body's widths what it makes of them
(`Head.options_for`).

Body first, then head: one seed gives the same body under every head.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from fullrank.errors import FullrankError
from fullrank.heads.base import Head
from fullrank.heads.registry import build as build_head
from fullrank.heads.registry import find as find_head
from fullrank.models.awd_lstm import AwdLstm
from fullrank.models.body import Body
from fullrank.models.language_model import LanguageModel
from fullrank.models.transformer import TransformerBody


class BodySettings(Protocol):
    """What `train.config.BodyConfig` holds; its docstrings say what each means."""

    @property
    def kind(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def last(self) -> int: ...
    @property
    def embedding(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def inner(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def dropout_embedding(self) -> float: ...
    @property
    def dropout_input(self) -> float: ...
    @property
    def dropout_hidden(self) -> float: ...
    @property
    def weight_drop(self) -> float: ...
    @property
    def normaliser(self) -> str: ...


class HeadSettings(Protocol):
    """What `train.config.HeadConfig` holds."""

    @property
    def name(self) -> str: ...
    @property
    def components(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def private(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def contexts(self) -> tuple[int, ...]: ...
    @property
    def dropout(self) -> float: ...
    @property
    def bias(self) -> bool: ...
    @property
    def as_published(self) -> bool: ...
    @property
    def tie(self) -> bool: ...
    @property
    def balance(self) -> float: ...


class TransformerSize(NamedTuple):
    layers: int
    hidden: int
    heads: int
    inner: int


PYTHIA = {
    "tiny": TransformerSize(layers=2, hidden=128, heads=4, inner=512),
    "14m": TransformerSize(layers=6, hidden=128, heads=4, inner=512),
    "31m": TransformerSize(layers=6, hidden=256, heads=8, inner=1024),
    "70m": TransformerSize(layers=6, hidden=512, heads=8, inner=2048),
    "160m": TransformerSize(layers=12, hidden=768, heads=12, inner=3072),
}
"""Pythia's widths and depths (EleutherAI/pythia, models/*/*.yml); tiny is ours, a 14m of two layers."""


def build_model(
    body: BodySettings,
    head: HeadSettings,
    *,
    vocab: int,
    length: int,
    activation: float = 0.0,
    temporal: float = 0.0,
) -> LanguageModel:
    """A fresh model for `vocab` tokens; `length` is a transformer's context, an LSTM has none."""
    state = body.last if body.kind == "awd_lstm" else body.hidden
    width = head.width or state
    embedding = body.embedding or (width if head.tie else body.hidden)
    if head.tie and embedding != width:
        raise FullrankError(
            f"an embedding of width {embedding} cannot be tied to a head of width {width}: set head.width="
            f"{embedding}, body.embedding=0, or head.tie=false"
        )
    trunk = build_body(body, vocab=vocab, embedding=embedding, context=length)
    top = build_top(head, widths=trunk.widths, vocab=vocab, width=width)
    return LanguageModel(
        trunk, top, tie=head.tie, activation=activation, temporal=temporal, balance=head.balance
    )


def build_body(body: BodySettings, *, vocab: int, embedding: int, context: int) -> Body:
    if body.kind == "awd_lstm":
        if body.normaliser != "softmax":
            raise FullrankError(
                f"an LSTM has no attention that {body.normaliser} could normalise: leave "
                "body.normaliser=softmax, or train a transformer"
            )
        return AwdLstm(
            vocab=vocab,
            embedding=embedding,
            hidden=body.hidden,
            last=body.last,
            layers=body.layers,
            dropout=body.dropout,
            dropout_embedding=body.dropout_embedding,
            dropout_input=body.dropout_input,
            dropout_hidden=body.dropout_hidden,
            weight_drop=body.weight_drop,
        )
    if body.kind == "transformer":
        return TransformerBody(
            vocab=vocab,
            embedding=embedding,
            hidden=body.hidden,
            layers=body.layers,
            heads=body.heads,
            inner=body.inner or 4 * body.hidden,
            context=context,
            dropout=body.dropout,
            normaliser=body.normaliser,
        )
    raise FullrankError(f"no body is called {body.kind!r}: expected awd_lstm or transformer")


def build_top(head: HeadSettings, *, widths: tuple[int, ...], vocab: int, width: int) -> Head:
    """The head for a body whose states have these widths, the last layer first."""
    settings: dict[str, Any] = {
        "components": head.components,
        "width": width,
        "dropout": head.dropout,
        "bias": head.bias,
        "as_published": head.as_published,
    }
    # 0 leaves these to the head.
    settings |= {name: value for name in ("private", "rank", "contexts") if (value := getattr(head, name))}
    options = find_head(head.name).options_for(settings, widths)
    return build_head(head.name, hidden=widths[0], vocab=vocab, **options)
