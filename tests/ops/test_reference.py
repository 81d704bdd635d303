"""The definition itself, against torch's own losses and the equations written out."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fullrank.ops.mixture import reference

KINDS = ("identity", "sigsoftmax", "softcap", "capped_sigsoftmax", "plif")


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
    target, lse, nll = reference.linear_logprob(
        problem.rows[:, 0], problem.weight, problem.targets, bias=problem.bias, pointwise=problem.pointwise
    )
    torch.testing.assert_close(target, bent[torch.arange(7), problem.targets])
    torch.testing.assert_close(lse, bent.exp().sum(1).log())
    torch.testing.assert_close(nll, lse - target)


@pytest.mark.parametrize("components", [1, 3])
def test_masked_entries_and_impossible_components_leave_finite_gradients(components: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(4, components, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    prior = torch.zeros(4, components, dtype=torch.float64).log_softmax(1)
    if components > 1:
        prior[0, 0] = -torch.inf
    bias = torch.tensor([0.0, -torch.inf, 0.0, 1.0, -torch.inf, 0.0, 0.0], dtype=torch.float64)
    log_probs = reference.mixture_log_probs(rows, prior.requires_grad_(), weight, bias=bias)
    assert bool(torch.isneginf(log_probs[:, [1, 4]]).all())
    log_probs[:, [0, 2, 3]].sum().backward()
    for tensor in (rows, prior, weight):
        assert bool(tensor.grad.isfinite().all())
    assert float(weight.grad[[1, 4]].abs().max()) == 0.0
