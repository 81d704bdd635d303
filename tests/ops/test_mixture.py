"""The fast path against plain torch: gradients, digits, masks and invariances, however the work is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.nn import functional

from fullrank.errors import FullrankError
from fullrank.ops import linear_logprob, linear_nll, mixture_log_probs, mixture_nll
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
    problem = make_problem(3, 1, 2, 5, kind=kind, bias=True)
    workspace = cut(cutting, problem)
    leaves = {name: value for name, value in inputs(problem).items() if name != "log_prior"}

    def rows(*tensors):
        return replace(problem, **dict(zip(leaves, tensors, strict=True))).logprob(workspace=workspace)

    assert gradcheck(rows, tuple(leaves.values()), check_undefined_grad=True)


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


KINDS = ("identity", "sigsoftmax", "softcap", "capped_sigsoftmax", "plif")
CUTS = ("whole", "chunks", "blocks")
every_kind = pytest.mark.parametrize("kind", KINDS)
every_cut = pytest.mark.parametrize("cutting", CUTS)


@every_kind
@every_cut
@pytest.mark.parametrize("trained", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_statistics_are_those_of_the_whole_distribution(make_problem, cut, kind, cutting, trained, reduction):
    problem = make_problem(9, 3, 4, 40, kind=kind, bias=True)
    problem.bias[5] = -torch.inf
    problem.targets[problem.targets == 5] = 6
    problem.targets[4] = -100
    workspace = cut(cutting, problem)
    log_probs = problem.log_probs()
    given_problem = problem.leaves() if trained else problem
    loss, stats = given_problem.nll(reduction=reduction, workspace=workspace, return_stats=True)
    counted = problem.targets >= 0
    nll = -log_probs.gather(1, problem.targets.clamp(min=0)[:, None])[:, 0] * counted
    entropy = torch.special.entr(log_probs.exp()).sum(1) * counted
    torch.testing.assert_close(stats.nll, nll, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stats.entropy, entropy, rtol=1e-12, atol=1e-12)
    assert torch.equal(stats.argmax, torch.where(counted, log_probs.argmax(1), -1))
    assert not any(value.requires_grad for value in stats)
    torch.testing.assert_close(loss.detach(), nll if reduction == "none" else nll.sum() / counted.sum())


@every_cut
def test_ties_go_to_one_of_the_best(cut, make_problem, cutting):
    """Equal scores everywhere, then two equal best entries: the answer is a best entry, the entropy exact."""
    problem = make_problem(6, 2, 3, 20)
    workspace = cut(cutting, problem)
    flat = replace(problem, weight=torch.zeros_like(problem.weight))
    _, stats = flat.nll(return_stats=True, workspace=workspace)
    torch.testing.assert_close(stats.entropy, torch.full((6,), 20.0, dtype=torch.float64).log())
    assert ((stats.argmax >= 0) & (stats.argmax < 20)).all()
    bias = torch.zeros(20, dtype=torch.float64)
    bias[[7, 15]] = 3.0
    _, stats = replace(flat, bias=bias).nll(return_stats=True, workspace=workspace)
    assert set(stats.argmax.tolist()) <= {7, 15}


def test_reference_gives_the_same_statistics(make_problem):
    problem = make_problem(kind="softcap", bias=True)
    loss, stats = problem.nll(return_stats=True, impl="reference")
    fast_loss, fast = problem.nll(return_stats=True)
    torch.testing.assert_close(loss, fast_loss)
    assert torch.equal(stats.argmax, fast.argmax)


@every_kind
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_log_probs_in_pieces_are_the_whole_and_normalised(make_problem, kind, bias):
    problem = make_problem(9, 4, 5, 300, kind=kind, bias=bias, dtype=torch.float32, scale=3.0)
    arguments = (problem.rows, problem.log_prior, problem.weight)
    options = {"bias": problem.bias, "pointwise": problem.pointwise}
    whole = mixture_log_probs(*(leaf.requires_grad_() for leaf in arguments), **options)
    assert whole.requires_grad
    with torch.no_grad():
        for workspace in (None, 50_000, 10_000, 1):
            pieces = mixture_log_probs(*arguments, **options, workspace=workspace)
            torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=2e-6)
            assert (pieces.exp().sum(1) - 1).abs().max() < 1e-5
    # log_softmax leaves normalised log-probabilities as they are.
    torch.testing.assert_close(whole.log_softmax(-1), whole, rtol=1e-6, atol=1e-5)


def test_log_probs_of_nothing():
    empty = mixture_log_probs(torch.zeros(0, 2, 3), torch.zeros(0, 2), torch.zeros(5, 3))
    assert empty.shape == (0, 5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("impl", ["chunked", "reference"])
@pytest.mark.parametrize("N", [0, 3], ids=["no-tokens", "all-ignored"])
def test_nothing_counted_is_a_loss_of_zero_with_gradient_zero(make_problem, tools, reduction, impl, N):
    problem = make_problem(N, 2, 3, 5, bias=True)
    problem.targets[:] = -100
    loss, gradients = tools.differentiate(problem, lambda p: p.nll(reduction=reduction, impl=impl))
    assert loss.shape == ((N,) if reduction == "none" else ())
    assert (loss == 0).all()
    for name in ("rows", "log_prior", "weight", "bias"):
        assert (gradients[name] == 0).all()


@pytest.mark.parametrize("impl", ["chunked", "reference"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("left_out", [(1, 4), range(5)], ids=["some", "all"])
def test_rows_ignore_and_reduce_as_mixtures_of_one(make_problem, tools, left_out, reduction, impl):
    problem = make_problem(5, 1, 3, 7, bias=True)
    problem.targets[list(left_out)] = -7
    problem = replace(problem, log_prior=torch.zeros(5, 1, dtype=torch.float64))
    want = tools.differentiate(problem, lambda p: p.nll(reduction=reduction, impl=impl, ignore_index=-7))
    problem.rows[problem.targets == -7] = torch.nan
    loss, gradients = tools.differentiate(
        problem,
        lambda p: linear_nll(
            p.rows[:, 0], p.weight, p.targets, bias=p.bias, reduction=reduction, ignore_index=-7, impl=impl
        )[0],
    )
    torch.testing.assert_close(loss, want[0])
    for name in ("rows", "weight", "bias"):
        torch.testing.assert_close(gradients[name], want[1][name])


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_an_ignored_row_has_a_normaliser_of_0_without_gradient(make_problem, impl):
    problem = make_problem(3, 1, 3, 7).leaves()
    problem.targets[1] = -100
    _, lse = linear_nll(problem.rows[:, 0], problem.weight, problem.targets, reduction="mean", impl=impl)
    lse.square().sum().backward()
    assert lse.shape == (3,)
    assert lse[1] == 0.0
    assert [bool(row.any()) for row in problem.rows.grad] == [True, False, True]


def test_weights_that_sum_to_zero_give_a_mean_of_zero(make_problem, tools):
    problem = make_problem(3, 2, 3, 5, token_weight=True)
    problem.token_weight[:] = 0.0
    loss, gradients = tools.differentiate(problem, lambda p: p.nll())
    assert loss == 0
    assert (gradients["weight"] == 0).all()


@given(
    N=st.integers(1, 5),
    K=st.integers(1, 3),
    D=st.integers(1, 3),
    V=st.integers(1, 5),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_smallest_shapes(make_problem, tools, N, K, D, V, seed):
    problem = make_problem(N, K, D, V, seed=seed, kind="softcap", bias=True)
    for reduction in ("mean", "none"):
        want = tools.differentiate(problem, lambda p, r=reduction: p.plain_nll(r))
        got = tools.differentiate(problem, lambda p, r=reduction: p.nll(reduction=r))
        torch.testing.assert_close(got[0], want[0], rtol=1e-10, atol=1e-12)
        for name in ("rows", "log_prior", "weight", "bias"):
            torch.testing.assert_close(got[1][name], want[1][name], rtol=1e-9, atol=1e-12)


def test_a_vocabulary_of_one_is_certain():
    rows, weight = torch.randn(4, 2, 3, requires_grad=True), torch.randn(1, 3, requires_grad=True)
    loss = mixture_nll(rows, torch.full((4, 2), 0.5).log(), weight, torch.zeros(4, dtype=torch.long))
    loss.backward()
    assert loss.abs() < 1e-7
    assert (rows.grad == 0).all()
    assert (weight.grad == 0).all()


STRIDES = {
    "rows-transposed": lambda p: replace(p, rows=p.rows.transpose(0, 1).contiguous().transpose(0, 1)),
    "rows-strided": lambda p: replace(p, rows=p.rows.repeat_interleave(2, dim=2)[:, :, ::2]),
    "rows-width-first": lambda p: replace(p, rows=p.rows.permute(2, 0, 1).contiguous().permute(1, 2, 0)),
    "weight-transposed": lambda p: replace(p, weight=p.weight.t().contiguous().t()),
    "weight-strided-both-ways": lambda p: replace(
        p, weight=p.weight.repeat(2, 2)[:11:1, :5].t().contiguous().t()
    ),
    "weight-every-second-column": lambda p: replace(p, weight=p.weight.repeat_interleave(2, dim=1)[:, ::2]),
    "prior-transposed": lambda p: replace(p, log_prior=p.log_prior.t().contiguous().t()),
    "targets-strided": lambda p: replace(p, targets=p.targets.repeat_interleave(2)[::2]),
    "targets-int32": lambda p: replace(p, targets=p.targets.int()),
}


def test_expanded_rows_and_weight(make_problem):
    """Stride 0: the same context for every token, the same vector for every word."""
    problem = make_problem(6, 2, 3, 8)
    row = problem.rows[:1].clone().requires_grad_()
    loss = mixture_nll(row.expand(6, 2, 3), problem.log_prior, problem.weight, problem.targets)
    loss.backward()
    again = problem.rows[:1].clone().requires_grad_()
    mixture_nll(again.repeat(6, 1, 1), problem.log_prior, problem.weight, problem.targets).backward()
    torch.testing.assert_close(row.grad, again.grad, rtol=1e-12, atol=1e-14)
    flat = mixture_nll(problem.rows, problem.log_prior, problem.weight[:1].expand(8, 3), problem.targets)
    assert flat.item() == pytest.approx(torch.tensor(8.0).log().item())


def test_rows_taken_from_the_weight_itself(make_problem):
    """Tied embeddings: one leaf is the source of the rows and the output matrix; its gradients add up."""
    ids = torch.tensor([[1, 2], [0, 4], [3, 3]])
    problem = make_problem(3, 2, 5, 11)
    gradients = []
    for fast in (True, False):
        weight = problem.weight.clone().requires_grad_()
        tied = replace(problem, rows=weight[ids], weight=weight)
        (tied.nll() if fast else tied.plain_nll()).backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-11, atol=1e-13)


ROWS, PRIOR, WEIGHT = torch.zeros(4, 2, 3), torch.zeros(4, 2), torch.zeros(7, 3)
TARGETS = torch.zeros(4, dtype=torch.long)
MIXTURE_ERRORS = {
    "rows-2d": (
        {"rows": ROWS[:, 0]},
        r"\[4, 3\], expected \[N, K, D\]: for one component pass rows\[:, None, :\]",
    ),
    "no-components": ({"rows": ROWS[:, :0]}, r"\[4, 0, 3\], expected \[N, K, D\] with K >= 1"),
    "weight-width": (
        {"weight": torch.zeros(7, 5)},
        r"weight has shape \[7, 5\], expected \[V, D\].* D=3 .*transpose",
    ),
    "weight-empty": ({"weight": torch.zeros(0, 3)}, r"weight has shape \[0, 3\], expected .* V >= 1"),
    "weight-1d": ({"weight": torch.zeros(3)}, r"weight has shape \[3\], expected \[V, D\]"),
    "prior-shape": (
        {"log_prior": torch.zeros(4, 3)},
        r"log_prior has shape \[4, 3\], expected \[N, K\] = \[4, 2\]",
    ),
    "targets-shape": ({"targets": TARGETS[:3]}, r"targets have shape \[3\], expected \[4\].*flatten"),
    "targets-float": ({"targets": TARGETS.float()}, r"targets are torch.float32, expected int64 or int32"),
    "rows-integer": ({"rows": ROWS.long()}, r"rows has dtype torch.int64, expected a floating"),
    "weight-integer": ({"weight": WEIGHT.long()}, r"weight has dtype torch.int64, expected a floating"),
    "prior-integer": ({"log_prior": PRIOR.long()}, r"log_prior has dtype torch.int64, expected a floating"),
    "bias-shape": ({"bias": torch.zeros(6)}, r"bias has shape \[6\], expected \[V\] = \[7\]"),
    "bias-integer": ({"bias": torch.zeros(7).long()}, r"bias has dtype torch.int64, expected a floating"),
    "two-dtypes": (
        {"weight": WEIGHT.double()},
        r"torch.float32 and weight is torch.float64, expected one dtype: cast",
    ),
    "device": ({"weight": WEIGHT.to("meta")}, r"weight is on meta and rows are on cpu: move"),
    "targets-device": ({"targets": TARGETS.to("meta")}, r"targets is on meta and rows are on cpu: move"),
    "prior-device": ({"log_prior": PRIOR.to("meta")}, r"log_prior is on meta and rows are on cpu: move"),
    "reduction": (
        {"reduction": "average"},
        r"reduction='average' is unknown: expected one of mean, sum, none",
    ),
    "implementation": (
        {"impl": "fast"},
        r"impl='fast' is unknown: expected one of auto, triton, chunked, reference",
    ),
    "token-weight-shape": (
        {"token_weight": torch.ones(3)},
        r"token_weight has shape \[3\], expected that of targets, \[4\]",
    ),
    "token-weight-trained": (
        {"token_weight": torch.ones(4, requires_grad=True)},
        r"token_weight requires a gradient.*detach",
    ),
    "target-beyond": (
        {"targets": TARGETS + 7},
        r"target 7 is outside .* 0 <= target < V=7 or ignore_index=-100",
    ),
    "target-negative": ({"targets": TARGETS - 1}, r"target -1 is outside .* V=7"),
    "target-beyond-reference": ({"targets": TARGETS + 9, "impl": "reference"}, r"target 9 is outside .* V=7"),
}


@pytest.mark.parametrize(("wrong", "message"), MIXTURE_ERRORS.values(), ids=MIXTURE_ERRORS)
def test_mixture_errors_say_what_came_and_what_was_expected(wrong, message):
    arguments = {"rows": ROWS, "log_prior": PRIOR, "weight": WEIGHT, "targets": TARGETS} | wrong
    with pytest.raises(FullrankError, match=message):
        mixture_nll(**arguments)


def test_target_errors_with_a_loss_a_token():
    with pytest.raises(FullrankError, match=r"target 12 is outside .* V=7"):
        mixture_nll(ROWS.requires_grad_(), PRIOR, WEIGHT, TARGETS + 12, reduction="none")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": ROWS}, r"rows have shape \[4, 2, 3\], expected \[R, D\]"),
        ({"targets": TARGETS[:2]}, r"targets have shape \[2\], expected \[4\]"),
        ({"targets": TARGETS - 100}, r"target -100 is outside .* V=7"),
        ({"targets": TARGETS - 100, "impl": "reference"}, r"target -100 is outside .* V=7"),
        ({"impl": "none"}, r"impl='none' is unknown"),
    ],
    ids=["rows-3d", "targets-shape", "no-ignore-index", "no-ignore-index-reference", "implementation"],
)
def test_row_errors_say_what_came_and_what_was_expected(wrong, message):
    arguments = {"rows": ROWS[:, 0], "weight": WEIGHT, "targets": TARGETS} | wrong
    with pytest.raises(FullrankError, match=message):
        linear_logprob(**arguments)


def test_log_probs_check_their_arguments():
    with pytest.raises(FullrankError, match=r"log_prior has shape \[3, 2\], expected \[N, K\] = \[4, 2\]"):
        mixture_log_probs(ROWS, PRIOR[:3], WEIGHT)
