"""Ways to turn attention scores into weights, softmax among them.

With z the scores of one query over temperature, V the positions that it may see and n = |V|,

    softmax      w_i = exp(z_i) / sum_V exp(z_j)
    sparsemax    w_i = max(z_i - t, 0), the point of the simplex nearest to z    (Martins & Astudillo 2016)
    entmax15     w_i = max(z_i / 2 - t, 0)^2                         (Peters et al. 2019, 1905.05702)
    sink         w_i = exp(z_i) / (exp(b) + sum_V exp(z_j)): what the sink b takes goes nowhere
    log_length   softmax of s log(n) z                               (SSMax, Nakanishi 2025, 2501.19399)
    sigmoid      w_i = 1 / (1 + n exp(-z_i)), each on its own        (Ramapuram et al. 2024, 2409.04431)

where t is the one number that makes the sum 1. In log_length the logarithm multiplies the scores: subtracted
from them it would change nothing, since softmax does not see a constant. The bias -log n of sigmoid makes
equal scores of zero sum to n / (n + 1). A parameter, b or s, is one number or a tensor that broadcasts
against scores, such as [heads, 1, 1], and may be learnt; b is compared with z, after the temperature.

How far weights move when scores do is the spectral norm of the Jacobian J of w in the scores, temperature T
and all (`sensitivity`). With s = w^(2 - a), a = 1, 3/2 and 2 for softmax, entmax15 and sparsemax, c = sum s
and p = s / c,

    J = (diag(s) - s s^T / c) / T = c / T (diag(p) - p p^T)        (1905.05702, proposition 2)

whose norm `theory.attention` has. A sink leaves diag(w) - w w^T with less than 1 in all, log_length has
|s| log n times the J of softmax, and sigmoid diag(w (1 - w)).

Shapes: scores [..., L], mask [..., L] or what broadcasts to it, weights [..., L]. What is masked, or has a
score of -inf, weighs exactly 0 and has no gradient; a row that sees nothing is all zeros. Half precision is
computed in fp32. sparsemax and entmax15 come from the `entmax` package, which is imported when they are used.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.theory.attention import jacobian_norm

Function = Callable[[Tensor, Tensor, "Tensor | float"], Tensor]
"""(scores [..., L], -inf where hidden unless the whole row is, number seen [..., 1], parameter): weights."""
Sensitivity = Callable[[Tensor, Tensor, "Tensor | float"], Tensor]
"""(weights [..., L] in fp64, number seen [..., 1], parameter): norm [...] of the Jacobian at T = 1."""

LOG_LENGTH_SCALE = 1 / math.log(512)
"""s of log_length unless given: a row that sees 512 tokens has the weights of softmax."""
FLOOR = -4.0
"""1 below the greatest score in sparsemax, 2 in entmax15, a position weighs 0: it may as well lie here."""


@dataclass(frozen=True, kw_only=True)
class Normaliser:
    """One way to turn scores into weights."""

    name: str
    label: str
    """For a table or a chart."""
    function: Function
    sensitivity: Sensitivity
    sums_to_one: bool = True
    """Whether the weights of every row that sees something sum to 1."""
    sparse: bool = False
    """Whether a visible position can weigh exactly 0."""
    parameter: str | None = None
    """What its parameter is, where it has one."""
    start: float = 0.0
    """Of the parameter, unless given."""


def normalise(
    scores: Tensor,
    *,
    mask: Tensor | None = None,
    name: str,
    temperature: float = 1.0,
    parameter: Tensor | float | None = None,
) -> Tensor:
    """The weights [..., L] of scores [..., L]; in `mask`, True may be seen. In the scores' dtype."""
    normaliser = normaliser_called(name)
    if not scores.is_floating_point() or scores.dim() < 1:
        raise FullrankError(
            f"scores of dtype {scores.dtype} and shape {list(scores.shape)} cannot be normalised: expected "
            "floating-point numbers, one row a query"
        )
    check_temperature(temperature)
    if parameter is not None and normaliser.parameter is None:
        raise FullrankError(f"{name} has no parameter and got {parameter}: leave it out")
    if scores.numel() == 0:
        return torch.zeros_like(scores)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    visible = _visible(scores, mask)
    any_visible = visible.any(-1, keepdim=True)
    # A filling of zero is finite in the forward pass and gets no gradient: a row that sees nothing is no NaN.
    filling = torch.where(any_visible, -torch.inf, 0.0).to(wide.dtype)
    filled = torch.where(visible, wide / temperature, filling)
    seen = visible.sum(-1, keepdim=True).clamp(min=1).to(wide.dtype)
    value = normaliser.start if parameter is None else parameter
    weights = normaliser.function(filled, seen, value)
    return torch.where(visible, weights, 0.0).to(scores.dtype)


def sensitivity(
    weights: Tensor,
    visible: Tensor,
    *,
    name: str,
    temperature: Tensor | float = 1.0,
    parameter: Tensor | float | None = None,
) -> Tensor:
    """The spectral norm [...] of the Jacobian of weights [..., L] in their scores, in fp64.

    `temperature` and `parameter` are those that the weights were made with; a tensor of temperatures has the
    shape [...].
    """
    normaliser = normaliser_called(name)
    seen = visible.sum(-1, keepdim=True).clamp(min=1).double()
    value = normaliser.start if parameter is None else parameter
    return normaliser.sensitivity(weights.double(), seen, value) / temperature


def normaliser_called(name: str) -> Normaliser:
    """The entry of `NORMALISERS`; raises FullrankError for an unknown name."""
    if name not in NORMALISERS:
        close = difflib.get_close_matches(name, NORMALISERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise FullrankError(
            f"no normaliser is called {name!r}: expected one of {', '.join(NORMALISERS)}{hint}"
        )
    return NORMALISERS[name]


def check_temperature(temperature: float, name: str = "temperature") -> None:
    """Raise FullrankError where scores cannot be divided by it."""
    # What comes from a file may be no number at all.
    if not isinstance(temperature, int | float) or not (temperature > 0 and math.isfinite(temperature)):
        raise FullrankError(
            f"{name}={temperature} is impossible: expected a finite number above 0, such as 1, which leaves "
            "the scores as they are"
        )


def check_available(name: str) -> None:
    """Raise FullrankError where `name` is unknown or its package is missing, before any work."""
    if normaliser_called(name).sparse:
        _entmax()


def _visible(scores: Tensor, mask: Tensor | None) -> Tensor:
    finite = scores.detach() != -torch.inf
    if mask is None:
        return finite
    if mask.dtype != torch.bool:
        raise FullrankError(
            f"the mask has dtype {mask.dtype}, expected bool with True where a position may be seen: compare "
            "an additive mask with 0"
        )
    try:
        return finite & mask.expand(scores.shape)
    except RuntimeError as error:
        raise FullrankError(
            f"a mask of shape {list(mask.shape)} does not fit scores of shape {list(scores.shape)}: expected "
            "one that broadcasts to it"
        ) from error


def _softmax(scores: Tensor, seen: Tensor, parameter: Tensor | float) -> Tensor:
    return torch.softmax(scores, -1)


def _sink(scores: Tensor, seen: Tensor, parameter: Tensor | float) -> Tensor:
    # What the sink leaves is a sigmoid of how far all scores together lie above it, at any size of scores.
    left = torch.sigmoid(torch.logsumexp(scores, -1, keepdim=True) - parameter)
    return torch.softmax(scores, -1) * left


def _log_length(scores: Tensor, seen: Tensor, parameter: Tensor | float) -> Tensor:
    factor = parameter * seen.log()
    # Where one is seen the factor is 0, and 0 times a filling of -inf would be no number.
    hidden = scores == -torch.inf
    scaled = factor * scores.masked_fill(hidden, 0.0)
    return torch.softmax(scaled.masked_fill(hidden, -torch.inf), -1)


def _sigmoid(scores: Tensor, seen: Tensor, parameter: Tensor | float) -> Tensor:
    return torch.sigmoid(scores - seen.log())


def _sparsemax(scores: Tensor, seen: Tensor, parameter: Tensor | float) -> Tensor:
    return _entmax().sparsemax(_below_greatest(scores), dim=-1)


def _entmax15(scores: Tensor, seen: Tensor, parameter: Tensor | float) -> Tensor:
    return _entmax().entmax15(_below_greatest(scores), dim=-1)


def _softmax_norm(weights: Tensor, seen: Tensor, parameter: Tensor | float) -> Tensor:
    return _power_norm(weights)


def _entmax15_norm(weights: Tensor, seen: Tensor, parameter: Tensor | float) -> Tensor:
    powers = weights.sqrt()
    return powers.sum(-1) * _power_norm(powers)


def _sparsemax_norm(weights: Tensor, seen: Tensor, parameter: Tensor | float) -> Tensor:
    # Of equal shares of a support of two or more it is 1, of one alone 0.
    return ((weights > 0).sum(-1) > 1).double()


def _sink_norm(weights: Tensor, seen: Tensor, parameter: Tensor | float) -> Tensor:
    # Rounded weights may sum to a little more than 1.
    return jacobian_norm(weights / weights.sum(-1, keepdim=True).clamp(min=1.0))


def _log_length_norm(weights: Tensor, seen: Tensor, parameter: Tensor | float) -> Tensor:
    factor = parameter * seen.log()
    return factor.abs().squeeze(-1) * _power_norm(weights)


def _sigmoid_norm(weights: Tensor, seen: Tensor, parameter: Tensor | float) -> Tensor:
    return (weights * (1 - weights)).amax(-1)


def _power_norm(powers: Tensor) -> Tensor:
    """Of diag(p) - p p^T with p the powers as shares of their sum; 0 for a row of zeros."""
    return jacobian_norm(powers / powers.sum(-1, keepdim=True).clamp(min=torch.finfo(powers.dtype).tiny))


def _below_greatest(scores: Tensor) -> Tensor:
    """Scores from their greatest down to the floor: the same weights, and sums over the row stay exact."""
    return (scores - scores.detach().amax(-1, keepdim=True)).clamp(min=FLOOR)


def _entmax() -> ModuleType:
    try:
        return importlib.import_module("entmax")
    except ImportError as error:
        raise FullrankError(
            "sparsemax and entmax15 need the entmax package: pip install 'fullrank[attention]'"
        ) from error


NORMALISERS: dict[str, Normaliser] = {
    entry.name: entry
    for entry in (
        Normaliser(name="softmax", label="softmax", function=_softmax, sensitivity=_softmax_norm),
        Normaliser(
            name="sparsemax", label="sparsemax", function=_sparsemax, sensitivity=_sparsemax_norm, sparse=True
        ),
        Normaliser(
            name="entmax15", label="1.5-entmax", function=_entmax15, sensitivity=_entmax15_norm, sparse=True
        ),
        Normaliser(
            name="sink", label="softmax with a sink", function=_sink, sensitivity=_sink_norm,
            sums_to_one=False, parameter="the logit of the sink",
        ),
        Normaliser(
            name="log_length", label="softmax scaled by log length", function=_log_length,
            sensitivity=_log_length_norm, parameter="the factor on log n", start=LOG_LENGTH_SCALE,
        ),
        Normaliser(
            name="sigmoid", label="sigmoid", function=_sigmoid, sensitivity=_sigmoid_norm, sums_to_one=False
        ),
    )
}  # fmt: skip
"""Every normaliser by name, softmax first."""
