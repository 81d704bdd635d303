"""AWD-LSTM without a head: Merity et al. 2017 (1708.02182), as Yang et al. 2018 (1711.03953) use it.

    x_0 = locked(words(E)[ids])                   locked: one mask [batch, width] for all times
    x_l = LSTM_l(x_{l-1}; U_l * mask)             recurrent weights U_l, one mask of their entries a call
    x_l fed upwards = locked(x_l)

Widths are `hidden` for every layer but the last, whose width is `last`. words() drops whole rows of the
embedding, that is, a word at all its places. Every mask keeps with probability 1 - p and scales by
1 / (1 - p); in eval mode there are none. Masks come from the default generator of the device.

Inside, time goes first, as the fused LSTM kernels have it; ids and outputs are [batch, time, ...].

Under autocast the recurrence keeps the dtype of its weights. Torch's autocast would run cuDNN's LSTM in fp16
whatever dtype was asked for, and fp16 gradients of a mean loss need a scaler; torch has no bf16 for it. In
fp32 it still uses TF32 where torch.backends.cudnn.allow_tf32 is set, which is torch's default.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads.base import require_positive
from fullrank.models.body import Body, BodyOutput, Carried

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
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)

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


class AwdLstm(Body):
    """Carried: (state, cell) of every layer from the first to the last, each [batch, width]."""

    context = None

    def __init__(
        self,
        *,
        vocab: int,
        embedding: int,
        hidden: int,
        last: int,
        layers: int,
        dropout: float = 0.0,
        dropout_embedding: float = 0.0,
        dropout_input: float = 0.0,
        dropout_hidden: float = 0.0,
        weight_drop: float = 0.0,
    ) -> None:
        super().__init__()
        require_positive(vocab=vocab, embedding=embedding, hidden=hidden, last=last, layers=layers)
        probabilities = {
            "dropout": dropout,
            "dropout_embedding": dropout_embedding,
            "dropout_input": dropout_input,
            "dropout_hidden": dropout_hidden,
            "weight_drop": weight_drop,
        }
        for name, probability in probabilities.items():
            if not 0.0 <= probability < 1.0:
                raise FullrankError(f"{name}={probability} is impossible: expected 0 <= {name} < 1")
        self.dropout, self.dropout_embedding = dropout, dropout_embedding
        self.dropout_input, self.dropout_hidden = dropout_input, dropout_hidden
        self.embedding = nn.Embedding(vocab, embedding)
        nn.init.uniform_(self.embedding.weight, -EMBEDDING_RANGE, EMBEDDING_RANGE)
        outputs = [hidden] * (layers - 1) + [last]
        sources = [embedding, *outputs[:-1]]
        self.layers = nn.ModuleList(
            LstmLayer(source, width, weight_drop=weight_drop)
            for source, width in zip(sources, outputs, strict=True)
        )
        self.widths = tuple(reversed(outputs))

    def start(self, batch: int, device: torch.device) -> Carried:
        dtype = self.embedding.weight.dtype
        return tuple(
            torch.zeros(batch, width, device=device, dtype=dtype)
            for width in reversed(self.widths)
            for _ in range(2)
        )

    def forward(self, ids: Tensor, carried: Carried = ()) -> BodyOutput:
        carried = self._checked(ids, carried) if carried else self.start(ids.shape[0], ids.device)
        fed = self._locked(self._embedded(ids.t()), self.dropout_input)
        states, following = [], []
        for number, layer in enumerate(self.layers):
            outputs, state, cell = layer(fed, *carried[2 * number : 2 * number + 2])
            following += [state.detach(), cell.detach()]
            if number + 1 < len(self.layers):
                fed = self._locked(outputs, self.dropout_hidden)
                states.append(fed.transpose(0, 1))
        # Heads view what they read as flat rows: contiguous, one copy for both.
        raw = outputs.transpose(0, 1).contiguous()
        dropped = self._locked(raw.transpose(0, 1), self.dropout).transpose(0, 1)
        return BodyOutput([dropped, *reversed(states)], raw, tuple(following))

    def _embedded(self, ids: Tensor) -> Tensor:
        """[time, batch, embedding]"""
        embedded = self.embedding(ids)
        if not self.training or not self.dropout_embedding:
            return embedded
        # The rows read, scaled by their words' masks: equal to reading an embedding with dropped rows.
        mask = keep_mask((self.embedding.num_embeddings, 1), self.dropout_embedding, embedded)
        return embedded * mask[ids]

    def _locked(self, values: Tensor, probability: float) -> Tensor:
        """values [time, batch, width], one mask for all times."""
        if not self.training or not probability:
            return values
        return values * keep_mask((1, *values.shape[1:]), probability, values)

    def _checked(self, ids: Tensor, carried: Carried) -> Carried:
        expected = [[ids.shape[0], width] for width in reversed(self.widths) for _ in range(2)]
        came = [list(tensor.shape) for tensor in carried]
        if came != expected:
            raise FullrankError(
                f"carried states have shapes {came}, expected {expected} for ids {list(ids.shape)}: pass "
                "what the last call on the same texts returned, or nothing to start afresh"
            )
        return carried
