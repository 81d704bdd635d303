"""Rows that share a trunk against whole rows; the kernels in Triton's interpreter and on CUDA."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.ops import mixture_nll, trunk_nll
from fullrank.ops.products import Needs
from fullrank.ops.trunk.operator import trunk_mixture

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAMES = ("trunk", "private", "log_prior", "weight", "bias")
TOLERANCE = {torch.float64: 1e-11, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def problem(
    *, N: int = 7, K: int = 3, shared: int = 5, r: int = 4, V: int = 37, device: str = "cpu", seed: int = 0
) -> dict[str, Tensor]:
    """In fp64; the weights have unit scores."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(device)

    return {
        "trunk": normal(N, shared),
        "private": normal(N, K, r),
        "log_prior": normal(N, K).log_softmax(1),
        "weight": normal(V, shared + r) / (shared + r) ** 0.5 * 2,
        "bias": normal(V),
        "targets": torch.randint(V, (N,), generator=draw).to(device),
    }


def leaves(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: tensor.to(
            tensor.dtype
            if name == "targets"
            else torch.float32
            if name == "log_prior" and dtype != torch.float64
            else dtype
        )
        .clone()
        .requires_grad_(name != "targets")
        for name, tensor in inputs.items()
    }


def by_rows(given: dict[str, Tensor], **options) -> Tensor:
    """The definition: every row written out."""
    private = given["private"]
    trunk = given["trunk"][:, None].expand(-1, private.shape[1], -1)
    rows = torch.cat([trunk, private], dim=2)
    return mixture_nll(
        rows, given["log_prior"], given["weight"], given["targets"], bias=given.get("bias"),
        impl="reference", **options,
    )  # fmt: skip


def by_trunk(given: dict[str, Tensor], **options) -> Tensor:
    return trunk_nll(
        given["trunk"], given["private"], given["log_prior"], given["weight"], given["targets"],
        bias=given.get("bias"), **options,
    )  # fmt: skip


def compare(
    inputs: dict[str, Tensor], dtype: torch.dtype, *, how: dict, bound: float | None = None, **options
) -> None:
    """Loss and every gradient against the definition in fp64 on the same rounded inputs."""
    mine = leaves(inputs, dtype)
    exact = leaves({name: tensor.detach() for name, tensor in mine.items()}, torch.float64)
    loss = by_trunk(mine, **how, **options)
    want = by_rows(exact, **options)
    bound = TOLERANCE[dtype] if bound is None else bound
    torch.testing.assert_close(loss.double(), want, rtol=bound, atol=bound)
    upstream = torch.ones_like(loss) if loss.ndim else torch.tensor(1.7, dtype=loss.dtype, device=loss.device)
    loss.backward(upstream)
    want.backward(upstream.double())
    for name in NAMES:
        if name in mine:
            got, right = mine[name].grad, exact[name].grad
            assert got.dtype == mine[name].dtype
            error = (got.double() - right).norm() / right.norm().clamp(min=1e-30)
            assert error < bound, (name, float(error))


@pytest.mark.parametrize("workspace", [None, 8192], ids=["whole", "chunks"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("biased", [True, False])
def test_equals_the_mixture_of_whole_rows(workspace, reduction, biased):
    inputs = problem()
    if not biased:
        del inputs["bias"]
    compare(inputs, torch.float64, how={"impl": "chunked", "workspace": workspace}, reduction=reduction)


@pytest.mark.parametrize("K", [1, 2, 6])
@pytest.mark.parametrize("r", [1, 9])
def test_any_number_and_width_of_private_parts(K, r):
    compare(problem(K=K, r=r, seed=K), torch.float64, how={"impl": "chunked"})


def test_nothing_shared_is_a_mixture_of_rows():
    compare(problem(shared=0), torch.float64, how={})


def test_ignored_tokens_and_weights_count_as_in_a_mixture():
    inputs = problem(N=9)
    inputs["targets"][[0, 4, 8]] = -100
    inputs["trunk"][4] = torch.nan
    mine, exact = leaves(inputs, torch.float64), leaves(inputs, torch.float64)
    exact["trunk"] = inputs["trunk"].nan_to_num().requires_grad_()
    weight = torch.linspace(0.0, 2.0, 9, dtype=torch.float64)
    loss = by_trunk(mine, token_weight=weight)
    want = by_rows(exact, token_weight=weight)
    torch.testing.assert_close(loss, want)
    loss.backward()
    want.backward()
    for name in NAMES:
        torch.testing.assert_close(mine[name].grad, exact[name].grad, msg=name)
    assert not mine["trunk"].grad[[0, 4, 8]].any()


def test_masked_entries_and_a_masked_target():
    inputs = problem()
    inputs["bias"][::3] = -torch.inf
    inputs["targets"][:] = torch.tensor([1, 2, 4, 5, 7, 8, 10])
    compare(inputs, torch.float64, how={"impl": "chunked"})
    inputs["targets"][2] = 3
    assert by_trunk(inputs, reduction="none")[2] == torch.inf
    assert torch.isfinite(by_trunk(inputs, reduction="none")).tolist() == [True, True, False, *[True] * 4]


def test_evaluation_makes_the_same_losses_without_gradients():
    inputs = problem(N=30)
    with torch.no_grad():
        alone = by_trunk(inputs, reduction="none", workspace=16384)
    torch.testing.assert_close(alone, by_rows(inputs, reduction="none"))


def test_the_operator_is_one_for_torch():
    """Fakes, mutation and autograd registration, as torch checks them."""
    given = leaves(problem(), torch.float64)
    arguments = [given[name] for name in ("trunk", "private", "log_prior", "weight", "targets", "bias")]
    needs = list(Needs(rows=True, prior=True, weight=True, bias=True))
    torch.library.opcheck(
        trunk_mixture, (*arguments, None, True, -100, needs, torch.float64, None, "chunked"),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip


def test_a_second_backward_pass_makes_the_gradients_again():
    given = leaves(problem(), torch.float64)
    loss = by_trunk(given)
    loss.backward(retain_graph=True)
    once = given["weight"].grad.clone()
    loss.backward()
    torch.testing.assert_close(given["weight"].grad, 2 * once)


def test_shapes_and_room_are_checked():
    given = problem()
    with pytest.raises(FullrankError, match=r"expected \[N, D - r\] and \[N, K, r\]"):
        trunk_nll(given["trunk"], given["private"][:3], given["log_prior"], given["weight"], given["targets"])
    with pytest.raises(FullrankError, match="expected \\[V, D\\] with V >= 1 and D=10"):
        trunk_nll(
            given["trunk"], torch.cat([given["private"], given["private"][..., :1]], 2), given["log_prior"],
            given["weight"], given["targets"],
        )  # fmt: skip
    with pytest.raises(FullrankError, match="pass workspace="):
        by_trunk(given, workspace=100)
    if not torch.cuda.is_available() and not INTERPRETED:
        with pytest.raises(FullrankError, match="impl='triton' cannot serve here"):
            by_trunk(given, impl="triton")


@pytest.mark.interpreter
@pytest.mark.parametrize("what", ["first masked", "all far above the first", "all far below", "one entry"])
def test_kernels_find_the_maximum_where_the_first_entries_do_not_tell(what):
    """Sums are relative to the first 64 entries: the others may be anywhere."""
    inputs = problem(N=6, V=1 if what == "one entry" else 200)
    if what == "first masked":
        inputs["bias"][:80] = -torch.inf
        inputs["bias"][80:] += 100.0
        inputs["targets"][:] = torch.arange(80, 86)
    elif what == "all far above the first":
        inputs["bias"][100:] += 100.0
    elif what == "all far below":
        inputs["bias"][3:] -= 100.0
    # Near 100 fp16 knows a score to 1/32.
    compare(inputs, torch.float16, how={"impl": "triton"}, bound=0.02)


def compiled_equals_eager(inputs: dict[str, Tensor], dtype: torch.dtype, **how) -> None:
    torch.compiler.reset()
    mine, other = leaves(inputs, dtype), leaves(inputs, dtype)
    compiled = torch.compile(by_trunk, fullgraph=True, **how)
    for given, call in ((mine, compiled), (other, by_trunk)):
        call(given).backward()
    for name in NAMES:
        torch.testing.assert_close(mine[name].grad, other[name].grad, rtol=1e-2, atol=1e-6)


def test_a_compiler_takes_it_whole():
    compiled_equals_eager(problem(), torch.float64, backend="aot_eager")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_cuda_a_compiler_takes_it_whole():
    compiled_equals_eager(problem(N=64, shared=64, r=16, V=500, device="cuda"), torch.bfloat16)


@pytest.mark.interpreter
def test_kernels_on_a_row_without_entries():
    """Every entry masked for a token that has nothing: infinite loss, no gradient, and no harm to others."""
    inputs = problem(N=5, V=90)
    inputs["bias"][10:] = -torch.inf
    inputs["targets"][:] = torch.tensor([1, 2, 50, 4, 5])
    mine = leaves(inputs, torch.float16)
    loss = by_trunk(mine, impl="triton", reduction="sum")
    assert loss == torch.inf
    loss.backward()
    assert all(mine[name].grad.isfinite().all() for name in NAMES)
    assert not mine["private"].grad[2].any()
    assert mine["private"].grad[1].any()


@pytest.mark.interpreter
def test_kernels_under_autocast():
    inputs = {
        name: value.float() if value.is_floating_point() else value for name, value in problem().items()
    }
    mine, rows = leaves(inputs, torch.float32), leaves(inputs, torch.float32)
    exact = leaves(inputs, torch.float64)
    with torch.autocast("cpu", torch.float16):
        loss, whole = by_trunk(mine, impl="triton"), by_rows(rows)
    for each in (loss, whole, by_rows(exact)):
        each.backward()
    for name in NAMES:
        assert mine[name].grad.dtype == torch.float32
        right = exact[name].grad
        error, eager = ((each[name].grad.double() - right).norm() / right.norm() for each in (mine, rows))
        assert error < 2 * eager + 1e-3, (name, float(error), float(eager))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"N": 300, "K": 4, "shared": 128, "r": 64, "V": 5000},
        {"N": 129, "K": 3, "shared": 60, "r": 20, "V": 1001},
        {"N": 200, "K": 2, "shared": 64, "r": 128, "V": 3000},
    ],
)
def test_cuda_kernels(dtype, sizes):
    """Error against fp64 at most twice that of the same rows written out in the same dtype, plus a floor."""
    inputs = problem(**sizes, device="cuda")
    mine, rows = leaves(inputs, dtype), leaves(inputs, dtype)
    exact = leaves({name: tensor.detach() for name, tensor in mine.items()}, torch.float64)
    losses = by_trunk(mine, impl="triton"), by_rows(rows), by_rows(exact)
    for loss in losses:
        loss.backward()
    found, eager_loss, right_loss = (loss.item() for loss in losses)
    assert abs(found - right_loss) < 2 * abs(eager_loss - right_loss) + 1e-3
    for name in NAMES:
        right = exact[name].grad
        error, eager = ((each[name].grad.double() - right).norm() / right.norm() for each in (mine, rows))
        assert error < 2 * eager + 1e-3, (name, float(error), float(eager))


@pytest.mark.gpu
def test_cuda_autocast():
    mine = leaves(problem(N=100, K=4, shared=64, r=64, V=1000, device="cuda"), torch.float32)
    rows = leaves({name: tensor.detach() for name, tensor in mine.items()}, torch.float32)
    exact = leaves({name: tensor.detach() for name, tensor in mine.items()}, torch.float64)
    with torch.autocast("cuda", torch.bfloat16):
        losses = by_trunk(mine), by_rows(rows)
    for loss in (*losses, by_rows(exact)):
        loss.backward()
    for name in NAMES:
        right = exact[name].grad
        error, eager = ((each[name].grad.double() - right).norm() / right.norm() for each in (mine, rows))
        assert error < 2 * eager + 1e-3, (name, float(error), float(eager))


@pytest.mark.gpu
def test_cuda_graph_of_a_trunk():
    inputs = leaves(problem(N=256, K=4, shared=64, r=64, V=2000, device="cuda"), torch.bfloat16)

    def step() -> Tensor:
        loss = by_trunk(inputs, impl="triton")
        return torch.cat(
            [part.flatten() for part in torch.autograd.grad(loss, [inputs[name] for name in NAMES])]
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            eager = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = step()
    graph.replay()
    torch.testing.assert_close(gradients, eager)
