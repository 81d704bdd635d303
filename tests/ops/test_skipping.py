"""Row skipping: what is left out is exactly what the bound names, what is missing is within the stated bound.

The reference is plain autograd of the loss whose posterior shares are constants, with those at or below the
bound set to zero: the gradient in scores of sum_k r_k nll_k is that of the mixture's loss.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.errors import FullrankError
from fullrank.ops import mixture_nll, posterior_shares, skipping
from fullrank.ops import workspace as plan_module
from fullrank.ops.autograd import mixture
from fullrank.ops.skipping import compact, rows_to_keep
from fullrank.ops.workspace import MIB, make_plan

KINDS = ("identity", "sigsoftmax", "softcap", "capped_sigsoftmax", "plif")
CUTS = ("whole", "chunks", "blocks")
SKIPPED = ("rows", "weight", "bias")
STEEPEST = {"identity": 1.0, "sigsoftmax": 2.0, "softcap": 1.0, "capped_sigsoftmax": 2.0}

every_kind = pytest.mark.parametrize("kind", KINDS)
every_cut = pytest.mark.parametrize("cutting", CUTS)


@pytest.fixture
def eager_to_skip(monkeypatch):
    """Rows are moved however few are left out."""
    monkeypatch.setattr(skipping, "MOVING_WIDTH", {"cpu": 0})


def row_losses(problem):
    """nll of every row [N, K] in plain torch; ignored tokens against entry 0."""
    log_probs = problem.bent().log_softmax(-1)
    y = problem.targets.clamp(min=0)[:, None, None].expand(-1, problem.rows.shape[1], 1)
    return -log_probs.gather(2, y)[..., 0]


def shares(problem):
    return (problem.log_prior - row_losses(problem)).softmax(1).detach()


def masked_gradients(problem, row_skip, mean=True):
    """Gradients of rows, weight and bias with the shares up to the bound put to zero."""
    leaves = problem.leaves()
    weight = torch.ones_like(leaves.log_prior[:, 0]) if leaves.token_weight is None else leaves.token_weight
    weight = weight.detach() * (problem.targets >= 0)
    share = shares(leaves)
    share = torch.where(share <= row_skip, 0.0, share)
    loss = (weight[:, None] * share * row_losses(leaves)).sum()
    (loss / weight.sum() if mean else loss).backward()
    return {name: value for name, value in leaves.gradients().items() if name in SKIPPED}


def close(found, want, tolerance=1e-10):
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=1e-2 * tolerance)


@every_kind
@every_cut
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_are_those_without_the_small_shares(
    make_problem, tools, cut, eager_to_skip, kind, cutting, reduction
):
    problem = make_problem(9, 4, 5, 23, kind=kind, bias=True, token_weight=True, scale=1.5)
    problem.targets[[2, 7]] = -100
    workspace = cut(cutting, problem)
    loss, found = tools.differentiate(
        problem, lambda p: p.nll(reduction=reduction, workspace=workspace, row_skip=0.2)
    )
    exact_loss, exact = tools.differentiate(problem, lambda p: p.nll(reduction=reduction))
    counted = problem.targets >= 0
    assert 0.2 < float((shares(problem)[counted] > 0.2).double().mean()) < 0.8
    torch.testing.assert_close(loss, exact_loss, rtol=1e-12, atol=0)
    close(found, {name: exact[name] for name in exact if name not in SKIPPED})
    # All rows of a cut vocabulary are scored again for the gradient of f's own numbers.
    scored_again = cutting == "blocks" and problem.slopes is not None
    want = masked_gradients(problem, 0.2, mean=reduction == "mean")
    close(found, {name: exact[name] for name in SKIPPED} if scored_again else want)


@every_cut
def test_skipping_at_the_usual_threshold(make_problem, tools, cut, cutting):
    """A chunk in which nearly all rows count stays exact, the others lose the small shares."""
    problem = make_problem(8, 4, 45, 500, bias=True, scale=0.02)
    problem.log_prior[:4] = torch.tensor([0.94, 0.02, 0.02, 0.02]).log()
    problem.log_prior[4:] = torch.tensor(0.25).log()
    workspace = cut(cutting, problem)
    _, found = tools.differentiate(problem, lambda p: p.nll(workspace=workspace, row_skip=0.1))
    keeping = (shares(problem) > 0.1).double().mean(1)
    # Width 45 moves up to 0.9 of the rows.
    assert (keeping[:4] <= 0.5).all()
    assert (keeping[4:] == 1).all()
    chunks = [slice(0, 8)] if cutting == "whole" else [slice(start, start + 2) for start in range(0, 8, 2)]
    want = dict.fromkeys(("weight", "bias"), 0.0)
    for chunk in chunks:
        part = replace(
            problem, rows=problem.rows[chunk], log_prior=problem.log_prior[chunk],
            targets=problem.targets[chunk],
        )  # fmt: skip
        bound = 0.1 if keeping[chunk].mean() <= 0.9 else 0.0
        gradients = masked_gradients(part, bound, mean=False)
        torch.testing.assert_close(found["rows"][chunk] * 8, gradients["rows"], rtol=1e-10, atol=1e-12)
        for name in want:
            want[name] = want[name] + gradients[name] / 8
    close(found, want)


@every_kind
@every_cut
def test_zero_is_the_loss_without_skipping_bit_for_bit(make_problem, tools, cut, kind, cutting):
    problem = make_problem(9, 3, 5, 23, kind=kind, bias=True, token_weight=True)
    problem.log_prior[:, 1] = -torch.inf
    problem.targets[3] = -100
    workspace = cut(cutting, problem)
    loss, want = tools.differentiate(problem, lambda p: p.nll(workspace=workspace))
    again, found = tools.differentiate(problem, lambda p: p.nll(workspace=workspace, row_skip=0.0))
    assert torch.equal(loss, again)
    assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"impl": "reference"}, {"single": True}], ids=str)
def test_where_skipping_is_not_served_the_gradients_are_exact(make_problem, tools, eager_to_skip, options):
    options = dict(options)
    problem = make_problem(9, 1 if options.pop("single", False) else 3, 5, 23, bias=True)
    want = tools.differentiate(problem, lambda p: p.nll(**options))
    found = tools.differentiate(problem, lambda p: p.nll(**options, row_skip=0.9))
    assert torch.equal(found[0], want[0])
    assert all(torch.equal(found[1][name], want[1][name]) for name in want[1])


@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(tuple(STEEPEST)),
    row_skip=st.floats(1e-6, 0.99),
    scale=st.floats(0.1, 8.0),
    sharpness=st.floats(0.0, 10.0),
    step=st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_what_is_missing_is_within_the_stated_bound(
    make_problem, tools, seed, kind, row_skip, scale, sharpness, step
):
    problem = make_problem(8, 4, 3, 13, seed=seed, kind=kind, bias=True, token_weight=True, scale=scale)
    problem = replace(problem, log_prior=(problem.log_prior * sharpness).log_softmax(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skipping, "MOVING_WIDTH", {"cpu": 0})
        patch.setattr(plan_module, "MOST_ROWS", {"cpu": step})
        loss, found = tools.differentiate(problem, lambda p: p.nll(row_skip=row_skip, reduction="sum"))
    exact_loss, exact = tools.differentiate(problem, lambda p: p.nll(reduction="sum"))
    torch.testing.assert_close(loss, exact_loss, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found["log_prior"], exact["log_prior"], rtol=1e-12, atol=1e-13)
    share, weight = shares(problem), problem.token_weight[:, None]
    skipped = share <= row_skip
    slack = 1 + 1e-9
    assert (found["rows"][skipped] == 0).all()
    bound = 2 * row_skip * weight * STEEPEST[kind] * problem.weight.norm(dim=1).max()
    assert (exact["rows"].norm(dim=2) <= bound * slack)[skipped].all()
    torch.testing.assert_close(found["rows"][~skipped], exact["rows"][~skipped], rtol=1e-10, atol=1e-12)
    # The shares themselves, and the bound in place of them, limit what W and b miss.
    length = problem.rows.norm(dim=2)
    for limit in (share, torch.full_like(share, row_skip)):
        per_row = 2 * STEEPEST[kind] * torch.where(skipped, weight * limit, 0.0)
        missing = (found["weight"] - exact["weight"]).norm(dim=1).sum()
        assert missing <= (per_row * length).sum() * slack + 1e-12
        assert (found["bias"] - exact["bias"]).abs().sum() <= per_row.sum() * slack + 1e-12


@pytest.mark.parametrize("rows", [4, 8, 20, 512])
@pytest.mark.parametrize("ignored", [False, True], ids=["all", "ignored"])
def test_chunks_do_not_matter(make_problem, tools, monkeypatch, eager_to_skip, rows, ignored):
    problem = make_problem(17, 4, 5, 23, kind="softcap", bias=True, token_weight=True)
    if ignored:
        problem.targets[::3] = -100
    monkeypatch.setattr(plan_module, "MOST_ROWS", {"cpu": rows})
    _, found = tools.differentiate(problem, lambda p: p.nll(row_skip=0.15))
    close(found, masked_gradients(problem, 0.15))


@every_cut
def test_every_row_may_be_skipped(make_problem, tools, cut, eager_to_skip, cutting):
    """A bound above 1/K can leave nothing of a token, and of a chunk."""
    problem = make_problem(8, 4, 5, 23, bias=True, scale=0.01)
    problem.log_prior[:] = torch.tensor(0.25).log()
    workspace = cut(cutting, problem)
    _, found = tools.differentiate(problem, lambda p: p.nll(workspace=workspace, row_skip=0.9))
    assert all((found[name] == 0).all() for name in SKIPPED)
    assert (found["log_prior"] < 0).all()


def test_no_number_is_never_skipped(make_problem, tools, eager_to_skip):
    problem = make_problem(6, 3, 5, 23)
    problem.rows[2, 1] = torch.nan
    loss, found = tools.differentiate(problem, lambda p: p.nll(row_skip=0.5))
    assert loss.isnan()
    assert found["rows"][2].isnan().all()
    assert found["rows"][3:].isfinite().all()
    assert found["weight"].isnan().all()


@pytest.mark.parametrize("trained", [("rows",), ("weight",), ("bias",), ("log_prior",), ("slopes",)], ids=str)
@every_cut
def test_some_gradients(make_problem, tools, cut, eager_to_skip, trained, cutting):
    problem = make_problem(9, 4, 5, 23, kind="plif", bias=True)
    workspace = cut(cutting, problem)
    _, everything = tools.differentiate(problem, lambda p: p.nll(row_skip=0.2))
    _, some = tools.differentiate(problem, lambda p: p.nll(row_skip=0.2, workspace=workspace), trained)
    for name in trained:
        torch.testing.assert_close(some[name], everything[name], rtol=1e-10, atol=1e-12)


@every_cut
def test_statistics_beside_skipping(make_problem, cut, eager_to_skip, cutting):
    problem = make_problem(9, 4, 5, 23).leaves()
    loss, want = problem.nll(return_stats=True)
    skipped, found = problem.nll(return_stats=True, row_skip=0.2, workspace=cut(cutting, problem))
    torch.testing.assert_close(skipped, loss, rtol=1e-12, atol=0)
    assert torch.equal(found.argmax, want.argmax)
    torch.testing.assert_close(found.entropy, want.entropy, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@every_cut
def test_narrow_dtypes_err_as_the_exact_path_does(make_problem, tools, cut, eager_to_skip, dtype, cutting):
    problem = make_problem(9, 4, 16, 40, dtype=dtype, bias=True, token_weight=True)
    truth = masked_gradients(problem.to(torch.float64), 0.1)
    assert ((shares(problem.to(torch.float64)) - 0.1).abs() > 1e-3).all(), "no share near the bound"
    plain = masked_gradients(problem, 0.1)
    workspace = cut(cutting, problem)
    _, found = tools.differentiate(problem, lambda p: p.nll(row_skip=0.1, workspace=workspace))
    for name in SKIPPED:
        tools.as_good(found[name], plain[name], truth[name], floor=1e-7 if dtype == torch.float32 else 4e-3)


def test_a_second_backward_pass_skips_the_same(make_problem, eager_to_skip):
    leaves = make_problem().leaves()
    loss = leaves.nll(row_skip=0.3)
    first, again = (torch.autograd.grad(loss, leaves.rows, retain_graph=True)[0] for _ in range(2))
    assert (first == 0).any()
    torch.testing.assert_close(again, first, rtol=1e-13, atol=1e-15)


def test_compiled_and_checked_as_an_operator(make_problem, tools, eager_to_skip):
    torch.compiler.reset()
    problem = make_problem(bias=True)
    compiled = torch.compile(lambda p: p.nll(row_skip=0.3), fullgraph=True, backend="aot_eager")
    want = tools.differentiate(problem, lambda p: p.nll(row_skip=0.3))
    found = tools.differentiate(problem, compiled)
    close(found[1], {name: want[1][name] for name in ("rows", "log_prior", "weight", "bias")}, 1e-12)
    tensors = (problem.rows, problem.log_prior, problem.weight, problem.targets, problem.bias, None, None)
    needs = [True, True, True, True, False]
    options = ("identity", 0.0, True, -100, False, needs, 1 << 20, "auto", 0.3)
    torch.library.opcheck(mixture, (*tensors, *options))


@pytest.mark.parametrize("bound", [-0.1, 1.0, 2.0, float("nan"), float("inf")])
def test_a_bound_that_is_none_is_refused(make_problem, bound):
    with pytest.raises(FullrankError, match=r"row_skip=.* expected 0 <= row_skip < 1; pass 0"):
        make_problem().nll(row_skip=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(300, 2, 8, 500), (12, 2, 8, 10_000), (10, 20, 8, 800), (120, 3, 200, 40)])
@pytest.mark.parametrize("ignored", [False, True], ids=["all", "ignored"])
def test_memory_stays_inside_the_workspace(make_problem, tools, eager_to_skip, dtype, shape, ignored):
    workspace = 192 * 1024
    problem = make_problem(*shape, dtype=dtype, bias=True)
    if ignored:
        problem.targets[::50] = -100
    assert (shares(problem.to(torch.float64)) < 0.4).double().mean() > 0.2
    leaves = problem.leaves()
    gradients = sum(t.numel() * t.element_size() for t in (leaves.rows, leaves.log_prior, leaves.bias))
    gradients += leaves.weight.numel() * (4 if dtype == torch.float32 else 6)
    peak = tools.peak_bytes(lambda: leaves.nll(workspace=workspace, row_skip=0.4).backward())
    assert peak - gradients <= workspace


@given(rows=st.integers(1, 60), step=st.integers(1, 70), seed=st.integers(0, 99), part=st.floats(0.0, 1.0))
@settings(max_examples=60, deadline=None)
def test_rows_move_to_the_top_in_place(rows, step, seed, part):
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, 3, generator=draw)
    kept = (torch.rand(rows, generator=draw) < part).nonzero()[:, 0]
    want, place = scores[kept], scores.untyped_storage().data_ptr()
    found = compact(scores, kept, step)
    assert torch.equal(found, want)
    assert found.untyped_storage().data_ptr() == place


def test_few_rows_less_are_not_moved():
    share = torch.full((10, 10), 0.1)
    share[0, :9] = 0.0
    assert rows_to_keep(share, 0.01, 5) is None
    assert rows_to_keep(share, 0.01, 100).shape == (91,)


@pytest.mark.parametrize("product", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("N", [1, 40, 8192])
@pytest.mark.parametrize("V", [40, 50_304, 128_256])
@pytest.mark.parametrize("workspace", [64 * MIB, 2048 * MIB])
def test_room_to_move_rows_is_planned_beside_the_kernel(product, N, V, workspace):
    plan = make_plan(
        N=N, K=10, D=280, V=V, product=product, device=torch.device("cuda"), tile_buffers=4,
        workspace=workspace, kernel=True, skip=True,
    )  # fmt: skip
    assert plan.copy_rows >= 1
    if plan.kernel:
        rows = plan.tokens * 10 + plan.copy_rows
        assert rows * plan.stride * product.itemsize + plan.tokens * 10 * 280 * 8 <= workspace


def test_shares_are_the_posterior(make_problem):
    problem = make_problem(9, 4, 5, 23, kind="plif", bias=True)
    problem.targets[4] = -100
    problem.log_prior[2] = torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf])
    leaves = problem.leaves()
    arguments = (leaves.rows, leaves.log_prior, leaves.weight, leaves.targets)
    found = posterior_shares(*arguments, bias=leaves.bias, pointwise=leaves.pointwise)
    want = shares(problem)
    want[4] = 0.0
    assert not found.requires_grad
    torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-13)
    with pytest.raises(FullrankError, match="log_prior has shape"):
        posterior_shares(leaves.rows, leaves.log_prior[:3], leaves.weight, leaves.targets)


def test_time_is_printed_not_asserted(make_problem, capsys):
    """A look at the saving on this processor: `pytest -s` shows it."""
    problem = make_problem(128, 4, 64, 4000, dtype=torch.float32, scale=0.1)
    problem = replace(problem, log_prior=(problem.log_prior * 8).log_softmax(1))
    leaves, seconds = problem.leaves(), {}
    for bound in (0.0, 2.0**-9):
        arguments = (leaves.rows, leaves.log_prior, leaves.weight, leaves.targets)
        for _ in range(2):
            start = time.perf_counter()
            mixture_nll(*arguments, row_skip=bound).backward()
            seconds[bound] = time.perf_counter() - start
    kept = float((posterior_shares(*arguments) > 2.0**-9).double().mean())
    with capsys.disabled():
        print(f"\nkept {kept:.2f} of the rows: {seconds[2.0**-9] / seconds[0.0]:.2f} of the time")
    assert 0 < kept < 1
