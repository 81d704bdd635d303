"""The fast path against plain torch: gradients, digits, masks and invariances, however the work is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.nn import functional

from fullrank.ops import linear_logprob, mixture_nll
from fullrank.ops.pointwise import from_parts

KINDS = ("identity", "sigsoftmax", "softcap", "capped_sigsoftmax", "plif")
CUTS = ("whole", "chunks", "blocks")
FLOOR = {torch.float64: 1e-14, torch.float32: 1e-7, torch.bfloat16: 2e-3}

every_kind = pytest.mark.parametrize("kind", KINDS)
every_cut = pytest.mark.parametrize("cutting", CUTS)


def inputs(problem):
    names = ("rows", "log_prior", "weight", "bias", "slopes")
    return {n: v.detach().requires_grad_() for n in names if (v := getattr(problem, n)) is not None}


@every_kind
@every_cut
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck_of_the_mixture(make_problem, cut, kind, cutting, reduction):
    """fp64 finite differences of every input at once; `none` is checked output by output."""
    weighted = reduction != "sum"
    problem = make_problem(5, 2, 3, 6, kind=kind, bias=True, token_weight=weighted)
    workspace = cut(cutting, problem)
    leaves = inputs(problem)

    def loss(*tensors):
        changed = replace(problem, **dict(zip(leaves, tensors, strict=True)))
        return changed.nll(reduction=reduction, workspace=workspace)

    assert gradcheck(loss, tuple(leaves.values()), fast_mode=True, check_undefined_grad=False)


@every_kind
@every_cut
def test_gradcheck_of_single_rows(make_problem, cut, kind, cutting):
    """Target score and normaliser have upstream gradients of their own."""
    problem = make_problem(5, 1, 3, 6, kind=kind, bias=True)
    workspace = cut(cutting, problem)
    leaves = {name: value for name, value in inputs(problem).items() if name != "log_prior"}

    def rows(*tensors):
        return replace(problem, **dict(zip(leaves, tensors, strict=True))).logprob(workspace=workspace)

    assert gradcheck(rows, tuple(leaves.values()), check_undefined_grad=True)


@every_kind
@every_cut
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_as_good_as_plain_torch(make_problem, tools, cut, kind, cutting, dtype):
    problem = make_problem(40, 3, 24, 300, kind=kind, dtype=dtype, bias=True, token_weight=True)
    workspace = cut(cutting, problem)
    for reduction in ("mean", "none"):
        truth = tools.differentiate(problem.to(torch.float64), lambda p, r=reduction: p.plain_nll(r))
        plain = tools.differentiate(problem, lambda p, r=reduction: p.plain_nll(r))
        fast = tools.differentiate(problem, lambda p, r=reduction: p.nll(reduction=r, workspace=workspace))
        assert fast[0].dtype == torch.float32
        tools.as_good(fast[0], plain[0], truth[0], floor=1e-7)
        for name, gradient in fast[1].items():
            assert gradient.dtype == dtype
            tools.as_good(gradient, plain[1][name], truth[1][name], floor=FLOOR[dtype])


@every_cut
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_single_rows_as_good_as_plain_torch(make_problem, tools, cut, cutting, dtype):
    problem = make_problem(60, 2, 24, 300, kind="softcap", dtype=dtype, bias=True)
    workspace = cut(cutting, problem)

    def mix(target, lse):
        return target.sin() + lse.square()

    def plain(p):
        bent = p.bent().flatten(0, 1)
        y = p.targets.repeat_interleave(2)[:, None]
        return mix(bent.gather(1, y)[:, 0], bent.logsumexp(1))

    truth = tools.differentiate(problem.to(torch.float64), plain)
    same = tools.differentiate(problem, plain)
    fast = tools.differentiate(problem, lambda p: mix(*p.logprob(workspace=workspace)))
    for name in ("rows", "weight", "bias"):
        tools.as_good(fast[1][name], same[1][name], truth[1][name], floor=FLOOR[dtype])
    tools.as_good(fast[0], same[0], truth[0], floor=1e-7)


@every_cut
def test_frozen_weight_gives_the_same_rows_gradient(make_problem, tools, cut, cutting):
    """With all but the rows frozen the gradient is kept from the forward pass; it must be the same."""
    problem = make_problem(9, 2, 5, 40, kind="sigsoftmax", bias=True)
    workspace = cut(cutting, problem)
    calls = {
        "none": lambda p: p.nll(reduction="none", workspace=workspace),
        "mean": lambda p: p.nll(workspace=workspace),
        "rows": lambda p: torch.stack(p.logprob(workspace=workspace)),
    }
    for call in calls.values():
        loss, gradients = tools.differentiate(problem, call)
        frozen_loss, frozen = tools.differentiate(problem, call, ("rows",))
        torch.testing.assert_close(frozen_loss, loss, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(frozen["rows"], gradients["rows"], rtol=1e-12, atol=1e-14)
        assert frozen["weight"] is None


def test_weight_gradient_does_not_lose_digits_with_the_number_of_chunks(make_problem, tools, monkeypatch):
    """A bf16 sum over 256 chunks would stop growing long before the end; the sum is kept in fp32."""
    problem = make_problem(512, 1, 8, 16, dtype=torch.bfloat16)
    problem = replace(problem, rows=problem.rows.abs(), targets=torch.zeros_like(problem.targets))
    _, truth = tools.differentiate(problem.to(torch.float64), lambda p: p.plain_nll("sum"))
    errors = []
    for rows in (512, 2):
        monkeypatch.setattr("fullrank.ops.workspace.MOST_ROWS", {"cpu": rows})
        _, got = tools.differentiate(problem, lambda p: p.nll(reduction="sum"))
        errors.append(tools.relative_error(got["weight"], truth["weight"]))
    assert errors[1] <= 1.1 * errors[0] + 1e-3
    assert errors[1] < 4e-3


def confident(problem):
    """Token losses from the odds of everything but the target: fp64 itself keeps its digits at a gap of 60.

    1 - sum_k prior_k / (1 + odds_k) = sum_k prior_k odds_k / (1 + odds_k) where the priors sum to 1.
    """
    bent = problem.bent()
    y = problem.targets[:, None, None].expand(*bent.shape[:2], 1)
    odds = (bent - bent.gather(2, y)).scatter(2, y, -torch.inf).exp().sum(2)
    return -torch.log1p(-(problem.log_prior.exp() * odds / (1 + odds)).sum(1))


@every_cut
@pytest.mark.parametrize("gap", [10.0, 20.0, 40.0, 60.0])
@pytest.mark.parametrize("K", [1, 2])
def test_confident_rows_keep_their_digits(tools, cut, make_problem, gap, cutting, K):
    """The target is `gap` above the rest: the loss is about V e^-gap, far below the rounding of lse."""
    problem = make_problem(6, K, 4, 50, dtype=torch.float32, scale=0.1)
    bias = torch.zeros(50)
    bias[3] = gap
    log_prior = torch.full((6, K), 1.0 / K).log()
    problem = replace(problem, bias=bias, targets=torch.full((6,), 3), log_prior=log_prior)
    workspace = cut(cutting, problem)
    calls = (
        (lambda p: p.nll(workspace=workspace)),
        (lambda p: p.nll(reduction="none", workspace=workspace)),
    )
    exact = (lambda p: confident(p).mean()), confident
    for call, truth_of in zip(calls, exact, strict=True):
        truth = tools.differentiate(problem.to(torch.float64), truth_of)
        got = tools.differentiate(problem, call)
        for name in ("rows", "weight", "bias"):
            assert tools.relative_error(got[1][name], truth[1][name]) < 1e-5
        # The bias gradient of the target itself is -(1 - p): no difference of nearly equal numbers.
        assert got[1]["bias"][3].item() == pytest.approx(truth[1]["bias"][3].item(), rel=1e-5)
        # With several components the rounding of the priors, whose sum is not quite 1, is in the loss.
        assert tools.relative_error(got[0], truth[0]) < 1e-5 or (
            K > 1 and (got[0] - truth[0]).abs().max() < 2e-7
        )


@every_kind
@every_cut
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_masked_entries_are_out_of_the_vocabulary(make_problem, tools, cut, kind, cutting, dtype):
    """bias = -inf equals leaving those rows of W out. A mask before a soft cap would leak e^-cap."""
    problem = make_problem(8, 2, 5, 40, kind=kind, bias=True, dtype=dtype)
    dropped = torch.arange(40) % 5 == 0
    dropped[8:16] = True
    kept = ~dropped
    position = torch.cumsum(kept, 0) - 1
    small_targets = problem.targets % int(kept.sum())
    targets = kept.nonzero()[:, 0][small_targets]
    assert torch.equal(position[targets], small_targets)
    small = replace(problem, weight=problem.weight[kept], bias=problem.bias[kept], targets=small_targets)
    masked = replace(problem, bias=problem.bias.masked_fill(dropped, -torch.inf), targets=targets)
    workspace = cut(cutting, masked)
    want_loss, want = tools.differentiate(small, lambda p: p.nll(reduction="none"))
    loss, got = tools.differentiate(masked, lambda p: p.nll(reduction="none", workspace=workspace))
    tight = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-3}
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got["rows"], want["rows"], **tight)
    torch.testing.assert_close(got["weight"][kept], want["weight"], **tight)
    assert (got["weight"][dropped] == 0).all()
    assert (got["bias"][dropped] == 0).all()
    if kind == "plif":
        torch.testing.assert_close(got["slopes"], want["slopes"], **tight)


@every_kind
def test_a_masked_target_costs_infinity_and_sends_no_gradient(make_problem, tools, kind):
    problem = make_problem(4, 2, 3, 9, kind=kind, bias=True)
    problem.bias[2] = -torch.inf
    problem.targets[:] = torch.tensor([2, 0, 1, 2])
    loss, gradients = tools.differentiate(problem, lambda p: p.nll(reduction="none"))
    assert loss.isposinf().tolist() == [True, False, False, True]
    _, mean = tools.differentiate(problem, lambda p: p.nll(reduction="sum"))
    for found in (gradients, mean):
        assert all(value is None or value.isfinite().all() for value in found.values())
        assert (found["rows"][[0, 3]] == 0).all()
        assert (found["rows"][[1, 2]] != 0).any()


@every_kind
@every_cut
def test_normaliser_of_a_masked_target(make_problem, tools, cut, kind, cutting):
    """The target score is constant, -inf; the normaliser's gradient must not fall on it."""
    problem = make_problem(4, 1, 3, 9, kind=kind, bias=True)
    problem.bias[2] = -torch.inf
    problem.targets[:2] = 2
    workspace = cut(cutting, problem)
    _, want = tools.differentiate(problem, lambda p: p.bent().logsumexp(-1)[:, 0])
    _, got = tools.differentiate(problem, lambda p: p.logprob(workspace=workspace)[1])
    for name in ("rows", "weight", "bias", "slopes"):
        if name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@every_cut
def test_components_switched_off(make_problem, tools, cut, cutting, reduction):
    problem = make_problem(6, 3, 4, 20)
    problem.log_prior[0, 1] = -torch.inf
    problem.log_prior[1, [0, 2]] = -torch.inf
    workspace = cut(cutting, problem)
    want_loss, want = tools.differentiate(problem, lambda p: p.plain_nll(reduction))
    loss, got = tools.differentiate(problem, lambda p: p.nll(reduction=reduction, workspace=workspace))
    torch.testing.assert_close(loss, want_loss, rtol=1e-12, atol=1e-12)
    for name in ("rows", "log_prior", "weight"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-11, atol=1e-13)
    assert (got["rows"][0, 1] == 0).all()


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_all_components_switched_off(make_problem, tools, reduction):
    """The loss of such a token is infinite; it has no posterior and sends no gradient, and no NaN."""
    problem = make_problem(4, 2, 3, 9)
    problem.log_prior[1] = -torch.inf
    loss, gradients = tools.differentiate(problem, lambda p: p.nll(reduction=reduction))
    assert loss.isposinf().any()
    assert not loss.isnan().any()
    for name in ("rows", "log_prior"):
        assert (gradients[name][1] == 0).all()
        assert gradients[name].isfinite().all()
    alive = torch.tensor([0, 2, 3])
    rest = replace(
        problem, rows=problem.rows[alive], log_prior=problem.log_prior[alive], targets=problem.targets[alive]
    )
    upstream = torch.linspace(-1.0, 2.0, 4, dtype=torch.float64)[alive] if reduction == "none" else 1.0
    leaves = rest.leaves()
    (leaves.plain_nll("none") * upstream).sum().backward()
    torch.testing.assert_close(gradients["weight"], leaves.weight.grad, rtol=1e-11, atol=1e-12)


@given(
    workspace=st.integers(20_000, 200_000),
    most_rows=st.integers(1, 64),
    reduction=st.sampled_from(["mean", "none"]),
)
@settings(max_examples=40, deadline=None)
def test_any_cut_gives_the_same_answer(make_problem, tools, workspace, most_rows, reduction):
    problem = make_problem(13, 3, 4, 30, bias=True, kind="sigsoftmax")
    want = tools.differentiate(problem, lambda p: p.nll(reduction=reduction))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fullrank.ops.workspace.MOST_ROWS", {"cpu": most_rows})
        got = tools.differentiate(problem, lambda p: p.nll(reduction=reduction, workspace=workspace))
    torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=1e-13)
    for name in ("rows", "log_prior", "weight", "bias"):
        torch.testing.assert_close(got[1][name], want[1][name], rtol=1e-10, atol=1e-13)


shapes = given(
    N=st.integers(1, 6),
    K=st.integers(1, 4),
    D=st.integers(1, 5),
    V=st.integers(1, 12),
    seed=st.integers(0, 999),
)


@shapes
@settings(max_examples=30, deadline=None)
def test_one_component_is_cross_entropy(make_problem, tools, N, K, D, V, seed):
    problem = make_problem(N, 1, D, V, seed=seed)
    problem = replace(problem, log_prior=torch.zeros_like(problem.log_prior))

    def torch_loss(p):
        return functional.cross_entropy(p.rows[:, 0] @ p.weight.t(), p.targets)

    want = tools.differentiate(problem, torch_loss)
    got = tools.differentiate(problem, lambda p: p.nll())
    torch.testing.assert_close(got[0], want[0], rtol=1e-11, atol=1e-13)
    for name in ("rows", "weight"):
        torch.testing.assert_close(got[1][name], want[1][name], rtol=1e-10, atol=1e-13)


@shapes
@settings(max_examples=30, deadline=None)
def test_equal_components_are_softmax(make_problem, N, K, D, V, seed):
    """Whatever the prior, K copies of one context are that context."""
    problem = make_problem(N, K, D, V, seed=seed)
    rows = problem.rows[:, :1].expand(N, K, D)
    got = mixture_nll(rows, problem.log_prior, problem.weight, problem.targets, reduction="none")
    want = functional.cross_entropy(rows[:, 0] @ problem.weight.t(), problem.targets, reduction="none")
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


@shapes
@settings(max_examples=30, deadline=None)
def test_orders_do_not_matter(make_problem, N, K, D, V, seed):
    """Components in any order give the loss; tokens in any order give their losses in that order."""
    problem = make_problem(N, K, D, V, seed=seed, kind="softcap")
    draw = torch.Generator().manual_seed(seed)
    components, tokens = torch.randperm(K, generator=draw), torch.randperm(N, generator=draw)
    want = problem.nll(reduction="none")
    turned = replace(problem, rows=problem.rows[:, components], log_prior=problem.log_prior[:, components])
    torch.testing.assert_close(turned.nll(reduction="none"), want, rtol=1e-11, atol=1e-13)
    moved = replace(
        problem,
        rows=problem.rows[tokens],
        log_prior=problem.log_prior[tokens],
        targets=problem.targets[tokens],
    )
    torch.testing.assert_close(moved.nll(reduction="none"), want[tokens], rtol=1e-11, atol=1e-13)


@shapes
@settings(max_examples=30, deadline=None)
def test_a_constant_on_every_score_changes_nothing(make_problem, N, K, D, V, seed):
    problem = make_problem(N, K, D, V, seed=seed, bias=True)
    lifted = replace(problem, bias=problem.bias + 37.0)
    torch.testing.assert_close(lifted.nll(), problem.nll(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.skipif(not hasattr(functional, "linear_cross_entropy"), reason="torch < 2.13")
def test_agrees_with_torch_linear_cross_entropy(make_problem, tools, reduction):
    """torch's own chunked loss, a mixture by -logsumexp_k (log prior_k - nll_k)."""
    problem = make_problem(20, 3, 8, 50, dtype=torch.float32)

    def torch_loss(p):
        y = p.targets.repeat_interleave(3)
        nll = functional.linear_cross_entropy(p.rows.flatten(0, 1), p.weight, y, reduction="none")
        loss = -torch.logsumexp(p.log_prior - nll.view(20, 3), 1)
        return loss.mean() if reduction == "mean" else loss

    truth = tools.differentiate(problem.to(torch.float64), lambda p: p.plain_nll(reduction))
    peer = tools.differentiate(problem, torch_loss)
    fast = tools.differentiate(problem, lambda p: p.nll(reduction=reduction))
    tools.as_good(fast[0], peer[0], truth[0], floor=1e-7)
    for name in ("rows", "log_prior", "weight"):
        tools.as_good(fast[1][name], peer[1][name], truth[1][name], floor=1e-7)


@pytest.mark.parametrize("size", [1e4, -1e4], ids=["+1e4", "-1e4"])
@every_cut
@every_kind
def test_huge_scores(make_problem, tools, cut, size, cutting, kind):
    problem = make_problem(5, 2, 3, 12, dtype=torch.float32, kind=kind, bias=True)
    problem = replace(problem, bias=problem.bias + size)
    workspace = cut(cutting, problem)
    plain = tools.differentiate(problem, lambda p: p.plain_nll())
    truth = tools.differentiate(problem.to(torch.float64), lambda p: p.plain_nll())
    fast = tools.differentiate(problem, lambda p: p.nll(workspace=workspace))
    assert fast[0].isfinite()
    # Scores of that size are rounded to 1e-3, and so are their differences.
    tools.as_good(fast[0], plain[0], truth[0], floor=5e-4)
    for name, gradient in fast[1].items():
        assert gradient.isfinite().all()
        if truth[1][name].norm() > 1e-30:
            tools.as_good(gradient, plain[1][name], truth[1][name], floor=5e-4)


@every_cut
def test_nan_and_infinity_reach_the_loss_of_their_token_alone(make_problem, cut, cutting):
    problem = make_problem(5, 2, 3, 12, dtype=torch.float32)
    workspace = cut(cutting, problem)
    want = problem.nll(reduction="none", workspace=workspace)
    problem.rows[1, 0, 0] = torch.nan
    problem.rows[3, 1, 2] = torch.inf
    got = problem.nll(reduction="none", workspace=workspace)
    assert got[1].isnan()
    assert got[3].isnan()
    torch.testing.assert_close(got[[0, 2, 4]], want[[0, 2, 4]])
    assert problem.nll(workspace=workspace).isnan()
    leaves = problem.leaves()
    leaves.nll(workspace=workspace).backward()
    assert leaves.rows.grad[1, 0].isnan().all()
    assert leaves.rows.grad[[0, 2, 4]].isfinite().all()
    assert leaves.weight.grad.isnan().any()


def test_minus_infinity_in_a_score_is_probability_zero():
    """A score of -inf that no mask made: W holds it. Nothing changes but its own loss."""
    weight = torch.tensor([[1.0], [-torch.inf], [0.5]])
    rows, prior = torch.ones(2, 1, 1), torch.zeros(2, 1)
    loss = mixture_nll(rows, prior, weight, torch.tensor([0, 1]), reduction="none")
    assert loss[0].item() == pytest.approx(
        functional.cross_entropy(torch.tensor([[1.0, 0.5]]), torch.tensor([0]))
    )
    assert loss[1].isposinf()


@every_kind
def test_target_score_is_the_one_inside_the_normaliser(kind, make_problem):
    """In bf16 a target score from another product would differ from the one summed in lse."""
    problem = make_problem(64, 1, 16, 1, dtype=torch.bfloat16, kind=kind, scale=8.0)
    target, lse = linear_logprob(
        problem.rows[:, 0], problem.weight, problem.targets,
        pointwise=from_parts(kind, problem.pointwise.constant, problem.slopes),
    )  # fmt: skip
    assert torch.equal(target, lse)
