"""What an upgraded head is held against: softmax heads that start as the original does.

softmax         the original head: W, and a map M of all rows together
softmax_equal   the same with a perceptron, so that it has as many parameters as the upgraded head, and a
                bias if that one has a bias
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from fullrank.heads import Head
from fullrank.heads.base import without_matrix
from fullrank.heads.contexts import Contexts
from fullrank.heads.softmax import Softmax
from fullrank.models.output_layer import OutputLayer
from fullrank.ops import Pointwise, Softcap

CONTROLS = ("softmax", "softmax_equal")


def plain_layer(output: OutputLayer, *, hidden: int | None = None) -> Head:
    """An output layer as a head of one row a token, sharing its matrix; `hidden` is the width of the states
    where a map takes these to the layer's own."""
    bias, capped = output.bias, isinstance(output.pointwise, Softcap)
    kind = Softmax if output.linear or capped else PlainLayer
    with without_matrix(), torch.random.fork_rng(devices=[]):
        head = kind(
            hidden=hidden or output.width, vocab=output.vocabulary, width=output.width, bias=bias is not None
        )
    # Before anything is moved: there is no matrix yet to move.
    head.decoder.weight = nn.Parameter(output.weight, requires_grad=False)
    if bias is not None:
        head.decoder.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    if capped:
        head.cap_scores(output.pointwise.constant)
    if isinstance(head, PlainLayer):
        head.function = output.pointwise
    return head.to(output.weight.device)


class PlainLayer(Softmax):
    """Softmax of a function of the scores that stays as it is."""

    function: Pointwise

    @property
    def pointwise(self) -> Pointwise:
        return self.function


class Perceptron(nn.Module):
    """One context from h + M h + m + U gelu(V h + v), U = 0 at the start: softmax with more parameters."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.linear = Contexts(sources=((width, 1),), width=width, as_published=False)
        self.enter, self.leave = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)
        nn.init.normal_(self.enter.weight, std=width**-0.5)
        nn.init.zeros_(self.enter.bias)
        nn.init.zeros_(self.leave.weight)

    def forward(self, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        contexts, log_prior = self.linear(states)
        added = self.leave(nn.functional.gelu(self.enter(states[0])))
        return contexts + added[..., None, :], log_prior

    @torch.no_grad()
    def redraw(self, size: float) -> None:
        """Draw the inner layer anew for states of this size, while it does nothing."""
        self.linear.redraw(size)
        if not bool(self.leave.weight.any()):
            self.enter.weight.normal_(std=self.enter.in_features**-0.5 / size)

    def pace(self, name: str, parameter: Tensor, sizes: Sequence[float]) -> float:
        """As `Head.pace`: into units of about unit size, and out of them to rows."""
        if name == "enter.weight":
            return 1.0 / (parameter.shape[-1] * sizes[0])
        if name == "leave.weight":
            return sizes[0] / self.linear.width
        return self.linear.pace(name.removeprefix("linear."), parameter, sizes)


class SoftmaxControl(Softmax):
    """Softmax over rows h + M h + m, with a perceptron of `inner` units beside them where asked for.

    M and m start at 0, so that this starts as the plain head whose matrix it takes. `bias` gives it a bias, 0
    at the start, where the plain head has none: a head that has one must be held against one that does.
    """

    def __init__(self, plain: Head, inner: int = 0, *, bias: bool = False) -> None:
        super().__init__(hidden=plain.hidden, vocab=1, width=plain.width)
        self.contexts: Contexts | Perceptron = Contexts(
            sources=((plain.hidden, 1),), width=plain.width, as_published=False
        )
        if inner:
            self.contexts = Perceptron(plain.width, inner)
        self.replace_decoder(plain.decoder)
        if bias and plain.decoder.bias is None:
            weight = plain.decoder.weight
            self.decoder = nn.Linear(plain.width, plain.vocab, device="meta")
            self.decoder.weight = weight
            self.decoder.bias = nn.Parameter(weight.new_zeros(plain.vocab))
        self.softcap = plain.softcap

    def rows(self, states: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        return cast(tuple[Tensor, Tensor], self.contexts(states[:1]))

    def redraw(self, size: float) -> None:
        self.contexts.redraw(size)

    def pace(self, name: str, parameter: Tensor, sizes: Sequence[float]) -> float:
        return self.contexts.pace(name.removeprefix("contexts."), parameter, sizes)


def controls(head: Head, plain: Head) -> dict[str, Head]:
    """The original head, and a softmax with as many parameters as this one, by their names."""
    return {
        "softmax": SoftmaxControl(plain),
        "softmax_equal": SoftmaxControl(plain, inner(head), bias=head.decoder.bias is not None),
    }


def inner(head: Head) -> int:
    """Units of the perceptron with which a softmax control has as many parameters as the head."""
    D = head.width
    bias = 0 if head.decoder.bias is None else head.vocab
    extra = size(head) - (D * D + D + head.hidden + bias)
    return max(1, extra // (2 * D + 1))


def size(head: nn.Module) -> int:
    return sum(parameter.numel() for name, parameter in head.named_parameters() if name != "decoder.weight")
