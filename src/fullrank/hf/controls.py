"""What an upgraded head is held against: softmax heads that start as the original does.

softmax         the original head: W, and a map M of all rows together
softmax_equal   the same with a perceptron, so that it has as many parameters as the upgraded head, and a
                bias if that one has a bias
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from fullrank.diagnose.better_head import Perceptron
from fullrank.heads import Head
from fullrank.heads.contexts import Contexts
from fullrank.heads.softmax import Softmax

CONTROLS = ("softmax", "softmax_equal")


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
