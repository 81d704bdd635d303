"""The operators inside torch: repeated and second backward passes, subsets, autocast, compile, opcheck."""

from __future__ import annotations

import copy
import shutil
from itertools import combinations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fullrank.errors import FullrankError
from fullrank.ops import linear_logprob, mixture_nll
from fullrank.ops.arguments import product_dtype
from fullrank.ops.mixture.operator import mixture
from fullrank.ops.rows.operator import row_statistics, rows_gradient

KINDS = ("identity", "sigsoftmax", "softcap", "plif")
NAMES = ("rows", "log_prior", "weight", "bias", "slopes")


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("trained", [NAMES, ("rows",)], ids=["all", "frozen"])
def test_a_second_backward_pass_gives_the_same_gradients(make_problem, reduction, trained):
    leaves = make_problem(kind="plif", bias=True).leaves(trained)
    loss = leaves.nll(reduction=reduction).sum()
    wanted = [getattr(leaves, name) for name in trained]
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    kept = [value.clone() for value in first]
    for value in first:
        value.zero_()
    for _ in range(2):
        again = torch.autograd.grad(loss, wanted, retain_graph=True)
        for one, other in zip(kept, again, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-13, atol=1e-15)


def test_gradients_accumulate_over_calls(make_problem, tools):
    problem = make_problem()
    _, once = tools.differentiate(problem, lambda p: p.nll())
    leaves = problem.leaves()
    leaves.nll().backward()
    first = leaves.weight.grad
    (leaves.nll() * 3.0).backward()
    assert leaves.weight.grad is first
    for name in ("rows", "log_prior", "weight"):
        torch.testing.assert_close(leaves.gradients()[name], once[name] * 4.0, rtol=1e-12, atol=1e-14)


def test_loss_used_twice_in_one_graph(make_problem, tools):
    problem = make_problem()
    _, want = tools.differentiate(problem, lambda p: (lambda loss: loss * loss + loss)(p.plain_nll()))
    _, got = tools.differentiate(problem, lambda p: (lambda loss: loss * loss + loss)(p.nll()))
    torch.testing.assert_close(got["weight"], want["weight"], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_raise_with_a_remedy(make_problem, reduction):
    leaves = make_problem().leaves()
    loss = leaves.nll(reduction=reduction).sum()
    with pytest.raises(FullrankError, match=r"differentiable once.*create_graph=True.*impl='reference'"):
        torch.autograd.grad(loss, leaves.rows, create_graph=True)


def test_reference_has_second_derivatives(make_problem):
    leaves = make_problem().leaves()
    (first,) = torch.autograd.grad(leaves.nll(impl="reference"), leaves.rows, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaves.rows)
    assert second.norm() > 0


SUBSETS = [subset for size in range(6) for subset in combinations(NAMES, size)]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_subset_of_gradients(make_problem, tools, reduction):
    """Asking for fewer gradients changes none of them and makes no other."""
    problem = make_problem(kind="plif", bias=True)
    _, everything = tools.differentiate(problem, lambda p: p.nll(reduction=reduction))
    for subset in SUBSETS:
        if not subset:
            assert not problem.leaves(()).nll(reduction=reduction).requires_grad
            continue
        _, some = tools.differentiate(problem, lambda p: p.nll(reduction=reduction), subset)
        for name in NAMES:
            if name in subset:
                torch.testing.assert_close(some[name], everything[name], rtol=1e-12, atol=1e-14)
            else:
                assert some[name] is None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_without_gradients(make_problem, context, reduction):
    leaves = make_problem(bias=True).leaves()
    with context():
        loss, stats = leaves.nll(reduction=reduction, return_stats=True)
        target, lse = leaves.logprob()
    assert not loss.requires_grad
    assert not target.requires_grad
    torch.testing.assert_close(loss, leaves.plain_nll(reduction).detach())
    torch.testing.assert_close(stats.nll, leaves.plain_nll("none").detach())
    torch.testing.assert_close(lse, leaves.bent().logsumexp(-1).flatten().detach())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_on_a_processor_multiplies_in_fp32(make_problem, tools, reduction):
    """Half products are slow there, or copy what the workspace is to bound: `arguments.product_dtype`."""
    problem = make_problem(20, 2, 16, 60, dtype=torch.float32, bias=True)

    def under_autocast(p):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return p.nll(reduction=reduction)

    loss, got = tools.differentiate(problem, under_autocast)
    assert loss.dtype == torch.float32
    plain, want = tools.differentiate(problem, lambda p: p.nll(reduction=reduction))
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=1e-6)
    for name in ("rows", "log_prior", "weight", "bias"):
        assert got[name].dtype == torch.float32
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)


def test_autocast_statistics_are_not_mixed_in_bf16(make_problem):
    problem = make_problem(20, 3, 16, 60, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, stats = problem.nll(return_stats=True)
    log_probs = problem.bent().log_softmax(-1) + problem.log_prior[..., None]
    log_probs = torch.logsumexp(log_probs, 1)
    entropy = torch.special.entr(log_probs.exp()).sum(1)
    torch.testing.assert_close(stats.entropy, entropy, rtol=1e-5, atol=1e-5)


def test_fp64_stays_fp64_under_autocast(make_problem):
    problem = make_problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = problem.nll()
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, problem.plain_nll(), rtol=1e-12, atol=1e-12)


def compiled_equals_eager(make_problem, tools, backend, kind, reduction):
    problem = make_problem(kind=kind, bias=True, token_weight=True)
    torch.compiler.reset()

    def loss_of(p):
        loss, stats = p.nll(reduction=reduction, return_stats=True)
        return loss + stats.entropy.mean()

    compiled = torch.compile(loss_of, fullgraph=True, backend=backend)
    want = tools.differentiate(problem, loss_of)
    got = tools.differentiate(problem, compiled)
    torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=1e-14)
    for name, value in want[1].items():
        torch.testing.assert_close(got[1][name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("kind", "reduction"), [("identity", "mean"), ("plif", "none")])
def test_compiled_fullgraph(make_problem, tools, kind, reduction):
    compiled_equals_eager(make_problem, tools, "aot_eager", kind, reduction)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("default")
def test_compiled_with_inductor(make_problem, tools, kind, reduction):
    compiled_equals_eager(make_problem, tools, "inductor", kind, reduction)


def test_compiled_row_statistics_and_dynamic_sizes(make_problem):
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def score(rows, weight, targets):
        target, lse = linear_logprob(rows, weight, targets)
        return (target * 2 - lse).sum()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def measure(rows, log_prior, weight, targets):
        return mixture_nll(rows, log_prior, weight, targets, return_stats=True)

    for N in (3, 5):
        problem = make_problem(N, 2, 4, 9)
        rows = problem.rows[:, 0].clone().requires_grad_()
        again = rows.detach().clone().requires_grad_()
        score(rows, problem.weight, problem.targets).backward()
        target, lse = linear_logprob(again, problem.weight, problem.targets)
        (target * 2 - lse).sum().backward()
        torch.testing.assert_close(rows.grad, again.grad, rtol=1e-12, atol=1e-14)
        loss, stats = measure(problem.rows, problem.log_prior, problem.weight, problem.targets)
        torch.testing.assert_close(loss, stats.nll.mean())
        assert torch.equal(stats.argmax, problem.log_probs().argmax(1))


def test_compiled_call_still_names_a_bad_target(make_problem):
    torch.compiler.reset()
    problem = make_problem()
    call = torch.compile(lambda y: mixture_nll(problem.rows, problem.log_prior, problem.weight, y),
                         fullgraph=True, backend="aot_eager")  # fmt: skip
    call(problem.targets)
    with pytest.raises(FullrankError, match=r"target 50 is outside .* V=11"):
        call(problem.targets.clone().fill_(50))


def product_of(problem):
    return product_dtype(problem.rows, problem.weight)


def mixture_arguments(problem, *, needs, stats=False):
    function = problem.pointwise
    tensors = (problem.rows, problem.log_prior, problem.weight, problem.targets, problem.bias, None)
    return (
        *tensors,
        problem.slopes,
        function.kind,
        function.constant,
        True,
        -100,
        stats,
        needs,
        product_of(problem),
        1 << 20,
        "auto",
    )


def rows_arguments(problem, *, needs):
    """Of a problem with one component; the rows are a leaf."""
    function = problem.pointwise
    rows = problem.rows.detach().flatten(0, 1).requires_grad_(problem.rows.requires_grad)
    tensors = (rows, problem.weight, problem.targets, problem.bias, problem.slopes)
    return (*tensors, function.kind, function.constant, None, needs, product_of(problem), 1 << 20, "auto")


@pytest.mark.parametrize("kind", ["identity", "plif"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_opcheck_mixture(make_problem, kind, dtype):
    problem = make_problem(kind=kind, bias=True, dtype=dtype)
    needs = [True, True, True, True, kind == "plif"]
    torch.library.opcheck(mixture, mixture_arguments(problem, needs=needs, stats=True))
    # Not test_aot_dispatch_dynamic: it compares all outputs after a backward pass, which by design has scaled
    # the gradients among them in place. What a compiled loss gives is tested above.
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(mixture, mixture_arguments(problem.leaves(), needs=needs), test_utils=tests)


@pytest.mark.parametrize("kind", ["identity", "plif"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_opcheck_rows(make_problem, kind, frozen):
    problem = make_problem(K=1, kind=kind, bias=True).leaves(("rows",) if frozen else NAMES)
    needs = [True, False, not frozen, not frozen, kind == "plif" and not frozen]
    torch.library.opcheck(row_statistics, rows_arguments(problem, needs=needs))


@pytest.mark.parametrize("kind", ["identity", "plif"])
def test_opcheck_rows_gradient(make_problem, kind):
    problem = make_problem(K=1, kind=kind, bias=True)
    needs = [True, False, True, True, kind == "plif"]
    arguments = rows_arguments(problem, needs=needs)
    target, _, nll, maximum, others = row_statistics(*arguments)
    torch.library.opcheck(
        rows_gradient, (*arguments[:5], target, maximum, others, nll, nll * 0.5, *arguments[5:])
    )


def test_without_a_compiler_the_operator_is_left_out_and_gives_the_same(make_problem):
    problem = make_problem(bias=True).leaves()
    needs = [True, True, True, True, False]
    with Seen() as seen:
        through = mixture(*mixture_arguments(problem, needs=needs))
    assert "fullrank.mixture.default" in seen.names
    loss = problem.nll(reduction="mean", workspace=1 << 20)
    assert type(loss.grad_fn).__name__ == "FullrankBackward"
    direct = torch.autograd.grad(loss, [problem.rows, problem.weight])
    want = torch.autograd.grad(through[0], [problem.rows, problem.weight])
    assert all(torch.equal(*pair) for pair in zip(direct, want, strict=True))


def test_a_tracer_sees_one_operator(make_problem):
    problem = make_problem()
    with Seen() as seen:
        problem.nll()
    assert [name for name in seen.names if name.startswith("fullrank")] == ["fullrank.mixture.default"]
    assert not any("mm" in name for name in seen.names)


class Seen(TorchDispatchMode):
    """The operators that torch dispatches inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Head(torch.nn.Module):
    """A module as a user would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.contexts = torch.nn.Linear(6, 2 * 4)
        self.gate = torch.nn.Linear(6, 2)
        self.output = torch.nn.Linear(4, 13)

    def forward(self, hidden, targets):
        rows = self.contexts(hidden).view(-1, 2, 4).tanh()
        prior = self.gate(hidden).log_softmax(-1)
        return mixture_nll(rows, prior, self.output.weight, targets, bias=self.output.bias)


def test_deepcopied_module_trains_on_its_own():
    torch.manual_seed(0)
    head = Head()
    twin = copy.deepcopy(head)
    hidden, targets = torch.randn(5, 6), torch.randint(13, (5,))
    head(hidden, targets).backward()
    assert all(parameter.grad is None for parameter in twin.parameters())
    twin(hidden, targets).backward()
    for one, other in zip(head.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    head, hidden, targets = Head(), torch.randn(20, 6), torch.randint(13, (20,))
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    first = head(hidden, targets).item()
    for _ in range(60):
        optimizer.zero_grad()
        loss = head(hidden, targets)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3 * first
