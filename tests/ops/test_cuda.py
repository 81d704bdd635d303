"""The mixture's kernels at the ends of their range, what they refuse, and the loss on CUDA.

That kernels and definition agree is the matter of `test_matrix.py`, in Triton's interpreter and on CUDA.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.ops import IDENTITY, SIGSOFTMAX, Pointwise, Softcap, mixture_nll
from fullrank.ops.mixture import fused, product
from fullrank.ops.reduce import Statistics, capturing, count_targets
from fullrank.ops.workspace import MIB

# numpy, under the interpreter, warns of what the unused ends of padded rows hold.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"
FUNCTIONS = {"identity": IDENTITY, "sigsoftmax": SIGSOFTMAX, "softcap": Softcap(3.0)}
# Twice the rounding of the stored Q.
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

every_function = pytest.mark.parametrize("kind", FUNCTIONS)
# From how much work on scores leave their product as exponentials.
either_product = pytest.mark.parametrize("work", [0, 10**15], ids=["raised", "passed"])
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


def scored(scores: Tensor, y: Tensor, f: Pointwise) -> Statistics:
    """Statistics of the scores, which become Q."""
    from fullrank.ops.mixture import kernels

    found = Statistics(*(scores.new_empty(scores.shape[0], dtype=torch.float32) for _ in range(3)))
    kernels.score_rows(scores, None, y, f, places=found, gradient=True)
    return found


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
    scores = padded_scores(values, torch.float32, 640)
    want, Q = definition(scores, None, y, f)
    found = scored(scores, y, f)
    for got, exact in zip(found, want, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=5e-4, atol=1e-6)
    torch.testing.assert_close(scores.double(), Q, rtol=5e-4, atol=1e-7)


@pytest.mark.interpreter
def test_nan_and_infinity_stay_in_their_row():
    values = torch.zeros(4, 600)
    values[1, 30], values[2, 40], values[3] = torch.nan, torch.inf, torch.nan
    scores = padded_scores(values, torch.float32, 640)
    found = scored(scores, torch.tensor([1, 2, 3, 4]), IDENTITY)
    assert found.nll.isnan().tolist() == [False, True, True, True]
    assert scores[0].isfinite().all()
    assert scores[1:].isnan().all(1).tolist() == [True, True, True]


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
def test_nothing_counted_leaves_zeros(make_problem, tools):
    problem = make_problem(5, 2, 8, 70, dtype=torch.float32, bias=True)
    problem.targets[:] = -100
    loss, found = tools.differentiate(problem, lambda p: p.nll(impl="triton"))
    assert loss == 0
    assert not any(gradient.any() for gradient in found.values())


def test_a_slower_path_is_said_once(caplog):
    from fullrank.ops.triton_base import refuse_or_say

    assert [refuse_or_say("auto", "the products run in no dtype") for _ in range(3)] == [False] * 3
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


@pytest.mark.parametrize(
    ("N", "K", "D", "V", "rows"),
    [(8192, 10, 280, 33278, 12288), (8192, 4, 768, 50304, 12288), (2800, 1, 400, 33278, 2800)],
)
def test_a_device_takes_chunks_of_the_best_size(N, K, D, V, rows):
    """The default workspace of a large device; even chunks may be a little smaller."""
    tokens = fused.chunk_tokens(N=N, K=K, D=D, V=V, product=torch.bfloat16, workspace=2048 * MIB)
    assert 0.8 * rows <= tokens * K <= rows
    assert fused.padded(V) % 64 == 0
    assert V <= fused.padded(V) < V + 64


def test_whether_a_graph_is_captured_is_asked_of_the_tensors_device(monkeypatch):
    """Not of the current device, which may be another one."""
    current = [0]

    @contextlib.contextmanager
    def device(where):
        before, current[0] = current[0], where.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == 1)
    found = [capturing(SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))) for index in (0, 1)]
    assert found == [False, True]
    assert not capturing(torch.zeros(1))
    assert current == [0]


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


@gpu(every_function, pytest.mark.parametrize("reduction", ["mean", "none"]), every_dtype, either_product)
def test_cuda_as_exact_as_eager(kind, dtype, reduction, work, monkeypatch):
    monkeypatch.setattr(fused, "ENOUGH_WORK", work)
    for V in (5003, 64):
        *tensors, targets = draw(123, 4, 280, V, dtype)
        as_good_as_eager(tensors, targets, pointwise=FUNCTIONS[kind], reduction=reduction)


@gpu(every_function, every_dtype, either_product)
def test_cuda_bias_and_masks(kind, dtype, work, monkeypatch):
    monkeypatch.setattr(fused, "ENOUGH_WORK", work)
    *tensors, targets = draw(200, 3, 64, 3001, dtype)
    bias = torch.randn(3001, device="cuda")
    bias[::7] = -torch.inf
    bias[targets] = 0.5
    floor = 1e-6 if dtype == torch.float32 else 2e-3
    as_good_as_eager([*tensors, bias], targets, floor, pointwise=FUNCTIONS[kind])


@gpu(
    every_function, pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str), either_product
)
def test_cuda_both_paths_give_the_same_gradients(kind, dtype, work, monkeypatch):
    monkeypatch.setattr(fused, "ENOUGH_WORK", work)
    *tensors, targets = draw(301, 5, 72, 10_001, dtype)
    targets[::9] = -100
    for reduction in ("mean", "none"):
        options = {"pointwise": FUNCTIONS[kind], "reduction": reduction}
        kernel = differentiate(tensors, targets, **options, impl="triton")
        plain = differentiate(tensors, targets, **options, impl="chunked")
        exact = differentiate([t.double() for t in tensors], targets, **options, impl="reference")
        for got, want, right in zip(kernel, plain, exact, strict=True):
            if dtype == torch.float32:
                assert error(got, want) < 1e-5
            # The products' own rounding differs, and no more may; where scores stay in fp32 losses are exact.
            assert error(got, right) <= 1.25 * error(want, right) + 1e-6


@gpu()
def test_cuda_more_scores_than_int32_can_index():
    """One chunk whose last rows lie beyond 2^31 scores: they must be scored, and written, at their place."""
    R, V = 45_056, 50_257
    assert R * V > 2**31
    buffer = torch.zeros(R, fused.padded(V), dtype=torch.bfloat16, device="cuda")
    scores = buffer[:, :V]
    last = torch.randn(3, V, device="cuda").bfloat16()
    scores[-3:] = last
    y = torch.randint(V, (R,), device="cuda")
    want, Q = definition(last.cpu(), None, y[-3:].cpu(), IDENTITY)
    found = scored(scores, y, IDENTITY)
    for got, exact in zip(found, want, strict=True):
        torch.testing.assert_close(got[-3:].double().cpu(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores[-3:].double().cpu(), Q, rtol=8e-3, atol=1e-7)
    torch.testing.assert_close(
        found.nll[:-3], torch.full((R - 3,), V, device="cuda").log(), rtol=1e-5, atol=0
    )


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
def test_cuda_graph_of_forward_and_backward(weighted, monkeypatch):
    # A graph has the product of `product.py` at any size: the call beside it too.
    monkeypatch.setattr(fused, "ENOUGH_WORK", 0)
    rows, prior, weight, targets = draw(256, 3, 64, 4001, torch.bfloat16)
    leaves = [t.requires_grad_() for t in (rows, prior, weight)]
    token_weight = torch.rand(256, device="cuda") + 0.5 if weighted else None

    def step() -> list[Tensor]:
        loss = mixture_nll(*leaves, targets, token_weight=token_weight, impl="triton")
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
        assert waits == 0, "it waits for the copy of the targets, and for nothing that stops the whole device"


@gpu()
def test_cuda_repeats_itself_bit_for_bit():
    *tensors, targets = draw(300, 3, 64, 4001, torch.bfloat16)
    first, second = (differentiate(tensors, targets, impl="triton") for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@gpu()
def test_cuda_every_tile_makes_the_same_exponentials():
    rows, _, weight, targets = draw(300, 1, 72, 640, torch.bfloat16)
    rows, exact = rows[:, 0], rows[:, 0].double() @ weight.double().t()
    for tile in product.TILES:
        places = Statistics(*(torch.empty(300, device="cuda") for _ in range(3)))
        out = rows.new_empty(300, 640)
        product.raise_rows(
            rows, weight, None, targets, IDENTITY, places=places, out=out, V=640, tile=tile
        )  # fmt: skip
        found = out.double().scatter(
            1, targets[:, None], (places.target - places.maximum)[:, None].exp().double()
        )
        found /= places.others[:, None] + (places.target - places.maximum)[:, None].exp()
        torch.testing.assert_close(found, exact.softmax(1), rtol=2**-8, atol=1e-9)
    assert product.measured_tile(torch.device("cuda", 0), 640, 72) in (None, *product.TILES)
