"""What a student learns from: another distribution over the same V tokens, or the top of one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.ops.arguments import check_device, check_float, check_mixture, shape_of
from fullrank.ops.pointwise import IDENTITY, Pointwise


class Mixture(NamedTuple):
    """N distributions: p = sum_k prior_k softmax(f(W row_k + b)). A teacher's is taken without gradients."""

    rows: Tensor
    """[N, K, D]"""
    log_prior: Tensor
    """[N, K]"""
    weight: Tensor
    """[V, D]"""
    bias: Tensor | None = None
    """[V]"""
    pointwise: Pointwise = IDENTITY

    @classmethod
    def softmax(
        cls, states: Tensor, weight: Tensor, bias: Tensor | None = None, pointwise: Pointwise = IDENTITY
    ) -> Mixture:
        """What a plain output layer W [V, D] makes of states [..., D]."""
        rows = states.flatten(0, -2)[:, None]
        return cls(rows, rows.new_zeros(rows.shape[:2], dtype=torch.float32), weight, bias, pointwise)

    def detached(self) -> Mixture:
        """Without what made it, and with a log prior that is one."""
        log_prior = torch.log_softmax(self.log_prior.detach(), 1)
        return self._replace(rows=self.rows.detach(), log_prior=log_prior)

    @property
    def masked(self) -> bool:
        """Whether tokens may have probability zero."""
        return self.bias is not None and bool(torch.isneginf(self.bias).any())


class TopTokens(NamedTuple):
    """A teacher of which m tokens are known, and of all others together what is left.

    At a temperature other than 1 the log-probabilities are to be the teacher's at that temperature: those of
    a lump cannot be tempered.
    """

    ids: Tensor
    """[N, m]; an ignored one (-100) stands for no token, so that tokens may have fewer than m."""
    log_probs: Tensor
    """[N, m], of the whole vocabulary: their probabilities sum to at most 1."""


Teacher = Mixture | TopTokens
"""What a student is compared with: distributions, or the most probable tokens of each."""


def check_teacher(teacher: Teacher, rows: Tensor, weight: Tensor) -> None:
    """Raise for a teacher that does not fit the student's rows [N, K, D] and weight [V, D]."""
    N, V = rows.shape[0], weight.shape[0]
    if isinstance(teacher, TopTokens):
        ids, log_probs = teacher
        if ids.ndim != 2 or ids.shape != log_probs.shape or ids.shape[0] != N:
            raise FullrankError(
                f"the teacher's top tokens have ids {shape_of(ids)} and log_probs {shape_of(log_probs)}, "
                f"expected [N, m] both, with N={N} as in rows {shape_of(rows)}: flatten all alike"
            )
        check_float("the teacher's log_probs", log_probs)
        check_device(rows, log_probs=log_probs)
        return
    check_mixture(teacher.rows, teacher.log_prior, teacher.weight, None, teacher.bias)
    if teacher.rows.shape[0] != N or teacher.weight.shape[0] != V:
        raise FullrankError(
            f"the teacher has {teacher.rows.shape[0]} tokens and a vocabulary of {teacher.weight.shape[0]}, "
            f"the student {N} and {V}: give both the same tokens, and rows of W for the same vocabulary "
            "(weight[:V] where one is padded)"
        )
    check_device(rows, teacher=teacher.rows)
