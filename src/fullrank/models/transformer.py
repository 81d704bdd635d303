"""A transformer without a head: GPT-NeoX as Pythia has it (Biderman et al. 2023, 2304.01373).

Rotary positions on a quarter of each attention head, attention and feed-forward layer in parallel on one
residual, layer norms with biases, weights normal with a spread of 0.02. The layers are those of
transformers.GPTNeoXModel. The embedding stands beside them, where every body has it:

    x_0 = E[ids], or P E[ids] where the embedding is not as wide as the layers, without bias

so that a head of another width can be tied. P keeps the size of what it maps: its entries have the variance
1 / (embedding width).

`normaliser` turns attention scores into weights (`ops/normalisers.py`). The parameter of one that has any is
learnt, a number for each layer and attention head: a sink starts at 0, and the factor on log n at
1 / log(context), which is softmax for the last token of a full context.

States: the last layer's after the final norm, then the outputs of the layers below it as they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads.base import require_positive
from fullrank.models.attention import install_normaliser
from fullrank.models.body import Body, BodyOutput, Carried

SPREAD = 0.02
"""Of the embedding's entries at the start, as GPT-NeoX has it."""


class TransformerBody(Body):
    context: int

    def __init__(
        self,
        *,
        vocab: int,
        hidden: int,
        layers: int,
        heads: int,
        inner: int,
        context: int,
        dropout: float = 0.0,
        embedding: int | None = None,
        normaliser: str = "softmax",
    ) -> None:
        super().__init__()
        embedding = hidden if embedding is None else embedding
        require_positive(
            vocab=vocab, hidden=hidden, layers=layers, heads=heads, inner=inner, context=context,
            embedding=embedding,
        )  # fmt: skip
        if hidden % heads:
            raise FullrankError(
                f"hidden={hidden} cannot be cut into heads={heads} attention heads of one width: choose a "
                "multiple"
            )
        if not 0.0 <= dropout < 1.0:
            raise FullrankError(f"dropout={dropout} is impossible: expected 0 <= dropout < 1")
        from transformers import GPTNeoXConfig, GPTNeoXModel

        self.embedding = nn.Embedding(vocab, embedding)
        nn.init.normal_(self.embedding.weight, std=SPREAD)
        self.project: nn.Module = nn.Identity()
        if embedding != hidden:
            self.project = nn.Linear(embedding, hidden, bias=False)
            nn.init.normal_(self.project.weight, std=embedding**-0.5)
        self.model = GPTNeoXModel(
            GPTNeoXConfig(
                # Its own embedding is thrown away: one row is the least it can have.
                vocab_size=1,
                hidden_size=hidden,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                intermediate_size=inner,
                max_position_embeddings=context,
                hidden_dropout=dropout,
                attention_dropout=dropout,
                initializer_range=SPREAD,
                use_cache=False,
                bos_token_id=None,
                eos_token_id=None,
                attn_implementation="sdpa",  # type: ignore[call-arg]  # it is read from the keywords
            )
        )
        self.model.set_input_embeddings(nn.Identity())
        if normaliser != "softmax":
            # Softmax stays with the fused attention that it has.
            start = 1 / math.log(max(2, context)) if normaliser == "log_length" else None
            install_normaliser(self.model, normaliser, start=start)
        self.widths = (hidden,) * layers
        self.context = context

    def start(self, batch: int, device: torch.device) -> Carried:
        return ()

    def forward(self, ids: Tensor, carried: Carried = ()) -> BodyOutput:
        if ids.shape[1] > self.context:
            raise FullrankError(
                f"ids have shape {list(ids.shape)}, expected at most {self.context} tokens a text, the "
                "context of this transformer: cut the text into shorter windows"
            )
        output = self.model(
            inputs_embeds=self.project(self.embedding(ids)), output_hidden_states=True, use_cache=False
        )
        last = output.last_hidden_state
        # hidden_states: the input, every layer's output, and in place of the last one the normed one.
        lower = output.hidden_states[1:-1]
        return BodyOutput([last, *reversed(lower)], last, ())
