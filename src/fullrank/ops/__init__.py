"""The primitive: exact losses of high-rank heads in a bounded workspace."""

from fullrank.ops.decode.operator import mixture_argmax, mixture_log_probs, row_scores
from fullrank.ops.distil.operator import divergence, entropy, token_logprobs
from fullrank.ops.distil.teacher import Mixture, Teacher, TopTokens
from fullrank.ops.mixture.operator import TokenStats, mixture_nll
from fullrank.ops.pointwise import (
    IDENTITY,
    SIGSOFTMAX,
    CappedSigsoftmax,
    PiecewiseLinear,
    Pointwise,
    Softcap,
)
from fullrank.ops.rows.operator import linear_logprob, linear_nll
from fullrank.ops.trunk.operator import trunk_nll

__all__ = [
    "IDENTITY", "SIGSOFTMAX", "CappedSigsoftmax", "Mixture", "PiecewiseLinear", "Pointwise", "Softcap",
    "Teacher", "TokenStats", "TopTokens", "divergence", "entropy", "linear_logprob", "linear_nll",
    "mixture_argmax", "mixture_log_probs", "mixture_nll", "row_scores", "token_logprobs", "trunk_nll",
]  # fmt: skip
