"""Gradient: against a dense projection in fp64, and matrices whose share is known."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as options
from hypothesis import strategies as some

from fullrank.diagnose.questions.gradient import gradient
from fullrank.models.output_layer import OutputLayer
from fullrank.ops import IDENTITY, Softcap


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(hidden, targets, output):
    """|P g|² / |g|² of each token, with g from autograd and P from an orthonormal basis, all in fp64."""
    weight = output.weight.double()
    logits = hidden.double() @ weight.T
    if output.bias is not None:
        logits = logits + output.bias.double()
    logits.requires_grad_()
    torch.nn.functional.cross_entropy(output.pointwise(logits), targets, reduction="sum").backward()
    left, values, _ = torch.linalg.svd(weight, full_matrices=False)
    basis = left[:, values > 1e-6 * values[0]]
    return (logits.grad @ basis).square().sum(dim=1) / logits.grad.square().sum(dim=1)


def check(hidden, targets, output, tolerance=1e-4, **options):
    truth = dense(hidden, targets, output)
    found = gradient(hidden, targets, torch.arange(len(targets)), output, **options)
    assert found.kept_energy.value == pytest.approx(float(truth.mean()), rel=tolerance)
    assert found.kept_norm.value == pytest.approx(float(truth.sqrt().mean()), rel=tolerance)
    expected = torch.quantile(truth.sqrt(), torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95]).double())
    assert found.quantiles == pytest.approx(expected.tolist(), rel=10 * tolerance)
    assert found.tokens == len(targets)
    return found


@options(max_examples=25)
@given(
    V=some.integers(2, 80),
    D=some.integers(1, 12),
    bias=some.booleans(),
    cap=some.sampled_from([None, 2.0, 30.0]),
    seed=some.integers(0, 1000),
)
def test_the_share_is_that_of_a_dense_projection(V, D, bias, cap, seed):
    output = OutputLayer(
        weight=gaussian(V, D, seed=seed),
        bias=gaussian(V, seed=seed + 1) if bias else None,
        pointwise=IDENTITY if cap is None else Softcap(cap),
        tokens=V,
    )
    targets = torch.randint(V, (17,), generator=torch.Generator().manual_seed(seed))
    # Where a token is all but certain g is a rounding error itself: small states keep it apart from that.
    check(0.5 * gaussian(17, D, seed=seed + 2), targets, output, 1e-3)


def test_pieces_do_not_change_the_answer():
    output = OutputLayer(weight=gaussian(300, 16), tokens=300)
    hidden, targets = gaussian(50, 16, seed=1), torch.arange(50)
    whole = check(hidden, targets, output)
    pieces = gradient(hidden, targets, torch.arange(50), output, limit=8 * 300 * 7)
    assert pieces.kept_energy.value == pytest.approx(whole.kept_energy.value, rel=1e-5)
    assert pieces.tokens == 50
    assert gradient(hidden, targets, torch.arange(50), output, limit=1).tokens == 50


def test_a_random_matrix_keeps_what_the_null_says():
    V, D, N = 2000, 50, 400
    output = OutputLayer(weight=gaussian(V, D), tokens=V)
    targets = torch.randint(V, (N,), generator=torch.Generator().manual_seed(1))
    found = gradient(0.01 * gaussian(N, D, seed=2), targets, torch.arange(N), output)
    assert found.null_energy == D / V
    assert found.null_norm == pytest.approx((D / V) ** 0.5)
    assert found.kept_energy.low - 0.001 < D / V < found.kept_energy.high + 0.001
    assert found.kept_energy.value == pytest.approx(D / V, rel=0.05)


def test_a_matrix_as_wide_as_the_vocabulary_keeps_everything():
    turn = torch.linalg.qr(gaussian(24, 24)).Q
    for weight in (torch.eye(24), turn, turn * torch.logspace(0, -3, 24)):
        output = OutputLayer(weight=weight, tokens=24)
        found = gradient(gaussian(30, 24, seed=1), torch.arange(30) % 24, torch.arange(30), output)
        assert found.kept_energy.value == pytest.approx(1.0, abs=1e-4)
        assert found.kept_energy.value <= 1.0
        assert found.null_energy == 1.0


def test_one_dimension_less_is_enough_because_slopes_sum_to_zero():
    # Columns that span all vectors of sum zero.
    weight = torch.eye(12)[:, :11] - 1 / 12
    output = OutputLayer(weight=weight, tokens=12)
    found = gradient(gaussian(30, 11), torch.arange(30) % 12, torch.arange(30), output)
    assert found.kept_energy.value == pytest.approx(1.0, abs=1e-5)
    assert found.null_energy == pytest.approx(11 / 12)


def test_a_matrix_orthogonal_to_the_gradient_keeps_nothing():
    # Tokens come in equal pairs: no state tells them apart, and g of a pair is ±1/2 around its mean.
    weight = gaussian(1, 3).expand(2, 3).contiguous()
    output = OutputLayer(weight=weight, tokens=2)
    found = gradient(gaussian(20, 3, seed=1), torch.arange(20) % 2, torch.arange(20), output)
    assert found.kept_energy.value == pytest.approx(0.0, abs=1e-10)
    assert found.null_energy == 1 / 2


def test_a_matrix_without_full_rank_has_the_null_of_its_rank():
    weight = gaussian(400, 5) @ gaussian(5, 20, seed=1)
    output = OutputLayer(weight=weight, tokens=400)
    hidden, targets = 0.1 * gaussian(40, 20, seed=2), torch.arange(40)
    found = check(hidden, targets, output, 1e-3)
    assert found.null_energy == 5 / 400


@pytest.mark.parametrize("case", ["condition 1e2", "condition 1e4", "large mean row"])
def test_matrices_that_are_hard_to_project_on(case):
    if case == "large mean row":
        weight, states = gaussian(500, 30) + 30 * gaussian(30, seed=1), 0.1 * gaussian(60, 30, seed=2)
    else:
        left, states = torch.linalg.qr(gaussian(500, 30)).Q, gaussian(60, 30, seed=1)
        weight = 20 * left * torch.logspace(0, -float(case[-1]), 30)
    check(states, torch.arange(60), OutputLayer(weight=weight, tokens=500), 1e-3)


@options(max_examples=15)
@given(scale=some.floats(1e-3, 1e3), seed=some.integers(0, 100))
def test_only_the_column_space_counts(scale, seed):
    weight, hidden, targets = gaussian(90, 8, seed=seed), gaussian(20, 8, seed=seed + 1), torch.arange(20)
    one = gradient(hidden, targets, torch.arange(20), OutputLayer(weight=weight, tokens=90))
    order = torch.randperm(90, generator=torch.Generator().manual_seed(seed))
    turn = torch.linalg.qr(gaussian(8, 8, seed=seed + 2)).Q
    other = gradient(
        hidden @ turn / scale,
        torch.argsort(order)[targets],
        torch.arange(20),
        OutputLayer(weight=scale * weight[order] @ turn, tokens=90),
    )
    assert other.kept_energy.value == pytest.approx(one.kept_energy.value, rel=1e-3)
    assert other.null_energy == one.null_energy
