"""The public functions: statistics, unusual inputs, and what every error says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.errors import FullrankError
from fullrank.ops import linear_logprob, mixture_log_probs, mixture_nll

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
@pytest.mark.parametrize("ignore", [-100, 3, 0, 99], ids=["default", "inside", "zero", "beyond"])
def test_ignored_tokens_do_not_count_whatever_they_hold(make_problem, tools, reduction, ignore):
    problem = make_problem(8, 2, 3, 9, token_weight=True)
    problem.targets[:] = torch.tensor([1, 2, 4, 5, 6, 7, 8, 1])
    kept = torch.tensor([0, 2, 3, 7])
    small = replace(
        problem, rows=problem.rows[kept], log_prior=problem.log_prior[kept], targets=problem.targets[kept],
        token_weight=problem.token_weight[kept],
    )  # fmt: skip
    gone = torch.ones(8, dtype=torch.bool)
    gone[kept] = False
    problem.targets[gone] = ignore
    for tensor in (problem.rows, problem.log_prior, problem.token_weight):
        tensor[gone] = torch.nan
    weigh = torch.linspace(1.0, 2.0, 4, dtype=torch.float64) if reduction == "none" else 1.0
    want_loss, want = tools.differentiate(small, lambda p: (p.plain_nll(reduction) * weigh).sum())
    everyone = torch.full((8,), 5.0, dtype=torch.float64)
    everyone[kept] = weigh
    upstream = everyone if reduction == "none" else 1.0

    def loss_of(p):
        return (p.nll(reduction=reduction, ignore_index=ignore) * upstream).sum()

    loss, got = tools.differentiate(problem, loss_of)
    torch.testing.assert_close(loss, want_loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got["weight"], want["weight"], rtol=1e-11, atol=1e-12)
    for name in ("rows", "log_prior"):
        torch.testing.assert_close(got[name][kept], want[name], rtol=1e-11, atol=1e-12)
        assert (got[name][gone] == 0).all()


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


def test_weights_that_sum_to_zero_give_a_mean_of_zero(make_problem, tools):
    problem = make_problem(3, 2, 3, 5, token_weight=True)
    problem.token_weight[:] = 0.0
    loss, gradients = tools.differentiate(problem, lambda p: p.nll())
    assert loss == 0
    assert (gradients["weight"] == 0).all()


def test_signed_weights_sum(make_problem, tools):
    problem = make_problem(6, 2, 3, 5, token_weight=True)
    problem.token_weight[:3] *= -2.0
    want = tools.differentiate(problem, lambda p: p.plain_nll("sum"))
    got = tools.differentiate(problem, lambda p: p.nll(reduction="sum"))
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1]["weight"], want[1]["weight"], rtol=1e-11, atol=1e-12)


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


@pytest.mark.parametrize("change", STRIDES.values(), ids=STRIDES)
@every_cut
def test_layout_does_not_matter(make_problem, cut, change, cutting):
    problem = make_problem()
    workspace = cut(cutting, problem)
    results = []
    for variant in (problem, change(problem)):
        leaves = [
            tensor.detach().requires_grad_() for tensor in (variant.rows, variant.log_prior, variant.weight)
        ]
        for reduction in ("mean", "none"):
            loss = mixture_nll(*leaves, variant.targets, reduction=reduction, workspace=workspace)
            loss.square().sum().backward()
        results.append((loss.detach(), *(leaf.grad for leaf in leaves)))
    for plain, changed in zip(*results, strict=True):
        torch.testing.assert_close(changed, plain, rtol=1e-11, atol=1e-13)


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
