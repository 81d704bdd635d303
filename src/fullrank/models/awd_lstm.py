"""AWD-LSTM as a body of transformers: Merity et al. 2017 (1708.02182), as in Yang et al. 2018 (1711.03953).

    x_0 = locked(words(E)[ids])                   locked: one mask [batch, width] for all times
    x_l = LSTM_l(x_{l-1}; U_l * mask)             recurrent weights U_l, one mask of their entries a call
    x_l fed upwards = locked(x_l)

Widths are `inner_size` for every layer but the last, whose width is `hidden_size`, and `embedding_size` for
E, so that a head of another width than the states can be tied. words() drops whole rows of the embedding,
that is, a word at all its places. Every mask keeps with probability 1 - p and scales by 1 / (1 - p); in eval
mode there are none. Masks come from the default generator of the device.

`state` is what a text hands on to its next part: (state, cell) of every layer from the first to the last,
each [batch, width]. As with RWKV `generate` carries it from token to token, training from batch to batch.

Inside, time goes first, as the fused LSTM kernels have it; ids and outputs are [batch, time, ...].

Under autocast the recurrence keeps the dtype of its weights. Torch's autocast would run cuDNN's LSTM in fp16
whatever dtype was asked for, and fp16 gradients of a mean loss need a scaler; torch has no bf16 for it. In
fp32 it still uses TF32 where torch.backends.cudnn.allow_tf32 is set, which is torch's default.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ModelOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModel
from transformers.utils.generic import can_return_tuple

from fullrank.errors import FullrankError
from fullrank.models.configuration import AwdLstmConfig

State = tuple[Tensor, ...]
"""(state, cell) of every layer, each [batch, width]."""

EMBEDDING_RANGE = 0.1
"""The embedding starts uniform within plus and minus this."""


def keep_mask(shape: tuple[int, ...], probability: float, like: Tensor) -> Tensor:
    """1 / (1 - p) with probability 1 - p, else 0."""
    keep = 1.0 - probability
    return like.new_empty(shape).bernoulli_(keep).div_(keep)


@contextmanager
def without_onednn() -> Iterator[None]:
    """Torch's own LSTM on a CPU: from a width of 256 on, a step of oneDNN's takes 1.6 to 2.3 times as long.

    A GPU takes no notice. torch.backends.mkldnn.flags would do the same, but sets TF32 too, which warns.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


class LstmLayer(nn.Module):
    """One LSTM layer whose recurrent weights are dropped while training."""

    def __init__(self, source: int, width: int, *, weight_drop: float) -> None:
        super().__init__()
        self.source, self.width, self.weight_drop = source, width, weight_drop
        self.weight_input = nn.Parameter(torch.empty(4 * width, source))
        self.weight_recurrent_raw = nn.Parameter(torch.empty(4 * width, width))
        self.bias_input = nn.Parameter(torch.empty(4 * width))
        self.bias_recurrent = nn.Parameter(torch.empty(4 * width))

    def weights(self) -> list[Tensor]:
        """In torch's order: input, recurrent and dropped, two biases."""
        recurrent: Tensor = self.weight_recurrent_raw
        if self.training and self.weight_drop:
            recurrent = recurrent * keep_mask(tuple(recurrent.shape), self.weight_drop, recurrent)
        weights = [self.weight_input, recurrent, self.bias_input, self.bias_recurrent]
        if not recurrent.is_cuda:
            return weights
        # cuDNN wants one chunk of memory. ATen copies scattered weights into one at every call and warns each
        # time; the same copy made here gives the same chunk without the warning, and split hands the gradient
        # back in one piece.
        chunk = torch.cat([weight.flatten() for weight in weights])
        pieces = chunk.split([weight.numel() for weight in weights])
        return [piece.view(weight.shape) for piece, weight in zip(pieces, weights, strict=True)]

    def forward(self, inputs: Tensor, state: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """inputs [time, batch, source], state and cell [batch, width]; the outputs alike."""
        dtype = self.weight_input.dtype
        before = (state.to(dtype)[None].contiguous(), cell.to(dtype)[None].contiguous())
        with torch.autocast(inputs.device.type, enabled=False), without_onednn():
            outputs, last_state, last_cell = torch.lstm(
                inputs.to(dtype),
                before,
                self.weights(),
                True,  # biases
                1,  # layers
                0.0,  # dropout between layers
                # "train" only keeps what a backward pass needs, and dynamic evaluation has one in eval mode.
                torch.is_grad_enabled(),
                False,  # bidirectional
                False,  # batch first
            )
        return outputs, last_state[0], last_cell[0]


@dataclass
class AwdLstmOutput(ModelOutput):
    """As transformers' models have it, and what the temporal penalty reads."""

    last_hidden_state: Tensor | None = None
    """[batch, time, hidden_size], dropout applied."""
    undropped: Tensor | None = None
    """The same before its dropout."""
    state: State | None = None
    """To go on with; detached."""
    hidden_states: tuple[Tensor, ...] | None = None
    """The embedded ids, then every layer's output, dropout applied."""


class AwdLstmModel(PreTrainedModel):
    """Token ids to states, without a head."""

    config_class = AwdLstmConfig
    base_model_prefix = "lstm"
    _no_split_modules = ["LstmLayer"]  # noqa: RUF012  (as transformers declares it)
    # A state cannot be cut back to an earlier token.
    _is_stateful = True

    def __init__(self, config: AwdLstmConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        outputs = [config.inner_size] * (config.num_hidden_layers - 1) + [config.hidden_size]
        sources = [config.embedding_size, *outputs[:-1]]
        self.layers = nn.ModuleList(
            LstmLayer(source, width, weight_drop=config.weight_drop)
            for source, width in zip(sources, outputs, strict=True)
        )
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = cast(nn.Embedding, value)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.uniform_(module.weight, -EMBEDDING_RANGE, EMBEDDING_RANGE)
        elif isinstance(module, LstmLayer):
            for parameter in module.parameters():
                nn.init.uniform_(parameter, -(module.width**-0.5), module.width**-0.5)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        state: State | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **unused: Any,
    ) -> AwdLstmOutput:
        """`input_ids` [batch, time]; without a `state` the text starts afresh.

        Padding may stand at the end only: a state that has read it is another state.
        """
        config = self.config
        if input_ids is not None and inputs_embeds is None:
            embedded = self._embedded(input_ids.t())
        elif inputs_embeds is not None and input_ids is None:
            embedded = inputs_embeds.transpose(0, 1)
        else:
            raise FullrankError("an LSTM reads either input_ids or inputs_embeds: pass one of them")
        _require_end_padding(attention_mask, embedded.shape[0])
        before = self._checked(embedded.shape[1], state) if state else self._start(embedded)
        fed = self._locked(embedded, config.dropout_input)
        states, following = [fed.transpose(0, 1)], []
        for number, layer in enumerate(self.layers):
            outputs, last, cell = layer(fed, *before[2 * number : 2 * number + 2])
            following += [last.detach(), cell.detach()]
            if number + 1 < len(self.layers):
                fed = self._locked(outputs, config.dropout_hidden)
                states.append(fed.transpose(0, 1))
        # Heads view what they read as flat rows: contiguous, one copy for both.
        undropped = outputs.transpose(0, 1).contiguous()
        dropped = self._locked(undropped.transpose(0, 1), config.dropout).transpose(0, 1)
        wanted = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        kept = config.use_cache if use_cache is None else use_cache
        return AwdLstmOutput(
            last_hidden_state=dropped,
            undropped=undropped,
            state=tuple(following) if kept else None,
            hidden_states=(*states, dropped) if wanted else None,
        )

    def _start(self, embedded: Tensor) -> State:
        """What a text begins with; `embedded` is [time, batch, width]."""
        batch, dtype = embedded.shape[1], self.embedding.weight.dtype
        return tuple(
            embedded.new_zeros(batch, width, dtype=dtype) for width in self._widths for _ in range(2)
        )

    @property
    def _widths(self) -> list[int]:
        return [cast(LstmLayer, layer).width for layer in self.layers]

    def _embedded(self, ids: Tensor) -> Tensor:
        """[time, batch, embedding]"""
        embedded = self.embedding(ids)
        probability = self.config.dropout_embedding
        if not self.training or not probability:
            return embedded
        # The rows read, scaled by their words' masks: equal to reading an embedding with dropped rows.
        mask = keep_mask((self.embedding.num_embeddings, 1), probability, embedded)
        return embedded * mask[ids]

    def _locked(self, values: Tensor, probability: float) -> Tensor:
        """values [time, batch, width], one mask for all times."""
        if not self.training or not probability:
            return values
        return values * keep_mask((1, *values.shape[1:]), probability, values)

    def _checked(self, batch: int, state: State) -> State:
        expected = [[batch, width] for width in self._widths for _ in range(2)]
        came = [list(tensor.shape) for tensor in state]
        if came != expected:
            raise FullrankError(
                f"carried states have shapes {came}, expected {expected} for {batch} texts: pass what the "
                "last call on the same texts returned, or nothing to start afresh"
            )
        return state


def _require_end_padding(mask: Tensor | None, time: int) -> None:
    # A mask that is longer covers the past too, which the state has read.
    if mask is None or mask.ndim != 2 or mask.shape[1] != time:
        return
    if bool((mask[:, :-1] < mask[:, 1:]).any()):
        raise FullrankError(
            "an LSTM reads every token, and the attention mask has padding before text: pad at the end with "
            "tokenizer.padding_side='right', or give one text at a time"
        )


AutoModel.register(AwdLstmConfig, AwdLstmModel, exist_ok=True)
