"""The kernel for the elementwise work against its definition in fp64: in Triton's interpreter, and on CUDA.

The interpreter has to be on before Triton is first imported, so the tests that use it run in a process of
their own; `TRITON_INTERPRET=1 pytest tests/ops/test_triton.py` shows them one by one. It rounds to bf16
towards zero.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.ops import IDENTITY, SIGSOFTMAX, Pointwise, Softcap, mixture_nll
from fullrank.ops.statistics import Statistics
from fullrank.ops.targets import count_targets
from fullrank.ops.workspace import MIB, make_plan, padded

# numpy, under the interpreter, warns of what the unused ends of padded rows hold.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"
FUNCTIONS = {"identity": IDENTITY, "sigsoftmax": SIGSOFTMAX, "softcap": Softcap(3.0)}
# Twice the rounding of the stored Q.
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

every_function = pytest.mark.parametrize("kind", FUNCTIONS)
every_dtype = pytest.mark.parametrize("dtype", ROUNDING, ids=["fp32", "fp16", "bf16"])


def definition(
    scores: Tensor, bias: Tensor | None, y: Tensor, f: Pointwise, *, late: bool = False
) -> tuple[Statistics, Tensor]:
    """Statistics and Q of scores [R, V] in fp64, with f' from autograd."""
    V = scores.shape[1]
    shift = torch.zeros(V, dtype=torch.float64) if bias is None else bias[:V].double()
    masked = shift == -torch.inf
    z = (scores.double() + shift.masked_fill(masked, 0.0)).requires_grad_()
    (slope,) = torch.autograd.grad(f(z).sum(), z)
    a = f(z).detach().masked_fill(masked, -torch.inf)
    own = torch.nn.functional.one_hot(y, V).bool()
    maximum = a.amax(1)
    exponentials = (a - maximum[:, None]).exp()
    others = exponentials.masked_fill(own, 0.0).sum(1)
    target = a[own]
    total = others + (target - maximum).exp()
    entry = torch.where(torch.isneginf(target) | late, 0.0, -others / total)
    Q = torch.where(own, entry[:, None], exponentials / total[:, None]) * slope
    return Statistics(maximum, others, target), Q


def padded_scores(values: Tensor, dtype: torch.dtype, stride: int) -> Tensor:
    """The values in a buffer with longer rows; what lies beyond V must not matter."""
    buffer = torch.full((values.shape[0], stride), torch.nan, dtype=dtype)
    buffer[:, : values.shape[1]] = values
    return buffer[:, : values.shape[1]]


def agree(found: Statistics, want: Statistics) -> None:
    for got, exact in zip(found, want, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=2e-6, atol=2e-6)
    finite = torch.isfinite(want.target)
    torch.testing.assert_close(found.nll[finite].double(), want.nll[finite], rtol=5e-6, atol=1e-12)


def check(
    values: Tensor, bias: Tensor | None, y: Tensor, f: Pointwise, dtype: torch.dtype, **options
) -> None:
    from fullrank.ops.mixture import kernels as score_kernels

    V = values.shape[1]
    stride = padded(V)
    scores = padded_scores(values, dtype, stride)
    shift = None if bias is None else torch.nn.functional.pad(bias, (0, stride - V), value=-torch.inf)
    want, Q = definition(scores, bias, y, f, **options)
    before = scores.clone()
    agree(score_kernels.score_rows(scores, shift, y, f, gradient=False), want)
    assert torch.equal(scores.nan_to_num(), before.nan_to_num()), "without gradients nothing is written"
    agree(score_kernels.score_rows(scores, shift, y, f, gradient=True, **options), want)
    torch.testing.assert_close(scores.double(), Q, rtol=ROUNDING[dtype], atol=1e-7)


@pytest.mark.interpreter
@every_function
@every_dtype
@pytest.mark.parametrize("V", [1, 7, 512, 513, 9001])
def test_statistics_and_gradient_of_scores(kind, dtype, V):
    draw = torch.Generator().manual_seed(V)
    values = torch.randn(3, V, generator=draw) * 4
    y = torch.randint(V, (3,), generator=draw)
    check(values, None, y, FUNCTIONS[kind], dtype)
    check(values[:1], torch.randn(V, generator=draw), y[:1], FUNCTIONS[kind], dtype)


@pytest.mark.interpreter
@every_function
def test_target_left_out(kind):
    values = torch.randn(4, 700, generator=torch.Generator().manual_seed(1))
    check(values, None, torch.tensor([0, 699, 5, 512]), FUNCTIONS[kind], torch.float32, late=True)


@pytest.mark.interpreter
@every_function
@every_dtype
def test_masks_and_a_masked_target(kind, dtype):
    draw = torch.Generator().manual_seed(2)
    bias = torch.randn(1300, generator=draw)
    bias[::3] = -torch.inf
    bias[512:1100] = -torch.inf
    y = torch.tensor([1, 513, 1298, 0])
    assert bias[y].isneginf().tolist() == [False, True, False, True]
    check(torch.randn(4, 1300, generator=draw), bias, y, FUNCTIONS[kind], dtype)


@pytest.mark.interpreter
@every_dtype
@pytest.mark.parametrize("gap", [10.0, 20.0, 60.0])
def test_confident_rows_keep_their_digits(dtype, gap):
    """The loss is V e^-gap, far below the rounding of the normaliser."""
    from fullrank.ops.mixture import kernels as score_kernels

    scores = torch.zeros(2, 832, dtype=dtype)
    scores[:, 17] = gap
    found = score_kernels.score_rows(scores, None, torch.tensor([17, 17]), IDENTITY, gradient=True)
    odds = 831 * torch.tensor(-gap, dtype=torch.float64).exp()
    torch.testing.assert_close(found.nll.double(), torch.log1p(odds).expand(2), rtol=1e-5, atol=0.0)
    small = 1e-8 if dtype == torch.float16 else 0.0
    torch.testing.assert_close(
        scores[:, 17].double(), (-odds / (1 + odds)).expand(2), rtol=ROUNDING[dtype] + 1e-5, atol=6 * small
    )


@pytest.mark.interpreter
@every_function
def test_extreme_scores(kind):
    values = torch.randn(6, 600, generator=torch.Generator().manual_seed(3))
    values[0] += 1e4
    values[1] -= 1e4
    values[2, 5] = 1e4
    values[3, :599] = -torch.inf
    values[4, 7] = -torch.inf
    f = FUNCTIONS[kind]
    y = torch.tensor([3, 4, 5, 599, 8, 9])
    if kind != "identity":
        # A soft cap lifts -inf to -cap, as the definition does; sigsoftmax of -inf has no slope in autograd.
        values = values.clamp(min=-1e4)
    from fullrank.ops.mixture import kernels as score_kernels

    scores = padded_scores(values, torch.float32, 640)
    want, Q = definition(scores, None, y, f)
    found = score_kernels.score_rows(scores, None, y, f, gradient=True)
    for got, exact in zip(found, want, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=5e-4, atol=1e-6)
    torch.testing.assert_close(scores.double(), Q, rtol=5e-4, atol=1e-7)


@pytest.mark.interpreter
def test_nan_and_infinity_stay_in_their_row():
    from fullrank.ops.mixture import kernels as score_kernels

    values = torch.zeros(4, 600)
    values[1, 30], values[2, 40], values[3] = torch.nan, torch.inf, torch.nan
    scores = padded_scores(values, torch.float32, 640)
    found = score_kernels.score_rows(scores, None, torch.tensor([1, 2, 3, 4]), IDENTITY, gradient=True)
    assert found.nll.isnan().tolist() == [False, True, True, True]
    assert scores[0].isfinite().all()
    assert scores[1:].isnan().all(1).tolist() == [True, True, True]


@pytest.mark.interpreter
@every_function
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("rows", [512, 12, 6], ids=["whole", "halves", "chunks"])
def test_losses_and_gradients(make_problem, tools, monkeypatch, kind, dtype, reduction, rows):
    """The whole loop with the kernel in it."""
    monkeypatch.setattr("fullrank.ops.workspace.MOST_ROWS", {"cpu": rows})
    problem = make_problem(7, 3, 24, 90, kind=kind, dtype=dtype, bias=True, token_weight=True)
    truth = tools.differentiate(problem.to(torch.float64), lambda p: p.plain_nll(reduction))
    plain = tools.differentiate(problem, lambda p: p.plain_nll(reduction))
    fast = tools.differentiate(problem, lambda p: p.nll(reduction=reduction, impl="triton"))
    # Truncation instead of rounding, in the interpreter alone, leaves a bias of half a unit.
    floor = 5e-7 if dtype == torch.float32 else 8e-3
    tools.as_good(fast[0], plain[0], truth[0], floor=5e-7)
    for name, gradient in fast[1].items():
        tools.as_good(gradient, plain[1][name], truth[1][name], floor=floor)


@pytest.mark.interpreter
def test_a_prior_of_one_component_may_be_a_view():
    """The kernel that makes the losses of a softmax reads it by itself."""
    draw = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(9, 1, 8, generator=draw), torch.randn(70, 8, generator=draw)
    targets, wide = torch.randint(70, (9,), generator=draw), torch.randn(9, 4, generator=draw)
    for log_prior in (torch.full((1, 1), -0.5).expand(9, 1), wide[:, 1:2]):
        want, found = (
            mixture_nll(rows, log_prior, weight, targets, impl=impl) for impl in ("chunked", "triton")
        )
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)


@pytest.mark.interpreter
@pytest.mark.parametrize("trained", [("rows",), ("weight",), ("bias",), ("log_prior",), ()], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_some_gradients_and_ignored_tokens(make_problem, tools, trained, reduction):
    problem = make_problem(9, 2, 8, 70, dtype=torch.float32, bias=True, token_weight=True)
    problem.targets[[0, 4]] = -100
    problem.rows[4] = torch.nan
    problem.bias[10:20] = -torch.inf
    problem.targets[5] = 12

    def both(impl):
        if not trained:
            return problem.nll(reduction=reduction, impl=impl), {}
        return tools.differentiate(problem, lambda p: p.nll(reduction=reduction, impl=impl), trained)

    (want, gradients), (loss, found) = both("chunked"), both("triton")
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-6)
    for name in trained:
        torch.testing.assert_close(found[name], gradients[name], rtol=1e-5, atol=1e-6)


@pytest.mark.interpreter
@every_function
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [512, 8], ids=["whole", "chunks"])
def test_skipped_rows(make_problem, tools, monkeypatch, kind, dtype, rows):
    """Rows of small share leave the buffer that the kernel filled, as they leave the plain one."""
    monkeypatch.setattr("fullrank.ops.workspace.MOST_ROWS", {"cpu": rows})
    monkeypatch.setattr("fullrank.ops.workspace.DEVICE_ENOUGH_ROWS", 5)
    monkeypatch.setattr("fullrank.ops.skipping.MOVING_WIDTH", {"cpu": 0})
    problem = make_problem(9, 4, 24, 90, kind=kind, dtype=dtype, bias=True, token_weight=True)
    problem.targets[4] = -100
    truth, exact = (
        tools.differentiate(problem.to(torch.float64), lambda p, skip=skip: p.nll(row_skip=skip))[1]
        for skip in (0.05, 0.0)
    )
    _, found = tools.differentiate(problem, lambda p: p.nll(row_skip=0.05, impl="triton"))
    assert torch.equal(found["rows"] == 0, truth["rows"] == 0)
    assert tools.relative_error(truth["weight"], exact["weight"]) > 1e-3
    for name in ("rows", "log_prior", "weight", "bias"):
        assert tools.relative_error(found[name], truth[name]) < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.interpreter
@pytest.mark.parametrize("lengths", [[5000], [3, 9000], [4097, 0, 2], [1, 4096, 5, 8193], [7] * 5], ids=str)
def test_gradients_are_scaled_together(lengths):
    from fullrank.ops import row_kernels

    draw = torch.Generator().manual_seed(0)
    narrow = [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16]
    given = [torch.randn(length, generator=draw) for length in lengths]
    pairs = [(x.clone(), torch.full_like(x, 9, dtype=d)) for x, d in zip(given, narrow, strict=False)]
    row_kernels.scale_all(pairs, torch.tensor(1.7), 0.3)
    for x, (_, out) in zip(given, pairs, strict=True):
        want = x * (1.7 * 0.3)
        torch.testing.assert_close(out.float(), want, rtol=8e-3 if out.itemsize == 2 else 1e-6, atol=1e-6)


@pytest.mark.interpreter
@pytest.mark.parametrize("rows", [1, 37, 9000])
def test_rows_are_kept_in_their_order(rows):
    from fullrank.ops import row_kernels

    share = torch.rand(rows, generator=torch.Generator().manual_seed(rows)).view(-1, 1)
    share[::7] = torch.nan
    kept, count = row_kernels.keep_rows(share, 0.4)
    want = (~(share[:, 0] <= 0.4)).nonzero()[:, 0]
    assert int(count) == len(want)
    assert torch.equal(kept[: int(count)], want)


@pytest.mark.interpreter
@every_function
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
@pytest.mark.parametrize("rows", [512, 3], ids=["whole", "chunks"])
def test_one_component(make_problem, tools, monkeypatch, kind, weighted, rows):
    """A softmax, whose kernel makes the losses as well; a token that cannot be emitted moves nothing."""
    monkeypatch.setattr("fullrank.ops.workspace.MOST_ROWS", {"cpu": rows})
    problem = make_problem(8, 1, 24, 90, kind=kind, dtype=torch.float32, bias=True, token_weight=weighted)
    problem.bias[5:9] = -torch.inf
    problem.targets[:] = torch.tensor([1, 6, 20, 30, 40, 50, 60, 70])
    problem.log_prior[3] = -torch.inf
    for counted in (None, 2):
        if counted is not None:
            problem.targets[counted] = -100
        trained = ("rows", "weight", "bias")
        (want, right), (loss, found) = (
            tools.differentiate(problem, lambda p, i=impl: p.nll(reduction="sum", impl=i), trained)
            for impl in ("chunked", "triton")
        )
        assert loss == want == torch.inf
        for name in trained:
            torch.testing.assert_close(found[name], right[name], rtol=1e-5, atol=1e-6)
        assert not found["rows"][[1, 3]].any()
        assert found["rows"][0].any()
        with torch.no_grad():
            alone = [problem.nll(reduction="none", impl=impl) for impl in ("chunked", "triton")]
        torch.testing.assert_close(*alone, rtol=1e-6, atol=1e-6)


@pytest.mark.interpreter
@pytest.mark.parametrize("skip", [0.0, 0.05])
def test_ignored_tokens_that_nobody_expected(make_problem, tools, monkeypatch, skip):
    """Work begins as if none were ignored, and is done again; a wrong target raises all the same."""
    problem = make_problem(9, 3, 8, 70, dtype=torch.float32, bias=True)
    problem.targets[[0, 4]] = -100
    problem.rows[4] = torch.nan
    found = {}
    for since in (0, 100):
        monkeypatch.setattr("fullrank.ops.targets._calls_since", since)
        found[since] = tools.differentiate(problem, lambda p: p.nll(impl="triton", row_skip=skip))
    assert torch.equal(found[0][0], found[100][0])
    for name, gradient in found[0][1].items():
        assert torch.equal(gradient, found[100][1][name]), name
        assert gradient.isfinite().all()
    problem.rows[4] = 0.0
    for wrong in (70, 1 << 40, -5):
        problem.targets[4] = wrong
        monkeypatch.setattr("fullrank.ops.targets._calls_since", 100)
        with pytest.raises(FullrankError, match=rf"target {wrong} is outside the vocabulary"):
            problem.nll(impl="triton")


def test_a_call_expects_what_the_last_ones_had(monkeypatch):
    from fullrank.ops.targets import FEW_CALLS, Asked

    monkeypatch.setattr("fullrank.ops.targets._calls_since", FEW_CALLS)
    plain, ignoring = torch.tensor([1, 2]), torch.tensor([1, -100])
    assert Asked(plain, 5, -100).all_expected
    Asked(ignoring, 5, -100).answer()
    for _ in range(FEW_CALLS):
        assert not Asked(plain, 5, -100).all_expected
        Asked(plain, 5, -100).answer()
    assert Asked(plain, 5, -100).all_expected


@pytest.mark.interpreter
def test_nothing_counted_leaves_zeros(make_problem, tools):
    problem = make_problem(5, 2, 8, 70, dtype=torch.float32, bias=True)
    problem.targets[:] = -100
    loss, found = tools.differentiate(problem, lambda p: p.nll(impl="triton"))
    assert loss == 0
    assert not any(gradient.any() for gradient in found.values())


def test_a_slower_path_is_said_once(caplog):
    from fullrank.ops.vocabulary import kernel_serves

    rows = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float64)
    assert [kernel_serves("auto", rows, IDENTITY) for _ in range(3)] == [False] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "on CUDA without its kernels, slower with the same results: " in caplog.text


def test_what_cannot_be_served_says_why(make_problem):
    problem = make_problem(4, 2, 3, 9, dtype=torch.float32)
    if not INTERPRETED:
        why = "the rows are on cpu, expected CUDA" if INSTALLED else "Triton is not installed"
        with pytest.raises(FullrankError, match=rf"impl='triton' cannot serve here: {why}; pass impl='auto'"):
            problem.nll(impl="triton")
        return
    with pytest.raises(FullrankError, match=r"run in torch.float64"):
        problem.to(torch.float64).nll(impl="triton")
    with pytest.raises(FullrankError, match=r"function is plif, expected one of identity"):
        replace(problem, kind="plif", slopes=torch.ones(6)).nll(impl="triton")
    with pytest.raises(FullrankError, match=r"function is capped_sigsoftmax, expected one of identity"):
        replace(problem, kind="capped_sigsoftmax", slopes=torch.ones(1)).nll(impl="triton")
    with pytest.raises(FullrankError, match=r"no argmax and no entropy for return_stats=True"):
        problem.nll(impl="triton", return_stats=True)
    large = make_problem(300, 2, 8, 900, dtype=torch.float32)
    with pytest.raises(FullrankError, match=r"does not hold all V=900 scores"):
        large.nll(impl="triton", workspace=100_000)


def test_a_cpu_never_loads_triton():
    code = (
        "import sys, torch; from fullrank.ops import mixture_nll\n"
        "w = torch.zeros(3, 2, requires_grad=True)\n"
        "mixture_nll(torch.zeros(2, 1, 2), torch.zeros(2, 1), w, torch.tensor([0, 1])).backward()\n"
        "assert 'fullrank.ops.triton_base' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("N", "K", "D", "V", "rows"),
    [(8192, 10, 280, 33278, 12288), (8192, 4, 768, 50304, 12288), (2800, 1, 400, 33278, 2800)],
)
def test_a_device_takes_chunks_of_the_best_size(N, K, D, V, rows):
    """The default workspace of a large device; even chunks may be a little smaller."""
    plan = make_plan(
        N=N, K=K, D=D, V=V, product=torch.bfloat16, device=torch.device("cuda"), tile_buffers=4,
        workspace=2048 * MIB, kernel=True,
    )  # fmt: skip
    assert plan.kernel
    assert 0.8 * rows <= plan.tokens * K <= rows
    assert plan.stride % 64 == 0
    assert V <= plan.stride < V + 64


def test_counted_targets_keep_their_order():
    counted = count_targets(torch.tensor([3, -100, 1, 0, -100, 2]), 4, -100)
    assert counted.count == 4
    assert counted.positions.tolist() == [0, 2, 3, 5]
    assert count_targets(torch.tensor([3, 1]), 4, -100).positions is None


# On CUDA.

cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
on_cuda = [*cuda, pytest.mark.skipif(INTERPRETED, reason="compiled kernels wanted")]


def gpu(*marks):
    def mark(test):
        for each in (*on_cuda, *marks):
            test = each(test)
        return test

    return mark


def draw(N: int, K: int, D: int, V: int, dtype: torch.dtype, scale: float = 3.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(N + K + D + V)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows, weight = normal(N, K, D).to(dtype), (normal(V, D) * D**-0.5 * scale).to(dtype)
    prior = torch.log_softmax(normal(N, K), dim=1).float()
    return [t.cuda() for t in (rows, prior, weight, torch.randint(V, (N,), generator=generator))]


def differentiate(tensors: list[Tensor], targets: Tensor, **options) -> list[Tensor]:
    """Loss and gradients of rows, prior, W and, where it is there, bias."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    rows, prior, weight, *bias = leaves
    loss = mixture_nll(rows, prior, weight, targets, bias=bias[0] if bias else None, **options)
    uneven = torch.linspace(0.5, 1.5, loss.numel(), device="cuda", dtype=loss.dtype).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, uneven)]


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def as_good_as_eager(tensors: list[Tensor], targets: Tensor, floor: float = 1e-6, **options) -> None:
    truth = differentiate([t.double() for t in tensors], targets, **options, impl="reference")
    plain = differentiate(tensors, targets, **options, impl="reference")
    found = differentiate(tensors, targets, **options, impl="triton")
    for got, eager, exact in zip(found, plain, truth, strict=True):
        assert error(got, exact) <= 2 * error(eager, exact) + floor


@gpu(every_function, pytest.mark.parametrize("reduction", ["mean", "none"]), every_dtype)
def test_cuda_as_exact_as_eager(kind, dtype, reduction):
    for V in (5003, 64):
        *tensors, targets = draw(123, 4, 280, V, dtype)
        as_good_as_eager(tensors, targets, pointwise=FUNCTIONS[kind], reduction=reduction)


@gpu(every_function, every_dtype)
def test_cuda_bias_and_masks(kind, dtype):
    *tensors, targets = draw(200, 3, 64, 3001, dtype)
    bias = torch.randn(3001, device="cuda")
    bias[::7] = -torch.inf
    bias[targets] = 0.5
    floor = 1e-6 if dtype == torch.float32 else 2e-3
    as_good_as_eager([*tensors, bias], targets, floor, pointwise=FUNCTIONS[kind])


@gpu(every_function, pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str))
def test_cuda_both_paths_give_the_same_gradients(kind, dtype):
    *tensors, targets = draw(301, 5, 72, 10_001, dtype)
    targets[::9] = -100
    for reduction in ("mean", "none"):
        options = {"pointwise": FUNCTIONS[kind], "reduction": reduction}
        kernel = differentiate(tensors, targets, **options, impl="triton")
        plain = differentiate(tensors, targets, **options, impl="chunked")
        for got, want in zip(kernel, plain, strict=True):
            assert error(got, want) < (1e-5 if dtype == torch.float32 else 5e-3)


@gpu()
def test_cuda_confident_rows_keep_their_digits():
    for gap in (10.0, 20.0, 60.0):
        rows = torch.zeros(6, 1, 8, device="cuda")
        bias = torch.zeros(900, device="cuda")
        bias[3] = gap
        weight = torch.zeros(900, 8, device="cuda")
        targets = torch.full((6,), 3, device="cuda")
        prior = torch.zeros(6, 1, device="cuda")
        leaves = [tensor.requires_grad_() for tensor in (rows, prior, weight, bias)]
        loss = mixture_nll(*leaves[:3], targets, bias=bias, impl="triton")
        d_bias = torch.autograd.grad(loss, leaves)[3]
        odds = 899 * torch.tensor(-gap, dtype=torch.float64).exp()
        assert loss.item() == pytest.approx(torch.log1p(odds).item(), rel=2e-5)
        assert d_bias[3].item() == pytest.approx((-odds / (1 + odds)).item(), rel=2e-5)


@gpu()
def test_cuda_more_scores_than_int32_can_index():
    """One chunk whose last rows lie beyond 2^31 scores: they must be scored, and written, at their place."""
    R, V = 45_056, 50_257
    assert R * V > 2**31
    from fullrank.ops.mixture import kernels as score_kernels

    buffer = torch.zeros(R, padded(V), dtype=torch.bfloat16, device="cuda")
    scores = buffer[:, :V]
    last = torch.randn(3, V, device="cuda").bfloat16()
    scores[-3:] = last
    y = torch.randint(V, (R,), device="cuda")
    want, Q = definition(last.cpu(), None, y[-3:].cpu(), IDENTITY)
    found = score_kernels.score_rows(scores, None, y, IDENTITY, gradient=True)
    for got, exact in zip(found, want, strict=True):
        torch.testing.assert_close(got[-3:].double().cpu(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores[-3:].double().cpu(), Q, rtol=8e-3, atol=1e-7)
    torch.testing.assert_close(
        found.nll[:-3], torch.full((R - 3,), V, device="cuda").log(), rtol=1e-5, atol=0
    )


@gpu(every_function, every_dtype)
def test_cuda_skipped_rows(kind, dtype, monkeypatch):
    """The kernel's buffer loses the rows that the plain one loses; small shares are known to fp32."""
    monkeypatch.setattr("fullrank.ops.skipping.DEVICE_MOVING_WIDTH", 0)
    *tensors, targets = draw(301, 4, 72, 5003, dtype)
    targets[::9] = -100
    options = {"pointwise": FUNCTIONS[kind], "row_skip": 0.1}
    found = differentiate(tensors, targets, **options, impl="triton")
    for want in (
        differentiate(tensors, targets, **options, impl="chunked"),
        differentiate(tensors, targets, **options, impl="chunked", workspace=4 * MIB),
    ):
        assert error(found[0], want[0]) < 1e-5
        for got, exact in zip(found[1:], want[1:], strict=True):
            assert error(got, exact) < (1e-4 if dtype == torch.float32 else 2e-2)
    skipped = (found[1] == 0).all(2)[targets >= 0]
    assert 0.2 < skipped.double().mean() < 0.8


def synchronisations(step) -> int:
    """How often a call makes the host wait for all that the device has to do."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return len([w for w in seen if "synchronizing CUDA operation" in str(w.message)])


@gpu()
def test_cuda_skipping_waits_for_nothing_but_its_counts():
    *tensors, targets = draw(64, 4, 64, 1001, torch.bfloat16)

    def step():
        return differentiate(tensors, targets, impl="triton", row_skip=0.2)

    step()
    torch.cuda.synchronize()
    assert synchronisations(step) == 0


@gpu()
def test_cuda_autocast():
    *tensors, targets = draw(150, 2, 64, 4001, torch.float32)
    truth = differentiate([t.double() for t in tensors], targets, impl="reference")
    with torch.autocast("cuda", torch.bfloat16):
        plain = differentiate(tensors, targets, impl="reference")
        found = differentiate(tensors, targets, impl="triton")
    for got, eager, exact in zip(found, plain, truth, strict=True):
        assert got.dtype == torch.float32
        assert error(got, exact) <= 2 * error(eager, exact) + 1e-6


# Inductor of torch 2.11 uses what torch.jit has deprecated.
@gpu(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
def test_cuda_compiled_caller():
    *tensors, targets = draw(150, 2, 64, 4001, torch.bfloat16)

    def loss_of(rows, prior, weight, targets):
        return mixture_nll(rows * 2.0, prior, weight, targets) + 1.0

    results = []
    exact = [t.double() for t in tensors]
    for function, inputs in (
        (loss_of, exact), (loss_of, tensors), (torch.compile(loss_of, fullgraph=True), tensors)
    ):  # fmt: skip
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        loss = function(*leaves, targets)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    # Inductor rounds to bf16 at other places than eager torch does.
    for truth, eager, compiled in zip(*results, strict=True):
        assert error(compiled, truth) <= 2 * error(eager, truth) + 1e-6


@gpu(pytest.mark.parametrize("weighted", [False, True]))
def test_cuda_graph_of_forward_and_backward(weighted):
    rows, prior, weight, targets = draw(256, 3, 64, 4001, torch.bfloat16)
    leaves = [t.requires_grad_() for t in (rows, prior, weight)]
    token_weight = torch.rand(256, device="cuda") + 0.5 if weighted else None
    skip = 0.3

    def step() -> list[Tensor]:
        loss = mixture_nll(*leaves, targets, token_weight=token_weight, impl="triton", row_skip=skip)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    # A captured graph skips nothing.
    skip = 0.0
    with torch.no_grad():
        rows.copy_(torch.randn_like(rows))
        targets.copy_(torch.randint(4001, (256,), device="cuda"))
        targets[10:20] = -100
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        assert error(got, want) < 1e-3
    targets[3] = 4001
    graph.replay()
    assert captured[0].isnan()


@gpu()
def test_cuda_waits_for_what_it_asked_and_for_nothing_else():
    *tensors, targets = draw(64, 2, 64, 1001, torch.bfloat16)
    bias = torch.zeros(1001, device="cuda")
    for ignored in (False, True):
        if ignored:
            targets[:5] = -100
        differentiate([*tensors, bias], targets, pointwise=SIGSOFTMAX, impl="triton")
        torch.cuda.synchronize()
        waits = synchronisations(
            lambda: differentiate([*tensors, bias], targets, pointwise=SIGSOFTMAX, impl="triton")
        )
        assert waits == 0, "it asks for an event, and for nothing that stops the whole device"


@gpu()
def test_cuda_repeats_itself_bit_for_bit():
    *tensors, targets = draw(300, 3, 64, 4001, torch.bfloat16)
    first, second = (differentiate(tensors, targets, impl="triton") for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
