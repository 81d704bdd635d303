"""The definition itself, against torch's own losses and the equations written out."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fullrank.ops import reference

KINDS = ("identity", "sigsoftmax", "softcap", "plif")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_mixture_is_the_prior_weighted_sum_of_component_probabilities(make_problem, kind, bias):
    problem = make_problem(kind=kind, bias=bias)
    components = problem.bent().exp()
    components = components / components.sum(-1, keepdim=True)
    truth = (problem.log_prior.exp()[..., None] * components).sum(1).log()
    got = reference.mixture_log_probs(
        problem.rows, problem.log_prior, problem.weight, bias=problem.bias, pointwise=problem.pointwise
    )
    torch.testing.assert_close(got, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_one_component_is_cross_entropy(make_problem, reduction):
    problem = make_problem(K=1)
    targets = problem.targets.clone()
    targets[2] = -100
    got = reference.mixture_nll(
        problem.rows, torch.zeros(7, 1, dtype=torch.float64), problem.weight, targets, reduction=reduction
    )
    truth = functional.cross_entropy(problem.rows[:, 0] @ problem.weight.t(), targets, reduction=reduction)
    torch.testing.assert_close(got, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_entries_have_probability_zero_whatever_f(make_problem, kind):
    problem = make_problem(kind=kind, bias=True)
    problem.bias[[1, 4]] = -torch.inf
    log_probs = reference.mixture_log_probs(
        problem.rows, problem.log_prior, problem.weight, bias=problem.bias, pointwise=problem.pointwise
    )
    assert (log_probs[:, [1, 4]] == -torch.inf).all()
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(7, dtype=torch.float64))


def test_rows_give_target_score_and_normaliser(make_problem):
    problem = make_problem(K=1, kind="softcap", bias=True)
    bent = problem.bent()[:, 0]
    target, lse = reference.linear_logprob(
        problem.rows[:, 0], problem.weight, problem.targets, bias=problem.bias, pointwise=problem.pointwise
    )
    torch.testing.assert_close(target, bent[torch.arange(7), problem.targets])
    torch.testing.assert_close(lse, bent.exp().sum(1).log())
