"""Log-probabilities at ids, entropy and divergences: what they are, what they cost, what they refuse.

The differential matrix (`test_matrix.py`) holds their values and gradients against fp64 written out by hand.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullrank.errors import FullrankError
from fullrank.ops import Mixture, TopTokens, divergence, entropy, mixture_nll, token_logprobs
from fullrank.ops.distil import reference
from fullrank.ops.pointwise import IDENTITY
from fullrank.ops.workspace import MIB

KINDS = ("forward", "reverse", "jensen_shannon")
PLAIN = {"impl": "chunked"}


def teacher_of(problem: Any, components: int = 2, seed: int = 5) -> Mixture:
    draw = torch.Generator().manual_seed(seed)
    N, (V, D), dtype = problem.rows.shape[0], problem.weight.shape, problem.rows.dtype
    rows = torch.randn(N, components, D + 1, generator=draw, dtype=torch.float64)
    weight = torch.randn(V, D + 1, generator=draw, dtype=torch.float64)
    prior = torch.randn(N, components, generator=draw, dtype=torch.float64).log_softmax(1)
    return Mixture(
        rows.to(dtype), prior.to(torch.float64 if dtype == torch.float64 else torch.float32), weight.to(dtype)
    )


def student_of(problem: Any) -> Mixture:
    return Mixture(problem.rows, problem.log_prior, problem.weight, problem.bias, problem.pointwise)


def parts(problem: Any) -> tuple[Tensor, Tensor, Tensor]:
    return problem.rows, problem.log_prior, problem.weight


def options(problem: Any, **more: Any) -> dict[str, Any]:
    return {"bias": problem.bias, "pointwise": problem.pointwise, **more}


# Half a second each: one component at one temperature here, several at the other, and what is written out as
# it is defined, which torch differentiates, in the slow tier.
@pytest.mark.parametrize("impl", ["chunked", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("K", "temperature"),
    [(1, 1.0), (3, 0.5), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1, 0.5), (3, 1.0)))],
)
@pytest.mark.parametrize("kind", ["identity", "sigsoftmax", "softcap", "plif", "capped_sigsoftmax"])
def test_gradients_by_finite_differences(make_problem, K, kind, temperature, impl):
    problem = make_problem(N=3, K=K, D=3, V=7, kind=kind, bias=True).leaves()
    inputs = [
        each
        for each in (problem.rows, problem.log_prior, problem.weight, problem.bias, problem.slopes)
        if each is not None
    ]
    teacher, common = teacher_of(problem), {"temperature": temperature, "impl": impl}
    ids = torch.tensor([[0, 6], [3, 3], [2, -100]])
    top = TopTokens(ids, torch.tensor([[0.5, 0.2], [0.3, 0.3], [0.8, 0.1]], dtype=torch.float64).log())

    def outputs(*_: Tensor) -> tuple[Tensor, ...]:
        # Leaves are shared, and gradcheck moves them in place; f is made anew of its parameters.
        given = options(problem, **common)
        return (
            token_logprobs(*parts(problem), ids, **given),
            entropy(*parts(problem), **given),
            *(divergence(*parts(problem), teacher, kind=each, **given) for each in KINDS),
            *(divergence(*parts(problem), top, kind=each, reduction="none", **given) for each in KINDS),
        )

    torch.autograd.gradcheck(outputs, inputs, atol=1e-6, nondet_tol=1e-12, fast_mode=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions_weigh_tokens_as_the_loss_does(make_problem, tools, reduction):
    """Also what carries no number counts nothing, and a second backward pass finds the same."""
    problem = make_problem(token_weight=True)
    problem.token_weight[2] = 0.0
    problem.rows[2] = torch.nan
    problem.log_prior[2] = torch.nan
    teacher = teacher_of(problem)
    teacher.rows[2] = torch.nan
    weight = problem.token_weight
    for kind in ("entropy", *KINDS):
        found = []
        for impl in ("chunked", "reference"):
            leaves = problem.leaves()
            given = options(leaves, token_weight=weight, reduction=reduction, impl=impl)
            if kind == "entropy":
                loss = entropy(*parts(leaves), **given)
            else:
                loss = divergence(*parts(leaves), teacher, kind=kind, **given)
            upstream = torch.linspace(-1.0, 2.0, 7, dtype=loss.dtype) if loss.ndim else torch.tensor(1.7)
            wanted = [leaves.rows, leaves.log_prior, leaves.weight]
            once = torch.autograd.grad(loss, wanted, upstream.to(loss.dtype), retain_graph=True)
            again = torch.autograd.grad(loss, wanted, upstream.to(loss.dtype))
            for one, two in zip(once, again, strict=True):
                torch.testing.assert_close(one, two)
            found.append((loss, *once))
        for fast, plain in zip(*found, strict=True):
            torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-12)


def test_log_probabilities_are_the_loss_at_the_target(make_problem):
    problem = make_problem(N=9, K=4, V=31, dtype=torch.float32, bias=True)
    nll = problem.nll(reduction="none")
    at = token_logprobs(*parts(problem), problem.targets[:, None], **options(problem))
    torch.testing.assert_close(-at[:, 0], nll)


@pytest.mark.parametrize("K", [1, 3])
def test_the_same_ids_at_every_token_and_ids_that_are_there_twice(make_problem, K):
    problem = make_problem(K=K)
    table = reference.log_probs(student_of(problem))
    ids = torch.tensor([4, 0, 4, 10])
    torch.testing.assert_close(token_logprobs(*parts(problem), ids), table[:, ids])
    every = torch.arange(11).expand(7, -1)
    torch.testing.assert_close(token_logprobs(*parts(problem), every), table)


def test_uniform_and_sure_distributions():
    weight = torch.zeros(37, 4)
    found = entropy(torch.randn(3, 2, 4), torch.zeros(3, 2), weight)
    assert float(found) == pytest.approx(math.log(37), rel=1e-6)
    sure = torch.zeros(37)
    sure[5] = 60.0
    rest = 36 * math.exp(-60.0)
    found = entropy(torch.zeros(1, 1, 4), torch.zeros(1, 1), weight, bias=sure)
    assert float(found) == pytest.approx(rest * (60.0 + 1.0), rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    K=st.integers(1, 3),
    J=st.integers(1, 3),
    scale=st.floats(0.1, 6.0),
    T=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_what_divergences_are(seed, K, J, scale, T):
    """None is negative, none is of a thing to itself, and Jensen-Shannon is the same from both sides."""
    draw = torch.Generator().manual_seed(seed)

    def one(components: int) -> Mixture:
        rows = torch.randn(4, components, 5, generator=draw) * scale
        return Mixture(
            rows,
            torch.randn(4, components, generator=draw).log_softmax(1),
            torch.randn(23, 5, generator=draw),
        )

    def between(one: Mixture, other: Mixture, kind: str) -> Tensor:
        return divergence(*one[:3], other, kind=kind, temperature=T, reduction="none")

    first, second = one(K), one(J)
    for kind in KINDS:
        assert bool((between(first, second, kind) >= -1e-6).all())
        torch.testing.assert_close(between(first, first, kind), torch.zeros(4), rtol=0, atol=2e-6)
    there, back = between(first, second, "jensen_shannon"), between(second, first, "jensen_shannon")
    torch.testing.assert_close(there, back, rtol=1e-4, atol=2e-6)
    assert bool((there <= math.log(2) + 1e-6).all())
    torch.testing.assert_close(
        between(first, second, "forward"), between(second, first, "reverse"), rtol=1e-4, atol=1e-5
    )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), m=st.integers(1, 23))
def test_a_lumped_teacher_knows_less(seed, m):
    """Lumping never adds to a divergence, and a teacher of all V tokens is the teacher itself."""
    draw = torch.Generator().manual_seed(seed)
    student, teacher = (
        Mixture(
            torch.randn(4, K, 5, generator=draw, dtype=torch.float64),
            torch.randn(4, K, generator=draw, dtype=torch.float64).log_softmax(1),
            torch.randn(23, 5, generator=draw, dtype=torch.float64),
        )
        for K in (2, 1)
    )
    log_q, ids = reference.log_probs(teacher).topk(m, dim=1)
    for kind in KINDS:
        lumped = divergence(*student[:3], TopTokens(ids, log_q), kind=kind, reduction="none")
        whole = divergence(*student[:3], teacher, kind=kind, reduction="none")
        assert bool((lumped <= whole + 1e-9).all())
        if m == 23 and kind != "reverse":
            torch.testing.assert_close(lumped, whole, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("K", [1, 3])
def test_temperature_is_that_of_the_distribution(make_problem, K):
    """p^(1/T), normalised, as transformers' samplers have it; for one component the scores over T."""
    problem = make_problem(K=K)
    table = (reference.log_probs(student_of(problem)) / 2.5).log_softmax(1)
    ids = torch.arange(11)
    torch.testing.assert_close(token_logprobs(*parts(problem), ids, temperature=2.5), table)
    found = entropy(*parts(problem), temperature=2.5, reduction="none")
    torch.testing.assert_close(found, -(table.exp() * table).sum(1))
    if K == 1:
        colder = token_logprobs(problem.rows / 2.5, problem.log_prior, problem.weight, ids)
        torch.testing.assert_close(colder, table)


def test_a_teacher_has_no_gradient_and_keeps_no_graph(make_problem):
    problem = make_problem().leaves()
    teacher = teacher_of(problem)
    rows = teacher.rows.requires_grad_()
    divergence(*parts(problem), teacher._replace(rows=rows * 1.0)).backward()
    assert rows.grad is None
    assert problem.rows.grad is not None


class Work(TorchDispatchMode):
    """Counts the matrix products, and records the sizes of the tensors that operations allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.allocated = 0, set[int]()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {each.untyped_storage() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = call(*args, **(kwargs or {}))
        self.products += call.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        new = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.allocated |= {each.numel() for each in new if each.untyped_storage() not in before}
        return result


@pytest.mark.parametrize("ask", ["ids", "entropy", *KINDS, "top"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_parameters_cost_no_gradients_where_none_are_recorded(make_problem, context, reduction, ask):
    """One product of the student's size and one of the teacher's; no gradient of W is allocated."""
    problem = make_problem(bias=True, kind="plif").leaves()
    V, D = problem.weight.shape
    teacher = teacher_of(problem)
    top = TopTokens(torch.arange(2).expand(7, 2), torch.full((7, 2), -2.0, dtype=torch.float64))
    common = options(problem, **({} if ask == "ids" else {"reduction": reduction}))
    with context(), Work() as work:
        if ask == "ids":
            token_logprobs(*parts(problem), torch.arange(2), **common)
        elif ask == "entropy":
            entropy(*parts(problem), **common)
        elif ask == "top":
            divergence(*parts(problem), top, **common)
        else:
            divergence(*parts(problem), teacher, kind=ask, **common)
    assert work.products == (2 if ask in KINDS else 1)
    assert V * D not in work.allocated


def test_support_that_the_student_lacks_is_an_infinite_loss_without_gradient(make_problem):
    problem = make_problem(bias=True).leaves()
    with torch.no_grad():
        problem.bias[3] = -torch.inf
    loss = divergence(*parts(problem), teacher_of(problem), bias=problem.bias)
    loss.backward()
    assert loss.item() == math.inf
    assert float(problem.weight.grad.abs().sum()) == 0.0
    there = divergence(*parts(problem), teacher_of(problem), kind="reverse", bias=problem.bias)
    assert math.isfinite(there.item())


@pytest.mark.parametrize("kind", KINDS)
def test_entries_that_are_masked_in_both_do_not_count(make_problem, kind):
    """And a teacher that cannot say what the student can is infinitely far the other way."""
    problem = make_problem(V=13, bias=True)
    keep = torch.arange(13) != 3
    teacher = teacher_of(problem)
    masked = torch.zeros(13, dtype=torch.float64).masked_fill(~keep, -torch.inf)
    found, smaller = (
        divergence(rows, prior, weight, taught, kind=kind, bias=bias)
        for rows, prior, weight, bias, taught in (
            (*parts(problem), problem.bias + masked, teacher._replace(bias=masked)),
            (
                problem.rows, problem.log_prior, problem.weight[keep], problem.bias[keep],
                teacher._replace(weight=teacher.weight[keep]),
            ),
        )
    )  # fmt: skip
    torch.testing.assert_close(found, smaller)
    apart = divergence(*parts(problem), teacher._replace(bias=masked), kind=kind, bias=problem.bias)
    assert (apart.item() == math.inf) == (kind == "reverse")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiler_leaves_the_calls_as_they_are(make_problem):
    problem = make_problem().leaves()
    teacher = teacher_of(problem)

    def loss(rows: Tensor) -> Tensor:
        rows = rows * 2.0
        at = token_logprobs(rows, problem.log_prior, problem.weight, problem.targets[:, None])
        return divergence(rows, problem.log_prior, problem.weight, teacher) - at.mean()

    compiled = torch.compile(loss, backend="eager")
    plain, found = (torch.autograd.grad(each(problem.rows), problem.rows)[0] for each in (loss, compiled))
    torch.testing.assert_close(found, plain)


def test_no_tokens(make_problem):
    problem = make_problem(N=0).leaves()
    for loss in (entropy(*parts(problem)), divergence(*parts(problem), teacher_of(problem))):
        loss.backward()
        assert loss.item() == 0.0
    assert token_logprobs(*parts(problem), torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3)


def test_once_differentiable_and_traced_by_nobody(make_problem):
    problem = make_problem().leaves()
    found = entropy(*parts(problem))
    with pytest.raises(FullrankError, match="reference"):
        torch.autograd.grad(found, problem.rows, create_graph=True)
    with pytest.raises(FullrankError, match=r"torch\.func"):
        torch.func.grad(lambda rows: entropy(rows, problem.log_prior, problem.weight))(problem.rows.detach())
    torch.func.grad(lambda rows: entropy(rows, problem.log_prior, problem.weight, impl="reference"))(
        problem.rows.detach()
    )
    first = torch.autograd.grad(entropy(*parts(problem), impl="reference"), problem.rows, create_graph=True)[
        0
    ]
    assert torch.autograd.grad(first.square().sum(), problem.rows)[0].isfinite().all()


@pytest.mark.parametrize("ask", ["ids", "entropy", *KINDS, "top"])
@pytest.mark.parametrize(
    ("K", "dtype"),
    # A second each: several components, and half precision, are both in the last.
    [(1, torch.float32), pytest.param(4, torch.float32, marks=pytest.mark.slow), (2, torch.bfloat16)],
    ids=str,
)
def test_workspace_bounds_memory(make_problem, tools, dtype, K, ask):
    N, V, workspace = 64, 8009, 5 * MIB
    problem = make_problem(N=N, K=K, D=16, V=V, dtype=dtype).leaves(("rows", "log_prior", "weight"))
    teacher = teacher_of(problem, 2)
    ids = torch.arange(N * 8).view(N, 8)
    top = TopTokens(ids, torch.full((N, 8), 0.1).log())

    def step() -> Tensor:
        given = {"workspace": workspace}
        if ask == "ids":
            loss = token_logprobs(*parts(problem), ids, **given).sum()
        elif ask == "entropy":
            loss = entropy(*parts(problem), reduction="none", **given).sum()
        elif ask == "top":
            loss = divergence(*parts(problem), top, **given)
        else:
            loss = divergence(*parts(problem), teacher, kind=ask, reduction="none", **given).sum()
        loss.backward()
        return loss

    # W's gradient is summed in fp32, and then there is one in its own dtype.
    made = sum(
        each.numel() * (4 + each.itemsize) for each in (problem.rows, problem.log_prior, problem.weight)
    )
    small = N * K * 8 * 8 * 24  # ids, their log-probabilities and what autograd keeps of them
    extra = tools.peak_bytes(step) - made - small
    assert extra <= workspace, f"{extra / MIB:.1f} MiB"
    assert workspace < N * V * 4 * 3  # a table would not fit


def test_a_workspace_that_holds_no_token_says_what_would(make_problem):
    problem = make_problem(N=3, K=4, D=8, V=20000, dtype=torch.float32)
    with pytest.raises(FullrankError, match="pass workspace=") as raised:
        entropy(*parts(problem), workspace=MIB)
    enough = int(str(raised.value).split("workspace=")[1].split()[0])
    entropy(*parts(problem), workspace=enough)


@pytest.mark.parametrize("cut", [3, 1000])
def test_cuts_of_the_tokens_change_nothing(make_problem, monkeypatch, cut):
    from fullrank.ops import workspace as workspace_module

    problem = make_problem(N=11, K=2, V=53, kind="plif", bias=True)
    teacher = teacher_of(problem, 3)
    monkeypatch.setattr(workspace_module, "MOST_ROWS", {"cpu": cut})
    found = []
    for impl in ("chunked", "reference"):
        leaves = problem.leaves()
        ids = torch.arange(22).view(11, 2)
        given = options(leaves, impl=impl)
        loss = divergence(*parts(leaves), teacher, kind="reverse", **given) + entropy(*parts(leaves), **given)
        (loss + token_logprobs(*parts(leaves), ids, **given).mean()).backward()
        found.append(leaves.gradients())
    for name, fast in found[0].items():
        torch.testing.assert_close(fast, found[1][name], rtol=1e-9, atol=1e-12)


def test_what_is_refused(make_problem):
    problem = make_problem()
    common = parts(problem)
    ids = torch.zeros(7, 2, dtype=torch.int64)
    with pytest.raises(FullrankError, match="target 11 is outside the vocabulary"):
        token_logprobs(*common, ids + 11)
    with pytest.raises(FullrankError, match=r"ids have shape \[3, 2\], expected \[N, M\] with N=7"):
        token_logprobs(*common, ids[:3])
    with pytest.raises(FullrankError, match=r"ids are torch\.float32"):
        token_logprobs(*common, ids.float())
    with pytest.raises(FullrankError, match=r"temperature=0\.0 is impossible"):
        entropy(*common, temperature=0.0)
    with pytest.raises(FullrankError, match="kind='kl' is unknown"):
        divergence(*common, teacher_of(problem), kind="kl")
    with pytest.raises(FullrankError, match="vocabulary of 9"):
        divergence(*common, teacher_of(problem)._replace(weight=torch.zeros(9, 6, dtype=torch.float64)))
    with pytest.raises(FullrankError, match="top tokens"):
        divergence(*common, TopTokens(ids, torch.zeros(7, 3)))
    with pytest.raises(FullrankError, match="impl='triton' cannot serve here"):
        entropy(*common, impl="triton")
    with pytest.raises(FullrankError, match="reduction='max'"):
        entropy(*common, reduction="max")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast_decides_the_products_and_nothing_else(make_problem, tools, dtype):
    problem = make_problem(N=5, K=2, D=16, V=40, dtype=torch.float32)
    truth = entropy(*parts(problem), reduction="none")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = entropy(problem.rows.to(dtype), problem.log_prior, problem.weight, reduction="none")
    assert found.dtype == torch.float32
    assert tools.relative_error(found, truth) < 2e-2


def test_reduced_and_apart_from_the_mixture_loss(make_problem):
    """With a teacher that is sure of the target, forward KL is the loss."""
    problem = make_problem(N=6, K=3, V=19)
    sure = torch.full((6, 1), 0.0, dtype=torch.float64)
    loss = divergence(*parts(problem), TopTokens(problem.targets[:, None], sure))
    torch.testing.assert_close(loss, mixture_nll(*parts(problem), problem.targets))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("ask", ["ids", "entropy", *KINDS, "top"])
@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("impl", ["auto", "chunked"])
def test_on_cuda(make_problem, tools, impl, dtype, K, ask):
    """As near to fp64 as the definition in the same dtype, whatever is between the products."""
    problem = make_problem(N=123, K=K, D=64, V=5003, bias=True)
    moved = {name: each.cuda() for name, each in vars(problem).items() if isinstance(each, Tensor)}
    moved["weight"] = moved["weight"] / 4
    ids = torch.randint(5003, (123, 8), generator=torch.Generator().manual_seed(1)).cuda()
    top = TopTokens(ids, torch.full((123, 8), 0.1, device="cuda").log())
    given = teacher_of(problem)
    uneven = torch.linspace(0.1, 1.7, 123, device="cuda")

    def found(dtype: torch.dtype, impl: str) -> list[Tensor]:
        prior = moved["log_prior"].to(torch.float64 if dtype == torch.float64 else torch.float32)
        leaves = [moved["rows"].to(dtype), prior, moved["weight"].to(dtype), moved["bias"].to(dtype)]
        leaves = [each.clone().requires_grad_() for each in leaves]
        *common, bias = leaves
        options = {"bias": bias, "impl": impl}
        if ask == "ids":
            loss = (token_logprobs(*common, ids, **options) * uneven[:, None]).mean()
            return [loss.detach(), *torch.autograd.grad(loss, leaves)]
        options["token_weight"] = uneven
        if ask == "entropy":
            loss = entropy(*common, **options)
        else:
            teacher = Mixture(
                given.rows.cuda().to(dtype), given.log_prior.cuda(), given.weight.cuda().to(dtype)
            )
            kind = "forward" if ask == "top" else ask
            loss = divergence(*common, top if ask == "top" else teacher, kind=kind, **options)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    truth, plain, fast = found(torch.float64, "reference"), found(dtype, "reference"), found(dtype, impl)
    for got, eager, exact in zip(fast, plain, truth, strict=True):
        if float(exact.norm()) > 1e-12:
            tools.as_good(got, eager, exact, floor=4 * torch.finfo(dtype).eps)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("ask", ["ids", "entropy", "forward"])
def test_workspace_bounds_memory_on_cuda(ask):
    N, D, V, workspace = 2048, 64, 128256, 512 * MIB
    rows = torch.randn(N, 1, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    common = (rows, torch.zeros(N, 1, device="cuda"), weight)
    teacher = Mixture.softmax(rows.detach()[:, 0].clone(), weight.detach().clone())
    ids = torch.arange(N * 4, device="cuda").view(N, 4)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    if ask == "ids":
        token_logprobs(*common, ids, workspace=workspace).mean().backward()
    elif ask == "entropy":
        entropy(*common, workspace=workspace).backward()
    else:
        divergence(*common, teacher, workspace=workspace).backward()
    made = (rows.numel() + weight.numel()) * 6
    assert torch.cuda.max_memory_allocated() - before - made <= workspace


@pytest.mark.interpreter
@pytest.mark.parametrize("rising", [False, True])
@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("name", ["entropy", "forward", "reverse", "jensen_shannon"])
def test_the_kernels_sums_hold_over_many_blocks(name: str, K: int, rising: bool) -> None:
    """Of scores as they are given, to the precision of its arithmetic: peaks that rise from block to block, a
    teacher whose scores lie 60 nats higher, a tail."""
    from fullrank.ops.distil.kernels import distil_rows

    draw = torch.Generator().manual_seed(0)
    tokens, V, stride = 3, 9001, 9008
    slope = torch.linspace(-8.0, 8.0, V) if rising else torch.linspace(8.0, -8.0, V)
    scores = torch.zeros(tokens * K, stride).half()
    scores[:, :V] = (2.0 * torch.randn(tokens * K, V, generator=draw) + slope).half()
    taught = torch.zeros(tokens, stride).half()
    taught[:, :V] = (2.0 * torch.randn(tokens, V, generator=draw) + slope + 60.0).half()
    log_prior = torch.log_softmax(torch.randn(tokens, K, generator=draw), -1)

    rows = scores[:, :V].double().requires_grad_()
    prior = log_prior.double().requires_grad_()
    log_p = torch.logsumexp(torch.log_softmax(rows.view(tokens, K, V), -1) + prior[..., None], 1)
    log_q = torch.log_softmax(taught[:, :V].double(), -1)
    p, q = log_p.exp(), log_q.exp()
    log_m = torch.log((p + q) / 2)
    value = {
        "entropy": -p * log_p,
        "forward": q * (log_q - log_p),
        "reverse": p * (log_p - log_q),
        "jensen_shannon": (p * (log_p - log_m) + q * (log_q - log_m)) / 2,
    }[name].sum(-1)
    gradient, prior_gradient = torch.autograd.grad(value.sum(), (rows, prior))

    arguments = () if name == "entropy" else (taught[:, :V],)
    options = {"temperature": 1.0, "gradient": True}
    found, shares = distil_rows(name, scores[:, :V], None, log_prior, IDENTITY, *arguments, **options)
    torch.testing.assert_close(found.double(), value.detach(), rtol=2e-5, atol=2e-5)
    # Stored in half precision, where the smallest are no longer told apart.
    torch.testing.assert_close(scores[:, :V].double(), gradient, rtol=2e-3, atol=2e-7)
    if K > 1:
        # Up to a multiple of the prior, which a softmax takes off again.
        rest = shares.double() - prior_gradient
        torch.testing.assert_close(
            rest, log_prior.double().exp() * rest.sum(-1, keepdim=True), atol=2e-5, rtol=0
        )
