"""Small models of ours, body and head, and bodies whose states a test decides."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel

from fullrank.heads.base import Head
from fullrank.models import AwdLstmConfig, FullrankConfig, FullrankForCausalLM, bodies


def lstm(
    head: str = "softmax",
    *,
    vocab: int,
    embedding: int = 6,
    inner: int = 8,
    last: int = 6,
    layers: int = 2,
    tie: bool = True,
    options: dict[str, Any] | None = None,
    **dropouts: float,
) -> FullrankForCausalLM:
    """An AWD-LSTM under a head; `options` are the head's."""
    body = AwdLstmConfig(
        vocab_size=vocab, embedding_size=embedding, inner_size=inner, hidden_size=last,
        num_hidden_layers=layers, **dropouts,
    )  # fmt: skip
    made = {"name": head, "hidden": last, **(options or {})}
    return FullrankForCausalLM(FullrankConfig(body=body, head=made, tie_word_embeddings=tie))


def transformer(
    head: str = "softmax",
    *,
    vocab: int,
    context: int,
    kind: str = "neox",
    hidden: int = 8,
    layers: int = 1,
    heads: int = 2,
    inner: int = 16,
    tie: bool = True,
    dropout: float = 0.0,
    normaliser: str = "softmax",
    temperature: float = 1.0,
    options: dict[str, Any] | None = None,
) -> FullrankForCausalLM:
    body = bodies.transformer(
        kind, vocab=vocab, hidden=hidden, layers=layers, heads=heads, inner=inner, context=context,
        dropout=dropout,
    )  # fmt: skip
    made = {"name": head, "hidden": hidden, **(options or {})}
    config = FullrankConfig(
        body=body, head=made, tie_word_embeddings=tie, normaliser=normaliser,
        attention_temperature=temperature,
    )  # fmt: skip
    return FullrankForCausalLM(config)


class Body(PreTrainedModel):
    """A body to derive from: an embedding, and `states(ids)`, the last layer first."""

    def __init__(self, vocab: int, embedding: int, hidden: int, context: int | None = None) -> None:
        limit = {} if context is None else {"max_position_embeddings": context}
        super().__init__(PreTrainedConfig(vocab_size=vocab, hidden_size=hidden, **limit))
        self.embedding = nn.Embedding(vocab, embedding)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def states(self, ids: Tensor) -> list[Tensor]:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, **unused: Any) -> BaseModelOutput:
        states = self.states(input_ids)
        return BaseModelOutput(last_hidden_state=states[0], hidden_states=tuple(reversed(states)))


class RecurrentBody(Body):
    """The same, with an empty state to carry."""

    def forward(self, input_ids: Tensor, state: Any = None, **unused: Any) -> BaseModelOutput:
        return super().forward(input_ids)


def under(body: Body, head: Head, *, tie: bool = False) -> FullrankForCausalLM:
    config = FullrankConfig(
        body=body.config, head={"name": head.name}, vocab_size=head.vocab, tie_word_embeddings=tie
    )
    return FullrankForCausalLM(config, body=body, head=head)
