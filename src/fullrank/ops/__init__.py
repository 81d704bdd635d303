"""The primitive: exact losses of high-rank heads in a bounded workspace."""

from fullrank.ops.decode.operator import mixture_argmax, mixture_log_probs, row_scores
from fullrank.ops.mixture.operator import TokenStats, linear_logprob, mixture_nll, trunk_nll
from fullrank.ops.pointwise import (
    IDENTITY,
    SIGSOFTMAX,
    CappedSigsoftmax,
    PiecewiseLinear,
    Pointwise,
    Softcap,
)
from fullrank.ops.shares import posterior_shares

__all__ = [
    "IDENTITY",
    "SIGSOFTMAX",
    "CappedSigsoftmax",
    "PiecewiseLinear",
    "Pointwise",
    "Softcap",
    "TokenStats",
    "linear_logprob",
    "mixture_argmax",
    "mixture_log_probs",
    "mixture_nll",
    "posterior_shares",
    "row_scores",
    "trunk_nll",
]
