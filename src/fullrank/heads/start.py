"""The output layer of a trained model, as a head needs it that is to start as that layer.

    logits = f(W x + b),   x the state that the head will read, f the identity or a soft cap

Whoever gives a trained model another head fills this in; `Head.start_options` says what to build a head with,
and `Head.start_from` gives it W and b and lets all that it owns beyond them change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """The layer to start as."""

    weight: nn.Parameter
    """[V, D], the layer's own tensor, which the head shares."""
    bias: Tensor | None
    """[V]; a parameter is shared as well."""
    softcap: float | None
    """c where the scores z are bent to c tanh(z / c)."""
    size: float
    """Root mean square of the states' entries."""
    low: float
    high: float
    """Range of the scores W x + b on some text."""
    widths: tuple[int, ...]
    """Of the states that the body gives, the last layer first."""
